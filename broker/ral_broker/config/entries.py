"""What one element of a list may be, and its normal form. Pure.

Nothing is evaluated: of all that a shell would expand, only the home directory at the start of a path is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ral_broker.config.settings import Entries

MAX_ENTRY = 4095
"""Bytes; PATH_MAX of Linux without the NUL."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SHELL = re.compile(r"`|\$[A-Za-z0-9_({]")
_HOME = re.compile(r"(?:~|\$HOME|\$\{HOME\})(?=/|$)")
_VARIABLE = re.compile(r"[^=\s]+")


class EntryError(Exception):
    """An element that cannot be taken: what is wrong with it, and what to do."""


def normal_entry(kind: Entries, text: str, home: str) -> str:
    """Return the normal form of an element. ``home``: the home directory, absolute and normal.

    Raises EntryError.
    """
    if not text:
        raise EntryError("is empty; leave it out")
    if _CONTROL.search(text):
        raise EntryError("holds a control character; no setting takes one")
    if len(text.encode("utf-8", "surrogateescape")) > MAX_ENTRY:
        raise EntryError(f"is longer than {MAX_ENTRY} bytes")
    return _FORMS[kind](text, home)


def normal_pattern(text: str, home: str) -> str:
    """Return the normal form of a pattern of project directories. Raises EntryError."""
    return normal_entry("absolute", text, home)


def is_under(path: str, ancestor: str) -> bool:
    """Tell whether ``path`` equals ``ancestor`` or lies below it, by component. Both absolute and normal."""
    return ancestor == "/" or path == ancestor or path.startswith(ancestor + "/")


def join(directory: str, relative: str) -> str:
    """Return the path of ``relative`` below ``directory``; both normal."""
    return ("" if directory == "/" else directory) + "/" + relative


def _expanded(text: str, home: str) -> str:
    found = _HOME.match(text)
    if found is not None:
        text = home + text[found.end() :]
    elif text.startswith("~"):
        raise EntryError("names another user's home; write the directory itself (or ./~ for a file name)")
    shell = _SHELL.search(text)
    if shell is not None:
        raise EntryError(
            f"holds {shell[0]!r}, which a shell would expand and ral does not (only ~, $HOME and ${{HOME}} "
            "at the start); write the path itself"
        )
    return text


def _components(text: str) -> str:
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise EntryError('goes up with ".."; write the path without it')
    return "/".join(parts)


def _absolute(text: str, home: str) -> str:
    text = _expanded(text, home)
    if not text.startswith("/"):
        raise EntryError("is no absolute path; begin it with / or ~/")
    return "/" + _components(text)


def _below_project(text: str, home: str) -> str:
    text = _expanded(text, home)
    if text.startswith("/"):
        return "/" + _components(text)
    relative = _components(text)
    if not relative:
        raise EntryError("is the project itself; name something in it")
    return relative


def _below_home(text: str, home: str) -> str:
    text = _expanded(text, home)
    if text.startswith("/"):
        absolute = "/" + _components(text)
        if not is_under(absolute, home):
            raise EntryError("is not below the home directory; use a setting that takes absolute paths")
        text = absolute[len(home) :]
    relative = _components(text)
    if not relative:
        raise EntryError("is the home directory itself; see home_access, or name something in it")
    return relative


def _device(text: str, _: str) -> str:
    normal = "/" + _components(text)
    if not text.startswith("/dev/") or normal == "/dev":
        raise EntryError("is nothing below /dev")
    return normal


def _variable(text: str, _: str) -> str:
    if not _VARIABLE.fullmatch(text):
        raise EntryError("is no name of an environment variable")
    return text


def _anything(text: str, _: str) -> str:
    return text


_FORMS: dict[Entries, Callable[[str, str], str]] = {
    "absolute": _absolute,
    "below project": _below_project,
    "in project": _below_project,
    "below home": _below_home,
    "device": _device,
    "variable": _variable,
    "pattern": _variable,
    "assignment": _anything,
    "word": _anything,
}
