"""What a client of the holder is shown, and that no client, slow or absent, holds the program up."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.holder import ID, Detached, End, Sessions, attach_when_free

pytestmark = pytest.mark.needs("bubblewrap")


@pytest.fixture
def start(runtime: Path) -> Iterator[Sessions]:
    """Start a detached session: a script for sh, or another command."""
    with Sessions(runtime) as sessions:
        yield sessions


def test_modes_of_the_program_are_rebuilt_for_a_new_client(start: Sessions) -> None:
    modes = r"\033[?1h\033[?2004h\033[?1002;1006h\033[?25l\033=\033[?7l"
    # The sequences themselves are long out of the scrollback when the client comes.
    session = start(f"printf '{modes}'; seq 1 60000; echo marker; read x")
    session.wait_logged(rb"marker")
    viewer = session.attach()
    viewer.expect(rb"marker\r\n")
    head = viewer.output.split(b"\n")[0]
    for mode in (b"?1h", b"?2004h", b"?1002h", b"?1006h", b"?25l", b"?7l"):
        assert b"\x1b[" + mode in head, (mode, head)
    assert b"\x1b=" in head
    assert b"?1000" not in head


def test_reset_modes_are_not_rebuilt(start: Sessions) -> None:
    session = start(
        r"printf '\033[?1h\033[?1000h\033[?2004h\033[?2004l\033c'; seq 1 60000; echo marker; read x"
    )
    session.wait_logged(rb"marker")
    viewer = session.attach()
    viewer.expect(rb"marker\r\n")
    assert b"\x1b" not in viewer.output


def test_scrollback_is_256_kib_from_a_line_start(start: Sessions) -> None:
    session = start("seq 100000 199999; echo marker; read x")
    session.wait_logged(rb"marker")
    viewer = session.attach()
    viewer.expect(rb"marker\r\n")
    lines = viewer.output.split(b"\r\n")
    assert 250_000 < len(viewer.output) <= 256 << 10
    assert all(len(line) == 6 for line in lines[:-2])
    assert lines[0] == str(200000 - (len(lines) - 2)).encode()


def test_alternate_screen_is_entered_and_repainted(start: Sessions) -> None:
    session = start(
        r"echo before; printf '\033[?1049h\033[?25lpainted'; trap 'stty size; echo repainted' WINCH;"
        "echo up;"
        "while :; do sleep 0.02; done"
    )
    session.wait_logged(rb"up")
    viewer = session.attach(rows=24, columns=80)
    viewer.expect(rb"^\x1b\[\?1049h\x1b\[0m\x1b\[2J\x1b\[H\x1b\[\?25l")
    viewer.expect(rb"repainted")
    assert b"before" not in viewer.output
    viewer.quiet(0.3)
    viewer.close()
    # The same size again: without two sizes the program would not hear of it.
    viewer = attach_when_free(session)
    viewer.expect(rb"23 80\r\nrepainted.*24 80\r\nrepainted")


def test_main_screen_after_the_alternate_one_is_replayed_without_entering_it(start: Sessions) -> None:
    session = start(r"printf '\033[?1049h'; seq 1 60000; printf '\033[?1049l'; echo after; read x")
    session.wait_logged(rb"after")
    viewer = session.attach()
    viewer.expect(rb"after\r\n")
    # The scrollback begins on the alternate screen: entered for it, left where the program left it.
    assert viewer.output.startswith(b"\x1b[?1049h")
    assert viewer.output.endswith(b"\x1b[?1049lafter\r\n")


def test_replay_neither_asks_nor_rings_nor_writes_the_clipboard(start: Sessions) -> None:
    questions = [
        r"\033[6n", r"\033[c", r"\033[>c", r"\033[5n", r"\033[?6n", r"\033[>q", r"\033[?u", r"\033[?2026$p",
        r"\005", r"\033]11;?\033\\", r"\033]52;c;c2VjcmV0\007", r"\033P+q544e\033\\", r"\033Z", r"\007",
        r"\033[18t", r"\033]9;note\007",
    ]  # fmt: skip
    kept = r"\033[1mbold\033[0m\033]0;title\007\033]8;;http://x\033\\link\033]8;;\033\\"
    session = start(
        f"stty -echo; read x; printf '{''.join(f'<{q}>' for q in questions)}{kept}'; echo end; read x"
    )
    live = session.attach()
    assert live.wait_greeting() == 0
    live.type(b"\n")
    live.expect(rb"end\r\n")
    for asked in (b"\x1b[6n", b"\x1b]11;?", b"\x1bP+q", b"\x05", b"\x07"):
        assert asked in live.output
    again = session.attach(read_only=True)
    again.expect(rb"end\r\n")
    assert b"<>" * len(questions) in again.output
    shown = b"\x1b[1mbold\x1b[0m\x1b]0;title\x07\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\end\r\n"
    assert again.output.endswith(shown)


def test_program_is_not_held_up_without_a_client(start: Sessions) -> None:
    session = start("head -c 20000000 /dev/zero | tr '\\0' 'x'; exit 3")
    assert session.wait(30) == 0
    assert session.sandbox.wait() == 3


def test_client_that_stands_still_does_not_hold_the_program_up(start: Sessions) -> None:
    session = start(
        "read x; head -c 4000000 /dev/zero | tr '\\0' 'x'; echo; echo done; read y; echo bye; exit 3"
    )
    viewer = session.attach()
    assert viewer.wait_greeting() == 0
    viewer.type(b"\n")
    # From here on the client reads nothing.
    session.wait_logged(rb"done")
    # It catches up: what is lost lies in the middle, and the present is exact.
    viewer.expect(rb"\x18.*done\r\n")
    viewer.type(b"\n")
    viewer.expect(rb"bye\r\n")
    assert viewer.wait_end() == End(3, lost=False)
    assert len(viewer.output) < 1 << 20


def test_modes_are_right_after_catching_up(start: Sessions) -> None:
    session = start(
        r"read x; printf '\033[?2004h\033[?1h'; seq 1 50000; printf '\033[?1l\033[?1000h'; seq 1 400000;"
        "echo done; read y"
    )
    viewer = session.attach()
    assert viewer.wait_greeting() == 0
    viewer.type(b"\n")
    session.wait_logged(rb"done")
    viewer.expect(rb"\x18.*done\r\n")
    before, after = viewer.output.split(b"\x18")
    state = {b"2004": b"l", b"1": b"l", b"1000": b"l"}
    for part in (before, after):
        for number in state:
            for letter in (b"h", b"l"):
                if b"\x1b[?" + number + letter in part:
                    state[number] = letter
    assert state == {b"2004": b"h", b"1": b"l", b"1000": b"h"}


def test_stopped_client_process_does_not_hold_the_program_up(start: Sessions) -> None:
    session = start("read x; seq 1 600000; echo done; read y")
    script = (
        "import socket,struct,sys\n"
        "s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET); s.connect(sys.argv[1])\n"
        "s.send(struct.pack('<cBHHHH',b'A',0,24,80,0,0)); s.recv(9); s.send(b'I\\n')\n"
        "print('on',flush=True)\n"
        "while s.recv(65536): pass\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(session.path)], stdout=subprocess.PIPE
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"on\n"
        try:
            client.send_signal(signal.SIGSTOP)
            session.wait_logged(rb"done", 40)
        finally:
            client.kill()


def test_client_that_keeps_up_misses_nothing(start: Sessions) -> None:
    session = start("read x; seq 1 300000; echo done; read y")
    viewer = session.attach()
    assert viewer.wait_greeting() == 0
    viewer.type(b"\n")
    deadline = time.monotonic() + 30
    # Without a search of all output for each packet, which would make this the client that does not keep up.
    while not viewer.output.endswith(b"done\r\n"):
        assert viewer.take(deadline - time.monotonic()), viewer.output[-200:]
    wanted = b"".join(b"%d\r\n" % number for number in range(1, 300001))
    assert wanted in viewer.output


def test_input_of_a_program_that_does_not_read_is_bounded_and_the_client_can_leave(start: Sessions) -> None:
    session = start("stty raw -echo; echo up; sleep 1000")
    viewer = session.attach()
    viewer.expect(rb"up")
    viewer.socket.setblocking(False)
    sent = 0
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            viewer.type(b"x" * 32000)
            sent += 32000
        except BlockingIOError:
            if not select.select([], [viewer.socket], [], 0.3)[1]:
                break
    assert 0 < sent < 1 << 20
    viewer.close()
    attach_when_free(session)


def test_log_is_rotated_and_bounded(start: Sessions) -> None:
    session = start("seq 1 500000; echo done; read x")
    session.wait_logged(rb"done")
    old = session.directory / f"{ID}.log.1"
    assert old.stat().st_size <= 1 << 20
    assert session.log.stat().st_size <= 1 << 20
    assert (session.log.stat().st_mode & 0o777, old.stat().st_mode & 0o777) == (0o600, 0o600)
    assert old.stat().st_size > (1 << 20) - 65536
    kept = old.read_bytes() + session.logged()
    assert kept.endswith(b"".join(b"%d\r\n" % number for number in range(400000, 500001)) + b"done\r\n")


def test_log_is_not_written_through_a_link(start: Sessions, runtime: Path) -> None:
    victim = runtime / "victim"
    victim.write_bytes(b"mine")
    (runtime / f"{ID}.log").symlink_to(victim)
    session = start("echo hello; read x; exit 4")
    viewer = session.attach()
    viewer.expect(rb"hello")
    viewer.type(b"\n")
    assert viewer.wait_end() == End(4, lost=False)
    assert victim.read_bytes() == b"mine"


@pytest.mark.root
def test_full_disk_does_not_stop_the_program(runtime: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(runtime)], check=True)
    try:
        with Detached(runtime, (b"sh", b"-c", b"seq 1 200000; echo done; read x; exit 6")) as session:
            viewer = session.attach()
            viewer.expect(rb"done\r\n")
            assert session.log.stat().st_size <= 128 << 10
            viewer.type(b"\n")
            assert viewer.wait_end() == End(6, lost=False)
            assert session.wait() == 0
    finally:
        subprocess.run(["umount", str(runtime)], check=True)
