"""Looking at files that anybody may have written, by handle and within bounds."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator

from ral_broker import syscalls

AT_FDCWD = -100

_ABSENT = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENXIO)
)
"""What git could not get at either."""

_BETWEEN = syscalls.RESOLVE_NO_MAGICLINKS
_TRIES = 3
_QUICK_STEPS = 2000
_QUICK_BYTES = 1 << 16


class UncachedError(Exception):
    """A file system would have to be asked, which may never answer; or it is too much work to do at once."""


class TooManyError(Exception):
    """A directory holds more entries than are looked at."""


class Tree:
    """Opens and reads. ``deadline``: when to give up, on the clock of time.monotonic; None: never wait, and
    raise UncachedError instead. ``at``: what is looked at just now, for a message about what does not
    answer."""

    def __init__(self, deadline: float | None) -> None:
        self._deadline, self._cached = deadline, deadline is None
        self._steps = self._bytes = 0
        self.at = b""

    @contextlib.contextmanager
    def opened(
        self, dir_fd: int, name: bytes, *, follow: bool = False, resolve: int = _BETWEEN
    ) -> Iterator[int | None]:
        """Open ``name`` with O_PATH, for the length of the block; None: absent or out of reach. ``follow``:
        through a link at the end too. Raises OSError for other faults, UncachedError."""
        fd = self._open(dir_fd, name, os.O_PATH | (0 if follow else os.O_NOFOLLOW), resolve)
        try:
            yield fd
        finally:
            if fd is not None:
                os.close(fd)

    @contextlib.contextmanager
    def directory(
        self, dir_fd: int, name: bytes, *, follow: bool = False, resolve: int = _BETWEEN
    ) -> Iterator[int | None]:
        """As ``opened``, but only a directory."""
        with self.opened(dir_fd, name, follow=follow, resolve=resolve) as fd:
            yield fd if fd is not None and stat.S_ISDIR(os.fstat(fd).st_mode) else None

    def _open(self, dir_fd: int, name: bytes, flags: int, resolve: int) -> int | None:
        if not name or b"\0" in name:
            return None
        self.at = name
        self._step(1, 0)
        if self._cached:
            resolve |= syscalls.RESOLVE_CACHED
        fd = -errno.EAGAIN
        for _ in range(_TRIES):
            # EAGAIN without RESOLVE_CACHED: something was renamed while a .. was resolved (openat2(2)).
            if fd == -errno.EAGAIN:
                fd = syscalls.try_openat2(dir_fd, name, flags, resolve)
        if fd >= 0:
            return fd
        if fd == -errno.EAGAIN and self._cached:
            raise UncachedError
        if -fd in _ABSENT:
            return None
        raise OSError(-fd, os.strerror(-fd), name)

    def _step(self, steps: int, size: int) -> None:
        self._steps += steps
        self._bytes += size
        if self._deadline is None:
            if self._steps > _QUICK_STEPS or self._bytes > _QUICK_BYTES:  # wall
                raise UncachedError
        elif time.monotonic() > self._deadline:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), self.at)

    def exists(self, dir_fd: int, name: bytes) -> bool:
        """Tell whether there is anything of that name."""
        with self.opened(dir_fd, name) as fd:
            return fd is not None

    def read(self, dir_fd: int, name: bytes, limit: int, *, follow: bool = False) -> bytes | None:
        """Return the content of a regular file of at most ``limit`` bytes; None: there is no such file."""
        with self.opened(dir_fd, name, follow=follow) as fd:
            return None if fd is None else self.content(fd, limit)

    def content(self, fd: int, limit: int) -> bytes | None:
        """As ``read``, of an object that is open with O_PATH."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:  # wall
            return None
        self._wait_for_nobody(status)
        self._step(0, status.st_size)
        # The very object that was checked: by its name it might be a FIFO by now.
        try:
            reading = os.open(b"/proc/self/fd/%d" % fd, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise
        try:
            # A buffer of the size of the limit would cost more than everything else here.
            content = os.read(reading, min(status.st_size + 4096, limit + 1))
        finally:
            os.close(reading)
        return content if len(content) <= limit else None

    def names(self, dir_fd: int, limit: int, *, directories: bool = False) -> list[bytes]:
        """Return the names in a directory, sorted; with ``directories`` no others. TooManyError: there are
        more than ``limit`` of all kinds."""
        self._wait_for_nobody(os.fstat(dir_fd))
        found: list[bytes] = []
        try:
            reading = os.open(b"/proc/self/fd/%d" % dir_fd, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _ABSENT:
                return []
            raise
        try:
            with os.scandir(reading) as entries:
                for number, entry in enumerate(entries):
                    if number == limit:  # wall
                        raise TooManyError
                    if not directories or entry.is_dir(follow_symlinks=False):
                        found.append(os.fsencode(entry.name))
        finally:
            os.close(reading)
        return sorted(found)

    def _wait_for_nobody(self, status: os.stat_result) -> None:
        # RESOLVE_CACHED covers names only. Content on a disk comes; a file system without a device of its
        # own (NFS, FUSE) may wait for a server.
        if self._cached and os.major(status.st_dev) == 0:
            raise UncachedError


def is_git_directory(tree: Tree, fd: int) -> bool:
    """Tell whether a directory has what git asks for before it takes one for a repository
    (gitrepository-layout(5)). What a repository keeps of a worktree has not."""
    return all(tree.exists(fd, name) for name in (b"HEAD", b"objects", b"refs"))


def one_line(untrusted_content: bytes | None) -> bytes:
    """Return a path that a file consists of; empty where there is none."""
    return (untrusted_content or b"").rstrip(b"\r\n")
