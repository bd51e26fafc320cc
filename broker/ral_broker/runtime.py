"""The broker's own directories, found and checked by handle, the lock of the one broker, and its socket.

Every other process that can reach them is the user's; nothing inside a sandbox can (each plan masks them).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import secrets
import socket
import stat
from collections.abc import Mapping

from ral_broker.errors import HostLacks
from ral_broker.log import shown
from ral_protocol import exits


class RuntimeDir:
    """Where the socket, the lock and the records live. All access goes through ``fd`` and ``sessions_fd``.

    ``path`` and ``sessions_path`` are canonical, for masks and messages.
    """

    def __init__(self, path: bytes, fd: int, sessions_path: bytes, sessions_fd: int) -> None:
        self.path, self.fd = path, fd
        self.sessions_path, self.sessions_fd = sessions_path, sessions_fd
        self.empty_file_fd = self._make_empty_file()
        self.lock_fd: int | None = None
        self._socket: tuple[int, int] | None = None

    def _make_empty_file(self) -> int:
        """Return an O_PATH descriptor of an empty read-only file: what a masked file shows."""
        name = "empty"
        with contextlib.suppress(FileExistsError):
            made = os.open(
                name,
                os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o444,
                dir_fd=self.fd,
            )
            os.fchmod(made, 0o444)
            os.close(made)
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != 0:  # wall
            raise HostLacks(f"{shown(self.path)}/empty is not the empty file that ral made; remove it")
        return fd

    def hidden(self) -> tuple[tuple[bytes, int], ...]:
        """Return the directories that no sandbox may show: present name and descriptor of each.

        A program that may write a directory above one can rename it; masking the name of this broker's start
        would then hide a decoy.
        """
        fds = (self.fd,) if self.sessions_path == self.path else (self.fd, self.sessions_fd)
        return tuple((_canonical(fd), fd) for fd in fds)

    def lock(self) -> bool:
        """Take the lock of the one broker of this directory; False if another one has it. Held until
        exit."""
        fd = self.open_own_file("broker.lock", os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self.lock_fd = fd
        return True

    def lock_holder(self) -> int | None:
        """Return the pid of the process that holds the lock, as the kernel tells it (proc_locks(5)); None if
        nobody does, or nobody that is visible here."""
        fd = self.open_own_file("broker.lock", os.O_RDWR)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        with open("/proc/locks", encoding="ascii") as file:
            for line in file:
                fields = line.split()
                if fields[1] == "FLOCK" and fields[5] == device and int(fields[4]) > 0:
                    return int(fields[4])
        return None

    def open_own_file(self, name: str, flags: int) -> int:
        """Open a regular file of this user's in the directory, making it if it is absent.

        Raises HostLacks for anything else in its place: a link would lead elsewhere, a FIFO never answer.
        """
        path = shown(self.path + b"/" + name.encode())
        flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # wall
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self.fd)
        except OSError as error:
            raise HostLacks(f"{path} cannot be opened: {error.strerror}; remove it") from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():  # wall
            os.close(fd)
            raise HostLacks(f"{path} is not a file that ral made; remove it")
        return fd

    def keep_lock(self, fd: int) -> None:
        """Keep a lock that this process took before it executed itself anew, and the socket beside it."""
        os.set_inheritable(fd, False)
        self.lock_fd = fd
        self._socket = self._socket_identity()

    def listen(self) -> socket.socket:
        """Bind the control socket in place of a stale one. Only with the lock held."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        # Bound under a name of its own and renamed, so that no client finds a socket nobody listens on;
        # through the descriptor, so that the length of the directory's path does not matter (unix(7): 108
        # bytes).
        name = f".control.{secrets.token_hex(4)}"
        listener.bind(f"/proc/self/fd/{self.fd}/{name}")
        listener.listen(256)
        try:
            os.rename(name, exits.SOCKET_NAME, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError as error:
            os.unlink(name, dir_fd=self.fd)
            path = shown(self.path + b"/" + exits.SOCKET_NAME.encode())
            raise HostLacks(f"{path} cannot be replaced: {error.strerror}; remove it") from error
        self._socket = self._socket_identity()
        return listener

    def _socket_identity(self) -> tuple[int, int] | None:
        try:
            status = os.stat(exits.SOCKET_NAME, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def remove_socket(self) -> None:
        """Remove the control socket; a client then starts a new broker. One that another process put in its
        place (systemd, when the socket unit was started) stays."""
        if self._socket is not None and self._socket == self._socket_identity():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(exits.SOCKET_NAME, dir_fd=self.fd)


def home_directory() -> bytes:
    """Return the home directory of the passwd entry; of the environment only where there is no entry."""
    try:
        return os.fsencode(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        return os.environb.get(b"HOME", b"/")


def user_name() -> bytes:
    """Return the name of the passwd entry, else the number."""
    try:
        return os.fsencode(pwd.getpwuid(os.geteuid()).pw_name)
    except KeyError:
        return b"%d" % os.geteuid()


def find_runtime_dir(environment: Mapping[bytes, bytes]) -> RuntimeDir:
    """Find or make the runtime directory (docs/architecture.md says which).

    Raises HostLacks when a candidate that was named is not safe to use.
    """
    uid = os.geteuid()
    named = environment.get(exits.RUNTIME_VARIABLE.encode())
    base = environment.get(b"XDG_RUNTIME_DIR") or b""
    usual = b"/run/user/%d" % uid
    if named:
        path = os.path.abspath(named)
    elif base.startswith(b"/") and _owned_directory(base):
        path = base.rstrip(b"/") + b"/ral"
    elif _owned_directory(usual):
        path = usual + b"/ral"
    else:
        path = b"/tmp/ral-%d" % uid
        state = environment.get(b"XDG_STATE_HOME") or home_directory() + b"/.local/state"
        fd = open_private(path)
        sessions = state + b"/ral/sessions"
        os.makedirs(os.path.dirname(sessions), mode=0o700, exist_ok=True)
        return RuntimeDir(_canonical(fd), fd, os.path.realpath(sessions), open_private(sessions))
    fd = open_private(path)
    canonical = _canonical(fd)
    sessions_fd = open_private(exits.SESSIONS_DIR.encode(), dir_fd=fd)
    return RuntimeDir(canonical, fd, canonical, sessions_fd)


def _canonical(fd: int) -> bytes:
    return os.readlink(b"/proc/self/fd/%d" % fd)


def _owned_directory(path: bytes) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def open_private(path: bytes, dir_fd: int | None = None) -> int:
    """Open a directory of this user that nobody else can enter, making it if it is absent.

    Raises HostLacks: a symbolic link, another owner, or rights for others.
    """
    try:
        os.mkdir(path, 0o700, dir_fd=dir_fd)
    except FileExistsError:
        pass
    except OSError as error:
        raise HostLacks(
            f"{shown(path)} cannot be made: {error.strerror}; name another with RAL_RUNTIME_DIR"
        ) from error
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # wall
    try:
        fd = os.open(path, flags, dir_fd=dir_fd)
    except OSError as error:
        word = (
            "a symbolic link or no directory"
            if error.errno in (errno.ELOOP, errno.ENOTDIR)
            else error.strerror
        )
        raise HostLacks(
            f"{shown(path)} is not used: {word}; remove it or name another with RAL_RUNTIME_DIR"
        ) from error
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:  # wall
        os.close(fd)
        raise HostLacks(
            f"{shown(path)} is not used: it must belong to you and be closed to others (mode 0700); "
            f"run chmod 700 {shown(path)} or name another with RAL_RUNTIME_DIR"
        )
    return fd
