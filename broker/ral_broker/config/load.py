"""From a caller to the effective configuration of a launch: which files, their values, the merge.

Nothing is kept but what the content of a file came to, by that content: a file that is changed within one
tick of a clock, or replaced by an older one, is read as it is.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import msgspec
import trio

from ral_broker.config.document import Document, override_document, profile_document, read_document
from ral_broker.config.effective import Effective, Problem
from ral_broker.config.files import (
    ProfileFiles,
    Source,
    canonical_paths,
    nowhere,
    out_of_reach,
    read_sources,
    select,
)
from ral_broker.config.merge import Merged, enabled_agents, merge, paths_of_interest
from ral_broker.config.parse import Malformed, ParsedFile, Reader
from ral_broker.config.profile import Profile
from ral_broker.config.profiles import find_profile
from ral_broker.config.where import Where
from ral_broker.errors import RalError, Refused
from ral_broker.log import shown

_KEPT_BYTES = 4 << 20
"""Content of files whose values are remembered."""


_KEPT_MERGES = 32
"""Projects whose last merge is remembered."""


class _Given(msgspec.Struct):
    """All that a merge depends on."""

    sources: list[Source]
    overrides: dict[str, str]
    where: Where
    profile: Profile | None
    problems: list[Problem]


class Loader:
    """Loads configurations for one user. ``home``: the directory of the passwd entry.

    Resource handling: one child at a time, gone when a load returns. Error handling: see ``load``.
    """

    def __init__(self, home: bytes, reader: Reader | None = None) -> None:
        self._home = os.fsdecode(os.path.normpath(b"/" + home.lstrip(b"/")))
        self._reader = reader or Reader()
        self._lock = trio.Lock()
        self._parsed: OrderedDict[bytes, ParsedFile | Malformed] = OrderedDict()
        self._size = 0
        self._merges: OrderedDict[str, tuple[_Given, Effective, list[Problem]]] = OrderedDict()

    async def load(
        self,
        environment: Iterable[bytes],
        overrides: Mapping[str, str],
        project: bytes,
        profile: str | None,
        command: bytes,
    ) -> Effective:
        """Return the configuration of one launch.

        ``environment``: the caller's, ``NAME=VALUE``; ``overrides``: those of its variables that set a
        setting for one launch; ``project``: canonical; ``profile``: by name, else ``command`` may choose
        one. Raises Refused with the first error, naming file, line and key where they are known.
        """
        effective, problems = await self.check(environment, overrides, project, profile, command)
        errors = [problem for problem in problems if problem.severity == "error"]
        if effective is None or errors:
            more = f" ({len(errors) - 1} more: run ral config check)" if len(errors) > 1 else ""
            raise Refused(errors[0].message + more)
        return effective

    async def check(
        self,
        environment: Iterable[bytes],
        overrides: Mapping[str, str],
        project: bytes,
        profile: str | None,
        command: bytes,
    ) -> tuple[Effective | None, list[Problem]]:
        """As ``load``, but return every problem; no configuration if there is an error among them."""
        place = os.fsdecode(project)
        try:
            selection = select(self._home, environment)
        except Refused as error:
            return None, [_problem(error)]
        closed = out_of_reach(selection)
        if closed is not None:
            selection = nowhere()
        sources, problems = await read_sources(selection)
        if closed is not None:
            text = "it belongs to another and cannot be entered, so no configuration of yours is read"
            problems.append(Problem("warning", shown(closed), None, None, text))
        documents, wrong = await self._documents(sources)
        problems += wrong
        documents += [override_document(variable, text) for variable, text in overrides.items() if text]
        chosen: Profile | None = None
        where = Where(
            self._home, place, await canonical_paths(paths_of_interest(documents, self._home, place))
        )
        try:
            chosen = await find_profile(
                ProfileFiles(),
                self.parse,
                selection.directory + "/profiles",
                name=profile,
                command=command,
                enabled=enabled_agents(documents, where),
            )
        except RalError as error:
            problems.append(_problem(error))
        if chosen is not None:
            documents.insert(0, profile_document(chosen.name, chosen.source, chosen.values, self._home))
            more = await canonical_paths(
                path
                for path in paths_of_interest(documents, self._home, place)
                if path not in where.canonical
            )
            where = Where(self._home, place, {**where.canonical, **more})
        # The merge is pure: the same of everything that goes in is the same result.
        given = _Given(sources, dict(overrides), where, chosen, list(problems))
        kept = self._merges.get(place)
        if kept is not None and kept[0] == given:
            return kept[1], [*problems, *kept[2]]
        merged = merge(documents, where)
        problems += merged.problems
        if any(problem.severity == "error" for problem in problems):
            return None, problems
        effective = _effective(merged, sources, chosen, problems)
        self._merges.pop(place, None)
        self._merges[place] = given, effective, list(merged.problems)
        if len(self._merges) > _KEPT_MERGES:
            self._merges.popitem(last=False)
        return effective, problems

    async def parse(self, content: bytes, label: str) -> ParsedFile:
        """Return the values of one file. Raises Refused, naming ``label`` and the line, if it is
        malformed."""
        (parsed,) = await self._parse_all([content])
        if isinstance(parsed, Malformed):
            raise Refused(_malformed(label, parsed).message)
        return parsed

    async def _documents(self, sources: list[Source]) -> tuple[list[Document], list[Problem]]:
        documents: list[Document] = []
        problems: list[Problem] = []
        try:
            answers = await self._parse_all([source.content for source in sources])
        except RalError as error:
            return [], [_problem(error)]
        for source, parsed in zip(sources, answers, strict=True):
            if isinstance(parsed, Malformed):
                problems.append(_malformed(source.path, parsed))
            else:
                file, name = shown(source.path), shown(source.name)
                documents.append(read_document(source.kind, file, name, parsed, self._home))
        return documents, problems

    async def _parse_all(self, contents: list[bytes]) -> list[ParsedFile | Malformed]:
        """Return the values of each file, asking one child for all that are not remembered."""
        if not contents:
            return []
        async with self._lock:
            # Whoever waited for the lock finds what the one before has learnt.
            new = [content for content in dict.fromkeys(contents) if content not in self._parsed]
            fresh = dict(zip(new, await self._reader.read(new), strict=True)) if new else {}
            found = [fresh.get(content) or self._parsed[content] for content in contents]
            self._remember(dict(zip(contents, found, strict=True)))
            return found

    def _remember(self, parsed: Mapping[bytes, ParsedFile | Malformed]) -> None:
        for content, values in parsed.items():
            if self._parsed.pop(content, None) is None:
                self._size += len(content)
            self._parsed[content] = values
        while self._size > _KEPT_BYTES:
            content, _ = self._parsed.popitem(last=False)
            self._size -= len(content)


def _malformed(label: str, malformed: Malformed) -> Problem:
    return Problem("error", shown(label), malformed.line, None, f"{malformed.text}; mend the file")


def _problem(error: RalError) -> Problem:
    return Problem("error", "", None, None, error.message)


def _effective(
    merged: Merged, sources: list[Source], profile: Profile | None, problems: list[Problem]
) -> Effective:
    files = (*(profile.files if profile is not None else ()), *(source.path for source in sources))
    return Effective(
        settings=merged.settings,
        origins=merged.origins,
        warnings=tuple(problem.message for problem in problems),
        files=files,
        profile=profile,
    )
