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
from ral_broker.log import logger, shown

Kind = Literal["absent", "directory", "file", "link", "unreadable"]
Reach = Literal["absent", "directory", "file", "unreadable"]

LOOK_SECONDS = 5.0
"""Deadline for all names together that the kernel's caches cannot answer."""

KERNEL_TREES = (b"/sys/", b"/proc/")
"""Trees that the kernel answers for by itself: they never block, and their names are not cached."""

_AT_FDCWD = -100
_ABSENT = (errno.ENOENT, errno.ENOTDIR)


class PathFact(msgspec.Struct, frozen=True):
    """One name. ``target`` is the text of a symbolic link; ``resolved`` the canonical path of what the name
    reaches in the end (for a dangling link: would reach); ``reaches`` its kind and ``identity`` its device
    and inode."""

    kind: Kind
    target: bytes | None = None
    resolved: bytes | None = None
    reaches: Reach = "absent"
    identity: Identity | None = None


ABSENT = PathFact("absent")
UNREADABLE = PathFact("unreadable", reaches="unreadable")


class _NotCachedError(Exception):
    """The kernel would have to ask a file system."""


def look(path: bytes, *, cached: bool = False) -> PathFact:
    """Describe one absolute path. Never raises for the state of the tree.

    ``cached``: raise _NotCachedError instead of asking a file system, which may never answer.
    """
    real = not (b"//" in path or b"/./" in path or b"/../" in path)
    # A name without any symbolic link is its own canonical name; most are.
    fd = _open(path, os.O_PATH, syscalls.RESOLVE_NO_SYMLINKS, cached=cached)
    if fd == -errno.ELOOP:
        real = False
        fd = _open(path, os.O_PATH | os.O_NOFOLLOW, 0, cached=cached)
    if fd < 0:
        return ABSENT if -fd in _ABSENT else UNREADABLE
    try:
        status = os.fstat(fd)
        if stat.S_ISLNK(status.st_mode):
            return _look_through(path, os.readlink(b"", dir_fd=fd), cached=cached)
        kind: Literal["directory", "file"] = "directory" if stat.S_ISDIR(status.st_mode) else "file"
        name = path if real else canonical_name(fd)
        return PathFact(kind, None, name, kind, Identity(status.st_dev, status.st_ino))
    finally:
        os.close(fd)


def _look_through(path: bytes, target: bytes, *, cached: bool) -> PathFact:
    fd = _open(path, os.O_PATH, 0, cached=cached)
    if fd < 0:
        if -fd in _ABSENT:
            # What would appear at the end of a dangling link is still worth naming.
            return PathFact("link", target, os.path.realpath(path))
        return PathFact("link", target, reaches="unreadable")
    try:
        status = os.fstat(fd)
        reaches: Reach = "directory" if stat.S_ISDIR(status.st_mode) else "file"
        return PathFact("link", target, canonical_name(fd), reaches, Identity(status.st_dev, status.st_ino))
    finally:
        os.close(fd)


def _open(path: bytes, flags: int, resolve: int, *, cached: bool) -> int:
    """Return a descriptor or a negated errno. Raises _NotCachedError where the caches do not know."""
    fd = syscalls.try_openat2(_AT_FDCWD, path, flags, resolve | (syscalls.RESOLVE_CACHED if cached else 0))
    if cached and fd == -errno.EAGAIN:
        raise _NotCachedError
    return fd


def canonical_name(fd: int) -> bytes:
    """Return the kernel's name of an open object: no symbolic link in it (proc_pid_fd(5))."""
    return os.readlink(b"/proc/self/fd/%d" % fd)


async def observe(paths: Iterable[bytes]) -> dict[bytes, PathFact]:
    """Describe each path once. What does not answer in time counts as unreadable, and is named in the
    log."""
    facts: dict[bytes, PathFact] = {}
    slow: list[bytes] = []
    for path in dict.fromkeys(paths):
        try:
            facts[path] = look(path, cached=not path.startswith(KERNEL_TREES))
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
            facts[path] = answers.get(path, UNREADABLE)
    return facts


def _look_all(paths: list[bytes], answers: dict[bytes, PathFact]) -> None:
    for path in paths:
        answers[path] = look(path)


slow_opens = trio.CapacityLimiter(8)
"""Worker threads for what may block: the one use of threads in the broker."""
