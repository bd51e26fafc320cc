"""The probes that sandboxes of this kind fail somewhere, with the settings that are built in."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.broker import Broker, OnTerminal, Ral
from support.hostile import PRELUDE, PYTHON, inside, outside
from support.installed import home_dir
from support.processes import descendants
from support.terminal import Terminal

pytestmark = [pytest.mark.attack, pytest.mark.usefixtures("broker")]


def families() -> set[str]:
    """Commands of everything that lives below this test, the broker aside."""
    return {p.command for p in descendants() if " ral_broker " not in f"{p.command} "}


def wait_for_none(seconds: float = 5) -> set[str]:
    deadline = time.monotonic() + seconds
    while (left := families()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


STUBBORN = "trap '' HUP TERM INT QUIT; (trap '' HUP TERM; sleep 600) & echo up; while :; do sleep 600; done"


@pytest.mark.parametrize("broker_too", [False, True], ids=["client", "client and broker"])
def test_p10_a_killed_client_takes_every_process_of_its_session_along(
    ral: Ral, broker: Broker, broker_too: bool
) -> None:
    client = ral.start("run", "-q", "--", "sh", "-c", STUBBORN)
    assert client.stdout is not None
    assert client.stdout.readline() == b"up\n"
    # The control: bwrap, pid 1, the shell and its child are there to be left behind.
    assert {c.split()[0].rpartition("/")[2] for c in families()} >= {"bwrap", "102", "sh", "sleep"}
    if broker_too:
        broker.crash()
    client.kill()
    client.wait(5)
    assert wait_for_none() == set()
    if broker_too:
        broker.start()


def test_p10_a_closed_terminal_ends_a_session_that_ignores_the_hangup(
    ral: Ral, on_terminal: OnTerminal
) -> None:
    terminal = on_terminal("run", "-q", "--", "sh", "-c", STUBBORN)
    terminal.expect(b"up")
    os.kill(terminal.pid, 9)
    assert wait_for_none() == set()


def test_a_killed_broker_ends_no_session_and_loses_no_status(ral: Ral, broker: Broker) -> None:
    client = ral.start("run", "-q", "--", "sh", "-c", "echo up; read line; echo $line; exit 9")
    assert client.stdout is not None
    assert client.stdout.readline() == b"up\n"
    # The program runs an instant before the client is told; that instant is not what this is about.
    assert len(ral.live()) == 1
    broker.crash()
    out, err = client.communicate(b"still here\n", timeout=10)
    assert (out, client.returncode) == (b"still here\n", 9), err
    broker.start()


def test_a_detached_program_that_ends_at_once_is_a_success_and_is_shown(ral: Ral) -> None:
    import json

    done = ral("run", "-d", "-q", "--json", "--", "true")
    assert done.status == 0, done
    session = json.loads(done.stdout)["id"]
    deadline = time.monotonic() + 5
    while True:
        lines = [s for s in json.loads(ral("sessions", "--all", "--json").stdout) if s["id"] == session]
        if lines and lines[0]["state"] == "ended":
            break
        assert time.monotonic() < deadline, lines
    assert lines[0]["exit"] == 0


def test_p13_on_a_terminal_the_program_learns_of_a_new_size_and_runs_its_ctrl_c_trap(
    on_terminal: OnTerminal,
) -> None:
    script = (
        "trap 'echo size $(stty size)' WINCH; trap 'echo interrupted; exit 5' INT;"
        "echo ready; while :; do sleep 0.05; done"
    )
    terminal = on_terminal("run", "-q", "--", "sh", "-c", script)
    terminal.expect(b"ready")
    terminal.resize(41, 97)
    terminal.expect(rb"size 41 97")
    terminal.send(b"\x03")
    terminal.expect(b"interrupted")
    assert terminal.wait() == 5


def test_programs_that_want_a_terminal_find_one(on_terminal: OnTerminal) -> None:
    script = (
        "tty; stty raw -echo; stty -a | grep -c -e '-icanon'; stty sane; "
        "sh -c 'exec </dev/tty; echo opened'; ps -o tty= -p $$ 2>/dev/null"
    )
    terminal = on_terminal("run", "-q", "--", "sh", "-c", script)
    terminal.expect(rb"/dev/pts/0\s")
    terminal.expect(rb"1\s")
    terminal.expect(b"opened")
    assert terminal.wait() == 0


@pytest.mark.parametrize(
    ("program", "command", "seen", "typed"),
    [
        ("script", "script -qec 'tty; echo nested' /dev/null", rb"/dev/pts/1\s+nested", b""),
        ("less", "seq 200 >s; less s; echo left", rb"\n:|1\s", b"q"),
        ("vim", "vim -u NONE -c 'call feedkeys(\"ihello\\<Esc>:wq\\<CR>\")' file; cat file", b"hello", b""),
        ("tmux", "tmux -f /dev/null new-session 'tty; echo in tmux; sleep 0.5'", rb"in tmux", b""),
        ("job control", "bash --norc -ic 'sleep 300 & fg'; echo status $?", rb"sleep 300", b"\x03"),
        (
            "password prompt",
            "/usr/bin/python3 -c 'import getpass; print(len(getpass.getpass(\"word? \")))' </dev/null",
            rb"word\? ",
            b"secret\n",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_interactive_programs_work(
    on_terminal: OnTerminal, program: str, command: str, seen: bytes, typed: bytes
) -> None:
    if program in ("script", "less", "vim", "tmux") and not Path(f"/usr/bin/{program}").exists():
        pytest.skip(f"{program} is not installed")
    terminal = on_terminal("run", "-q", "--", "bash", "-c", command)
    terminal.expect(seen)
    if typed:
        time.sleep(0.2)
        terminal.send(typed)
    if program == "password prompt":
        terminal.expect(rb"6\s")
        assert b"secret" not in terminal.output
    if program == "job control":
        terminal.expect(rb"status 130")
    assert terminal.wait() == 0, terminal.output


INJECT = """
found = {}
for fd in (0, 1, 2):
    found[str(fd)] = {name: call(16, fd, request, ctypes.byref(ctypes.c_char(b"x"))) for name, request in
                      (("TIOCSTI", 0x5412), ("high bits", 0x100005412))}
tell(**found)
"""


def test_p14_nothing_can_be_typed_into_the_callers_terminal(ral: Ral, on_terminal: OnTerminal) -> None:
    terminal = on_terminal("run", "-q", "--", *PYTHON, PRELUDE + INJECT)
    refused = rb'\{"TIOCSTI": "EPERM", "high bits": "EPERM"\}'
    terminal.expect(rb'\{"0": ' + refused + rb', "1": ' + refused + rb', "2": ' + refused + rb"\}")
    assert terminal.wait() == 0
    assert b"xx" not in terminal.output
    if Path("/proc/sys/dev/tty/legacy_tiocsti").read_text().strip() != "1" and os.getuid() != 0:
        return  # no program without privileges could, here
    command = [*PYTHON, PRELUDE + INJECT]
    with Terminal(command, cwd=ral.directory, env=ral.environment) as control:
        control.expect(rb'"TIOCSTI": 0')
        assert control.wait() == 0


NESTED = """
flags = struct.pack("=QQQQQQQQ", 0x10000000, 0, 0, 0, 17, 0, 0, 0)   # CLONE_NEWUSER, SIGCHLD
def made(number, *arguments):
    result = call(number, *arguments)
    if result == 0: os._exit(0)
    if isinstance(result, int): os.waitpid(result, 0)
    return "made" if isinstance(result, int) else result
cloned, old = made(435, flags, 64), made(56, 0x10000000 | 17, 0, 0, 0, 0)
caps = [line.split()[1] for line in open("/proc/self/status") if line[:3] == "Cap"]
tell(clone3=cloned, clone=old, unshare=call(272, 0x10000000), caps=caps)
"""
NO_CAPABILITIES = ["0" * 16] * 5


def test_p17_no_user_namespace_can_be_made_inside(ral: Ral) -> None:
    found = inside(ral, NESTED)
    assert {found["unshare"], found["clone"]} <= {"EPERM", "ENOSPC", "EUSERS"}
    assert found["clone3"] in ("EPERM", "ENOSPC", "EUSERS", "ENOSYS")
    assert found["caps"] == NO_CAPABILITIES
    control = outside(NESTED)
    assert (control["unshare"], control["clone3"], control["clone"]) == (0, "made", "made")


@contextlib.contextmanager
def listening(name: str | bytes) -> Iterator[str]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen(8)
        yield os.fsdecode(name)


CONNECT = """
names = [os.fsencode(n) for n in json.loads(sys.argv[1])]
names += [b"\\0" + n[1:] for n in names if n[:1] == b"@"]
def connect(name): return tried(lambda: socket.socket(socket.AF_UNIX).connect(name))
tell(found={os.fsdecode(n).replace("\\0", "abstract "): connect(n) for n in names if n[:1] != b"@"})
"""


@pytest.mark.needs("landlock scopes")
def test_p18_sockets_of_the_host_are_out_of_reach(ral: Ral, tmp_path: Path, runtime: Path) -> None:
    """Where D-Bus, X11, Wayland, ssh-agent and docker listen, and abstract ones in a shared network."""
    import json

    token = secrets.token_hex(6)
    places = [
        Path(f"/tmp/.X11-ral-{token}"), home_dir() / f".agent-{token}", tmp_path / "bus",
        runtime / "wayland-0",
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(listening(str(place)))
            stack.callback(place.unlink)
        stack.enter_context(listening(f"\0ral-{token}"))
        names = json.dumps([*map(str, places), f"@ral-{token}"])
        control = outside(CONNECT, names)["found"]
        found = inside(ral, CONNECT, names)["found"]
    assert isinstance(control, dict)
    assert isinstance(found, dict)
    assert set(control.values()) == {None}, control
    assert found.pop(f"abstract ral-{token}") == "EPERM"
    assert set(found.values()) <= {"ENOENT"}, found


def test_p18_variables_that_name_sockets_of_the_desktop_do_not_lead_anywhere(ral: Ral) -> None:
    names = {
        "SSH_AUTH_SOCK": "/tmp/agent", "DBUS_SESSION_BUS_ADDRESS": "unix:path=/run/bus",
        "WAYLAND_DISPLAY": "w", "DOCKER_HOST": "unix:///run/docker.sock", "XAUTHORITY": "/home/x",
    }  # fmt: skip
    found = inside(ral, "tell(names=sorted(os.environ))", env=names)["names"]
    assert isinstance(found, list)
    assert "SSH_AUTH_SOCK" not in found
    assert "DBUS_SESSION_BUS_ADDRESS" not in found


def test_internet_sockets_work_as_network_mode_open_says(ral: Ral) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        script = 'tell(r=tried(lambda: socket.create_connection(("127.0.0.1", int(sys.argv[1]))) and 0))'
        assert inside(ral, script, str(server.getsockname()[1])) == {"r": 0}
