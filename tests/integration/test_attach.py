"""Detached sessions: they live on in their holder, and another terminal finds their screen usable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support.broker import Broker, OnTerminal, Ral

DETACH = b"\x10\x11"
"""Ctrl-P Ctrl-Q."""

EDITOR = r"""
import os, signal, sys
def draw(*_):
    size = os.get_terminal_size()
    sys.stdout.write(f"\033[2J\033[H{size.lines} {size.columns}\r\nline one of the screen")
    sys.stdout.flush()
signal.signal(signal.SIGWINCH, draw)
sys.stdout.write("\033[?1049h")
draw()
while sys.stdin.readline() != "quit\n":
    pass
sys.stdout.write("\033[?1049l")
sys.exit(6)
"""
"""What a full-screen program does: the alternate screen, redrawn when the size changes."""


def detached(ral: Ral, *command: str) -> str:
    done = ral("run", "-d", "-q", "--", *command)
    assert done.status == 0, done
    return done.stdout.decode().strip()


def test_detach_prints_the_id_and_returns(broker: Broker, ral: Ral) -> None:
    session = detached(ral, "sleep", "60")
    assert len(session) == 8
    line = json.loads(ral("sessions", "--json").stdout)[0]
    assert (line["id"], line["state"], line["command"]) == (session, "detached", ["sleep", "60"])
    document = ral("run", "-d", "--json", "--", "true").stdout
    assert set(json.loads(document)) == {"id"}


@pytest.mark.parametrize("status", [0, 3])
def test_a_detached_command_that_ends_at_once_is_no_failure(broker: Broker, ral: Ral, status: int) -> None:
    session = detached(ral, "sh", "-c", f"echo output; exit {status}")
    deadline = time.monotonic() + 5
    while session in ral.live():
        assert time.monotonic() < deadline
    ended = {line["id"]: line for line in json.loads(ral("sessions", "--all", "--json").stdout)}
    assert (ended[session]["state"], ended[session]["exit"]) == ("ended", status)
    assert ral("logs", session).stdout == b"output\r\n"


def test_a_detached_command_that_cannot_start_says_so(broker: Broker, ral: Ral) -> None:
    assert ral("run", "-d", "--", "no-such-command").status == 127
    assert ral("run", "-d", "--", "/etc/passwd").status == 126
    assert ral.live() == []


def test_attach_replays_passes_input_on_and_gives_the_status(
    broker: Broker, ral: Ral, on_terminal: OnTerminal
) -> None:
    session = detached(ral, "sh", "-c", "echo before anyone looked; read x; echo got $x; exit 5")
    terminal = on_terminal("attach", session)
    terminal.expect(b"before anyone looked")
    terminal.send(b"typed\n")
    terminal.expect(b"got typed")
    assert terminal.wait() == 5


def test_detach_key_and_attach_again_from_another_terminal_with_its_screen(
    broker: Broker, ral: Ral, on_terminal: OnTerminal
) -> None:
    session = detached(ral, "/usr/bin/python3", "-c", EDITOR)
    first = on_terminal("attach", session, rows=20, columns=70)
    first.expect(b"20 70")
    before = len(first.output)
    first.send(DETACH)
    assert first.wait() == 0
    # What the program left on the first terminal is undone: it is back on its main screen.
    assert b"\033[?1049l" in first.output[before:]
    assert ral.live() == [session]

    second = on_terminal("attach", session, rows=40, columns=100)
    second.expect(rb"\x1b\[\?1049h")
    second.expect(b"40 100")
    second.expect(b"line one of the screen")
    second.send(b"quit\n")
    assert second.wait() == 6


def test_a_lone_ctrl_p_is_passed_on(broker: Broker, ral: Ral, on_terminal: OnTerminal) -> None:
    session = detached(ral, "sh", "-c", "stty raw -echo; printf ready; head -c 3 | od -An -tx1; exit 0")
    terminal = on_terminal("attach", session)
    terminal.expect(b"ready")
    terminal.send(b"\x10ab")
    terminal.expect(b"10 61 62")
    assert terminal.wait() == 0


def test_one_writes_and_others_watch(broker: Broker, ral: Ral, on_terminal: OnTerminal) -> None:
    session = detached(ral, "sh", "-c", "while read x; do echo got $x; [ $x = end ] && exit 2; done")
    writer = on_terminal("attach", session)
    writer.send(b"one\n")
    writer.expect(b"got one")
    refused = on_terminal("attach", session)
    refused.expect(b"--read-only")
    assert refused.wait() == 1
    watcher = on_terminal("attach", "--read-only", session)
    watcher.expect(b"got one")
    watcher.send(b"from the watcher\n")
    writer.send(b"two\n")
    watcher.expect(b"got two")
    assert b"got from" not in watcher.output
    writer.send(b"end\n")
    assert writer.wait() == 2
    assert watcher.wait() == 2


def test_attach_while_no_broker_lives(broker: Broker, ral: Ral, on_terminal: OnTerminal) -> None:
    session = detached(ral, "sh", "-c", "echo here; read x; exit 7")
    broker.crash()
    terminal = on_terminal("attach", session[:5])
    terminal.expect(b"here")
    terminal.send(b"\n")
    assert terminal.wait() == 7
    broker.start()
    assert ral.live() == []


def test_a_client_killed_while_attached_leaves_the_session_running(
    broker: Broker, ral: Ral, on_terminal: OnTerminal
) -> None:
    session = detached(ral, "sh", "-c", "echo here; read x; exit 8")
    terminal = on_terminal("attach", session)
    terminal.expect(b"here")
    os.kill(terminal.pid, signal.SIGKILL)
    assert terminal.wait() == 137
    assert ral.live() == [session]
    again = on_terminal("attach", session)
    again.expect(b"here")
    again.send(b"\n")
    assert again.wait() == 8


def test_only_detached_sessions_are_attached(broker: Broker, ral: Ral, on_terminal: OnTerminal) -> None:
    client = ral.start("run", "-q", "--", "sh", "-c", "echo x; read y")
    assert client.stdout is not None
    client.stdout.readline()
    terminal = on_terminal("attach", ral.live()[0])
    terminal.expect(b"ral: .*--detach")
    assert terminal.wait() == 1
    client.communicate(b"\n", timeout=10)
    for unknown in ("ffffffff", "zzz"):
        assert ral("attach", "--read-only", unknown).status == 1


def test_logs_follow_until_the_end(broker: Broker, ral: Ral, project: Path) -> None:
    session = detached(ral, "sh", "-c", "for i in 1 2 3; do echo line $i; sleep 0.2; done")
    done = ral("logs", session, "--follow")
    assert done.stdout == b"line 1\r\nline 2\r\nline 3\r\n"
    assert b"started" in done.stderr
    assert b"ended" in done.stderr


def test_the_log_is_capped_in_two_files_and_blocks_nothing(broker: Broker, ral: Ral, runtime: Path) -> None:
    session = detached(ral, "sh", "-c", "head -c 4000000 /dev/zero | tr '\\0' x; echo; echo the end")
    deadline = time.monotonic() + 20
    while session in ral.live():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    logs = [name for name in os.listdir(runtime / "sessions") if ".log" in name]
    assert sorted(logs) == [f"{session}.log", f"{session}.log.1"]
    assert sum((runtime / "sessions" / name).stat().st_size for name in logs) <= 2 << 20
    assert ral("logs", session).stdout.endswith(b"the end\r\n")


def test_kill_ends_a_program_that_ignores_term(broker: Broker, ral: Ral) -> None:
    session = detached(ral, "sh", "-c", "trap '' TERM HUP INT; while :; do sleep 0.05; done")
    assert ral("kill", session, "--signal", "TERM").status == 0
    time.sleep(0.2)
    assert ral.live() == [session]
    assert ral("kill", "--signal", "STOP", session).status == 1
    assert ral("kill", session).status == 0
    assert ral.live() == []


def test_the_holders_process_is_gone_after_the_end(broker: Broker, ral: Ral) -> None:
    session = detached(ral, "sleep", "60")
    assert (
        subprocess.run(["pgrep", "-f", f"ral-holder {session}"], capture_output=True, check=False).returncode
        == 0
    )
    ral("kill", session)
    deadline = time.monotonic() + 5
    while (
        subprocess.run(["pgrep", "-f", f"ral-holder {session}"], capture_output=True, check=False).returncode
        == 0
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
