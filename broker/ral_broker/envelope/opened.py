"""The one place where a launch opens what it shows: each source once, in the host, never through a symbolic
link.

An open first asks the kernel's caches only (RESOLVE_CACHED): then it cannot block. What is not cached is
opened in a worker thread with a deadline, for a dead NFS or FUSE path must not stop the broker; that thread
is the one use of threads here.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections.abc import Mapping

import trio

from ral_broker import syscalls
from ral_broker.envelope.facts import KERNEL_TREES, slow_opens
from ral_broker.envelope.options import is_lent
from ral_broker.envelope.plan import (
    MAX_COPY,
    Bind,
    Copy,
    Data,
    Device,
    Identity,
    Mask,
    Operation,
    PinName,
    Pinned,
    Plan,
)
from ral_broker.errors import HostLacks, RalError, Refused
from ral_broker.log import shown

AT_FDCWD = -100
OPEN_SECONDS = 5.0
"""Deadline of one open that the caches cannot answer."""


class _SlowOpen:
    """An open in a thread that may be given up: whoever comes second closes the descriptor."""

    def __init__(self, path: bytes, flags: int) -> None:
        self._path, self._flags = path, flags
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._abandoned = False

    def run(self) -> None:
        """Open; called in the thread."""
        fd = syscalls.openat2(AT_FDCWD, self._path, self._flags, syscalls.RESOLVE_NO_SYMLINKS)  # wall
        with self._lock:
            if self._abandoned:
                os.close(fd)
            else:
                self._fd = fd

    def take(self) -> int:
        """Return the descriptor, which is the caller's from now on. OSError ETIMEDOUT if there is none
        yet."""
        with self._lock:
            if self._fd is None:
                raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), self._path)
            fd, self._fd = self._fd, None
            return fd

    def abandon(self) -> None:
        """Close what was not taken, now or when the thread gets it."""
        with self._lock:
            self._abandoned = True
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


class Opened:
    """The operations of a plan whose sources were found, and a descriptor for each lent one, in order.

    Resource handling: ``close`` closes what was opened here; pins and the empty file are borrowed.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.handles: list[int] = []
        self._owned: list[int] = []

    def add(self, operation: Operation, handle: int | None = None, *, owned: bool = False) -> None:
        """Take up an operation, and the descriptor if it is a lent one."""
        self.operations.append(operation)
        if handle is not None:
            self.handles.append(handle)
            if owned:
                self._owned.append(handle)

    def close(self) -> None:
        """Close every descriptor that was opened for this launch."""
        while self._owned:
            os.close(self._owned.pop())


async def open_real(path: bytes, flags: int = os.O_PATH) -> int:
    """Open a canonical path without following any symbolic link.

    Raises OSError (ETIMEDOUT when the path does not answer within OPEN_SECONDS).
    """
    cached = 0 if path.startswith(KERNEL_TREES) else syscalls.RESOLVE_CACHED
    try:
        return syscalls.openat2(AT_FDCWD, path, flags, syscalls.RESOLVE_NO_SYMLINKS | cached)  # wall
    except OSError as error:
        if error.errno != errno.EAGAIN:
            raise
    slow = _SlowOpen(path, flags)
    try:
        with trio.move_on_after(OPEN_SECONDS):
            await trio.to_thread.run_sync(slow.run, abandon_on_cancel=True, limiter=slow_opens)
        return slow.take()
    finally:
        slow.abandon()


def identity_of(fd: int) -> Identity:
    """Return device and inode of an open object."""
    status = os.fstat(fd)
    return Identity(status.st_dev, status.st_ino)


async def open_plan(plan: Plan, pins: Mapping[PinName, int], empty_file: int) -> Opened:
    """Open every source of a plan.

    A source that is absent is dropped, and so is a system default that this user may not reach; a required
    one refuses. Raises Refused or HostLacks; then nothing stays open.
    """
    opened = Opened()
    try:
        for operation in plan.operations:
            match operation:
                case Bind() | Copy() | Device():
                    handle = await _open_source(operation)
                    if handle is not None:
                        opened.add(operation, handle, owned=True)
                case Data(content=content):
                    opened.add(operation, syscalls.sealed_memfd("ral-data", content), owned=True)
                case Pinned(pin=pin):
                    opened.add(operation, pins[pin])
                case Mask() if is_lent(operation):
                    opened.add(operation, empty_file)
                case _:
                    opened.add(operation)
    except BaseException:
        opened.close()
        raise
    return opened


async def _open_source(operation: Bind | Copy | Device) -> int | None:
    required = isinstance(operation, Bind) and operation.required
    try:
        handle = await open_real(operation.source)
    except OSError as error:
        if not required and error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        if not required and operation.layer == "system" and error.errno == errno.EACCES:
            return None
        raise open_refusal(operation.source, error) from error
    try:
        if operation.identity is not None and identity_of(handle) != operation.identity:  # wall
            raise _replaced(operation.source, handle)
        match operation:
            case Bind():
                kept, handle = handle, -1
                return kept
            case Copy():
                return _open_for_copy(operation, handle)
            case Device(device=device):
                status = os.fstat(handle)
                node = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
                if not node or status.st_rdev != device:  # wall
                    raise _replaced(operation.source, handle)
                kept, handle = handle, -1
                return kept
    finally:
        if handle >= 0:
            os.close(handle)


def _open_for_copy(copy: Copy, handle: int) -> int:
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):  # wall
        raise _replaced(copy.source, handle)
    if status.st_size > MAX_COPY:  # wall
        raise Refused(
            f"{copy.why}: {shown(copy.source)} has {status.st_size} bytes and a copy at most {MAX_COPY}; "
            "take it out of the list, or list it in home_readonly"
        )
    try:
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise open_refusal(copy.source, error) from error


def _replaced(source: bytes, handle: int) -> Refused:
    reached = os.readlink(f"/proc/self/fd/{handle}")
    return Refused(
        f"{shown(source)} now reaches {shown(reached)}, not what the grant rendered; another "
        "process changed it while the sandbox was prepared; run the command again if that was you"
    )


def open_refusal(path: bytes, error: OSError) -> RalError:
    """Word a failed open of something a sandbox was to show."""
    name = shown(path)
    match error.errno:
        case errno.ELOOP:
            return Refused(
                f"{name} now goes through a symbolic link that ral will not follow; "
                "reload the grant or restart ral if you made that change"
            )
        case errno.EACCES:
            return Refused(
                f"{name}: Permission denied; it cannot be shown, for you may not reach it yourself"
            )
        case errno.ENOENT | errno.ENOTDIR:
            return Refused(f"{name}: it is no longer there; run ral in a directory that exists")
        case errno.ETIMEDOUT:
            return Refused(
                f"{name} did not answer within {OPEN_SECONDS:.0f} seconds (a dead network mount?)"
            )
        case errno.EMFILE | errno.ENFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            return Refused(
                f"{name}: {error.strerror}; the hard limit of open files is {limit}: raise it (ulimit -Hn, "
                "LimitNOFILE=) or show fewer paths"
            )
        case errno.ENOSYS:
            return HostLacks(
                "this kernel has no openat2, which opens without following links; ral needs Linux 5.14"
            )
        case _:
            return Refused(f"{name}: {error.strerror}")
