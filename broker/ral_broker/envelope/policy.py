"""What a session is to be, as data: the input of the plan builder. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from ral_broker.envelope.places import SYSTEM_PATHS
from ral_broker.envelope.plan import PinName

HomeAccess = Literal["tmpwrite", "restricted", "read", "write"]
"""``tmpwrite``: an empty home in memory; ``restricted``: the same, read-only; ``read``: the real home,
read-only; ``write``: the real home."""


class Rule(msgspec.Struct, frozen=True):
    """One path of a setting. ``path`` is absolute and normal (no ``.``, ``..``, ``//``), as the setting
    spells it: links in it are followed by whoever looks. ``why`` names the setting."""

    path: bytes
    why: str


class Text(msgspec.Struct, frozen=True):
    """A file made for the session: where it is, and all of its content."""

    path: bytes
    content: bytes
    why: str


SYSTEM_RULES = tuple(Rule(path, "readonly_mounts") for path in SYSTEM_PATHS)


class SessionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What a session is to be. Paths are canonical and absolute, except ``home`` (as the passwd entry spells
    it; ``home_path`` is its canonical path) and those in rules.

    ``hidden``: the broker's own directories. ``installation``: directories whose change would poison the
    next broker. ``readonly``, ``writable``: shown so; where they overlap, the most specific path decides,
    whatever their order. ``home_*`` lie below ``home_path``. ``protected``: read-only wherever something
    above or below grants writing; a project in one is refused, except in a directory of ``installation``.
    ``denied_writable``: no setting makes them writable, nor the project. ``credentials`` and ``blocked``:
    nobody inside may read or change them; what is a file is masked by a file, what is a directory by a
    directory. To the former the builder adds the names of places.py below the home. ``devices`` are
    absolute names below /dev. ``texts`` replace files of the system that exist.
    """

    uid: int
    home: bytes
    home_path: bytes
    project: bytes
    cwd: bytes
    session: str
    hidden: tuple[bytes, ...] = ()
    installation: tuple[bytes, ...] = ()
    pins: tuple[tuple[PinName, bytes], ...] = ()
    fresh_proc: bool = True
    home_access: HomeAccess = "tmpwrite"
    readonly: tuple[Rule, ...] = SYSTEM_RULES
    writable: tuple[Rule, ...] = ()
    home_readonly: tuple[Rule, ...] = ()
    home_writable: tuple[Rule, ...] = ()
    home_seeded: tuple[Rule, ...] = ()
    protected: tuple[Rule, ...] = ()
    denied_writable: tuple[Rule, ...] = ()
    credentials: tuple[Rule, ...] = ()
    blocked: tuple[Rule, ...] = ()
    devices: tuple[bytes, ...] = ()
    texts: tuple[Text, ...] = ()
    private_tmp: bool = True
    private_ipc: bool = True
    share_network: bool = True
    nested_userns: bool = False
