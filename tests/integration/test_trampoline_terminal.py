"""The trampoline's terminal, signals and end: pid 1 of real sandboxes (docs/protocol.md, section 3)."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import termios
import time
from collections.abc import Iterator

import pytest

from ral_broker.envelope.warrant import Warrant, encode
from support.native import (
    CONTINUED,
    GO,
    STARTED,
    STOPPED,
    Sandbox,
    run,
)
from support.running import ON_TERMINAL, PATH, Running, Typed, python, shell

pytestmark = pytest.mark.needs("bubblewrap", "fresh /proc")


@pytest.fixture
def bash() -> Iterator[Typed]:
    environment = (PATH, b"PS1=% ", b"TERM=dumb", b"HOME=/nonexistent", b"LC_ALL=C")
    argv = (b"bash", b"--norc", b"--noprofile", b"--noediting", b"-i")
    with Sandbox(encode(Warrant(argv=argv, environment=environment, terminals=ON_TERMINAL))) as sandbox:
        typed = Typed(sandbox)
        typed.expect(rb"% ")
        yield typed


def test_terminal_is_the_sandbox_s_own(bash: Typed) -> None:
    fcntl.ioctl(bash.sandbox.master, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
    bash.type(b"tty; stty size; readlink /proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2; tty </dev/tty\n")
    bash.expect(rb"/dev/pts/0\r\n33 99\r\n/dev/pts/0\r\n/dev/pts/0\r\n/dev/pts/0\r\n/dev/tty\r\n% ")
    bash.type(b"ps -o sid=,tpgid= -p $$; echo $$\n")
    match = bash.expect(rb"\n\s*(\d+)\s+(\d+)\r\n(\d+)\r\n% ")
    assert match[1] == b"1"


def test_job_control_in_a_shell(bash: Typed) -> None:
    bash.type(b"sleep 1000\n")
    time.sleep(0.2)
    bash.type(b"\x1a")
    bash.expect(rb"\[1\]\+  Stopped +sleep 1000\r\n% ")
    bash.type(b"bg\n")
    bash.expect(rb"\[1\]\+ sleep 1000 &\r\n% ")
    bash.type(b"jobs\n")
    bash.expect(rb"\[1\]\+  Running +sleep 1000 &\r\n% ")
    bash.type(b"fg\n")
    bash.expect(rb"sleep 1000\r\n")
    bash.type(b"\x03")
    bash.expect(rb"% ")
    bash.type(b"echo $?\n")
    bash.expect(rb"130\r\n% ")
    bash.type(b"cat &\n")
    bash.expect(rb"\[1\] \d+\r\n")
    bash.type(b"until jobs | grep -q 'Stopped.*cat'; do sleep 0.05; done; echo stopped $((6*7))\n")
    bash.expect(rb"stopped 42\r\n")
    bash.type(b"kill -9 %1; exit 4\n")
    bash.type(b"exit 4\n")
    assert bash.sandbox.wait() == 4


def test_interrupt_reaches_a_trap() -> None:
    with Sandbox(
        shell(
            "trap 'echo trapped; exit 9' INT; echo up; while :; do sleep 0.05; done", terminals=ON_TERMINAL
        )
    ) as sandbox:
        typed = Typed(sandbox)
        typed.expect(rb"up")
        typed.type(b"\x03")
        typed.expect(rb"trapped")
        assert sandbox.wait() == 9


def test_interrupt_ends_a_plain_program_with_130() -> None:
    with Sandbox(shell("echo up; exec sleep 100", terminals=ON_TERMINAL)) as sandbox:
        typed = Typed(sandbox)
        typed.expect(rb"up")
        typed.type(b"\x03")
        assert sandbox.wait() == 130


def test_window_size_reaches_a_trap() -> None:
    script = "trap 'stty size' WINCH; echo up; while :; do sleep 0.05; done"
    with Sandbox(shell(script, terminals=ON_TERMINAL)) as sandbox:
        typed = Typed(sandbox)
        typed.expect(rb"up")
        fcntl.ioctl(sandbox.master, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 34, 0, 0))
        typed.expect(rb"12 34")


def test_plain_program_stops_and_continues() -> None:
    with Sandbox(encode(Warrant(argv=(b"cat",), environment=(PATH,), terminals=ON_TERMINAL))) as sandbox:
        typed = Typed(sandbox)
        for text in (b"one", b"two"):
            typed.type(text + b"\n")
            typed.expect(text + rb"\r\n" + text + rb"\r\n")
            typed.type(b"\x1a")
            packet = sandbox.expect(STOPPED)
            assert packet.a == signal.SIGTSTP
            typed.type(b"while stopped\n")
            time.sleep(0.1)
            sandbox.signal(signal.SIGCONT)
            sandbox.expect(CONTINUED)
            typed.expect(rb"while stopped\r\n.*while stopped\r\n")
        typed.type(b"\x04")
        assert sandbox.wait() == 0


def test_stopped_program_can_be_ended() -> None:
    script = (
        "import os,signal\nsignal.signal(15,lambda *a: os._exit(6))\nprint('up')\nwhile 1: signal.pause()\n"
    )
    with Sandbox(python(script, terminals=ON_TERMINAL)) as sandbox:
        typed = Typed(sandbox)
        typed.expect(rb"up")
        typed.type(b"\x1a")
        sandbox.expect(STOPPED)
        sandbox.signal(signal.SIGTERM)
        assert sandbox.wait() == 6


@pytest.mark.parametrize("terminals", [(True, False, False), (False, True, True), (True, True, False)])
def test_only_those_descriptors_that_are_terminals_are_replaced(terminals: tuple[bool, bool, bool]) -> None:
    script = "import os,sys; sys.exit(sum(os.isatty(n) << n for n in range(3)))"
    with Sandbox(python(script, terminals=terminals)) as sandbox:
        sandbox.ready()
        sandbox.go([sandbox.status_fd] * terminals.count(False))
        sandbox.expect(STARTED)
        assert sandbox.wait() == sum(wanted << index for index, wanted in enumerate(terminals))


def test_without_a_terminal_there_is_none() -> None:
    ran = run(shell("exec 2>&1; tty; echo x >/dev/tty"))
    assert b"not a tty" in ran.stdout
    assert ran.status != 0
    with Sandbox(shell("exit 0")) as sandbox:
        assert sandbox.ready().fds == []


def test_closing_the_terminal_hangs_up() -> None:
    script = "trap 'exit 0' HUP; echo up; while :; do sleep 0.05; done"
    with Sandbox(shell(script, terminals=ON_TERMINAL)) as sandbox:
        typed = Typed(sandbox)
        typed.expect(rb"up")
        os.close(sandbox.master)
        sandbox.master = -1
        assert sandbox.wait() == 0


TRAP_ALL = (
    "import signal\n"
    "for name in 'HUP INT QUIT USR1 USR2 TERM TSTP CONT WINCH'.split():\n"
    "  signal.signal(signal.Signals['SIG'+name], lambda *a, name=name: print(name))\n"
    "print('up')\n"
    "while True: signal.pause()\n"
)


@pytest.mark.parametrize("way", ["pid 1", "lease"])
def test_signals_are_forwarded_to_the_program_s_group(way: str) -> None:
    with Running(python(TRAP_ALL)) as running:
        assert running.line() == b"up"
        for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "TERM", "TSTP", "CONT", "WINCH"):
            number = signal.Signals[f"SIG{name}"]
            if way == "lease":
                running.sandbox.signal(number)
            else:
                signal.pidfd_send_signal(running.sandbox.init, number)
            assert running.line() == name.encode()


@pytest.mark.parametrize("number", [0, -1, 9, 19, 11, 14, 65, 1 << 30])
def test_other_signals_are_not_forwarded(number: int) -> None:
    with Running(python(TRAP_ALL)) as running:
        assert running.line() == b"up"
        running.sandbox.signal(number)
        running.sandbox.signal(signal.SIGUSR1)
        assert running.line() == b"USR1"


def test_malformed_packets_of_the_lease_holder_change_nothing() -> None:
    with Running(python(TRAP_ALL)) as running:
        assert running.line() == b"up"
        for data in (
            b"x",
            b"x" * 100,
            struct.pack("<IiiI", 7, 15, 1, 0),
            struct.pack("<IiiI", 99, 15, 0, 0),
        ):
            running.sandbox.lease.send(data)
        running.sandbox.send(GO, fds=[running.sandbox.status_fd])
        running.sandbox.signal(signal.SIGUSR2)
        assert running.line() == b"USR2"


def test_program_that_left_its_group_is_still_reached() -> None:
    script = (
        "import os,signal,time\n"
        "child=os.fork()\n"
        "if not child: os.setpgid(0,0); time.sleep(100)\n"
        "time.sleep(.1); os.setpgid(0,child)\n"
        "signal.signal(signal.SIGUSR1,lambda *a: os._exit(21)); print('up',flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    with Running(python(script)) as running:
        assert running.line() == b"up"
        running.sandbox.signal(signal.SIGUSR1)
        assert running.sandbox.wait() == 21


def test_background_children_end_with_the_program() -> None:
    script = "setsid sh -c 'trap \"\" HUP TERM INT; exec sleep 1234.5' & echo up; sleep 0.2; exit 3"
    with Running(shell(script)) as running:
        assert running.line() == b"up"
        assert running.sandbox.wait() == 3
        # The pipe's last holder was the child in the background.
        assert running.out.data == b""
        assert os.read(running.out.read_end, 1) == b""


@pytest.mark.parametrize("terminals", [(False, False, False), ON_TERMINAL])
def test_closing_the_lease_ends_everything(terminals: tuple[bool, bool, bool]) -> None:
    inner = "trap '' HUP TERM INT QUIT TSTP; while :; do sleep 0.05; done"
    with Sandbox(shell(f'setsid sh -c "{inner}" & {inner}', terminals=terminals)) as sandbox:
        sandbox.ready()
        sandbox.go([sandbox.status_fd] * terminals.count(False))
        sandbox.expect(STARTED)
        time.sleep(0.2)
        assert not sandbox.ended(0)
        sandbox.lease.close()
        assert sandbox.ended(1)
        assert sandbox.wait() == 137


def test_closing_the_lease_ends_a_stopped_program() -> None:
    with Running(shell("echo up; kill -STOP $$")) as running:
        assert running.line() == b"up"
        running.sandbox.expect(STOPPED)
        running.sandbox.lease.close()
        assert running.sandbox.ended(1)


def test_lease_that_is_not_read_does_not_block_pid_1() -> None:
    stops = (
        "import os,signal,sys,time\n"
        "me=os.getpid()\n"
        "if not os.fork():\n"
        "  for _ in range(3000): os.kill(me,signal.SIGSTOP); os.kill(me,signal.SIGCONT)\n"
        "  os.kill(me,signal.SIGUSR1); os._exit(0)\n"
        "signal.signal(signal.SIGUSR1,lambda *a: os._exit(5))\n"
        "while True: time.sleep(.01)\n"
    )
    with Running(python(stops)) as running:
        # Nobody reads the packets meanwhile.
        assert running.sandbox.wait() == 5
