"""Who is at the other end of a connection: from the kernel, never from what the peer wrote.

A program inside a sandbox has this broker's uid, so SO_PEERCRED alone proves nothing: the peer's user, pid
and mount namespace must be the broker's own.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from ral_broker import syscalls
from ral_broker.errors import Refused

SO_PEERPIDFD = 77
"""asm-generic/socket.h, Linux 6.5."""

_NAMESPACES = (
    ("user", syscalls.PIDFD_GET_USER_NAMESPACE),
    ("pid", syscalls.PIDFD_GET_PID_NAMESPACE),
    ("mnt", syscalls.PIDFD_GET_MNT_NAMESPACE),
)


class Peer:
    """The process that connected. ``pidfd`` proves that ``pid`` is still it; owned, closed by ``close``."""

    def __init__(self, pid: int, uid: int, pidfd: int) -> None:
        self.pid, self.uid, self.pidfd = pid, uid, pidfd

    def close(self) -> None:
        """Close the pidfd."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def own_namespaces() -> dict[str, tuple[int, int]]:
    """Return device and inode of this process's user, pid and mount namespace."""
    return {name: _identity(os.stat(f"/proc/self/ns/{name}")) for name, _ in _NAMESPACES}


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


@contextmanager
def identified(connection: trio.socket.SocketType, own: dict[str, tuple[int, int]]) -> Iterator[Peer]:
    """Identify the peer of a unix socket. Raises Refused, with the likely cause, for a peer that may not
    ask."""
    peer = _peer_of(connection)
    try:
        if peer.uid != os.geteuid():  # wall
            raise Refused(f"this broker serves uid {os.geteuid()} only, and the caller is uid {peer.uid}")
        for name, request in _NAMESPACES:
            if _namespace(peer, name, request) != own[name]:  # wall
                raise Refused(_FOREIGN[name])
        yield peer
    finally:
        peer.close()


_FOREIGN = {
    "user": "the caller is in another user namespace (a sandbox, or unshare -U): only processes outside may "
    "ask this broker",
    "pid": "the caller is in another pid namespace (a sandbox or a container): only processes outside may "
    "ask this broker; give the container a broker of its own with RAL_RUNTIME_DIR",
    "mnt": "the caller sees other mounts than this broker (a service with PrivateTmp, a container, a batch "
    "job): what it names could be something else here; give it a broker of its own with RAL_RUNTIME_DIR",
}


def _peer_of(connection: trio.socket.SocketType) -> Peer:
    pid, uid, _ = struct.unpack("=iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if pid <= 0:
        raise Refused("the caller is not visible to this broker (another pid namespace)")
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4)
        pidfd = struct.unpack("=i", raw)[0]
        os.set_inheritable(pidfd, False)
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EINVAL, errno.ESRCH, errno.ENODATA):
            raise
        if error.errno != errno.ENOPROTOOPT:
            raise Refused("the caller is gone") from error
        pidfd = _pidfd_of_old_kernel(pid)
    return Peer(pid, uid, pidfd)


def _pidfd_of_old_kernel(pid: int) -> int:
    """Before 6.5 the pid may have been reused since the connect, and what is looked at is then another
    process than the one that asks. Whoever asks has reached the socket all the same, which no sandbox
    shows; and the accept follows the connect in less time than it takes to use up every pid."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise Refused("the caller is gone") from error


def _namespace(peer: Peer, name: str, request: int) -> tuple[int, int]:
    try:
        fd = syscalls.pidfd_namespace(peer.pidfd, request)
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP):
            raise Refused("the caller's namespaces cannot be read, so it may not ask this broker") from error
        return _namespace_by_proc(peer, name)
    try:
        return _identity(os.fstat(fd))
    finally:
        os.close(fd)


def _namespace_by_proc(peer: Peer, name: str) -> tuple[int, int]:
    """Before 6.11: through /proc, and a signal 0 by pidfd afterwards proves that it was the same process."""
    try:
        found = _identity(os.stat(f"/proc/{peer.pid}/ns/{name}"))
        signal.pidfd_send_signal(peer.pidfd, 0)
    except OSError as error:
        raise Refused("the caller's namespaces cannot be read, so it may not ask this broker") from error
    return found
