"""One file of a profile: what it may hold. Pure.

A key that is none, a value of another kind and an entry that can mean nothing are errors: what a file grants
must be what it seems to grant.
"""

from __future__ import annotations

import difflib
import posixpath
import re

import msgspec

from ral_broker.config.values import Other, ParsedFile, Value
from ral_broker.errors import Refused
from ral_broker.log import shown

SETTING_KEYS = (
    "home_writable", "home_readonly", "home_seeded_files", "extra_writable_paths", "blocked_files",
    "extra_blocked_paths", "allowed_env_vars", "devices", "sandbox_env", "project_protected_paths",
)  # fmt: skip
"""The settings that a profile may add to."""

OWN_KEYS = (
    "extends", "commands", "credential_variables", "auth_markers", "protected_files", "sockets",
    "login_hint",
)  # fmt: skip

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_RELATIVE = ("home_writable", "home_readonly", "home_seeded_files", "auth_markers", "protected_files")


class ProfileFile(msgspec.Struct, frozen=True):
    """One file, as it stands. ``lists`` has every key of the file but login_hint."""

    name: str
    source: str
    lists: dict[str, tuple[str, ...]]
    login_hint: str = ""


def decode(parsed: ParsedFile, name: str, source: str) -> ProfileFile:
    """Return the profile that a file holds. Raises Refused for what it may not hold, naming file, line and
    key."""
    lists: dict[str, tuple[str, ...]] = {}
    login_hint = ""
    for key, untrusted_value in parsed.values.items():
        place = _place(parsed, source, key)
        if key not in (*SETTING_KEYS, *OWN_KEYS):
            near = difflib.get_close_matches(key, (*SETTING_KEYS, *OWN_KEYS), 1)
            raise Refused(
                f"{place}: a profile has no such key; "
                + (f"did you mean {near[0]}?" if near else "remove it")
            )
        if key == "login_hint":
            [login_hint] = _strings(untrusted_value, place, "a string", single=True)
            continue
        one = key == "extends" and isinstance(untrusted_value, str)
        entries = _strings(untrusted_value, place, "a list of strings", single=one)
        for entry in entries:
            if reason := _refusal(key, entry):
                raise Refused(f"{place}: '{shown(entry)}' {reason}")
        lists[key] = tuple(dict.fromkeys(entries))
    return ProfileFile(name, source, lists, login_hint)


def _place(parsed: ParsedFile, source: str, key: str) -> str:
    line = parsed.lines.get(key)
    return f"{shown(source)}: {shown(key)}" if line is None else f"{shown(source)}:{line}: {shown(key)}"


def _strings(untrusted_value: Value, place: str, wanted: str, *, single: bool = False) -> tuple[str, ...]:
    if single and isinstance(untrusted_value, str):
        untrusted_value = (untrusted_value,)
    elif single or not isinstance(untrusted_value, tuple):
        got = untrusted_value.what if isinstance(untrusted_value, Other) else _kind(untrusted_value)
        raise Refused(f"{place}: {got} where {wanted} is wanted; put it in {'quotes' if single else '[ ]'}")
    for entry in untrusted_value:
        if _CONTROL.search(entry):
            raise Refused(f"{place}: '{shown(entry)}' holds a control character; leave it out")
    return untrusted_value


def _kind(value: Value) -> str:
    if isinstance(value, bool):
        return "a boolean"
    names = {int: "a number", str: "a string", tuple: "a list"}
    return names.get(type(value), "a table")


def _refusal(key: str, entry: str) -> str | None:
    """Return what is wrong with one element of a list, and what to write."""
    if not entry:
        return "is empty; leave it out"
    if key in _RELATIVE and (entry.startswith(("/", "~")) or ".." in entry.split("/")):
        return "is no path below the home directory; write it relative to that, as in '.config/tool'"
    if key in _RELATIVE and posixpath.normpath(entry) == ".":
        return "is the whole home directory; name what is needed in it"
    if key == "extends" and not NAME.fullmatch(entry):
        return "is no name of a profile; write the file's name without .toml"
    if key == "commands" and "/" in entry:
        return "is a path; write the name of the command alone"
    if key == "credential_variables" and not _VARIABLE.fullmatch(entry):
        return "is no name of a variable; write letters, digits and '_'"
    if key == "sockets" and not (
        entry.startswith("/") or (entry.startswith("$") and _VARIABLE.fullmatch(entry[1:]))
    ):
        return "is no socket; write an absolute path, or '$NAME' for the one that a variable names"
    return None
