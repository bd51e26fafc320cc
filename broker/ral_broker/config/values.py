"""What a TOML file comes to: plain values, and the line of every key. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Other(msgspec.Struct, frozen=True):
    """A value that no setting takes; ``what`` is what it is, in words ("a float")."""

    what: str


Value = bool | int | str | tuple[str, ...] | Other | Mapping[str, "Value"]
"""A value of a file. An array of anything but strings is Other."""


class ParsedFile(msgspec.Struct, frozen=True):
    """The values of one file, tables nested, and the line (from 1) of every key by its dotted name
    (``match.project``); a key whose line is not known is not in ``lines``."""

    values: dict[str, Value]
    lines: dict[str, int]


class Malformed(msgspec.Struct, frozen=True):
    """A file that is no TOML. ``line`` is None where it is not known."""

    line: int | None
    text: str
