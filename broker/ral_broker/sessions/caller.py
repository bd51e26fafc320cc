"""What a launch takes from its caller: limits and habits from the kernel, descriptors and bytes checked."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import stat

import msgspec

from ral_broker import syscalls
from ral_broker.errors import Refused, RequestError
from ral_broker.frames import Descriptors
from ral_broker.log import shown
from ral_broker.peers import Peer
from ral_protocol.control import MAX_PAYLOAD, Payload, Run

_LIMITS = tuple(
    getattr(resource, f"RLIMIT_{name}")
    for name in (
        "CPU", "FSIZE", "DATA", "STACK", "CORE", "RSS", "NPROC", "NOFILE", "MEMLOCK", "AS", "SIGPENDING",
        "MSGQUEUE", "NICE", "RTPRIO", "RTTIME",
    )
)  # fmt: skip
_INFINITY = (1 << 64) - 1
_decode_payload = msgspec.msgpack.Decoder(Payload).decode
_KERNEL_HANDLES = (syscalls.NSFS_MAGIC, syscalls.PID_FS_MAGIC, syscalls.ANON_INODE_FS_MAGIC)
_NAMES = ("standard input", "standard output", "standard error")


class Habits(msgspec.Struct, frozen=True):
    """What the kernel says of the calling process (proc_pid_status(5), getrlimit(2))."""

    umask: int
    nice: int
    limits: tuple[tuple[int, int, int], ...]
    affinity: frozenset[int]
    groups: frozenset[int]
    cgroup: bytes


def habits_of(peer: Peer) -> Habits:
    """Read the caller's habits through its pid; its pidfd proves afterwards that it was the same process.

    Raises Refused if it is gone.
    """
    try:
        status = read_small(b"/proc/%d/status" % peer.pid)
        limits: list[tuple[int, int, int]] = []
        for number in _LIMITS:
            soft, hard = resource.prlimit(peer.pid, number)
            limits.append((number, _limit(soft), _limit(hard)))
        habits = Habits(
            umask=int(_field(status, b"Umask"), 8), nice=os.getpriority(os.PRIO_PROCESS, peer.pid),
            limits=tuple(limits), affinity=frozenset(os.sched_getaffinity(peer.pid)),
            groups=frozenset(map(int, _field(status, b"Groups").split())),
            cgroup=read_small(b"/proc/%d/cgroup" % peer.pid),
        )  # fmt: skip
        signal.pidfd_send_signal(peer.pidfd, 0)
    except (OSError, IndexError, ValueError) as error:
        raise Refused("the calling process cannot be read; it may have ended") from error
    return habits


def read_small(path: bytes, limit: int = 65536) -> bytes:
    """Return the first ``limit`` bytes of a file of proc(5) or the system: without the layers of a Python
    file. OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, limit)
    finally:
        os.close(fd)


def _field(untrusted_status: bytes, name: bytes) -> bytes:
    """Return a field of proc_pid_status(5). The name that a process gave itself is on the first line,
    escaped."""
    return untrusted_status.split(b"\n" + name + b":\t", 1)[1].split(b"\n", 1)[0]


def _limit(value: int) -> int:
    return _INFINITY if value == resource.RLIM_INFINITY else value


def check_habits(habits: Habits) -> None:
    """Refuse a caller whose groups or control group this broker would silently replace by its own.

    Raises Refused.
    """
    if habits.groups != frozenset(os.getgroups()):
        raise Refused(
            "your supplementary groups differ from the broker's, so files would be open or closed to the "
            "program that should not be; "
            + (
                "your user manager, which started it, keeps the groups of its own start: end all your "
                "logins (loginctl terminate-user), or give this one a broker of its own: "
                "export RAL_RUNTIME_DIR=$(mktemp -d)"
                if "NOTIFY_SOCKET" in os.environ
                else "restart the broker (ral broker stop) from this login"
            )
        )
    if os.path.isdir("/run/systemd/system"):
        return
    if read_small(b"/proc/self/cgroup") != habits.cgroup:
        raise Refused(
            "you are in another control group than the broker (a batch job?), and the program would "
            "escape its limits; give this one a broker of its own: export RAL_RUNTIME_DIR=$(mktemp -d)"
        )


def read_payload(untrusted_fd: int, *, command: bool = True) -> Payload:
    """Seal, read and decode the memfd of a request; closes it. Raises RequestError, also where there is a
    command and none is wanted, or the other way round."""
    try:
        try:
            syscalls.seal(untrusted_fd)  # wall
        except OSError as error:
            raise RequestError(
                f"the payload is not a memory file that can be sealed: {error.strerror}"
            ) from error
        size = os.fstat(untrusted_fd).st_size
        if size > MAX_PAYLOAD:  # wall
            raise RequestError(
                f"arguments and environment take {size} bytes; at most {MAX_PAYLOAD} are possible"
            )
        untrusted_bytes = os.pread(untrusted_fd, size, 0)
    finally:
        os.close(untrusted_fd)
    try:
        payload = _decode_payload(untrusted_bytes)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise RequestError(f"the payload cannot be decoded: {error}") from error
    if command and (not payload.argv or not payload.argv[0]):
        raise RequestError("a command is needed")
    if payload.argv and not command:
        raise RequestError("this request takes no command")
    if any(b"\0" in text for text in (*payload.argv, *payload.environment)):
        raise RequestError("an argument or variable holds a NUL byte")
    return payload


def checked_path(untrusted_path: bytes, fd: int, what: str) -> bytes:
    """Return the path if the client's descriptor is a directory that the kernel calls by this very name."""
    if not untrusted_path.startswith(b"/") or b"\0" in untrusted_path:
        raise RequestError(f"the {what} must be an absolute path")
    try:
        real = os.readlink(b"/proc/self/fd/%d" % fd)
        mode = os.fstat(fd).st_mode
    except OSError as error:
        raise RequestError(f"the {what} cannot be read: {error.strerror}") from error
    if not stat.S_ISDIR(mode):  # wall
        raise Refused(f"the {what} {shown(untrusted_path)} is no directory; name one")
    if real != untrusted_path:  # wall
        raise Refused(
            f"{shown(untrusted_path)} now reaches {shown(real)}, not what the grant rendered; "
            "another process changed it meanwhile; run the command again if that was you"
        )
    return real


def take_stdio(request: Run, untrusted_fds: Descriptors) -> list[int]:
    """Take the descriptors for those of 0, 1, 2 that are no terminals, checked; the caller owns them.

    Raises Refused for one that would open more to the program than a stream of bytes, RequestError for a
    count that does not add up.
    """
    taken: list[int] = []
    try:
        for number, terminal in enumerate(request.terminals):
            if not terminal:
                taken.append(untrusted_fds.take())
                _check_stdio(taken[-1], _NAMES[number])
        if len(untrusted_fds):
            raise RequestError("the request came with more descriptors than it needs")
    except BaseException:
        for fd in taken:
            os.close(fd)
        raise
    return taken


def _check_stdio(fd: int, name: str) -> None:
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):  # wall
        raise Refused(
            f"{name} is a directory: the program could open everything below it; redirect it elsewhere"
        )
    if stat.S_ISBLK(mode):  # wall
        raise Refused(f"{name} is a block device; redirect it to a file or a pipe")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH:  # wall
        raise Refused(f"{name} is an O_PATH descriptor, which names a file without opening it; open it")
    if syscalls.filesystem_type(fd) in _KERNEL_HANDLES:  # wall
        raise Refused(
            f"{name} is a handle of the kernel (a namespace, a process, an event), no stream of bytes"
        )
    if os.isatty(fd):  # wall
        raise RequestError(f"{name} is a terminal and was sent all the same")
