"""The user's systemd starts the broker, hears when it is ready, keeps what it says, ends nothing else."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from pathlib import Path

from support.login import SECONDS, SERVICE, SOCKET, User, has_ended, wait_until

RUN = ("run", "-q", "--")


def test_the_client_starts_the_socket_unit_and_that_the_service(user: User) -> None:
    assert user.unit(SOCKET, "ActiveState") == "inactive"
    assert user.ral(*RUN, "echo", "hello")[:2] == (0, b"hello\n")
    assert user.unit(SOCKET, "ActiveState") == "active"
    assert user.unit(SERVICE, "ActiveState") == "active"
    said = user.broker()
    assert said["activated"] is True
    assert said["pid"] == int(user.unit(SERVICE, "MainPID"))
    assert said["runtime_dir"] == str(user.runtime)


def test_a_socket_that_was_started_waits_for_the_first_client(user: User) -> None:
    assert user.systemctl("start", SOCKET).status == 0
    assert user.unit(SERVICE, "ActiveState") == "inactive"
    for path, kind, mode in (
        (user.runtime, stat.S_ISDIR, 0o700),
        (user.runtime / "control.sock", stat.S_ISSOCK, 0o600),
    ):
        status = path.lstat()
        assert kind(status.st_mode)
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (mode, user.uid)
    assert user.ral(*RUN, "echo", "hello")[:2] == (0, b"hello\n")
    assert user.broker()["activated"] is True


def test_the_socket_unit_can_be_enabled_and_is_there_with_the_manager(user: User) -> None:
    assert user.systemctl("enable", SOCKET).status == 0
    subprocess.run(["systemctl", "restart", f"user@{user.uid}.service"], check=True, timeout=SECONDS)
    wait_until(lambda: user.unit(SOCKET, "ActiveState") == "active", "the socket listens")
    assert user.unit(SERVICE, "ActiveState") == "inactive"
    assert user.ral(*RUN, "echo", "hello")[:2] == (0, b"hello\n")


def test_the_service_is_active_when_the_broker_says_so_and_clients_wait_until_then(user: User) -> None:
    user.drop_in(SERVICE, "[Service]\nExecStart=\nExecStart=/bin/sh -c 'sleep 6; exec ral broker run'")
    assert user.systemctl("start", SOCKET).status == 0
    client = user.start("ral run -q -- echo hello")
    wait_until(lambda: user.unit(SERVICE, "ActiveState") != "inactive", "the client woke the service")
    assert user.unit(SERVICE, "ActiveState") == "activating"
    assert client.finish()[:2] == (0, b"hello\n")
    assert user.unit(SERVICE, "ActiveState") == "active"


def test_a_service_that_cannot_start_is_an_error_message_and_no_wait(user: User) -> None:
    user.drop_in(SERVICE, "[Service]\nExecStart=\nExecStart=/bin/false")
    done = user.ral(*RUN, "echo", "hello", seconds=30)
    assert done.status == 69, done
    assert b"the broker" in done.stderr
    assert b"journal" in done.stderr


def test_what_the_broker_says_is_in_the_journal_of_its_unit(user: User) -> None:
    assert user.ral(*RUN, "true").status == 0
    pid = user.unit(SERVICE, "MainPID")
    done = user.login(f"journalctl --user -u {SERVICE} -o json _PID={pid}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = [line for line in lines if line["MESSAGE"].endswith(f" serves {user.runtime}")]
    assert len(found) == 1, lines
    assert found[0]["PRIORITY"] == "6"
    assert not (user.runtime / "broker.log").exists()


def test_the_caller_is_in_its_login_session_and_the_broker_in_the_managers_slice(user: User) -> None:
    """Without systemd, another control group than the broker's is a batch job, and refused."""
    done = user.login("cat /proc/self/cgroup; ral run -q -- true")
    assert done.status == 0, done
    assert b"/session-" in done.stdout
    assert b"user@" not in done.stdout
    broker = Path(f"/proc/{user.unit(SERVICE, 'MainPID')}/cgroup").read_text()
    assert broker.strip().endswith(f"/user@{user.uid}.service/app.slice/{SERVICE}")


def _running_sessions(user: User) -> tuple[str, int, int]:
    """A detached session: its id, the pids of its pid 1 and of bwrap."""
    detached = user.ral("run", "-d", "-q", "--", "sleep", "1000")
    assert detached.status == 0, detached
    session = detached.stdout.decode().strip()
    line = user.sessions()[session]
    pid, bwrap_pid = line["pid"], line["bwrap_pid"]
    assert isinstance(pid, int)
    assert isinstance(bwrap_pid, int)
    return session, pid, bwrap_pid


def test_a_stopped_service_leaves_its_sessions_and_the_next_broker_has_them(user: User) -> None:
    session, *pids = _running_sessions(user)
    attended = user.start(
        "ral run -q -- sh -c 'echo ready; read line; echo got $line; exit 3'", subprocess.PIPE
    )
    assert attended.line() == b"ready\n"
    first = int(user.unit(SERVICE, "MainPID"))
    assert user.systemctl("stop", SERVICE).status == 0
    assert user.unit(SERVICE, "ActiveState") == "inactive"
    assert user.unit(SERVICE, "Result") == "success"
    for pid in pids:
        os.kill(pid, 0)
    assert has_ended(first)
    found = user.sessions()
    assert len(found) == 2
    assert found[session]["pid"] == pids[0]
    assert user.broker()["pid"] != first
    assert attended.finish(text=b"line\n")[:2] == (3, b"got line\n")
    assert user.ral("kill", session).status == 0
    wait_until(lambda: not user.sessions(), "the session that was killed has ended")


def test_a_killed_broker_is_started_again_and_has_its_sessions(user: User) -> None:
    session, *pids = _running_sessions(user)
    attended = user.start(
        "ral run -q -- sh -c 'echo ready; read line; echo got $line; exit 4'", subprocess.PIPE
    )
    assert attended.line() == b"ready\n"
    first = int(user.unit(SERVICE, "MainPID"))
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: user.unit(SERVICE, "NRestarts") == "1", "systemd starts it again")
    found = user.sessions()
    assert int(user.unit(SERVICE, "MainPID")) not in (0, first)
    assert len(found) == 2
    assert found[session]["pid"] == pids[0]
    assert attended.finish(text=b"line\n")[:2] == (4, b"got line\n")


def test_a_stopped_socket_is_gone_and_the_next_client_brings_it_back(user: User) -> None:
    session, *_ = _running_sessions(user)
    assert user.systemctl("stop", SOCKET).status == 0
    assert not (user.runtime / "control.sock").exists()
    assert user.unit(SERVICE, "ActiveState") == "inactive"
    assert user.broker() == {"running": False}  # nobody is started to be asked this
    assert user.ral(*RUN, "echo", "hello")[:2] == (0, b"hello\n")
    assert list(user.sessions()) == [session]
    assert user.broker()["activated"] is True


def test_broker_stop_ends_the_service_and_leaves_the_socket(user: User) -> None:
    session, *_ = _running_sessions(user)
    first = user.broker()["pid"]
    assert user.ral("broker", "stop").status == 0
    wait_until(lambda: user.unit(SERVICE, "ActiveState") == "inactive", "the service has ended")
    assert user.unit(SERVICE, "Result") == "success"
    assert user.unit(SOCKET, "ActiveState") == "active"
    assert list(user.sessions()) == [session]
    assert user.broker()["pid"] != first


NEWER = """
import os, socket, sys
from ral_protocol import exits, wire
peer = socket.socket(socket.AF_UNIX)
peer.connect(os.environ["XDG_RUNTIME_DIR"] + "/ral/control.sock")
peer.sendall(wire.frame(wire.pack({"t": "hello", "proto": exits.PROTOCOL, "version": "99.0.0"})))
data = peer.recv(4096)
print(wire.unpack(data[4:])["t"])
"""


def test_a_broker_that_executes_itself_anew_stays_the_service(user: User) -> None:
    """A newer client asks for it. systemd must not take it for the end, and the socket stays its own."""
    session, *_ = _running_sessions(user)
    first = user.broker()
    (user.home / "newer.py").write_text(NEWER)
    asked = user.login("/usr/local/lib/ral/bin/python -I ../newer.py")
    assert asked.stdout == b"restarting\n", asked
    wait_until(lambda: user.broker()["started"] != first["started"], "it has executed itself anew")
    second = user.broker()
    for key in ("activated", "pid", "runtime_dir", "sessions"):
        assert second[key] == first[key], key
    assert user.unit(SERVICE, "ActiveState") == "active"
    assert user.unit(SERVICE, "SubState") == "running"
    assert list(user.sessions()) == [session]
    assert user.ral("broker", "stop").status == 0
    wait_until(lambda: user.unit(SERVICE, "ActiveState") == "inactive", "the service has ended")
    assert (user.runtime / "control.sock").is_socket()
    assert list(user.sessions()) == [session]


def test_a_broker_that_a_client_started_gives_way_to_the_unit(user: User) -> None:
    """ral is used before the manager knows the units, and then they are installed."""
    user.bare("mkdir -p .config/systemd/user && ln -s /dev/null .config/systemd/user/ral-broker.socket")
    assert user.systemctl("daemon-reload").status == 0
    session, *_ = _running_sessions(user)
    first = user.broker()
    assert first["activated"] is False
    (user.home / ".config/systemd/user/ral-broker.socket").unlink()
    assert user.systemctl("daemon-reload").status == 0
    assert user.systemctl("start", SOCKET).status == 0
    assert user.ral(*RUN, "echo", "hello")[:2] == (0, b"hello\n")
    assert list(user.sessions()) == [session]
    assert user.broker()["activated"] is True
    pid = first["pid"]
    assert isinstance(pid, int)
    wait_until(lambda: has_ended(pid), "the first broker has gone")
