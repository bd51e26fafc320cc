"""Sockets of the host that a session is to reach, each named by itself. Pure.

No setting passes a directory of sockets: what lies beside the one that is wanted (an agent with keys, a bus
that starts programs) is what a sandbox keeps away.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping

import msgspec

from ral_broker.log import shown

_DISPLAY = re.compile(rb"(?:unix)?:(\d{1,5})(?:\.\d+)?")
_PREFIXES = (b"unix:path=", b"unix://", b"unix:")


class Socket(msgspec.Struct, frozen=True):
    """One socket. ``path`` is absolute and normal; whether a socket is there, and no directory, is for
    whoever opens it to see. ``variables`` lead programs to it, so they are let in. ``why``: the entry."""

    path: bytes
    variables: tuple[bytes, ...]
    why: str


def named_sockets(
    entries: Iterable[str], environment: Mapping[bytes, bytes]
) -> tuple[tuple[Socket, ...], tuple[str, ...]]:
    """Return the sockets that the entries of ``sockets`` name, and a warning for each that names none.

    An entry is an absolute path, or ``$NAME``: the socket that a variable of the caller names, in the way of
    that variable (a path, an address of D-Bus or Docker, a display of X11 or Wayland).
    """
    found: dict[bytes, Socket] = {}
    warnings = []
    variables: tuple[bytes, ...]
    for entry in entries:
        if entry.startswith("$"):
            name = entry[1:].encode("utf-8", "surrogateescape")
            value = environment.get(name, b"")
            path = _path(name, value, environment.get(b"XDG_RUNTIME_DIR", b""))
            if path is None:
                said = f"{shown(value)!r} is no socket of this host" if value else "the variable is not set"
                warnings.append(f"sockets entry '{shown(entry)}' ignored: {said}")
                continue
            relative = name == b"WAYLAND_DISPLAY" and not value.startswith(b"/")
            variables = (name, b"XDG_RUNTIME_DIR") if relative else (name,)
        else:
            path, variables = entry.encode("utf-8", "surrogateescape"), ()
        path = posixpath.normpath(b"/" + path.lstrip(b"/"))
        before = found[path].variables if path in found else ()
        found[path] = Socket(path, tuple(dict.fromkeys((*before, *variables))), f"sockets = {shown(entry)}")
    return tuple(found.values()), tuple(warnings)


def _path(name: bytes, value: bytes, runtime_directory: bytes) -> bytes | None:
    """Return the absolute path that the value of a variable means."""
    if name == b"DISPLAY":
        display = _DISPLAY.fullmatch(value)
        return display and b"/tmp/.X11-unix/X" + display[1]
    if name == b"WAYLAND_DISPLAY" and value and b"/" not in value and runtime_directory.startswith(b"/"):
        return runtime_directory + b"/" + value
    for prefix in _PREFIXES:
        if value.startswith(prefix):
            # D-Bus: more keys may follow the path, and other addresses that address.
            value = value.removeprefix(prefix).partition(b";")[0].partition(b",")[0]
            break
    return value if value.startswith(b"/") else None
