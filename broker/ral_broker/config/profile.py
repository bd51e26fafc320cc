"""A profile as data. Pure."""

from __future__ import annotations

import msgspec

from ral_broker.log import shown

BUILT_IN = "built-in"
"""The layer of the defaults, and where a shipped profile is from."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A profile with what it extends. ``values``: settings, by key of SETTING_KEYS.

    ``source``: ``built-in`` or the path of its file; ``files``: the paths of all that were read for it.
    ``commands``: names that choose it. ``auth_markers`` and ``protected_files`` lie below the home: what is
    there once the program is logged in, and what stays read-only in directories that the profile makes
    writable. ``sockets``: see sockets.py.
    """

    name: str
    source: str = BUILT_IN
    values: dict[str, tuple[str, ...]] = {}
    files: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    credential_variables: tuple[str, ...] = ()
    auth_markers: tuple[str, ...] = ()
    protected_files: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    login_hint: str = ""

    @property
    def title(self) -> str:
        """For the line that a session starts with."""
        return self.name if self.source == BUILT_IN else f"{self.name} ({shown(self.source)})"
