"""The administrator's files. Their path is compiled in: nothing an ordinary user sets can move or disable
them."""

from __future__ import annotations

import os
import stat

from ral_broker.errors import Refused
from ral_broker.log import shown

DIRECTORY = "/etc/ral"
PATH = "/etc/ral/ral.toml"
MAX_BYTES = 1 << 20


def read_trusted(path: str = PATH) -> bytes | None:
    """Return the content of a file of the administrator's below DIRECTORY; None where there is none.

    Raises Refused, naming the file, if it cannot be read or is not root's alone: a pin that cannot be read
    must not be taken for absent.
    """
    name = shown(path)
    # Opened by reference first: opening a device or a FIFO for reading can do something.
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        if not os.path.lexists(path):
            return None
        raise Refused(f"{name} is a symbolic link to nothing; ask the administrator of this host") from None
    except OSError as error:
        raise _unreadable(name, error) from error
    try:
        _check_directories(path)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != 0 or status.st_mode & 0o022:  # wall
            raise Refused(
                f"{name} must be a file of root's that nobody else can write; run chown root, chmod go-w "
                "on it"
            )
        if status.st_size > MAX_BYTES:
            raise Refused(f"{name} is larger than {MAX_BYTES} bytes")
        try:
            with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as file:
                return file.read(MAX_BYTES)
        except OSError as error:
            raise _unreadable(name, error) from error
    finally:
        os.close(fd)


def _unreadable(name: str, error: OSError) -> Refused:
    return Refused(f"{name} cannot be read: {error.strerror}; ask the administrator of this host")


def _check_directories(path: str) -> None:
    directory = os.path.dirname(path)
    while True:
        above = os.stat(directory)
        if above.st_uid != 0 or above.st_mode & 0o022:  # wall
            raise Refused(
                f"{shown(path)} lies in {shown(directory)}, which others than root can write; run chown "
                "root, chmod go-w on it"
            )
        if directory == os.path.dirname(DIRECTORY):
            return
        directory = os.path.dirname(directory)


def check_root_session(allowed: bool) -> list[str]:
    """Return what a session of root's must be told. ``allowed``: allow_root_session. Raises Refused."""
    if not allowed:
        raise Refused(
            f"{PATH} sets allow_root_session = false: no session runs as root here; use ral run --as-user "
            "NAME"
        )
    sentence = (
        "this session runs as root: what root may read in the paths it shows, it may read; "
        "ral run --as-user NAME gives it less"
    )
    return [sentence]
