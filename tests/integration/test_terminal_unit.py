"""The client on a real pty, with a scripted broker and a real program on a real pty behind it."""

from __future__ import annotations

import os
import signal
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ral_protocol import exits
from support.peer import Peer, Session, client_command
from support.terminal import Terminal

READY = "echo ready; "


class Driver:
    """Starts the client on a pty, by itself or below a shell, and knows the session behind it."""

    def __init__(self, runtime: Path, project: Path) -> None:
        self.project = project
        self.session = Session()
        self.peer = Peer(runtime, self.session)
        self.environment = {"PATH": os.environ["PATH"], "RAL_RUNTIME_DIR": str(runtime), "PS1": "prompt> "}
        self.terminals: list[Terminal] = []

    def start(self, command: list[str]) -> Terminal:
        self.terminals.append(Terminal(command, cwd=self.project, env=self.environment))
        return self.terminals[-1]

    def run(self, *command: str) -> Terminal:
        return self.start(client_command("run", *command))

    def shell(self, tail: str, *command: str) -> Terminal:
        """A shell with job control that runs the client, with ``tail`` (a redirection, a pipe) after it."""
        (self.project / "ral").write_text(
            "#!/bin/sh\nexec " + " ".join(map(quote, client_command("run", *command))) + "\n"
        )
        (self.project / "ral").chmod(0o755)
        terminal = self.start(["/bin/bash", "--norc", "--noprofile", "-i"])
        terminal.expect(rb"prompt> ")
        terminal.send(b"./ral " + tail.encode() + b"\n")
        return terminal


def quote(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


@pytest.fixture
def driver(runtime: Path, project: Path) -> Iterator[Driver]:
    driver = Driver(runtime, project)
    yield driver
    for terminal in driver.terminals:
        terminal.__exit__(None, None, None)
    driver.peer.close()
    if driver.session.init_pid:
        driver.session.reap()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def wait_for_modes(terminal: Terminal, raw: bool) -> None:
    wait_until(
        lambda: bool(terminal.modes()[3] & termios.ICANON) != raw, f"the terminal did not become raw={raw}"
    )


def test_the_program_has_a_terminal_of_its_own(driver: Driver) -> None:
    terminal = driver.run("sh", "-c", "tty; stty size; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && exit 9")
    terminal.expect(rb"(/dev/pts/\d+)\r\n24 80\r\n")
    assert terminal.wait() == 9
    assert driver.session.slave.encode() in terminal.output
    assert terminal.slave.encode() not in terminal.output
    assert driver.peer.requests[0]["terminals"] == [True, True, True]


def test_bytes_pass_unchanged_in_both_directions(driver: Driver) -> None:
    terminal = driver.run(
        "sh", "-c", f"stty raw -echo; {READY} head -c 256 | od -An -v -tx1; printf 'x\\ny'"
    )
    terminal.expect(b"ready")
    wait_for_modes(terminal, raw=True)
    terminal.send(bytes(range(256)))
    assert terminal.wait() == 0
    seen = terminal.output.partition(b"ready")[2]
    assert bytes.fromhex(seen.partition(b"x\ny")[0].decode()) == bytes(range(256))
    assert seen.endswith(b"x\ny")


def test_modes_are_copied_and_put_back(driver: Driver) -> None:
    terminal = driver.start(
        [
            "sh",
            "-c",
            'stty -ixon erase ^H; exec "$@"',
            "sh",
            *client_command("run", "sh", "-c", f"stty -a; {READY} cat"),
        ]
    )
    terminal.expect(rb"erase = \^H")
    terminal.expect(rb"-ixon")
    terminal.expect(b"ready")
    wait_for_modes(terminal, raw=True)
    terminal.send(b"\x04")
    assert terminal.wait() == 0
    iflag, oflag, _, lflag = terminal.modes()
    assert lflag & termios.ICANON
    assert lflag & termios.ECHO
    assert lflag & termios.ISIG
    assert oflag & termios.OPOST
    assert iflag & termios.ICRNL
    assert not iflag & termios.IXON


def test_ctrl_c_runs_the_programs_trap(driver: Driver) -> None:
    terminal = driver.run("sh", "-c", f"trap 'echo got; exit 5' INT; {READY} while :; do sleep 0.01; done")
    terminal.expect(b"ready")
    wait_for_modes(terminal, raw=True)
    terminal.send(b"\x03")
    terminal.expect(b"got")
    assert terminal.wait() == 5


def test_ctrl_c_ends_a_program_without_a_trap_with_130(driver: Driver) -> None:
    terminal = driver.run("sh", "-c", f"{READY} exec sleep 60")
    terminal.expect(b"ready")
    wait_for_modes(terminal, raw=True)
    terminal.send(b"\x03")
    assert terminal.wait() == 130
    wait_for_modes(terminal, raw=False)


def test_a_new_window_size_arrives(driver: Driver) -> None:
    program = f"trap 'stty size; exit 3' WINCH; {READY} while :; do sleep 0.05; done"
    terminal = driver.run("bash", "-c", program)
    terminal.expect(b"ready")
    wait_for_modes(terminal, raw=True)
    terminal.resize(33, 101)
    terminal.expect(rb"33 101")
    assert terminal.wait() == 3


def test_all_output_arrives_before_the_end(driver: Driver) -> None:
    terminal = driver.run("sh", "-c", "seq 1 60000")
    assert terminal.wait(20) == 0
    assert terminal.output == b"".join(b"%d\r\n" % number for number in range(1, 60001))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1])
def test_the_terminal_is_restored_after_a_signal(driver: Driver, number: signal.Signals) -> None:
    terminal = driver.run("sh", "-c", f"{READY} exec sleep 60")
    terminal.expect(b"ready")
    wait_for_modes(terminal, raw=True)
    os.kill(terminal.pid, number)
    assert terminal.wait() == 128 + number
    assert terminal.modes()[3] & termios.ICANON


def test_the_terminal_is_restored_when_the_session_is_lost(driver: Driver) -> None:
    terminal = driver.run("sh", "-c", f"{READY} exec sleep 60")
    terminal.expect(b"ready")
    wait_for_modes(terminal, raw=True)
    driver.session.kill_monitor()
    terminal.expect(rb"ral: sh: lost")
    assert terminal.wait() == exits.LOST
    assert terminal.modes()[3] & termios.ICANON


def test_a_session_goes_on_without_its_broker(driver: Driver) -> None:
    terminal = driver.run("sh", "-c", f'{READY} read line; echo "<$line>"; exit 4')
    terminal.expect(b"ready")
    wait_for_modes(terminal, raw=True)
    for incoming in driver.peer.connections:
        incoming.sock.close()
    terminal.send(b"typed\r")
    terminal.expect(b"<typed>")
    assert terminal.wait() == 4


def test_a_notice_does_not_break_the_line(driver: Driver) -> None:
    terminal = driver.run("sh", "-c", f"{READY} read line")
    terminal.expect(b"ready")
    wait_for_modes(terminal, raw=True)
    driver.peer.connections[0].answer({"t": "notice", "text": "a mask was lost"})
    terminal.expect(rb"ral: a mask was lost\r\n")
    terminal.send(b"\r")
    assert terminal.wait() == 0


def test_a_program_that_was_not_executed_leaves_the_terminal_as_it_was(driver: Driver) -> None:
    driver.session.fail = (7, 2)
    terminal = driver.run("nosuch")
    terminal.expect(rb"ral: nosuch: not found inside the sandbox")
    assert terminal.wait() == exits.NOT_FOUND
    assert terminal.modes()[3] & termios.ICANON


def test_ctrl_z_stops_the_job_and_fg_continues_it(driver: Driver) -> None:
    terminal = driver.shell("; echo status=$?", "sh", "-c", f"{READY} exec cat")
    terminal.expect(b"ready")
    wait_for_modes(terminal, raw=True)
    terminal.send(b"\x1a")
    terminal.expect(rb"Stopped")
    terminal.expect(rb"prompt> ")
    terminal.resize(40, 90)
    terminal.send(b"jobs\r")
    terminal.expect(rb"Stopped .*ral")
    terminal.send(b"fg; echo status=$?\r")
    terminal.expect(rb"\./ral.*\r\n")
    wait_for_modes(terminal, raw=True)
    terminal.send(b"after\r\x04")
    terminal.expect(rb"after\r\nafter\r\n")
    terminal.expect(rb"status=0")
    terminal.send(b"exit\r")
    assert terminal.wait() == 0


def test_a_stopped_job_ends_when_its_shell_is_killed(driver: Driver) -> None:
    """The kernel sends HUP and CONT to a stopped process group that becomes orphaned."""
    terminal = driver.shell("", "sh", "-c", f"{READY} exec cat")
    terminal.expect(b"ready")
    wait_for_modes(terminal, raw=True)
    terminal.send(b"\x1a")
    terminal.expect(rb"Stopped")
    os.kill(terminal.pid, signal.SIGKILL)
    assert terminal.wait() == 128 + signal.SIGKILL
    assert driver.session.reap() == 0
    driver.session.init_pid = 0


def test_in_the_background_the_terminal_is_the_shells(driver: Driver) -> None:
    program = f'{READY} read line; echo "<$line>"; exit 6'
    terminal = driver.shell("&", "sh", "-c", program)
    terminal.expect(b"ready")
    # Bash reads a command line in a mode of its own, not in ours: ISIG stays.
    for _ in range(20):
        assert terminal.modes()[3] & termios.ISIG
        time.sleep(0.01)
    terminal.send(b"echo still mi''ne; jobs\r")
    terminal.expect(rb"still mine")
    terminal.expect(rb"Running .*ral")
    terminal.send(b"fg\r")
    wait_until(lambda: not terminal.modes()[3] & termios.ISIG, "not raw in the foreground")
    terminal.send(b"typed\r")
    terminal.expect(rb"<typed>")
    terminal.expect(rb"prompt> ")
    terminal.send(b"echo status=$?\r")
    terminal.expect(rb"status=6")
    terminal.send(b"exit\r")
    terminal.wait()


def test_output_in_the_background_does_not_stop_with_tostop(driver: Driver) -> None:
    program = "for i in 1 2 3; do sleep 0.1; echo line $i; done; exit 0"
    terminal = driver.start(["/bin/bash", "--norc", "--noprofile", "-i"])
    terminal.expect(rb"prompt> ")
    (driver.project / "ral").write_text(
        "#!/bin/sh\nexec " + " ".join(map(quote, client_command("run", "sh", "-c", program)))
    )
    (driver.project / "ral").chmod(0o755)
    terminal.send(b"stty tostop; ./ral & wait; echo do''ne\r")
    terminal.expect(rb"line 3")
    terminal.expect(rb"done")
    terminal.send(b"exit\r")
    terminal.wait()


def test_with_a_pipe_as_stdout_the_terminal_is_not_read(driver: Driver) -> None:
    terminal = driver.shell(
        "| { read line; read typed </dev/tty; echo got $line $typed; }", "sh", "-c", f"{READY} sleep 0.3"
    )
    wait_until(lambda: bool(driver.session.init_pid), "not started")
    terminal.send(b"answer\r")
    terminal.expect(rb"got ready answer")
    assert driver.peer.requests[0]["terminals"] == [True, False, True]
    terminal.send(b"exit\r")
    terminal.wait()


def test_ctrl_c_reaches_a_program_whose_stdout_is_a_pipe(driver: Driver) -> None:
    terminal = driver.shell(
        "| cat; echo status=${PIPESTATUS[0]}",
        "sh",
        "-c",
        f"trap 'echo got; exit 5' INT; {READY} while :; do sleep 0.01; done",
    )
    wait_until(lambda: bool(driver.session.init_pid), "not started")
    time.sleep(0.3)
    assert terminal.modes()[3] & termios.ICANON
    terminal.send(b"\x03")
    terminal.expect(rb"prompt> ")
    terminal.send(b"exit\r")
    terminal.wait()


def test_typing_into_a_program_whose_stdout_is_a_file(driver: Driver) -> None:
    terminal = driver.shell("> out; echo status=$?", "cat")
    wait_for_modes(terminal, raw=True)
    wait_until(lambda: not terminal.modes()[3] & termios.ISIG, "not raw")
    terminal.send(b"typed\r")
    terminal.expect(rb"typed\r\n")
    terminal.send(b"\x04")
    terminal.expect(rb"status=0")
    assert (driver.project / "out").read_bytes() == b"typed\n"
    terminal.send(b"exit\r")
    terminal.wait()


def test_a_terminal_only_as_stderr_gets_what_is_written_there(driver: Driver) -> None:
    command = [
        "sh",
        "-c",
        'exec "$@" </dev/null >out',
        "sh",
        *client_command("run", "sh", "-c", "echo out; echo err >&2"),
    ]
    terminal = driver.start(command)
    terminal.expect(rb"err\r\n")
    assert terminal.wait() == 0
    assert b"out" not in terminal.output
    assert (driver.project / "out").read_bytes() == b"out\n"
    assert driver.peer.requests[0]["terminals"] == [False, False, True]


def test_a_hung_up_terminal_ends_the_program_and_the_client(driver: Driver) -> None:
    terminal = driver.run("sh", "-c", f"{READY} exec sleep 60")
    terminal.expect(b"ready")
    wait_for_modes(terminal, raw=True)
    init = os.pidfd_open(driver.session.init_pid)
    os.close(terminal.master)
    terminal.master = os.open("/dev/null", os.O_RDWR)
    _, status = os.waitpid(terminal.pid, 0)
    terminal._status = os.waitstatus_to_exitcode(status)
    assert terminal._status == 128 + signal.SIGHUP
    os.close(init)


def test_a_hung_up_terminal_also_ends_a_program_that_ignores_it(driver: Driver) -> None:
    terminal = driver.run("sh", "-c", f"trap '' HUP; {READY} while :; do sleep 0.05; done")
    terminal.expect(b"ready")
    wait_for_modes(terminal, raw=True)
    os.close(terminal.master)
    terminal.master = os.open("/dev/null", os.O_RDWR)
    assert terminal.wait() == 128 + signal.SIGHUP


def test_a_terminal_that_nobody_reads_does_not_keep_signals_from_the_program(driver: Driver) -> None:
    terminal = driver.run("sh", "-c", f"{READY} exec yes")
    terminal.expect(b"ready")
    time.sleep(0.5)
    os.kill(terminal.pid, signal.SIGTERM)
    started = time.monotonic()
    while os.waitid(os.P_PID, terminal.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        assert time.monotonic() - started < 10, "the client waits for its terminal"
        time.sleep(0.01)
    assert terminal.wait() == 143
    assert terminal.modes()[3] & termios.ICANON
