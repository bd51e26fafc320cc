"""What the host's tree looks like at the names a plan may ask about. Looks, keeps nothing open, decides
nothing.

The plan builder is pure; this is its input. Between this look and the open the tree may change: the open
compares identity and decides.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from typing import Literal

import msgspec
import trio

from ral_broker import syscalls
from ral_broker.envelope.plan import Identity
from ral_broker.errors import Refused
from ral_broker.log import logger, shown

Kind = Literal["absent", "directory", "file", "link", "unreadable"]
Reach = Literal["absent", "directory", "file", "unreadable"]

LOOK_SECONDS = 5.0
"""Deadline for all names together that the kernel's caches cannot answer."""

KERNEL_TREES = (b"/sys/", b"/proc/")
"""Trees that the kernel answers for by itself: they never block, and their names are not cached."""

_AT_FDCWD = -100
_FOLLOW_TRIES = 16
_REAL = syscalls.RESOLVE_NO_SYMLINKS
_NO_ENTRY = -errno.ENOENT
_ABSENT = (errno.ENOENT, errno.ENOTDIR)
_FORBIDDEN = (errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG)


class PathFact(msgspec.Struct, frozen=True):
    """One name. ``target`` is the text of a symbolic link; ``resolved`` the canonical path of what the name
    reaches in the end (for a dangling link: would reach); ``reaches`` its kind and ``identity`` its device
    and inode. What is no directory counts as a file: ``regular`` tells a file of bytes, ``device`` is the
    number of a device node (st_rdev, stat(2)). What is unreadable: ``closed`` is the user's own directory
    whose permissions stand in the way; ``silent`` says that a file system failed or did not answer."""

    kind: Kind
    target: bytes | None = None
    resolved: bytes | None = None
    reaches: Reach = "absent"
    identity: Identity | None = None
    regular: bool = True
    device: int | None = None
    closed: bytes | None = None
    silent: bool = False


ABSENT = PathFact("absent")
UNREADABLE = PathFact("unreadable", reaches="unreadable")
SILENT = PathFact("unreadable", reaches="unreadable", silent=True)


class _NotCachedError(Exception):
    """The kernel would have to ask a file system."""


def look(path: bytes, *, cached: bool = False) -> PathFact:
    """Describe one absolute path. Never raises for the state of the tree.

    ``cached``: raise _NotCachedError instead of asking a file system, which may never answer.
    """
    # A name without any symbolic link is its own canonical name; most are.
    fd = _open(path, _REAL, cached=cached)
    if fd >= 0:
        return _found(fd, path)
    if fd != -errno.ELOOP:
        return _failure(-fd, path, cached=cached)
    # The link and what it leads to have been read: neither call asks a file system again.
    fd = _open(path, 0, cached=cached)
    try:
        target = os.readlink(path)
    except OSError:
        target = None
    if fd < 0:
        if target is None:
            return _failure(-fd, path, cached=cached)
        if -fd in _ABSENT:
            # What would appear at the end of a dangling link is still worth naming.
            return PathFact("link", target, followed(path))
        return msgspec.structs.replace(_failure(-fd, path, cached=cached), kind="link", target=target)
    try:
        return _describe(fd, target, canonical_name(fd))
    finally:
        os.close(fd)


def _found(fd: int, path: bytes) -> PathFact:
    """Describe what was opened without a link on the way; closes ``fd``."""
    try:
        real = not (b"//" in path or b"/./" in path or b"/../" in path)
        return _describe(fd, None, path if real else canonical_name(fd))
    finally:
        os.close(fd)


def _describe(fd: int, target: bytes | None, name: bytes) -> PathFact:
    status = os.fstat(fd)
    identity = Identity(status.st_dev, status.st_ino)
    if stat.S_ISDIR(status.st_mode):
        return PathFact("directory" if target is None else "link", target, name, "directory", identity)
    node = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
    return PathFact(
        "file" if target is None else "link", target, name, "file", identity, stat.S_ISREG(status.st_mode),
        status.st_rdev if node else None,
    )  # fmt: skip


def _failure(number: int, path: bytes, *, cached: bool) -> PathFact:
    if number in _ABSENT:
        return ABSENT
    if number not in _FORBIDDEN:
        return SILENT
    while number == errno.EACCES and path != b"/":
        path = path.rpartition(b"/")[0] or b"/"
        fd = _open(path, 0, cached=cached)
        if fd >= 0:
            try:
                own = os.fstat(fd).st_uid == os.geteuid()
                return PathFact(
                    "unreadable", reaches="unreadable", closed=canonical_name(fd) if own else None
                )
            finally:
                os.close(fd)
        number = -fd
    return UNREADABLE


def _open(path: bytes, resolve: int, *, cached: bool) -> int:
    """Return a descriptor or a negated errno. Raises _NotCachedError where the caches do not know."""
    if cached:
        resolve |= syscalls.RESOLVE_CACHED
    fd = syscalls.try_openat2(_AT_FDCWD, path, os.O_PATH, resolve)
    if cached and fd == -errno.EAGAIN:
        raise _NotCachedError
    return fd


def followed(path: bytes) -> bytes:
    """Return a path with every link followed, what does not exist as it is written below what does.

    Raises Refused where another process keeps changing it: posixpath.realpath fails if a link is replaced
    between its two looks.
    """
    for _ in range(_FOLLOW_TRIES):
        try:
            return os.path.realpath(path)
        except OSError:
            continue
    raise Refused(
        f"{shown(path)} changes all the time, so it is not known where it leads; run the command again when "
        "the process that does it has ended"
    )


def canonical_name(fd: int) -> bytes:
    """Return the kernel's name of an open object: no symbolic link in it (proc_pid_fd(5))."""
    return os.readlink(b"/proc/self/fd/%d" % fd)


async def observe(paths: Iterable[bytes]) -> dict[bytes, PathFact]:
    """Describe each path once. What does not answer in time counts as unreadable, and is named in the
    log."""
    facts: dict[bytes, PathFact] = {}
    slow: list[bytes] = []
    for path in dict.fromkeys(paths):
        cached = not path.startswith(KERNEL_TREES)
        # Most names are absent, and these cost one call.
        resolve = _REAL | syscalls.RESOLVE_CACHED if cached else _REAL
        fd = syscalls.try_openat2(_AT_FDCWD, path, os.O_PATH, resolve)
        if fd == _NO_ENTRY:
            facts[path] = ABSENT
            continue
        if fd >= 0:
            facts[path] = _found(fd, path)
            continue
        try:
            facts[path] = look(path, cached=cached)
        except _NotCachedError:
            slow.append(path)
    if slow:
        answers: dict[bytes, PathFact] = {}
        with trio.move_on_after(LOOK_SECONDS):
            await trio.to_thread.run_sync(
                _look_all, slow, answers, abandon_on_cancel=True, limiter=slow_opens
            )
        for path in slow:
            if path not in answers:
                logger.warning(
                    "%s did not answer within %g seconds and is not shown", shown(path), LOOK_SECONDS
                )
            facts[path] = answers.get(path, SILENT)
    return facts


def _look_all(paths: list[bytes], answers: dict[bytes, PathFact]) -> None:
    for path in paths:
        answers[path] = look(path)


slow_opens = trio.CapacityLimiter(8)
"""Worker threads for what may block: the one use of threads in the broker."""
