"""Empty files for blocked paths that do not exist yet, made on request only (``materialize_blocked_files``).

A mask needs something to lie over. Everything here works from directory descriptors and follows no symbolic
link below the nearest directory that exists: another process of the user may swap names meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence

import trio

from ral_broker import syscalls
from ral_broker.config.settings import Settings
from ral_broker.envelope.facts import followed, slow_opens
from ral_broker.errors import Refused
from ral_broker.log import shown
from ral_protocol.records import Placeholder

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW

# linux/magic.h: network file systems, where an unlink may hit what another host has made of the name.
_NETWORK_TYPES = frozenset({
    0x6969, 0xFF534D42, 0xFE534D42, 0x517B, 0x00C36400, 0x5346414F, 0x65735546, 0x01021997, 0x0BD00BD0,
    0x47504653, 0x61756673,
})  # fmt: skip


async def materialize(settings: Settings) -> tuple[list[Placeholder], list[str]]:
    """Make what ``materialize_blocked_files`` asks for: see make_placeholders. Raises Refused."""
    if not settings.materialize_blocked_files or not settings.blocked_files:
        return [], []
    paths = [os.fsencode(path) for path in settings.blocked_files]
    # In a thread, for a file system may be slow; not given up, for what it made has to be known.
    return await trio.to_thread.run_sync(make_placeholders, paths, limiter=slow_opens)


def make_placeholders(paths: Sequence[bytes]) -> tuple[list[Placeholder], list[str]]:
    """Make an empty file at each absolute path that reaches nothing, with the directories above it.

    Returns what was made and a notice for each. May block on the file system. Raises Refused with every
    path that cannot be made; then nothing stays.
    """
    made: list[Placeholder] = []
    failed: list[str] = []
    for path in paths:
        try:
            _make(path, made)
        except OSError as error:
            failed.append(f"{shown(path)} ({error.strerror})")
    if failed:
        remove_placeholders(made)
        raise Refused(
            f"materialize_blocked_files cannot make {', '.join(failed)}: what does not exist cannot be "
            "blocked; make it yourself, or take it out of blocked_files"
        )
    notices = [
        f"made the empty {'directory' if p.directory else 'file'} {shown(p.path)} to block it "
        "(materialize_blocked_files)"
        for p in made
    ]
    return made, notices


def _make(path: bytes, made: list[Placeholder]) -> None:
    above, _, name = followed(path).rpartition(b"/")
    with contextlib.ExitStack() as stack:
        directory = os.open(b"/", _DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, directory)
        walked = b""
        for part in above.strip(b"/").split(b"/") if above else []:
            walked += b"/" + part
            try:
                directory = os.open(part, _DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
            except FileNotFoundError:
                os.mkdir(part, 0o700, dir_fd=directory)
                directory = os.open(part, _DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
                made.append(_placeholder(walked, directory))
            stack.callback(os.close, directory)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, 0o600, dir_fd=directory)
        except FileExistsError:
            return
        stack.callback(os.close, fd)
        made.append(_placeholder(walked + b"/" + name, fd))


def _placeholder(path: bytes, fd: int) -> Placeholder:
    status = os.fstat(fd)
    return Placeholder(path, status.st_dev, status.st_ino, stat.S_ISDIR(status.st_mode))


def remove_placeholders(placeholders: Sequence[Placeholder]) -> list[str]:
    """Remove what was made, if it is still that very object, still empty, and on a local file system.

    Returns a notice for each that is kept. Never raises for the state of the tree.
    """
    notices: list[str] = []
    for placeholder in reversed(placeholders):
        reason = _remove(placeholder)
        if reason:
            notices.append(f"kept {shown(placeholder.path)}: {reason}")
    return notices


def _remove(placeholder: Placeholder) -> str | None:
    above, _, name = placeholder.path.rpartition(b"/")
    try:
        directory = syscalls.openat2(
            -100, above or b"/", os.O_PATH | os.O_DIRECTORY, syscalls.RESOLVE_NO_SYMLINKS
        )
    except OSError as error:
        return None if error.errno in (errno.ENOENT, errno.ENOTDIR) else error.strerror
    try:
        if syscalls.filesystem_type(directory) & 0xFFFFFFFF in _NETWORK_TYPES:
            return "it is on a network file system"
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if (status.st_dev, status.st_ino) != (placeholder.device, placeholder.inode):
            return "it has been replaced"
        if placeholder.directory:
            os.rmdir(name, dir_fd=directory)
        elif status.st_size:
            return "it is no longer empty"
        else:
            os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror
    finally:
        os.close(directory)
    return None
