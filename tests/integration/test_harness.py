"""The harness itself: a fixture that cannot fail would make every other test worthless."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.broker import Broker, OnTerminal, Ral, assert_nothing_left
from support.processes import descendants


def orphan() -> None:
    """Start a process whose parent ends at once."""
    subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 </dev/null &"], check=True)


def test_a_process_left_behind_is_found_and_ended(runtime: Path) -> None:
    known = {process.pid for process in descendants()}
    orphan()
    with pytest.raises(AssertionError, match=r"processes left:\n +\d+ sleep 600"):
        assert_nothing_left(runtime, known, seconds=0.1)
    assert {process.pid for process in descendants()} <= known


def test_a_socket_left_behind_is_found(runtime: Path) -> None:
    (runtime / "left.sock").touch()
    with pytest.raises(AssertionError, match="sockets left"):
        assert_nothing_left(runtime, {process.pid for process in descendants()})


def test_a_broker_that_dies_at_start_is_reported_with_what_it_said(runtime: Path, tmp_path: Path) -> None:
    runtime.chmod(0o777)
    broker = Broker(runtime, tmp_path / "log")
    with pytest.raises(AssertionError, match=r"the broker ended with \d+ before it was ready:\n.*chmod 700"):
        broker.start()


def test_a_broker_starts_and_stops(broker: Broker) -> None:
    assert broker.socket.is_socket()


def test_the_client_runs_a_program(broker: Broker, ral: Ral) -> None:
    done = ral("run", "-q", "--", "sh", "-c", "cat; echo error >&2; exit 3", stdin=b"input\n")
    assert done == (3, b"input\n", b"error\n")
    assert ral.live() == []


def test_a_detached_session_is_ended_with_its_test(broker: Broker, ral: Ral) -> None:
    assert ral("run", "-q", "-d", "--", "sleep", "600").status == 0
    assert len(ral.live()) == 1


def test_a_terminal_is_driven(broker: Broker, on_terminal: OnTerminal) -> None:
    terminal = on_terminal("run", "-q", "--", "sh", rows=30, columns=90)
    terminal.send(b"stty size; tty\n")
    terminal.expect(rb"30 90\r\n/dev/pts/0\r\n")
    terminal.resize(40, 100)
    terminal.send(b"stty size\n")
    terminal.expect(rb"40 100\r\n")
    terminal.send(b"exit 7\n")
    assert terminal.wait() == 7
