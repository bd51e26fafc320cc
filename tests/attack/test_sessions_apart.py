"""Two sessions of one user that meet in the same project, on a unix socket, in the same network."""

from __future__ import annotations

import json
import secrets
import subprocess
from pathlib import Path

import pytest

from support.broker import Ral
from support.hostile import PRELUDE, PYTHON, Found, decode
from support.installed import ral_path

pytestmark = [
    pytest.mark.attack,
    pytest.mark.usefixtures("broker"),
    pytest.mark.needs("fresh /proc", "pidfd of a socket peer", "landlock scopes"),
]

# The one that is attacked: connects, keeps something open, has a key, lives until it is told to end.
VICTIM = """
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])
secret = os.open("/tmp", os.O_RDONLY)
os.dup2(secret, 77)
added = call(248, b"user", sys.argv[2].encode(), b"secret", 6, -4)     # add_key, KEY_SPEC_USER_KEYRING
signal.signal(10, signal.SIG_IGN)
s.sendall(json.dumps([os.getpid(), added]).encode())
print("up", flush=True)
s.recv(1)
tell(survived=True)
"""

# The other: takes what the connection gives of its peer and tries everything on it.
ATTACKER = """
server = socket.socket(socket.AF_UNIX); server.bind(sys.argv[1]); server.listen()
print("listening", flush=True)
peer, _ = server.accept()
pid, key = json.loads(peer.recv(100))
credentials = struct.unpack("=iII", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
pidfd = struct.unpack("=i", peer.getsockopt(socket.SOL_SOCKET, 77, 4))[0]
names = ("cgroup", "ipc", "mnt", "net", "pid", "pid_children", "time", "time_children", "user", "uts")
spaces = {n: tried(fcntl.ioctl, pidfd, 0xFF01 + i) for i, n in enumerate(names)}
iovec = struct.pack("=QQ", 0x400000, 4096)
number = credentials[0]
found = {
    "visible pid": number > 0,
    "pidfd_getfd": call(438, pidfd, 77, 0),
    "signal": tried(signal.pidfd_send_signal, pidfd, 10),
    "signal 0": tried(signal.pidfd_send_signal, pidfd, 0),
    "setns": call(308, pidfd, 0x20000 | 0x40000000 | 0x8000000 | 0x20000000),
    "setns user": call(308, pidfd, 0x10000000),
    "process_madvise": call(440, pidfd, iovec, 1, 20, 0),
    "request key": call(249, b"user", sys.argv[2].encode(), 0, -4),
    "search key": call(250, 10, -4, b"user", sys.argv[2].encode(), 0),
}
by_number = {
    "kill": lambda: tried(os.kill, number, 0),
    "ptrace": lambda: call(101, 16, number, 0, 0),
    "prlimit": lambda: call(302, number, 7, 0, ctypes.create_string_buffer(16)),
}
found |= {name: action() if number else "no pid" for name, action in by_number.items()}
if found["ptrace"] == 0: os.waitpid(number, 0x40000000); call(101, 17, number, 0, 0)
got = {n: "got" if isinstance(v, int) else v for n, v in spaces.items()}
found = {k: v if isinstance(v, (str, bool)) or v is None else "done" for k, v in found.items()}
tell(found=found, spaces=got)
peer.sendall(b"x"); time.sleep(.2)
"""


def meet(prefix: list[str], ral: Ral, place: Path) -> tuple[Found, Found]:
    """What the attacker and the victim tell, both started through ``prefix``."""
    key = f"ral-test-{secrets.token_hex(8)}"
    arguments = [str(place), key]
    processes = []
    for script, word in ((ATTACKER, b"listening\n"), (VICTIM, b"up\n")):
        process = subprocess.Popen(
            [*prefix, *PYTHON, PRELUDE + script, *arguments], env=ral.environment, cwd=ral.directory,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == word
        processes.append(process)
    outputs: list[bytes] = []
    for process in processes:
        stdout, stderr = process.communicate(timeout=20)
        assert process.returncode == 0, stderr
        outputs.append(stdout)
    place.unlink()
    return decode(outputs[0]), decode(outputs[1])


def test_a_peer_in_another_session_can_be_talked_to_and_nothing_else(ral: Ral, project: Path) -> None:
    attacker, victim = meet([*ral_run(ral)], ral, project / "s")
    assert victim == {"survived": True}
    found, spaces = attacker["found"], attacker["spaces"]
    assert isinstance(found, dict)
    assert isinstance(spaces, dict)
    assert not found.pop("visible pid")
    refused = {"EPERM", "EACCES", "EINVAL", "ESRCH", "ENOKEY", "EBADF", "no pid", "ENOSYS"}
    assert set(found.values()) <= refused, found
    assert set(spaces.values()) <= {"EPERM", "EACCES", "ENOTTY", "EINVAL"}, spaces
    # The control: the same two programs, outside.
    attacker, victim = meet([], ral, project / "s")
    found, spaces = attacker["found"], attacker["spaces"]
    assert isinstance(found, dict)
    assert isinstance(spaces, dict)
    assert found["visible pid"] is True
    for name in ("pidfd_getfd", "ptrace", "prlimit", "request key"):
        assert found[name] == "done", (name, found)
    assert found["signal 0"] is None
    assert "got" in spaces.values() or set(spaces.values()) <= {"ENOTTY", "EINVAL"}


def ral_run(ral: Ral) -> list[str]:
    return [str(ral_path()), "run", "-q", "--"]


def test_abstract_sockets_of_one_session_are_closed_to_the_other_and_to_no_program_of_its_own(
    ral: Ral,
) -> None:
    name = f"ral-{secrets.token_hex(8)}"
    script = (
        "s = socket.socket(socket.AF_UNIX); s.bind('\\0' + sys.argv[1]); s.listen()\n"
        "if os.fork() == 0: socket.socket(socket.AF_UNIX).connect('\\0' + sys.argv[1]); os._exit(0)\n"
        "print('own', os.wait()[1], flush=True); input()"
    )
    server = ral.start("run", "-q", "--", *PYTHON, PRELUDE + script, name)
    assert server.stdout is not None
    assert server.stdout.readline() == b"own 0\n"
    connect = "tell(r=tried(lambda: socket.socket(socket.AF_UNIX).connect('\\0' + sys.argv[1])))"
    done = ral("run", "-q", "--", *PYTHON, PRELUDE + connect, name)
    assert json.loads(done.stdout) == {"r": "EPERM"}
    outside = subprocess.run([*PYTHON, PRELUDE + connect, name], capture_output=True, check=True)
    assert json.loads(outside.stdout) == {"r": None}
    server.communicate(b"\n", timeout=10)


def test_processes_and_shared_memory_of_one_session_are_not_in_the_other(ral: Ral) -> None:
    script = (
        "shm = call(29, int(sys.argv[1]), 4096, 0o1666)\n"  # shmget, IPC_CREAT
        "open('/dev/shm/' + sys.argv[1], 'w').write('x'); open('/tmp/' + sys.argv[1], 'w').write('x')\n"
        "print('up', flush=True); input()"
    )
    key = str(secrets.randbelow(1 << 30))
    first = ral.start("run", "-q", "--", *PYTHON, PRELUDE + script, key)
    assert first.stdout is not None
    assert first.stdout.readline() == b"up\n"
    look = (
        "pids = [p for p in os.listdir('/proc') if p.isdigit()]\n"
        "tell(shm=call(29, int(sys.argv[1]), 0, 0), dev=tried(os.stat, '/dev/shm/' + sys.argv[1]), "
        "tmp=tried(os.stat, '/tmp/' + sys.argv[1]), pids=len(pids))"
    )
    done = ral("run", "-q", "--", *PYTHON, PRELUDE + look, key)
    assert decode(done.stdout) == {"shm": "ENOENT", "dev": "ENOENT", "tmp": "ENOENT", "pids": 2}
    first.communicate(b"\n", timeout=10)
