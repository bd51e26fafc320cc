"""What a configuration comes to: the value of every setting, and where each piece of it is from. Pure.

Paths are text that os.fsencode turns into the bytes of the path: a home or a project whose name is no UTF-8
stands in it with surrogates, and ``log.shown`` prints it. After the merge ``readonly_mounts``,
``allowed_project_parents``, ``denied_writable_paths``, ``extra_writable_paths``, ``extra_blocked_paths`` and
``blocked_files`` are absolute and normal (what a file says relative to the project has been put below it),
the ``home_*`` lists are normal and relative to the home directory, and ``project_protected_paths`` are
normal and stay as they were written, most of them relative to the project. Links are left as they are
spelled.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from ral_broker.config.profile import Profile
from ral_broker.config.settings import SETTINGS, Settings

Severity = Literal["error", "warning"]


class Origin(msgspec.Struct, frozen=True):
    """Where one value is from. ``value``: one element of a list, or the scalar, as TOML text. ``layer``:
    ``built-in``, ``/etc/ral/ral.toml``, the path of the user file, ``conf.d/NAME``, ``profile NAME`` or
    ``environment NAME``. ``line``: that of the key in the file, where there is one."""

    value: str
    layer: str
    line: int | None = None


class Problem(msgspec.Struct, frozen=True):
    """Something that is wrong with a configuration. An ``error`` starts no session; a ``warning`` says what
    was put right or left out."""

    severity: Severity
    file: str
    line: int | None
    key: str | None
    text: str

    @property
    def message(self) -> str:
        """``FILE:LINE: key: text``, without what is not known."""
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(part for part in (place, self.key, self.text) if part)


class Effective(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a load. ``origins`` has every setting: one for a scalar, one for each element of a list
    in its order. ``files``: what was read, weakest first, by the path it was opened at."""

    settings: Settings
    origins: dict[str, tuple[Origin, ...]]
    warnings: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    profile: Profile | None = None


def restart_digests(settings: Settings, salt: bytes) -> dict[str, str]:
    """Return a digest of each setting that a running session keeps as it was at its launch.

    A session's record stores them, and a reload compares: what differs needs a restart. What a plan shows is
    left out, its differences are found in the plan. ``salt``: random, of the record's own, at most 16 bytes;
    without it, short values (a variable of sandbox_env) could be guessed from their digests.
    """
    return {
        name: hashlib.blake2b(
            msgspec.json.encode([name, _printable(getattr(settings, name))]), digest_size=16, salt=salt
        ).hexdigest()
        for name, setting in SETTINGS.items()
        if setting.reload == "restart"
    }


def _printable(value: object) -> object:
    """Return ``value`` with text as bytes: msgspec encodes no surrogates."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, tuple):
        return [_printable(element) for element in value]
    return value
