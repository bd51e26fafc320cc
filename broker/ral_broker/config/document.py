"""One layer of a configuration: known keys, right types, values in normal form, or what is wrong. Pure."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from ral_broker.config.effective import Problem
from ral_broker.config.entries import EntryError, normal_entry, normal_pattern
from ral_broker.config.settings import SETTINGS, Settings
from ral_broker.config.values import Other, ParsedFile, Value

Setting = bool | int | str | tuple[str, ...]
"""A value that a layer sets."""

Kind = Literal["profile", "admin", "user", "conf.d", "environment"]
"""What a layer is; weakest first."""

MAX_ENTRIES = 10_000
"""Elements of one list in one file."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One layer. ``name`` as in Origin; ``file``: what problems are reported for. ``replaced``: lists that
    replace what weaker layers say. ``projects``: patterns of the projects it is for, None for all."""

    kind: Kind
    file: str
    name: str
    values: dict[str, Setting] = {}
    replaced: frozenset[str] = frozenset()
    lines: dict[str, int] = {}
    projects: tuple[str, ...] | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def label(self) -> str:
        """What warnings call the layer, with a colon; nothing for those that their file names."""
        if self.kind in ("profile", "admin"):
            return ""
        return _LABELS[self.kind] + ": "

    def warning(self, key: str, text: str) -> Problem:
        """Return a warning about what this layer says of ``key``."""
        return Problem("warning", self.file, self.lines.get(key), key, self.label + text)


_LABELS: dict[Kind, str] = {
    "user": "User config",
    "conf.d": "Project config",
    "environment": "Launch override (env/CLI)",
}


class Expected(msgspec.Struct, frozen=True):
    """The type of a setting: Python's, and the words it may be."""

    type: type
    words: tuple[str, ...] = ()

    def sentence(self) -> str:
        """Say what is expected."""
        if self.words:
            return "one of " + ", ".join(f'"{word}"' for word in self.words)
        return _TYPE_WORDS[self.type]


_TYPE_WORDS: dict[type, str] = {
    bool: "true or false", int: "a whole number", str: "a string", tuple: "an array of strings",
}  # fmt: skip


def _expected(hint: object) -> Expected:
    if get_origin(hint) is Literal:
        return Expected(str, get_args(hint))
    if get_origin(hint) is tuple:
        return Expected(tuple)
    if get_origin(hint) in (Union, types.UnionType):
        return _expected(next(part for part in get_args(hint) if part is not type(None)))
    assert isinstance(hint, type)
    return Expected(hint)


EXPECTED: dict[str, Expected] = {
    name: _expected(hint) for name, hint in get_type_hints(Settings).items() if name in SETTINGS
}
DEFAULTS: dict[str, Setting | None] = {name: getattr(Settings(), name) for name in SETTINGS}


def toml_text(value: object) -> str:
    """Return a value as TOML text: quoted, control characters escaped."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            plain = value.isprintable() and '"' not in value and "\\" not in value
            return f'"{value if plain else "".join(map(_escaped, value))}"'
        case tuple():
            return "[" + ", ".join(map(toml_text, value)) + "]"
        case _:
            return str(value)


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class _Invalid(Exception):
    """What is wrong with the value of one key."""


class _Reading:
    """Collects the values of one layer and everything that is wrong with them."""

    def __init__(self, kind: Kind, file: str, lines: Mapping[str, int], home: str) -> None:
        self._kind, self._file, self._lines, self._home = kind, file, lines, home
        self.values: dict[str, Setting] = {}
        self.problems: list[Problem] = []

    def fail(self, key: str, text: str) -> None:
        self.problems.append(Problem("error", self._file, self._lines.get(key), key, text))

    def take(self, name: str, value: Value, key: str | None = None) -> None:
        """Check one setting and keep its value. ``key``: how it is written in the file."""
        key = key or name
        setting = SETTINGS.get(name)
        if setting is None:
            self.fail(key, f"no setting has this name; {_nearest(name)}")
        elif setting.admin_only and self._kind != "admin":
            self.fail(key, "only the administrator's /etc/ral/ral.toml may set this; leave it out")
        else:
            try:
                found = self._checked(name, value)
            except _Invalid as error:
                self.fail(key, str(error))
                return
            if setting.state == "refused" and found != DEFAULTS[name]:
                self.fail(key, f"{toml_text(found)} is refused: {setting.note}")
                return
            earlier = self.values.get(name)
            if isinstance(found, tuple) and isinstance(earlier, tuple):
                found = tuple(dict.fromkeys((*earlier, *found)))
            self.values[name] = found

    def _checked(self, name: str, value: Value) -> Setting:
        expected, setting = EXPECTED[name], SETTINGS[name]
        if isinstance(value, Other | Mapping) or type(value) is not expected.type:
            raise _Invalid(f"is {_what(value)}; {expected.sentence()} is expected")
        if expected.words and value not in expected.words:
            raise _Invalid(
                f"{toml_text(value)} is not {expected.sentence()}{_hint(str(value), expected.words)}"
            )
        if type(value) is int and not setting.least <= value <= 0x7FFFFFFF:
            raise _Invalid(f"{value} is out of range; the smallest is {setting.least}")
        if isinstance(value, tuple):
            if len(value) > MAX_ENTRIES:
                raise _Invalid(f"has {len(value)} elements; at most {MAX_ENTRIES} are read from one file")
            return tuple(dict.fromkeys(self._entries(name, value)))
        if type(value) is str and not value.isprintable():
            raise _Invalid("holds a control character; no setting takes one")
        return value

    def _entries(self, name: str, texts: tuple[str, ...]) -> Iterator[str]:
        for text in texts:
            try:
                yield normal_entry(SETTINGS[name].entries, text, self._home)
            except EntryError as error:
                raise _Invalid(f"{toml_text(text)} {error}") from error

    def patterns(self, value: Value) -> tuple[str, ...]:
        """Return the patterns of ``[match] project``."""
        if not isinstance(value, tuple) or not value:
            self.fail("match.project", "has to be an array of patterns of project directories")
            return ()
        found = []
        for text in value:
            try:
                found.append(normal_pattern(text, self._home))
            except EntryError as error:
                self.fail("match.project", f"{toml_text(text)} {error}")
        return tuple(found)


def _what(value: Value) -> str:
    match value:
        case Other(what=what):
            return what
        case bool() | int() | str():
            return toml_text(value)
        case tuple():
            return "an array"
        case _:
            return "a table"


def _hint(text: str, words: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(text.lower(), words, n=1)
    return f'; did you mean "{close[0]}"?' if close else ""


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), [*SETTINGS, *_TABLES], n=1)
    return f"the nearest is {close[0]}" if close else "ral.toml(5) lists them all"


_TABLES = ("match", "replace")


def read_document(kind: Kind, file: str, name: str, parsed: ParsedFile, home: str) -> Document:
    """Return the layer that a file is; what is wrong with it is in its ``problems``."""
    reading = _Reading(kind, file, parsed.lines, home)
    replaced: set[str] = set()
    projects: tuple[str, ...] | None = None
    table = parsed.values.get("replace", {})
    if not isinstance(table, Mapping):
        reading.fail("replace", "is a table of lists: [replace]")
        table = {}
    for key, value in table.items():
        if key in EXPECTED and EXPECTED[key].type is not tuple:
            reading.fail(
                f"replace.{key}", "is no list, so there is nothing to add to; put it above [replace]"
            )
            continue
        reading.take(key, value, f"replace.{key}")
        replaced.add(key)
    for key, value in parsed.values.items():
        if key == "match":
            projects = _read_match(reading, kind, value)
        elif key != "replace":
            reading.take(key, value)
    lines = {key.removeprefix("replace."): line for key, line in parsed.lines.items()} | parsed.lines
    return Document(
        kind=kind,
        file=file,
        name=name,
        values=reading.values,
        replaced=frozenset(replaced & reading.values.keys()),
        lines={key: line for key, line in lines.items() if key in reading.values},
        projects=projects,
        problems=tuple(reading.problems),
    )


def _read_match(reading: _Reading, kind: Kind, value: Value) -> tuple[str, ...] | None:
    if kind != "conf.d":
        reading.fail("match", "belongs into a file in conf.d: this one is for every project")
        return None
    if not isinstance(value, Mapping):
        reading.fail("match", "is a table: [match]")
        return None
    for key in value:
        if key != "project":
            reading.fail(f"match.{key}", "nothing else than project can be matched")
    return reading.patterns(value.get("project", ()))


def profile_document(name: str, source: str, values: Mapping[str, tuple[str, ...]], home: str) -> Document:
    """Return the layer that a profile is."""
    reading = _Reading("profile", source, {}, home)
    for key, entries in values.items():
        reading.take(key, entries)
    return Document(
        kind="profile",
        file=source,
        name=f"profile {name}",
        values=reading.values,
        problems=tuple(reading.problems),
    )


_TRUE, _FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")
OVERRIDES: dict[str, str] = {
    setting.override: name for name, setting in SETTINGS.items() if setting.override is not None
}
"""Settings by the environment variable that sets them for one launch."""


def override_document(variable: str, untrusted_text: str) -> Document:
    """Return the layer that one variable of the caller's environment is. Case does not matter in it."""
    layer = f"environment {variable}"
    reading = _Reading("environment", layer, {}, "/")
    name = OVERRIDES.get(variable)
    if name is None:
        reading.fail(variable, "no setting is changed by this variable")
    else:
        value = _override_value(EXPECTED[name], untrusted_text.strip().lower())
        if value is None:
            reading.fail(
                name, f"{toml_text(untrusted_text)} is not {EXPECTED[name].sentence()}; unset {variable}"
            )
        else:
            reading.take(name, value)
    return Document(
        kind="environment",
        file=layer,
        name=layer,
        values=reading.values,
        problems=tuple(reading.problems),
    )


def _override_value(expected: Expected, text: str) -> bool | int | str | None:
    if expected.type is bool:
        return True if text in _TRUE else False if text in _FALSE else None
    if expected.type is int:
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else None
    return text
