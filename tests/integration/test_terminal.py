"""``ral run`` on a terminal: job control inside, and the caller's terminal as it was after every ending."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support.broker import Broker, OnTerminal, Ral
from support.installed import bin_dir
from support.terminal import Terminal

pytestmark = pytest.mark.usefixtures("broker")


def test_the_terminal_inside_is_a_whole_one(on_terminal: OnTerminal) -> None:
    terminal = on_terminal(
        "run",
        "-q",
        "--",
        "sh",
        "-c",
        "tty; stty size; test -t 0 -a -t 1 -a -t 2 && echo all; exec 3<>/dev/tty && echo ctty",
        rows=31,
        columns=101,
    )
    terminal.expect(rb"/dev/pts/\d+")
    terminal.expect(b"31 101")
    terminal.expect(b"all")
    terminal.expect(b"ctty")
    assert terminal.wait() == 0


def test_the_callers_terminal_is_not_the_one_inside(on_terminal: OnTerminal, project: Path) -> None:
    """A program that holds the caller's terminal reads what the user types later."""
    terminal = on_terminal(
        "run", "-q", "--", "sh", "-c", "stat -L -c %d:%i:%r /proc/self/fd/0 /dev/tty >inside; echo done"
    )
    terminal.expect(b"done")
    assert terminal.wait() == 0
    outside = os.stat(terminal.slave)
    for line in (project / "inside").read_text().split():
        device, inode, _ = line.split(":")
        assert (int(device), int(inode)) != (outside.st_dev, outside.st_ino)


def test_a_resize_arrives_and_so_do_control_characters(on_terminal: OnTerminal) -> None:
    terminal = on_terminal(
        "run",
        "-q",
        "--",
        "bash",
        "--norc",
        "-c",
        "trap 'stty size' WINCH; trap 'echo interrupted; exit 9' INT; echo ready; "
        "while :; do sleep 0.05; done",
    )
    terminal.expect(b"ready")
    terminal.resize(50, 120)
    terminal.expect(b"50 120")
    terminal.send(b"\x03")
    terminal.expect(b"interrupted")
    assert terminal.wait() == 9


def test_job_control_of_a_shell_inside(on_terminal: OnTerminal) -> None:
    terminal = on_terminal("run", "-q", "--", "bash", "--norc", "-i")
    terminal.send(b"PS1='$ '; sleep 100\n")
    time.sleep(0.3)
    terminal.send(b"\x1a")
    terminal.expect(b"Stopped")
    terminal.send(b"bg; jobs; echo listed\n")
    terminal.expect(b"Running.*sleep 100")
    terminal.send(b"fg\n")
    time.sleep(0.2)
    terminal.send(b"\x03")
    terminal.send(b"echo status=$?\n")
    terminal.expect(b"status=130")
    terminal.send(b"exit 6\n")
    assert terminal.wait() == 6


def stty(terminal: Terminal) -> str:
    return subprocess.run(
        ["stty", "-g", "-F", terminal.slave], capture_output=True, check=True, text=True
    ).stdout


PROGRAM = "stty raw -echo; echo ready; "
ENDINGS = {
    "status 0": "exit 0",
    "status 7": "exit 7",
    "killed by a signal": "kill -9 $$",
    "segmentation fault": "kill -SEGV $$",
    "broken terminal modes": "stty -icanon min 7 time 3; exit 0",
    "closes its terminal": "exec <&- >&- 2>&-; exit 0",
    "child holds the terminal": "sleep 100 & exit 0",
    "alternate screen left on": "printf '\\033[?1049h'; exit 0",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_the_callers_modes_are_as_they_were_after(on_terminal: OnTerminal, project: Path, name: str) -> None:
    terminal = shell(on_terminal, project)
    before = stty(terminal)
    terminal.send(
        f"{ral_command()} sh -c '{PROGRAM}{ENDINGS[name]}'; echo over\n".encode()
        .replace(b"'\\033", b"\\033")
        .replace(b"h'", b"h")
    )
    terminal.expect(b"ready")
    terminal.expect(b"over")
    assert stty(terminal) == before


@pytest.mark.parametrize("number", ["TERM", "INT", "HUP", "QUIT"])
def test_the_callers_modes_are_as_they_were_after_a_signal_to_the_client(
    on_terminal: OnTerminal, project: Path, number: str
) -> None:
    terminal = shell(on_terminal, project)
    before = stty(terminal)
    terminal.send(f"{ral_command()} sh -c '{PROGRAM}sleep 100'; echo over\n".encode())
    terminal.expect(b"ready")
    assert stty(terminal) != before
    subprocess.run(["pkill", f"-{number}", "-P", str(terminal.pid)], check=True)
    terminal.expect(b"over")
    assert stty(terminal) == before


def test_the_callers_modes_are_as_they_were_after_a_command_that_does_not_exist(
    on_terminal: OnTerminal, project: Path
) -> None:
    terminal = shell(on_terminal, project)
    before = stty(terminal)
    terminal.send(f"{ral_command()} no-such-command; echo status=$?\n".encode())
    terminal.expect(b"status=127")
    assert stty(terminal) == before


def test_the_callers_modes_are_as_they_were_after_lost_and_killed_sessions(
    on_terminal: OnTerminal, project: Path, ral: Ral
) -> None:
    terminal = shell(on_terminal, project)
    before = stty(terminal)
    for kill in ("bwrap_pid", "pid"):
        terminal.send(f"{ral_command()} sh -c '{PROGRAM}sleep 100'; echo status=$?\n".encode())
        terminal.expect(b"ready")
        line = json.loads(ral("sessions", "--json").stdout)[0]
        os.kill(line[kill], signal.SIGKILL)
        terminal.expect(b"status=137")
        assert stty(terminal) == before
    terminal.send(f"{ral_command()} sh -c '{PROGRAM}sleep 100'; echo status=$?\n".encode())
    terminal.expect(b"ready")
    ral("kill", json.loads(ral("sessions", "--json").stdout)[0]["id"])
    terminal.expect(b"status=143")
    assert stty(terminal) == before


def test_the_callers_modes_are_as_they_were_when_the_broker_died(
    on_terminal: OnTerminal, project: Path, broker: Broker
) -> None:
    terminal = shell(on_terminal, project)
    before = stty(terminal)
    terminal.send(f"{ral_command()} sh -c '{PROGRAM}read x; exit 4'; echo status=$?\n".encode())
    terminal.expect(b"ready")
    broker.crash()
    terminal.send(b"x\n")
    terminal.expect(b"status=4")
    assert stty(terminal) == before
    broker.start()


def shell(on_terminal: OnTerminal, project: Path) -> Terminal:
    """An interactive shell of the caller's, with job control."""
    environment = on_terminal.ral.environment | {"PS1": "$ ", "HISTFILE": "/dev/null"}
    terminal = on_terminal.opened.enter_context(
        Terminal(["/bin/bash", "--norc", "--noediting", "-i"], cwd=project, env=environment)
    )
    terminal.send(b"stty -echo; set -m; echo 'shell' 'ready'\n")
    terminal.expect(b"shell ready")
    return terminal


def ral_command() -> str:
    return f"{bin_dir() / 'ral'} run -q --"


def test_ctrl_z_of_a_plain_program_gives_the_shell_back(on_terminal: OnTerminal, project: Path) -> None:
    terminal = shell(on_terminal, project)
    before = stty(terminal)
    terminal.send(f"{ral_command()} sh -c 'echo ready; read x; echo got $x'\n".encode())
    terminal.expect(b"ready")
    terminal.send(b"\x1a")
    terminal.expect(b"Stopped")
    assert stty(terminal) == before
    terminal.send(b"echo in the shell\n")
    terminal.expect(b"in the shell")
    terminal.send(b"fg\n")
    terminal.expect(b"run -q")
    time.sleep(0.3)
    terminal.send(b"again\n")
    terminal.expect(b"got again")
    terminal.expect(rb"\$ ")
    terminal.send(b"echo status=$?\n")
    terminal.expect(b"status=0")
    assert stty(terminal) == before


def test_a_pipeline_leaves_the_terminal_to_its_last_member(on_terminal: OnTerminal, project: Path) -> None:
    """``ral run -- make | less``: what is typed belongs to the pager."""
    terminal = shell(on_terminal, project)
    before = stty(terminal)
    terminal.send(
        f"{ral_command()} sh -c 'echo from inside; sleep 0.5' | ".encode()
        + b"sh -c 'cat; read x </dev/tty; echo pager got $x'\n"
    )
    terminal.expect(b"from inside")
    terminal.send(b"typed\n")
    terminal.expect(b"pager got typed")
    assert stty(terminal) == before


def test_in_the_background_it_writes_and_does_not_touch_the_terminal(
    on_terminal: OnTerminal, project: Path
) -> None:
    terminal = shell(on_terminal, project)
    before = stty(terminal)
    terminal.send(
        f"{ral_command()} sh -c 'sleep 0.3; echo from behind; exit 3' & sleep 0.1; echo front\n".encode()
    )
    terminal.expect(b"front")
    assert stty(terminal) == before
    terminal.expect(b"from behind")
    terminal.send(b"wait $!; echo status=$?\n")
    terminal.expect(b"status=3")
    assert stty(terminal) == before


def test_a_program_in_the_background_comes_to_the_front(on_terminal: OnTerminal, project: Path) -> None:
    terminal = shell(on_terminal, project)
    terminal.send(f"{ral_command()} sh -c 'sleep 0.5; read x; echo got $x' &\n".encode())
    time.sleep(0.2)
    terminal.send(b"fg\n")
    time.sleep(0.5)
    terminal.send(b"hello\n")
    terminal.expect(b"got hello")


def test_a_piped_stdin_with_a_terminal_as_output(on_terminal: OnTerminal, project: Path) -> None:
    terminal = shell(on_terminal, project)
    before = stty(terminal)
    terminal.send(
        f"echo piped | {ral_command()} sh -c ".encode()
        + b"'cat; test -t 1 && echo tty out; test -t 0 || echo no tty in'\n"
    )
    terminal.expect(b"piped")
    terminal.expect(b"tty out")
    terminal.expect(b"no tty in")
    assert stty(terminal) == before


def test_a_terminal_that_is_hung_up_ends_the_session(on_terminal: OnTerminal, ral: Ral) -> None:
    terminal = on_terminal(
        "run", "-q", "--", "sh", "-c", "trap '' HUP; echo ready; while :; do sleep 0.05; done"
    )
    terminal.expect(b"ready")
    os.close(terminal.master)
    terminal.master = os.open("/dev/null", os.O_RDONLY)
    deadline = time.monotonic() + 10
    while ral.live():
        assert time.monotonic() < deadline
        time.sleep(0.05)
