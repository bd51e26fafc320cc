"""The scope of a session: abstract sockets and signals of the host, with and without the ruleset."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ral_broker import syscalls
from ral_broker.envelope import landlock
from ral_broker.envelope.landlock import missing_scope, session_ruleset
from ral_broker.errors import HostLacks

# As a session's trampoline does it: no new privileges, the ruleset, the attack. Prints an errno, or 0.
ENTER = """
import ctypes, os, signal, socket, sys
fd, what, *rest = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0): sys.exit("no_new_privs")
if int(fd) >= 0 and libc.syscall(446, int(fd), 0): sys.exit("restrict_self")
try:
    if what == "connect":
        socket.socket(socket.AF_UNIX).connect("\\0" + rest[0])
    elif what == "own socket":
        server = socket.socket(socket.AF_UNIX); server.bind("\\0" + rest[0]); server.listen()
        if os.fork() == 0:
            socket.socket(socket.AF_UNIX).connect("\\0" + rest[0]); os._exit(0)
        os._exit(print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True) or 0)
    elif what == "signal":
        os.kill(int(rest[0]), signal.SIGUSR1)
    elif what == "signal by pidfd":
        signal.pidfd_send_signal(int(rest[0]), signal.SIGUSR1)
    elif what == "own child":
        child = os.fork()
        if child == 0: signal.pause()
        os.kill(child, signal.SIGTERM); os.waitpid(child, 0)
    elif what == "thread":
        import threading
        threading.Thread(target=lambda: signal.pthread_kill(threading.main_thread().ident, 0)).start()
    elif what == "files":
        os.listdir("/"); open("/dev/null", "w").close(); os.stat("/etc/passwd")
    print(0)
except OSError as error:
    print(error.errno)
"""


@pytest.fixture
def ruleset() -> Iterator[int]:
    fd, notice = session_ruleset()
    assert fd is not None, notice
    yield fd
    os.close(fd)


def attempt(fd: int, *what: str, also: tuple[int, ...] = ()) -> int:
    done = subprocess.run(
        [sys.executable, "-I", "-c", ENTER, str(fd), *what],
        pass_fds=[f for f in (fd, *also) if f >= 0], capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
    return int(done.stdout)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the host that dies of SIGUSR1."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.attack
@pytest.mark.needs("landlock scopes")
def test_an_abstract_socket_of_the_host_is_out_of_reach(ruleset: int) -> None:
    name = f"ral-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen()
        assert attempt(ruleset, "connect", name) == errno.EPERM
        assert attempt(-1, "connect", name) == 0


@pytest.mark.attack
@pytest.mark.needs("landlock scopes")
def test_no_signal_leaves_the_scope(ruleset: int, bystander: subprocess.Popen[bytes]) -> None:
    assert attempt(ruleset, "signal", str(bystander.pid)) == errno.EPERM
    pidfd = os.pidfd_open(bystander.pid)
    try:
        assert attempt(ruleset, "signal by pidfd", str(pidfd), also=(pidfd,)) == errno.EPERM
        assert bystander.poll() is None
        assert attempt(-1, "signal by pidfd", str(pidfd), also=(pidfd,)) == 0
    finally:
        os.close(pidfd)
    assert bystander.wait(timeout=10) == -signal.SIGUSR1


@pytest.mark.needs("landlock scopes")
@pytest.mark.parametrize("what", ["own child", "thread", "files"])
def test_what_happens_inside_the_scope_goes_on(ruleset: int, what: str) -> None:
    assert attempt(ruleset, what) == 0


@pytest.mark.needs("landlock scopes")
def test_abstract_sockets_work_among_the_programs_of_one_session(ruleset: int) -> None:
    assert attempt(ruleset, "own socket", f"ral-test-{secrets.token_hex(8)}") == 0


@pytest.mark.needs("landlock scopes")
def test_the_ruleset_is_not_inherited_by_accident(ruleset: int) -> None:
    assert not os.get_inheritable(ruleset)


def answer(monkeypatch: pytest.MonkeyPatch, result: int | OSError) -> None:
    """Let the kernel's answer to the question for its ABI be another one."""

    def landlock_abi() -> int:
        if isinstance(result, OSError):
            raise result
        return result

    monkeypatch.setattr(syscalls, "landlock_abi", landlock_abi)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (OSError(errno.ENOSYS, ""), "has no Landlock"),
        (OSError(errno.EOPNOTSUPP, ""), "has no Landlock"),
        (1, "ABI 1"),
        (5, "ABI 5"),
    ],
)
def test_an_older_kernel_gets_no_ruleset_and_a_sentence(
    monkeypatch: pytest.MonkeyPatch, result: int | OSError, words: str
) -> None:
    answer(monkeypatch, result)
    fd, notice = session_ruleset()
    assert fd is None
    assert notice is not None
    assert words in notice
    assert "abstract sockets" in notice
    assert notice == missing_scope(landlock.landlock_abi())


def test_any_other_answer_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, OSError(errno.EPERM, os.strerror(errno.EPERM)))
    with pytest.raises(HostLacks, match="Operation not permitted"):
        session_ruleset()


def test_a_kernel_that_has_scopes_and_refuses_the_ruleset_refuses_the_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer(monkeypatch, 6)

    def create(*_: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(syscalls, "landlock_create_ruleset", create)
    with pytest.raises(HostLacks, match="ABI 6"):
        session_ruleset()
