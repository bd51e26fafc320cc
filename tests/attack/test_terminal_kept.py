"""A terminal that is only written to (``x | ral run -- prog``) is the user's still: what is typed there, its
modes and its line discipline are out of the program's reach."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path

import pytest

from support.broker import Ral
from support.hostile import PRELUDE, PYTHON
from support.installed import ral_path
from support.terminal import Terminal

pytestmark = [pytest.mark.attack, pytest.mark.usefixtures("broker"), pytest.mark.needs("fresh /proc")]

# Tries every way to a terminal that there is, and writes what it found to a file. The first argument is the
# device number of the caller's.
SCRIPT = """
caller, out = int(sys.argv[1]), sys.argv[2]
def is_callers(fd):
    status = os.fstat(fd)
    return status.st_rdev == caller and status.st_dev != os.stat("/dev/pts").st_dev
ways = {}
for fd in range(0, 256):
    if isinstance(tried(os.fstat, fd), os.stat_result): ways[f"fd {fd}"] = fd
names = ["/dev/tty", "/dev/console", "/dev/tty0", "/dev/tty1", "/dev/ttyS0", "/dev/vcs"]
names += [f"/proc/self/fd/{n}" for n in range(3)] + [f"/proc/1/fd/{n}" for n in range(3)]
names += [f"/dev/pts/{n}" for n in tried(os.listdir, "/dev/pts") if n != "ptmx"]
for name in names:
    fd = tried(os.open, name, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY)
    if isinstance(fd, int): ways[name] = fd
ttys = {name: fd for name, fd in ways.items() if tried(os.isatty, fd)}
found = {"callers": [], "injected": [], "discipline": [], "linux": [], "changed": [], "read": []}
letter = ctypes.create_string_buffer(b"\\n")
for name, fd in ttys.items():
    if sys.argv[3] == "control" or is_callers(fd): found["callers"].append(name)
    if call(16, fd, 0x5412, letter) == 0: found["injected"].append(name)              # TIOCSTI
    if call(16, fd, 0x541C, ctypes.create_string_buffer(b"\\3")) == 0: found["linux"].append(name)
    modes = tried(termios.tcgetattr, fd)
    if isinstance(modes, list):
        modes[3] &= ~termios.ECHO
        tried(termios.tcsetattr, fd, termios.TCSANOW, modes)
        found["changed"].append(name)
    discipline = ctypes.create_string_buffer(struct.pack("=i", 2))
    if call(16, fd, 0x5423, discipline) == 0: found["discipline"].append(name)        # TIOCSETD
    os.set_blocking(fd, False)
open(out + ".ready", "w").close()
end = time.monotonic() + 1.0
while time.monotonic() < end:
    for name, fd in ttys.items():
        data = tried(os.read, fd, 100)
        if isinstance(data, bytes) and b"typed" in data: found["read"].append(name)
    time.sleep(.01)
found["ttys"] = len(ttys)
with open(out, "w") as file: json.dump(found, file)
"""

CONTROL = ("bwrap", "--bind", "/", "/", "--dev-bind", "/dev", "/dev", "--unshare-pid", "--proc", "/proc")


def attempt(ral: Ral, project: Path, command: str, kept: str, mode: str) -> tuple[dict[str, object], bool]:
    """What the program found, and whether the caller's terminal is as it was."""
    out = project / "found"
    redirect = {"stderr": ">o 2>/dev/tty", "stdout": ">/dev/tty 2>e", "both": ">/dev/tty 2>/dev/tty"}[kept]
    # The shell opens its own terminal by the name that its session gives it.
    line = f"echo word | {command} {redirect}; echo over"
    with Terminal(["sh", "-c", line], cwd=project, env=ral.environment) as terminal:
        device = os.stat(terminal.slave).st_rdev
        before = terminal.modes()
        (project / "device").write_text(str(device))
        deadline = time.monotonic() + 15
        while not (project / "found.ready").exists():
            assert time.monotonic() < deadline, terminal.output
            time.sleep(0.01)
        terminal.send(b"typed\n")
        terminal.expect(b"over", 15)
        same = terminal.modes() == before
        terminal.wait()
    found: dict[str, object] = json.loads(out.read_text())
    return found, same


def command_of(project: Path, mode: str) -> str:
    script = shlex.join([*PYTHON, PRELUDE + SCRIPT])
    arguments = f'"$(while ! test -s device; do sleep 0.01; done; cat device)" {project}/found {mode}'
    prefix = f"{ral_path()} run -q --" if mode == "ral" else shlex.join([*CONTROL, "--die-with-parent"])
    return f"{prefix} {script} {arguments}"


@pytest.mark.parametrize("kept", ["stderr", "stdout", "both"])
def test_the_callers_terminal_is_neither_read_nor_changed_nor_typed_into(
    ral: Ral, project: Path, kept: str
) -> None:
    found, same = attempt(ral, project, command_of(project, "ral"), kept, "ral")
    assert isinstance(found["ttys"], int)
    assert found["ttys"] >= 1, "a terminal of the sandbox's own is there"
    assert same
    for what in ("callers", "injected", "discipline", "linux", "read"):
        assert found[what] == [], (what, found)


def test_the_control_reads_and_changes_it(ral: Ral, project: Path) -> None:
    """The same pipeline through a sandbox that hands the caller's descriptors over."""
    found, same = attempt(ral, project, command_of(project, "control"), "stderr", "control")
    assert found["read"]
    assert found["changed"]
    assert not same
