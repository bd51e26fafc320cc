"""Paths compared with each other: through links, by component, against patterns. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

import msgspec

from ral_broker.config.document import Document
from ral_broker.config.entries import join


class Where(msgspec.Struct, frozen=True):
    """Home and project, absolute and normal, and the canonical form of every path of ``paths_of_interest``;
    one that is missing did not answer."""

    home: str
    project: str
    canonical: Mapping[str, str]

    def forms(self, path: str) -> tuple[str, ...]:
        """Return a path as it is spelled and with its links followed, if that is known."""
        canonical = self.canonical.get(path, path)
        return (path,) if canonical == path else (path, canonical)


def applies(document: Document, where: Where) -> bool:
    """Tell whether a layer is for this project: for one that a pattern matches, and for what lies below it.

    ``*``, ``?`` and ``[…]`` stay within one component; ``**`` is any number of components.
    """
    if document.projects is None:
        return True
    project = _components(where.project)
    for pattern in document.projects:
        literal = literal_part(pattern)
        rest = _components(pattern)[len(literal) :]
        for form in where.forms("/" + "/".join(literal)):
            start = _components(form)
            if project[: len(start)] == start and _matches(rest, project[len(start) :]):
                return True
    return False


def _components(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def literal_part(pattern: str) -> list[str]:
    """Return the components before the first one that is no plain name."""
    return list(takewhile(lambda part: not any(c in part for c in "*?["), _components(pattern)))


def _matches(pattern: Sequence[str], components: Sequence[str]) -> bool:
    """Tell whether the pattern matches the components or the first of them."""
    # Where the pattern so far can have ended, as in a nondeterministic automaton.
    reached = {0}
    for part in pattern:
        if part == "**":
            reached = set(range(min(reached), len(components) + 1))
        else:
            reached = {
                end + 1
                for end in reached
                if end < len(components) and fnmatch.fnmatchcase(components[end], part)
            }
        if not reached:
            return False
    return True


def forms_of(paths: Iterable[str], where: Where, home: str | None = None) -> dict[str, str]:
    """Return every form of each path, with the entry it is of (relative to ``home``, if given)."""
    found: dict[str, str] = {}
    for path in paths:
        entry = path if home is None else path[len(join(home, "")) :]
        for form in where.forms(path):
            found.setdefault(form, entry)
    return found


class Tree:
    """Paths, asked by component and not one by one: lists of thousands are compared with each other."""

    def __init__(self, entries: Mapping[str, str]) -> None:
        self._entries = entries
        self._ancestors: dict[str, str] = {}
        for path, entry in entries.items():
            for ancestor in _upwards(path):
                self._ancestors.setdefault(ancestor, entry)

    def above(self, path: str) -> str | None:
        """Return the entry that ``path`` equals or lies below."""
        return next((self._entries[up] for up in _upwards(path) if up in self._entries), None)

    def below(self, path: str) -> str | None:
        """Return an entry that equals ``path`` or lies below it."""
        return self._ancestors.get(path)


def _upwards(path: str) -> Iterator[str]:
    while path != "/":
        yield path
        path = path.rpartition("/")[0] or "/"
    yield path
