"""The broker dies; nothing else does. What was running goes on, and the next broker knows it again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ral_broker.errors import Refused
from ral_broker.sessions.session import Session
from ral_protocol.records import ProcessMark, SessionRecord
from support.broker import Broker, OnTerminal, Ral


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Poll until ``condition`` holds; AssertionError at the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.02)


def line_of(ral: Ral, session: str) -> dict[str, object]:
    for line in json.loads(ral("sessions", "--all", "--json").stdout):
        if line["id"] == session:
            found: dict[str, object] = line
            return found
    raise AssertionError(f"{session} is not listed")


def test_three_kinds_of_session_survive_kill_9_of_the_broker(
    broker: Broker, ral: Ral, on_terminal: OnTerminal, project: Path
) -> None:
    terminal = on_terminal("run", "-q", "--", "sh", "-c", "echo ready; read line; echo got $line; exit 3")
    terminal.expect(b"ready")
    piped = ral.start("run", "-q", "--", "sh", "-c", "echo ready; read line; echo got $line; exit 4")
    assert piped.stdout is not None
    assert piped.stdout.readline() == b"ready\n"
    script = "while [ ! -e stop ]; do sleep 0.05; done; echo done; exit 5"
    detached = ral("run", "-d", "-q", "--", "sh", "-c", script).stdout.decode().strip()
    assert len(ral.live()) == 3

    broker.crash()
    terminal.send(b"one\n")
    terminal.expect(b"got one")
    assert terminal.wait() == 3
    out, _ = piped.communicate(b"two\n", timeout=10)
    assert (out, piped.returncode) == (b"got two\n", 4)
    (project / "stop").touch()

    broker.start()
    wait_until(lambda: line_of(ral, detached)["state"] == "ended")
    assert line_of(ral, detached)["exit"] == 5
    assert ral.live() == []
    statuses = {line["exit"] for line in json.loads(ral("sessions", "--all", "--json").stdout)}
    assert statuses == {3, 4, 5}
    assert b"done" in ral("logs", detached).stdout


def test_a_new_broker_lists_and_kills_what_the_old_one_started(broker: Broker, ral: Ral) -> None:
    piped = ral.start("run", "-q", "--", "sh", "-c", "echo ready; exec sleep 100")
    assert piped.stdout is not None
    piped.stdout.readline()
    detached = ral("run", "-d", "-q", "--", "sleep", "100").stdout.decode().strip()
    before = set(ral.live())
    assert detached in before
    broker.crash()
    broker.start()
    assert set(ral.live()) == before
    for session in before:
        assert ral("kill", session).status == 0
    piped.communicate(timeout=10)
    assert piped.returncode == 143
    assert ral.live() == []


def test_a_client_killed_while_no_broker_lives_takes_its_session_along(
    broker: Broker, ral: Ral, project: Path
) -> None:
    client = ral.start(
        "run", "-q", "--", "sh", "-c", "trap '' HUP TERM; echo x; while :; do date >alive; sleep 0.02; done"
    )
    assert client.stdout is not None
    client.stdout.readline()
    broker.crash()
    client.kill()
    client.communicate(timeout=10)
    time.sleep(0.3)
    stamp = (project / "alive").stat().st_mtime_ns
    time.sleep(0.3)
    assert (project / "alive").stat().st_mtime_ns == stamp
    broker.start()
    assert ral.live() == []


def test_an_adopted_session_ends_with_its_client(broker: Broker, ral: Ral) -> None:
    client = ral.start(
        "run", "-q", "--", "sh", "-c", "trap '' HUP TERM; echo x; while :; do sleep 0.05; done"
    )
    assert client.stdout is not None
    client.stdout.readline()
    broker.crash()
    broker.start()
    assert len(ral.live()) == 1
    client.kill()
    client.communicate(timeout=10)
    wait_until(lambda: ral.live() == [])


def test_a_killed_monitor_is_a_lost_status_and_a_dead_program(
    broker: Broker, ral: Ral, project: Path
) -> None:
    client = ral.start("run", "-q", "--", "sh", "-c", "echo x; while :; do date >alive; sleep 0.02; done")
    assert client.stdout is not None
    client.stdout.readline()
    line = json.loads(ral("sessions", "--json").stdout)[0]
    os.kill(line["bwrap_pid"], signal.SIGKILL)
    _, err = client.communicate(timeout=10)
    assert client.returncode == 137
    assert b"lost" in err
    stamp = (project / "alive").stat().st_mtime_ns
    time.sleep(0.2)
    assert (project / "alive").stat().st_mtime_ns == stamp
    wait_until(lambda: line_of(ral, line["id"])["lost"] is True)


def test_a_monitor_killed_while_no_broker_lives_leaves_no_program(
    broker: Broker, ral: Ral, project: Path
) -> None:
    detached = (
        ral("run", "-d", "-q", "--", "sh", "-c", "while :; do date >alive; sleep 0.02; done")
        .stdout.decode()
        .strip()
    )
    line = json.loads(ral("sessions", "--json").stdout)[0]
    broker.crash()
    os.kill(line["bwrap_pid"], signal.SIGKILL)
    wait_until((project / "alive").exists)
    time.sleep(0.3)
    stamp = (project / "alive").stat().st_mtime_ns
    time.sleep(0.2)
    assert (project / "alive").stat().st_mtime_ns == stamp
    broker.start()
    assert line_of(ral, detached)["lost"] is True


def test_a_killed_holder_ends_its_session(broker: Broker, ral: Ral) -> None:
    detached = (
        ral("run", "-d", "-q", "--", "sh", "-c", "trap '' HUP; while :; do sleep 0.05; done")
        .stdout.decode()
        .strip()
    )
    found = subprocess.run(["pgrep", "-f", f"ral-holder {detached}"], capture_output=True, check=True)
    os.kill(int(found.stdout), signal.SIGKILL)
    wait_until(lambda: ral.live() == [])


def test_crashes_in_the_middle_of_launches_leave_nothing(broker: Broker, ral: Ral, runtime: Path) -> None:
    """The fixture looks for processes that are left; here the files are looked at."""
    for delay in (0.0, 0.01, 0.02, 0.03, 0.04, 0.06):
        clients = [ral.start("run", "-q", "--", "sleep", "0.1") for _ in range(3)]
        time.sleep(0.05 + delay)
        broker.crash()
        for client in clients:
            client.communicate(timeout=20)
        broker.start()
        wait_until(lambda: ral.live() == [])
    wait_until(lambda: os.listdir(runtime / "sessions") == [])


def test_the_brokers_graceful_stop_leaves_its_sessions_running(broker: Broker, ral: Ral) -> None:
    detached = ral("run", "-d", "-q", "--", "sleep", "100").stdout.decode().strip()
    broker.stop()
    broker.start()
    assert ral.live() == [detached]
    assert ral("kill", detached).status == 0


def test_a_client_starts_a_broker_where_there_is_none(stopped_broker: Broker, ral: Ral) -> None:
    done = ral("run", "-q", "--", "echo", "hello")
    assert done.stdout == b"hello\n", done
    assert ral("broker", "stop").status == 0


def test_many_clients_start_one_broker(stopped_broker: Broker, ral: Ral) -> None:
    clients = [ral.start("run", "-q", "--", "echo", "hello") for _ in range(8)]
    for client in clients:
        out, err = client.communicate(timeout=30)
        assert out == b"hello\n", err
    assert ral("broker", "stop").status == 0


def test_sessions_and_clients_that_end_together_do_not_harm_a_new_broker(broker: Broker, ral: Ral) -> None:
    """The end of an adopted session and that of its client are two events at one time."""
    clients = [ral.start("run", "-q", "--", "sh", "-c", "echo x; read y") for _ in range(12)]
    for client in clients:
        assert client.stdout is not None
        client.stdout.readline()
    broker.crash()
    broker.start()
    assert len(ral.live()) == 12
    for client in clients:
        assert client.stdin is not None
        client.stdin.close()
        client.stdin = None
    for client in clients:
        client.communicate(timeout=10)
    wait_until(lambda: ral.live() == [])
    assert broker.process is not None
    assert broker.process.poll() is None


def test_a_closed_session_is_neither_killed_nor_signalled() -> None:
    """Its descriptors are gone, and their numbers may belong to another session by now."""
    mark = ProcessMark(2, 0)
    record = SessionRecord(
        id="0123abcd", uid=0, host="", boot_id="", pid_namespace=0, version="0", kind="session",
        project=b"/", command=[], started="", monitor=mark, init=mark, mount_namespace=0, user_namespace=0,
        client=None, holder=None, plan=msgspec.Raw(b"{}"),
    )  # fmt: skip
    sleeper = subprocess.Popen(["sleep", "30"])
    pidfd = os.pidfd_open(sleeper.pid)
    session = Session(record, os.dup(pidfd), os.dup(pidfd), os.open("/dev/null", os.O_RDONLY))
    session.close()
    session.kill()
    with pytest.raises(Refused, match="has ended"):
        session.signal(signal.SIGTERM)
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()
    os.close(pidfd)
