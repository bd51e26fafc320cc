"""System calls that Python's standard library does not wrap. The only module that uses ctypes.

Numbers are those of asm-generic/unistd.h, equal on x86-64 and aarch64 for every call here. Each wrapper
raises OSError with errno, its text and the path.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import struct

_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_OPENAT2 = 437

# linux/openat2.h
RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10
RESOLVE_CACHED = 0x20

# linux/fcntl.h; Python 3.11 has neither
F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SEAL = 0x01
F_SEAL_SHRINK = 0x02
F_SEAL_GROW = 0x04
F_SEAL_WRITE = 0x08
ALL_SEALS = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE

# linux/memfd.h (Linux 6.3)
_MFD_EXEC = 0x10

# linux/landlock.h
LANDLOCK_CREATE_RULESET_VERSION = 1 << 0
LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET = 1 << 0
LANDLOCK_SCOPE_SIGNAL = 1 << 1

# linux/pidfd.h: _IO(0xFF, n)
PIDFD_GET_MNT_NAMESPACE = 0xFF03
PIDFD_GET_PID_NAMESPACE = 0xFF05
PIDFD_GET_USER_NAMESPACE = 0xFF09

# linux/magic.h
NSFS_MAGIC = 0x6E736673
PID_FS_MAGIC = 0x50494446
ANON_INODE_FS_MAGIC = 0x09041934

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
# Every argument is passed as a long: the kernel reads registers, and an int would leave the upper half
# undefined.
_syscall.argtypes = [ctypes.c_long] * 5
_syscall.restype = ctypes.c_long
# Indexing makes a function object of its own, with a prototype of its own: this call is made some forty
# times a launch.
_openat2 = _libc["syscall"]
_openat2.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
_openat2.restype = ctypes.c_long
_fstatfs = _libc.fstatfs
_fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]
_fstatfs.restype = ctypes.c_int


def _call(path: bytes | None, number: int, *arguments: int) -> int:
    padded = arguments + (0,) * (4 - len(arguments))
    result: int = _syscall(number, *padded)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return result


def openat2(dir_fd: int, path: bytes, flags: int, resolve: int, mode: int = 0) -> int:
    """Open ``path`` with the restrictions of ``resolve`` (openat2(2), Linux 5.6). O_CLOEXEC is always
    added."""
    fd = try_openat2(dir_fd, path, flags, resolve, mode)
    if fd < 0:
        raise OSError(-fd, os.strerror(-fd), path)
    return fd


def try_openat2(dir_fd: int, path: bytes, flags: int, resolve: int, mode: int = 0) -> int:
    """As openat2, but return the negated errno of a failure: most names that a plan asks about are absent,
    and
    an exception for each would cost more than the system call."""
    if b"\0" in path:
        raise ValueError("a path cannot hold a NUL byte")
    how = _open_how(flags, resolve, mode)
    fd: int = _openat2(_SYS_OPENAT2, dir_fd, path, how, len(how))
    return -ctypes.get_errno() if fd < 0 else fd


@functools.cache
def _open_how(flags: int, resolve: int, mode: int) -> bytes:
    return struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve)


def landlock_abi() -> int:
    """Return the Landlock ABI of this kernel (landlock(7)). OSError ENOSYS or EOPNOTSUPP: there is none."""
    return _call(None, _SYS_LANDLOCK_CREATE_RULESET, 0, 0, LANDLOCK_CREATE_RULESET_VERSION)


def landlock_create_ruleset(handled_fs: int, handled_net: int, scoped: int) -> int:
    """Return a descriptor of a new ruleset (landlock_create_ruleset(2)). ``scoped`` needs ABI 6."""
    attribute = struct.pack("=QQQ", handled_fs, handled_net, scoped)
    record = ctypes.create_string_buffer(attribute, len(attribute))
    return _call(None, _SYS_LANDLOCK_CREATE_RULESET, ctypes.addressof(record), len(attribute), 0)


def filesystem_type(fd: int) -> int:
    """Return f_type of the file system that holds ``fd`` (fstatfs(2), linux/magic.h)."""
    record = ctypes.create_string_buffer(256)
    if _fstatfs(fd, ctypes.addressof(record)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(struct.unpack_from("=q", record.raw)[0])


def seal(fd: int) -> None:
    """Make the content and size of a memfd final (fcntl(2), F_ADD_SEALS); verify that all seals hold.

    Raises OSError: EPERM if the memfd was not made for sealing, EBUSY while somebody maps it writable.
    """
    fcntl.fcntl(fd, F_ADD_SEALS, ALL_SEALS)
    if fcntl.fcntl(fd, F_GET_SEALS) & ALL_SEALS != ALL_SEALS:  # wall
        raise OSError(errno.EPERM, "the seals of a memory file did not hold")


def sealed_memfd(name: str, content: bytes) -> int:
    """Return a descriptor of a sealed memfd that holds ``content``, at offset 0 (memfd_create(2)).

    A process of the same user can open our descriptors through /proc and write before the seals are on, so
    the content is compared afterwards. Raises OSError.
    """
    return _filled(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), content)


def _filled(fd: int, content: bytes) -> int:
    """Return ``fd``, filled and sealed; closed if that fails."""
    try:
        written = 0
        while written < len(content):
            written += os.write(fd, content[written:])
        seal(fd)
        if os.fstat(fd).st_size != len(content) or os.pread(fd, len(content) + 1, 0) != content:  # wall
            raise OSError(errno.EIO, "a memory file was changed by another process while it was filled")
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def executable_memfd(name: str, content: bytes) -> int:
    """Return a descriptor of a sealed memfd that can be executed as ``/proc/self/fd/N``.

    Raises PermissionError where the host forbids to execute memory files (vm.memfd_noexec=2), OSError
    otherwise.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | _MFD_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Before Linux 6.3 every memfd could be executed and there is no flag.
        fd = os.memfd_create(name, flags)
    return _filled(fd, content)


def pidfd_namespace(pidfd: int, request: int) -> int:
    """Return a descriptor of a namespace of the process behind ``pidfd`` (Linux 6.11; ENOTTY or EINVAL
    before)."""
    return fcntl.ioctl(pidfd, request, 0)
