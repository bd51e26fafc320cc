"""Starts the broker, through systemd where there is one. Only imported when no broker listens."""

import _signal
import _socket
import posix
import select
import sys
from time import monotonic

from ral_client.call import Failure, connect, escape, open_dir
from ral_protocol import exits

MANAGER = b"/systemd/private"
"""Socket of the user's systemd, below the directory that logind made for the user."""
UNIT = "ral-broker.socket"
SYSTEMCTL_SECONDS = 5.0
READY_SECONDS = 20.0
RACE_SECONDS = 2.0
"""How long a broker that another client is just starting may take to listen."""
PATH = "/usr/local/bin:/usr/bin:/bin"
PASSED = ("HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", exits.RUNTIME_VARIABLE)
"""What the broker's environment takes from the client's. Not more: it must hold no secret."""
READY_FD = 3
LOG_NAME = b"broker.log"
LOG_TAIL = 600


def broker_program() -> str:
    """The broker's first file, of the installation that this client belongs to.

    By path: an isolated interpreter does not look for modules where `pip install --user` puts them.
    """
    return __file__.rpartition("/ral_client/")[0] + "/ral_broker/__main__.py"


def start_broker(runtime: bytes) -> "_socket.socket":
    """Start a broker, or lose the race against another client's, and connect. Raises Failure (69) with the
    reason.

    ``runtime`` is the name of the runtime directory, which may not exist yet.
    """
    if exits.RUNTIME_VARIABLE.encode() not in posix.environ and _start_unit(runtime):
        sock = _connect(runtime)
        if sock is not None:
            return sock
    turn_fd = _take_turn(runtime)
    try:
        # Whoever had the turn before may have started one.
        sock = _connect_once(runtime)
        why = "" if sock is not None else _spawn()
    finally:
        if turn_fd is not None:
            posix.close(turn_fd)
    sock = sock or _connect(runtime)
    if sock is not None:
        return sock
    tail = _log_tail(runtime)
    if tail:
        why += f"; the last it wrote to {escape(runtime)}/{LOG_NAME.decode()}:\n{tail}"
    raise Failure(f"no broker can be started: {why}", exits.UNAVAILABLE)


def _take_turn(runtime: bytes) -> "int | None":
    """Wait until no other client is starting a broker: each would load all of it to find out that it is not
    needed. Returns a descriptor that keeps the turn until it is closed, None where no directory can be.
    """
    from fcntl import LOCK_EX, LOCK_NB, flock

    try:
        posix.mkdir(runtime, 0o700)
    except FileExistsError:
        pass
    except OSError:
        return None  # the broker says what is wrong with it
    dir_fd = open_dir(runtime)
    deadline = monotonic() + READY_SECONDS
    while dir_fd is not None:
        try:
            flock(dir_fd, LOCK_EX | LOCK_NB)
            break
        except BlockingIOError:
            if monotonic() > deadline:
                break
            select.poll().poll(20)
    return dir_fd


def _connect(runtime: bytes) -> "_socket.socket | None":
    deadline = monotonic() + RACE_SECONDS
    while True:
        sock = _connect_once(runtime)
        if sock is not None or monotonic() > deadline:
            return sock
        select.poll().poll(20)


def _connect_once(runtime: bytes) -> "_socket.socket | None":
    dir_fd = open_dir(runtime)
    if dir_fd is None:
        return None
    sock = connect(dir_fd, exits.SOCKET_NAME.encode())
    posix.close(dir_fd)
    return sock


def _start_unit(runtime: bytes) -> bool:
    """Ask the user's systemd to start the socket unit; False where there is none, or it does not know the
    unit.

    It is asked also where XDG_RUNTIME_DIR is not set (cron, su without PAM): it runs all the same, and a
    broker of this client's would live in the control group of a job.
    """
    manager = runtime.removesuffix(b"/ral")
    try:
        posix.stat(manager + MANAGER)
        pid = _posix_spawn(
            "/usr/bin/systemctl",
            ["systemctl", "--user", "start", UNIT],
            _environment() | {b"XDG_RUNTIME_DIR": manager},
        )
    except OSError:
        return False
    pidfd = posix.pidfd_open(pid)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    if not poller.poll(int(SYSTEMCTL_SECONDS * 1000)):
        _signal.pidfd_send_signal(pidfd, _signal.SIGKILL)
    posix.close(pidfd)
    _, status = posix.waitpid(pid, 0)
    return status == 0


def _environment() -> "dict[bytes, bytes]":
    environment = {name.encode(): posix.environ.get(name.encode(), b"") for name in PASSED}
    return {
        b"PATH": PATH.encode(),
        b"LANG": b"C.UTF-8",
        **{name: value for name, value in environment.items() if value},
    }


def _posix_spawn(path: str, argv: "list[str]", environment: "dict[bytes, bytes]", ready_fd: int = -1) -> int:
    """Start a program with /dev/null as 0, 1, 2, no other descriptor of ours but ``ready_fd``, and no
    signal ignored."""
    actions: list[tuple[int, int, int] | tuple[int, int] | tuple[int, int, bytes, int, int]] = [
        (posix.POSIX_SPAWN_OPEN, fd, b"/dev/null", posix.O_RDWR, 0) for fd in (0, 1, 2)
    ]
    if ready_fd >= 0:
        actions.append((posix.POSIX_SPAWN_DUP2, ready_fd, READY_FD))
    for name in posix.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            leaks = fd > 2 and fd != READY_FD and posix.get_inheritable(fd)
        except OSError:
            continue
        if leaks:
            actions.append((posix.POSIX_SPAWN_CLOSE, fd))
    if ready_fd < 0:
        # 3 may be one that the caller's shell left open; dup2 above replaces it where there is a ready pipe.
        actions.append((posix.POSIX_SPAWN_DUP2, 0, READY_FD))
    signals = _signal.valid_signals() - {_signal.SIGKILL, _signal.SIGSTOP}
    return posix.posix_spawn(
        path, argv, environment, file_actions=actions, setsid=True, setsigdef=signals, setsigmask=[]
    )  # fmt: skip


def _spawn() -> str:
    """Start the broker detached and wait until it says that it listens. Returns what went wrong, for the
    message."""
    ready, theirs = posix.pipe2(posix.O_CLOEXEC)
    # The working directory and the umask are inherited: a broker in `/` keeps no file system busy.
    umask = posix.umask(0o077)
    try:
        here = posix.open(".", posix.O_PATH | posix.O_DIRECTORY)
        posix.chdir("/")
        argv = [sys.executable, "-I", broker_program(), "run", "--ready-fd", str(READY_FD)]
        pid = _posix_spawn(sys.executable, argv, _environment(), theirs)
        posix.fchdir(here)
        posix.close(here)
    except OSError as error:
        return f"{escape(sys.executable)}: {posix.strerror(error.errno or 0)}"
    finally:
        posix.umask(umask)
        posix.close(theirs)
    poller = select.poll()
    poller.register(ready, select.POLLIN)
    spoke = bool(poller.poll(int(READY_SECONDS * 1000)))
    said = posix.read(ready, 1) if spoke else b""
    posix.close(ready)
    if not spoke:
        return f"it has not said within {READY_SECONDS:.0f} s that it listens"
    if said:
        return "it said that it listens, but nobody does"
    # The pipe closes a moment before the process has ended.
    ended = status = 0
    for _ in range(50):
        ended, status = posix.waitpid(pid, posix.WNOHANG)
        if ended:
            break
        select.poll().poll(10)
    return (
        f"it ended with status {posix.waitstatus_to_exitcode(status)}"
        if ended
        else "it closed the ready pipe"
    )


def _log_tail(runtime: bytes) -> str:
    try:
        dir_fd = open_dir(runtime)
        if dir_fd is None:
            return ""
        fd = posix.open(LOG_NAME, posix.O_RDONLY | posix.O_NOFOLLOW | posix.O_NONBLOCK, dir_fd=dir_fd)
        size = posix.fstat(fd).st_size
        untrusted_tail = posix.pread(fd, LOG_TAIL, max(0, size - LOG_TAIL))
        posix.close(fd)
    except OSError:
        return ""
    lines = untrusted_tail.decode("utf-8", "backslashreplace").strip().split("\n")
    return "\n".join(
        f"  {escape(line)}" for line in (lines[1:] if size > LOG_TAIL and len(lines) > 1 else lines)
    )
