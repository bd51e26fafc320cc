"""The holder of a detached session (docs/protocol.md, section 4): a real sandbox, terminal and clients."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.holder import Detached, End, Sessions, Viewer, attach_when_free
from support.native import program

pytestmark = pytest.mark.needs("bubblewrap")


@pytest.fixture
def start(runtime: Path) -> Iterator[Sessions]:
    """Start a detached session: a script for sh, or another command."""
    with Sessions(runtime) as sessions:
        yield sessions


def test_attached_client_types_and_sees_and_gets_the_exit_status(start: Sessions) -> None:
    session = start("read line; echo got $line; tty; exit 42")
    viewer = session.attach()
    assert viewer.wait_greeting() == 0
    viewer.type(b"hello\n")
    viewer.expect(rb"got hello\r\n/dev/pts/0\r\n")
    assert viewer.wait_end() == End(42, lost=False)
    assert session.wait() == 0
    assert not session.path.exists()


def test_output_before_the_first_client_is_replayed_and_then_goes_on(start: Sessions) -> None:
    session = start("echo early; read x; echo late; read x")
    session.wait_logged(rb"early")
    viewer = session.attach()
    viewer.expect(rb"early\r\n")
    viewer.type(b"\n")
    viewer.expect(rb"late\r\n")
    again = session.attach(read_only=True)
    again.expect(rb"early\r\n.*late\r\n")


def test_session_outlives_its_clients(start: Sessions) -> None:
    session = start("read a; echo first $a; read b; echo second $b; read c")
    viewer = session.attach()
    viewer.type(b"one\n")
    viewer.expect(rb"first one")
    viewer.close()
    viewer = attach_when_free(session)
    viewer.type(b"two\n")
    viewer.expect(rb"first one.*second two")


def test_input_is_delivered_although_the_client_detaches_at_once(start: Sessions) -> None:
    session = start("read a; echo got $a; read b")
    viewer = session.attach()
    viewer.type(b"parting words\n")
    viewer.close()
    session.wait_logged(rb"got parting words")


def test_only_one_client_may_write_and_any_number_watch(start: Sessions) -> None:
    session = start("read a; echo got $a; read b")
    writer = session.attach()
    assert writer.wait_greeting() == 0
    second = session.attach()
    assert second.wait_greeting() == 1
    assert second.wait_end() is None
    watchers = [session.attach(read_only=True) for _ in range(16)]
    assert [watcher.wait_greeting() for watcher in watchers] == [0] * 16
    assert session.attach(read_only=True).wait_greeting() == 2
    writer.type(b"it\n")
    for watcher in watchers:
        watcher.expect(rb"got it\r\n")


def test_watcher_can_neither_write_nor_resize(start: Sessions) -> None:
    session = start("stty size; read a; echo got $a; stty size; read b")
    writer = session.attach(rows=30, columns=90)
    watcher = session.attach(read_only=True, rows=5, columns=5)
    assert watcher.wait_greeting() == 0
    watcher.resize(7, 7)
    watcher.type(b"forged\n")
    assert b"forged" not in watcher.quiet(0.3)
    writer.type(b"true\n")
    writer.expect(rb"got true\r\n30 90\r\n")


def test_size_of_the_writer_is_the_size_of_the_terminal(start: Sessions) -> None:
    session = start("trap 'stty size' WINCH; echo up; while :; do sleep 0.05; done")
    viewer = session.attach(rows=31, columns=91)
    viewer.expect(rb"up")
    viewer.resize(11, 44)
    viewer.expect(rb"11 44")


def test_malformed_packets_end_the_connection_and_nothing_else(start: Sessions) -> None:
    session = start("read a; echo got $a; read b")
    malformed = [b"A", b"A" + bytes(10), b"A\x02" + bytes(8), b"I", b"Q" + bytes(9), b"\0", b"I" * 40000]
    for packet in malformed:
        viewer = Viewer(session.path, first=packet)
        assert viewer.wait_end() is None, packet
        assert viewer.greeting is None, packet
        viewer.close()
    for packet in (b"W", b"W" + bytes(9), b"A" + bytes(9), b"Q", b"I" * 40000):
        viewer = session.attach(read_only=True)
        viewer.send(packet)
        assert viewer.wait_end() is None, packet
    writer = session.attach()
    writer.type(b"alive\n")
    writer.expect(rb"got alive")


def test_stop_is_told_and_the_next_input_continues(start: Sessions) -> None:
    session = start(None, b"cat")
    viewer = session.attach()
    assert viewer.wait_greeting() == 0
    viewer.type(b"a\n")
    viewer.expect(rb"a\r\na\r\n")
    viewer.type(b"\x1a")
    while not viewer.stops:
        assert viewer.take(5), "the stop was not told"
    assert viewer.stops == [signal.SIGTSTP]
    viewer.type(b"b\n")
    viewer.expect(rb"b\r\nb\r\n")


def test_attaching_continues_a_stopped_program_and_watching_does_not(start: Sessions) -> None:
    session = start("trap 'echo continued' CONT; echo up; kill -STOP $$; while :; do sleep 0.05; done")
    session.wait_logged(rb"up")
    watcher = session.attach(read_only=True)
    while not watcher.stops:
        assert watcher.take(5), "the stop was not told"
    assert watcher.stops == [signal.SIGSTOP]
    assert b"continued" not in watcher.quiet(0.2)
    session.attach()
    watcher.expect(rb"continued")


def test_killed_monitor_means_lost_and_the_program_is_gone(start: Sessions) -> None:
    session = start("echo up; trap '' HUP; while :; do sleep 0.05; done")
    viewer = session.attach()
    viewer.expect(rb"up")
    signal.pidfd_send_signal(session.sandbox.monitor, signal.SIGKILL)
    assert viewer.wait_end() == End(137, lost=True)
    assert session.wait() == 0
    assert session.sandbox.ended(0)
    assert not session.path.exists()


def test_killed_holder_ends_the_session(start: Sessions) -> None:
    session = start("echo up; trap '' HUP TERM; while :; do sleep 0.05; done")
    session.wait_logged(rb"up")
    os.kill(session.pid, signal.SIGKILL)
    assert session.sandbox.ended(1)


def test_signals_of_a_logout_do_not_end_the_session(start: Sessions) -> None:
    session = start("echo up; read x; exit 8")
    viewer = session.attach()
    viewer.expect(rb"up")
    for number in (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTSTP,
        signal.SIGPIPE,
        signal.SIGUSR1,
    ):
        os.kill(session.pid, number)
    viewer.type(b"\n")
    assert viewer.wait_end() == End(8, lost=False)


def test_term_ends_the_session_with_the_status_of_the_program(start: Sessions) -> None:
    session = start("trap 'echo bye; exit 9' TERM; echo up; while :; do sleep 0.05; done")
    viewer = session.attach()
    viewer.expect(rb"up")
    os.kill(session.pid, signal.SIGTERM)
    viewer.expect(rb"bye")
    assert viewer.wait_end() == End(9, lost=False)


def test_second_term_does_not_wait(start: Sessions) -> None:
    session = start("trap '' TERM; echo up; while :; do sleep 0.05; done")
    viewer = session.attach()
    viewer.expect(rb"up")
    os.kill(session.pid, signal.SIGTERM)
    assert viewer.quiet(0.3) == b""
    os.kill(session.pid, signal.SIGTERM)
    assert viewer.wait_end(3) == End(137, lost=False)


def test_last_output_arrives_although_the_program_ends_at_once(start: Sessions) -> None:
    session = start("read x; seq 1 20000; exit 5")
    viewer = session.attach()
    assert viewer.wait_greeting() == 0
    viewer.type(b"\n")
    assert viewer.wait_end() == End(5, lost=False)
    assert viewer.output.endswith(b"19999\r\n20000\r\n")


def test_holder_waits_for_a_terminal_that_everybody_closed(start: Sessions) -> None:
    session = start(
        "exec 3<>/dev/tty; exec 0<&- 1>&- 2>&-; exec 3>&-; sleep 1; echo again >/dev/pts/0; exit 2"
    )
    viewer = session.attach()
    before = os.times()
    viewer.expect(rb"again")
    assert viewer.wait_end() == End(2, lost=False)
    assert os.times().elapsed - before.elapsed < 5


def test_holder_does_nothing_while_nothing_happens(start: Sessions) -> None:
    session = start("echo up; read x")
    viewer = session.attach()
    viewer.expect(rb"up")
    time.sleep(0.2)

    def switches() -> str:
        lines = Path(f"/proc/{session.pid}/status").read_text().splitlines()
        return next(line for line in lines if line.startswith("voluntary_ctxt_switches"))

    before = switches()
    time.sleep(1)
    assert switches() == before


def test_holder_refuses_to_run_by_hand() -> None:
    done = subprocess.run([program("holder"), "zzzz"], capture_output=True, check=False)
    assert done.returncode == 2
    assert b"the broker starts this program" in done.stderr


@pytest.mark.parametrize(
    ("content", "end"),
    [
        (b'{ "child-pid": 9 }\n{ "exit-code": 3 }\n', End(3, lost=False)),
        (b'{ "exit-code": 255 }\n', End(255, lost=False)),
        (b'{ "child-pid": 9 }\n{ "exit-code": 3 }', End(137, lost=True)),
        (b'{ "exit-code": 5 }\n{ "exit-code": 6', End(5, lost=False)),
        (b'{ "exit-code": 256 }\n', End(137, lost=True)),
        (b'{ "exit-code": -1 }\n', End(137, lost=True)),
        (b'{ "exit-code": \n', End(137, lost=True)),
        (b"", End(137, lost=True)),
        (b"x" * 9000 + b'\n{ "exit-code": 4 }\n', End(4, lost=False)),
    ],
)
def test_status_is_what_complete_lines_of_the_status_file_say(
    runtime: Path, content: bytes, end: End
) -> None:
    with Detached(runtime, (b"sh", b"-c", b"read x; exit 77"), status=content) as session:
        viewer = session.attach()
        viewer.type(b"\n")
        assert viewer.wait_end() == end
