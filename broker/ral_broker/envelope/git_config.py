"""The few keys of a git configuration file that lead git to further files (git-config(1)). Pure.

Read generously: a condition of ``includeIf`` counts as met, a key that is set twice counts twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

_SECTION = re.compile(rb'\s*\[\s*([A-Za-z0-9.-]+)(?:\s+"(?:[^"\\]|\\.)*")?\s*\]')
_KEY = re.compile(rb"\s*([A-Za-z][A-Za-z0-9-]*)\s*=\s*(.*)", re.DOTALL)
_MENTIONED = re.compile(rb"path|worktree", re.IGNORECASE)
_ESCAPES = {ord("n"): b"\n", ord("t"): b"\t", ord("b"): b"\b"}


class GitConfig(msgspec.Struct, frozen=True):
    """Values as they are written. ``worktree``: where the working tree is; ``paths``: of submodules (in
    .gitmodules)."""

    hooks: tuple[bytes, ...] = ()
    includes: tuple[bytes, ...] = ()
    worktree: bytes | None = None
    paths: tuple[bytes, ...] = ()


def parse_git_config(untrusted_content: bytes) -> GitConfig:
    """Find core.hooksPath, core.worktree, include.path, includeIf.*.path and submodule.*.path. What is not
    understood is passed over."""
    if not _MENTIONED.search(untrusted_content):
        return GitConfig()
    found: dict[bytes, list[bytes]] = {}
    for section, key, value in _entries(untrusted_content):
        found.setdefault(section + b"." + key, []).append(value)
    return GitConfig(
        hooks=tuple(found.get(b"core.hookspath", ())),
        includes=tuple(found.get(b"include.path", ())) + tuple(found.get(b"includeif.path", ())),
        worktree=found.get(b"core.worktree", [None])[-1],
        paths=tuple(found.get(b"submodule.path", ())),
    )


def _entries(content: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield (section, key, value), the names in lower case."""
    section = b""
    lines = iter(content.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").split(b"\n"))
    for line in lines:
        rest = line
        while header := _SECTION.match(rest):
            section, rest = header[1].lower(), rest[header.end() :]
        if not (key := _KEY.match(rest)):
            continue
        value = key[2]
        # A line goes on where it ends in an odd number of backslashes.
        while (len(value) - len(value.rstrip(b"\\"))) % 2:
            value = value[:-1] + next(lines, b"")
        if value := _unquoted(value):
            yield section, key[1].lower(), value


def _unquoted(raw: bytes) -> bytes:
    """Return a value without its quotes, escapes and comment."""
    value, quoted, kept = bytearray(), False, 0
    characters = iter(raw)
    for character in characters:
        if character == ord("\\"):
            following = next(characters, ord("\\"))
            value += _ESCAPES.get(following, bytes([following]))
            kept = len(value)
        elif character == ord('"'):
            quoted = not quoted
            kept = len(value)
        elif character in b"#;" and not quoted:
            break
        else:
            value.append(character)
            if quoted or character not in b" \t":
                kept = len(value)
    return bytes(value[:kept])
