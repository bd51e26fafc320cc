"""Executables that the broker opens once, at its start, and runs by descriptor ever after."""

from __future__ import annotations

import errno
import importlib.resources
import os
import stat

import msgspec

from ral_broker import syscalls
from ral_broker.errors import HostLacks
from ral_broker.log import shown
from ral_broker.spawn import CHILD_PATH


class Pin(msgspec.Struct, frozen=True):
    """An open executable. ``argv0`` is the path it was found at; ``in_memory``: a sealed copy that has no
    name and that nobody can change.

    Resource handling: whoever took the pin owns ``fd``, for the life of the broker.
    """

    fd: int
    device: int
    inode: int
    argv0: bytes
    in_memory: bool = False


def take_bwrap(path: bytes = CHILD_PATH) -> Pin:
    """Open bwrap, found on the absolute entries of ``path``; symbolic links are followed this once.

    Raises HostLacks if there is none, naming what was searched and what was found but cannot be executed.
    """
    unusable: list[str] = []
    for directory in path.split(b":"):
        if not directory.startswith(b"/"):
            continue
        name = os.path.join(directory, b"bwrap")
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            unusable.append(f"{shown(name)}: {error.strerror}")
            continue
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and os.access(f"/proc/self/fd/{fd}", os.X_OK, effective_ids=True):
            return Pin(fd=fd, device=status.st_dev, inode=status.st_ino, argv0=name)
        os.close(fd)
        unusable.append(f"{shown(name)}: not an executable file")
    found = f" (not usable: {'; '.join(unusable)})" if unusable else ""
    raise HostLacks(
        f"no sandbox can be made: bwrap was not found on PATH={shown(path)}{found}; install it: apt install "
        "bubblewrap (Fedora: dnf install bubblewrap)"
    )


def take_helper(name: str) -> Pin:
    """Copy a native helper of this package into a sealed memory file that is executed by descriptor.

    Where the host forbids to execute memory files (vm.memfd_noexec=2, Linux 6.3) the installed file itself
    is pinned. Raises HostLacks if the helper is not installed or is not for this machine.
    """
    path = os.fsencode(str(importlib.resources.files("ral_helpers").joinpath(name)))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise HostLacks(
            f"no sandbox can be made: {shown(path)} cannot be opened ({error.strerror}): this installation "
            "is incomplete; install ral again"
        ) from error
    try:
        content = _read_whole(fd)
        _check_machine(content, path)
        status = os.fstat(fd)
        try:
            memory_fd = syscalls.executable_memfd(f"ral-{name}", content)
        except PermissionError:
            return Pin(fd=os.dup(fd), device=status.st_dev, inode=status.st_ino, argv0=path)
        status = os.fstat(memory_fd)
        return Pin(memory_fd, status.st_dev, status.st_ino, path, in_memory=True)
    finally:
        os.close(fd)


def _read_whole(fd: int) -> bytes:
    parts: list[bytes] = []
    while part := os.read(fd, 1 << 20):
        parts.append(part)
    return b"".join(parts)


# e_machine of elf(5) by the machine name of uname(2).
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


def _check_machine(content: bytes, path: bytes) -> None:
    machine = os.uname().machine
    built_for = int.from_bytes(content[18:20], "little")
    if content[:6] == b"\x7fELF\x02\x01" and _ELF_MACHINES.get(machine) == built_for:
        return
    known = {number: name for name, number in _ELF_MACHINES.items()}
    built = (
        f"is built for {known.get(built_for, 'another machine')}"
        if content[:4] == b"\x7fELF"
        else "is no program"
    )
    raise HostLacks(
        f"no sandbox can be made: {shown(path)} {built} and this machine is {machine}; install the package "
        f"of ral for {machine}"
    )


def names(pin: Pin) -> bytes | None:
    """Return the path that the pinned file has now, None if none is known.

    The kernel tells the name it was opened by, also after a rename. Once that is unlinked it appends "
    (deleted)", whether or not a second hard link is left; so the file at the name decides.
    """
    name = os.readlink(b"/proc/self/fd/%d" % pin.fd)
    try:
        return name if is_pinned(pin, os.lstat(name)) else None
    except OSError:
        return None


def is_pinned(pin: Pin, status: os.stat_result) -> bool:
    """Tell whether ``status`` is the pinned file's, under whatever name."""
    return (status.st_dev, status.st_ino) == (pin.device, pin.inode)


def extra_rights(pin: Pin) -> str | None:
    """Return what this file gets on execution that this process does not have, None if nothing.

    Root's bwrap may be setuid root: it gets nothing by that.
    """
    status = os.fstat(pin.fd)
    if status.st_mode & stat.S_ISUID and status.st_uid != os.geteuid():
        return "setuid root" if status.st_uid == 0 else f"setuid to uid {status.st_uid}"
    if status.st_mode & stat.S_ISGID and status.st_mode & stat.S_IXGRP and status.st_gid != os.getegid():
        return f"setgid to gid {status.st_gid}"
    try:
        os.getxattr(pin.fd, "security.capability")
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return None
        raise
    return "installed with file capabilities"
