"""The end of a session is the end of its program: nothing inside can report another, nothing outside loses
it without saying so."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from pathlib import Path

import pytest

from support.broker import Ral
from support.hostile import PRELUDE, PYTHON, decode
from support.installed import ral_path
from support.terminal import Terminal

pytestmark = [pytest.mark.attack, pytest.mark.usefixtures("broker"), pytest.mark.needs("fresh /proc")]

# Everything by which a sandbox's own pid 1 was ever made to report an end. Goes on afterwards.
END_IT = """
PIDFD_OPEN, PIDFD_GETFD, PIDFD_SEND, PTRACE = 434, 438, 424, 101
for number in range(1, 65):
    if number not in (9, 19, 32, 33): signal.signal(number, signal.SIG_IGN) if number != 17 else None
ours = os.fork()
if ours == 0:
    while True: time.sleep(1)
def attack(pid):
    fd = call(PIDFD_OPEN, pid, 0)
    copies = {n: call(PIDFD_GETFD, fd, n, 0) for n in range(120)}
    taken = [n for n, copy in copies.items() if isinstance(copy, int)]
    for n in taken: os.close(copies[n])
    attached = call(PTRACE, 16, pid, 0, 0)
    if attached == 0: os.waitpid(pid, 0); call(PTRACE, 17, pid, 0, 0)
    memory = tried(lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR)))
    fds = tried(os.listdir, f"/proc/{pid}/fd")
    fds = fds if isinstance(fds, str) else "listed"
    return {"taken": taken[:1], "attached": attached, "memory": memory, "fds": fds}
control, found = attack(ours), attack(1)
for _ in range(3):
    for number in range(1, 65): tried(os.kill, 1, number)
tried(os.killpg, 1, 9)
pidfd = os.pidfd_open(1)
for number in (9, 15, 19): tried(signal.pidfd_send_signal, pidfd, number)
for fd in range(3, 200): tried(os.write, fd, b'{ "exit-code": 0 }\\n' + bytes(8))
os.kill(ours, 9); os.waitpid(ours, 0)
"""


def test_no_end_can_be_forged_from_inside(ral: Ral) -> None:
    script = END_IT + "tell(control=control, found=found); time.sleep(.3); tell(still=True); os._exit(7)"
    done = ral("run", "-q", "--", *PYTHON, PRELUDE + script)
    told = decode(done.stdout)
    assert done.status == 7, done
    assert told["still"] is True
    assert told["found"] == {"taken": [], "attached": "EPERM", "memory": "EACCES", "fds": "EACCES"}
    assert told["control"] == {"taken": [0], "attached": 0, "memory": None, "fds": "listed"}


def test_while_it_is_tried_the_session_is_listed_as_live(ral: Ral) -> None:
    client = ral.start(
        "run", "-q", "--", *PYTHON, PRELUDE + END_IT + "print('done', flush=True); input(); os._exit(9)"
    )
    assert client.stdout is not None
    assert client.stdout.readline() == b"done\n"
    time.sleep(0.2)
    assert len(ral.live()) == 1
    assert client.poll() is None
    client.communicate(b"\n", timeout=10)
    assert client.returncode == 9


def the_session(ral: Ral) -> dict[str, object]:
    (session,) = json.loads(ral("sessions", "--json").stdout)
    assert isinstance(session, dict)
    return session


def ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 5)[0])


BEAT = "trap '' HUP TERM INT; echo up; while :; do date +%N >beat; sleep 0.02; done"


def stands_still(project: Path) -> bool:
    deadline = time.monotonic() + 5
    while not (project / "beat").exists():
        assert time.monotonic() < deadline
    before = (project / "beat").stat().st_mtime_ns
    time.sleep(0.3)
    return (project / "beat").stat().st_mtime_ns == before


def test_a_killed_monitor_loses_the_status_says_so_and_leaves_nothing_running(
    ral: Ral, project: Path
) -> None:
    client = ral.start("run", "-q", "--", "sh", "-c", BEAT)
    assert client.stdout is not None
    assert client.stdout.readline() == b"up\n"
    assert not stands_still(project)
    session = the_session(ral)
    pid, monitor = session["pid"], session["bwrap_pid"]
    assert isinstance(pid, int)
    assert isinstance(monitor, int)
    init = os.pidfd_open(pid)
    try:
        os.kill(monitor, signal.SIGKILL)
        _, err = client.communicate(timeout=10)
        assert client.returncode == 137
        assert b"lost" in err
        assert ended(init)
    finally:
        os.close(init)
    assert stands_still(project)
    (line,) = json.loads(ral("sessions", "--all", "--json").stdout)
    assert (line["state"], line["exit"], line["lost"]) == ("ended", 137, True)


def test_the_same_on_a_terminal_which_is_as_it_was(ral: Ral, project: Path) -> None:
    with Terminal(
        [str(ral_path()), "run", "-q", "--", "sh", "-c", BEAT], cwd=project, env=ral.environment
    ) as terminal:
        modes = terminal.modes()
        terminal.expect(b"up")
        monitor = the_session(ral)["bwrap_pid"]
        assert isinstance(monitor, int)
        os.kill(monitor, signal.SIGKILL)
        terminal.expect(b"lost")
        assert terminal.wait() == 137
        assert terminal.modes() == modes
    assert stands_still(project)


def test_a_killed_init_ends_the_session_as_a_signal_does(ral: Ral, project: Path) -> None:
    client = ral.start("run", "-q", "--", "sh", "-c", BEAT)
    assert client.stdout is not None
    assert client.stdout.readline() == b"up\n"
    pid = the_session(ral)["pid"]
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    client.communicate(timeout=10)
    assert client.returncode == 137
    assert stands_still(project)


def test_a_stopped_monitor_changes_nothing_for_the_program(ral: Ral, project: Path) -> None:
    client = ral.start("run", "-q", "--", "sh", "-c", "echo up; read x; exit 4")
    assert client.stdout is not None
    assert client.stdout.readline() == b"up\n"
    monitor = the_session(ral)["bwrap_pid"]
    assert isinstance(monitor, int)
    os.kill(monitor, signal.SIGSTOP)
    assert client.stdin is not None
    client.stdin.write(b"\n")
    client.stdin.flush()
    time.sleep(0.2)
    os.kill(monitor, signal.SIGCONT)
    client.communicate(timeout=10)
    assert client.returncode == 4
