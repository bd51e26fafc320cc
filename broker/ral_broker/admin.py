"""The administrator's file. Its path is compiled in: nothing an ordinary user sets can move or disable
it."""

from __future__ import annotations

import os
import stat
import tomllib

import msgspec

from ral_broker.errors import Refused

PATH = "/etc/ral/ral.toml"
_MAX_BYTES = 1 << 20


class AdminSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an administrator may pin (docs/settings.md)."""

    allow_root_session: bool = True


def load_admin_settings() -> AdminSettings:
    """Read the administrator's file; defaults where there is none.

    Raises Refused, naming the file, if it is not root's alone, malformed, or has an unknown key: a pin that
    cannot be read must not be taken for absent.
    """
    try:
        fd = os.open(PATH, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        if not os.path.lexists(PATH):
            return AdminSettings()
        raise Refused(f"{PATH} is a symbolic link to nothing; ask the administrator of this host") from None
    except OSError as error:
        raise Refused(
            f"{PATH} cannot be read: {error.strerror}; ask the administrator of this host"
        ) from error
    try:
        for directory in (os.path.dirname(PATH), "/etc"):
            above = os.stat(directory)
            if above.st_uid != 0 or above.st_mode & 0o022:  # wall
                raise Refused(
                    f"{PATH} lies in {directory}, which others than root can write; run chown root, "
                    "chmod go-w on it"
                )
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != 0 or status.st_mode & 0o022:  # wall
            raise Refused(
                f"{PATH} must be a file of root's that nobody else can write; run chown root, chmod go-w "
                "on it"
            )
        if status.st_size > _MAX_BYTES:
            raise Refused(f"{PATH} is larger than {_MAX_BYTES} bytes")
        untrusted_text = os.read(fd, _MAX_BYTES)
    finally:
        os.close(fd)
    try:
        return msgspec.convert(tomllib.loads(untrusted_text.decode("utf-8")), AdminSettings)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise Refused(f"{PATH}: {error}; no session is started until it is mended") from error


def check_root_session() -> list[str]:
    """Return what a session of root's must be told. Raises Refused where the administrator forbids one."""
    if not load_admin_settings().allow_root_session:
        raise Refused(
            f"{PATH} sets allow_root_session = false: no session runs as root here; use ral run --as-user "
            "NAME"
        )
    sentence = (
        "this session runs as root: what root may read in the paths it shows, it may read; "
        "ral run --as-user NAME gives it less"
    )
    return [sentence]
