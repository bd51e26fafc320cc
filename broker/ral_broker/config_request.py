"""The requests ``config`` and ``explain``: they read what a launch would read, and start nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

import msgspec

from ral_broker import admin
from ral_broker.config.advice import Advice, Sources, advise
from ral_broker.config.document import toml_text
from ral_broker.config.effective import Effective, Problem
from ral_broker.config.files import select
from ral_broker.config.settings import SETTINGS, Settings
from ral_broker.envelope import masks
from ral_broker.envelope.coverage import leads_to
from ral_broker.envelope.explain import Explanation, deciding, explain
from ral_broker.envelope.facts import PathFact, observe
from ral_broker.envelope.plan import Bind, Plan, Symlink, mode_word, source_of
from ral_broker.envelope.policy import Rule
from ral_broker.errors import HostLacks, Refused, RequestError
from ral_broker.frames import Descriptors
from ral_broker.listen import Connection
from ral_broker.sessions.caller import checked_path, read_payload
from ral_broker.sessions.preparation import Planned, Planner
from ral_broker.sessions.registry import Registry
from ral_protocol import exits
from ral_protocol.control import (
    Config,
    ConfigFiles,
    Done,
    Explain,
    Explained,
    OriginLine,
    ProblemLine,
    SettingLine,
)

_DEFAULTS = Settings()
_NO_SESSION = "00000000"
_MAX_LINKS = 40
"""Links on the way to a path, as many as the kernel follows (path_resolution(7))."""


class ConfigRequests:
    """Serves both requests; nothing is kept between them."""

    def __init__(self, planner: Planner, registry: Registry) -> None:
        self._planner, self._registry = planner, registry

    async def config(self, connection: Connection, request: Config, fds: Descriptors) -> None:
        """Answer with the effective settings, or with what is wrong in the files. Raises what listen.py
        sorts by fault."""
        loader = self._planner.loader
        with contextlib.ExitStack() as stack:
            environment, project, project_fd = _take(stack, request.project, fds)
            caller = (environment, request.overrides, project, request.profile, b"")
            effective, problems = await loader.check(*caller)
            if effective is None and not request.check:
                effective = await loader.load(*caller)  # raises the first error
            if effective is not None:
                problems += await self._doubts(effective, environment, project, project_fd)
        files = () if effective is None else effective.files
        profile = None if effective is None or effective.profile is None else effective.profile.name
        await connection.answer(ConfigFiles([os.fsencode(file) for file in files], profile))
        for problem in problems:
            await connection.answer(_problem_line(problem))
        if effective is not None and not request.check:
            await _show_settings(connection, effective)
        await connection.answer(Done())

    async def _doubts(
        self, effective: Effective, environment: list[bytes], project: bytes, project_fd: int
    ) -> list[Problem]:
        """Return what only turns out when the settings meet this host and this project."""
        try:
            planned = await self._plan(effective, environment, project, project_fd)
        except (Refused, HostLacks) as error:
            # Often the fault of the place: a home directory is no project, and its files may be right.
            texts = [f"no session would start here: {error.message}"]
        else:
            texts = [text for text in planned.warnings if text not in effective.warnings]
        return [Problem("warning", "", None, None, text) for text in texts]

    async def _plan(
        self, effective: Effective, environment: list[bytes], project: bytes, project_fd: int
    ) -> Planned:
        return await self._planner.plan(_NO_SESSION, effective, environment, project, project_fd, project)

    async def explain(self, connection: Connection, request: Explain, fds: Descriptors) -> None:
        """Answer with what a session shows at a path. Raises what listen.py sorts by fault."""
        if not _is_normal(request.path):
            raise RequestError("the path to explain must be absolute and normal")
        if (request.project is None) == (request.session is None):
            raise RequestError("either a project or a session has to be named")
        if request.project is not None:
            await connection.answer(await self._of_project(request, request.project, fds))
            return
        if len(fds):
            raise RequestError("a session is explained without descriptors")
        plan = self._plan_of(request.session or "")
        await connection.answer(_explained(await _look(plan, request.path), Advice()))

    async def _of_project(self, request: Explain, untrusted_project: bytes, fds: Descriptors) -> Explained:
        with contextlib.ExitStack() as stack:
            environment, project, project_fd = _take(stack, untrusted_project, fds)
            effective = await self._planner.effective(
                environment, request.overrides, project, request.profile, b""
            )
            planned = await self._plan(effective, environment, project, project_fd)
        explanation = await _look(planned.plan, request.path, masks.rules(planned.policy))
        sources = Sources(
            admin_file=admin.PATH,
            user_file=select(os.fsdecode(self._planner.home), environment).user_file,
            homes=(planned.policy.home_path, planned.policy.home),
            project=project,
        )
        advice = advise(explanation, planned.effective, sources)
        return _explained(explanation, advice)

    def _plan_of(self, untrusted_prefix: str) -> Plan:
        session = self._registry.find_live(untrusted_prefix)
        try:
            return msgspec.json.decode(session.record.plan, type=Plan)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise Refused(
                f"session {session.id} was started by version {session.record.version}, whose plan this one "
                "cannot read",
                status=exits.FAILED,
            ) from error


def _take(
    stack: contextlib.ExitStack, untrusted_project: bytes, fds: Descriptors
) -> tuple[list[bytes], bytes, int]:
    """Return (environment, project, its descriptor, which ``stack`` closes) of a request."""
    environment = read_payload(fds.take(), command=False).environment
    project_fd = fds.take()
    stack.callback(os.close, project_fd)
    if len(fds):
        raise RequestError("the request came with more descriptors than it needs")
    return environment, checked_path(untrusted_project, project_fd, "project"), project_fd


def _is_normal(untrusted_path: bytes) -> bool:
    if not untrusted_path.startswith(b"/") or b"\0" in untrusted_path:
        return False
    return untrusted_path == b"/" or not {b"", b".", b".."} & set(untrusted_path.split(b"/")[1:])


async def _show_settings(connection: Connection, effective: Effective) -> None:
    for name, setting in SETTINGS.items():
        value: object = getattr(effective.settings, name)
        is_list = isinstance(value, tuple)
        default = value == getattr(_DEFAULTS, name)
        await connection.answer(SettingLine(name, is_list, setting.state, default))
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        for element, origin in zip(values, effective.origins[name], strict=True):
            await connection.answer(OriginLine(_toml(element), origin.layer, origin.line))


def _toml(value: object) -> bytes:
    """Return a value as TOML text, where the bytes of a path that are no UTF-8 stay as they are."""
    if isinstance(value, str) and not value.isprintable():
        return b'"%b"' % b"".join(
            bytes((ord(c) - 0xDC00,)) if "\udc80" <= c <= "\udcff" else toml_text(c)[1:-1].encode()
            for c in value
        )
    return toml_text(value).encode()


def _problem_line(problem: Problem) -> ProblemLine:
    return ProblemLine(problem.severity, problem.file or None, problem.line, problem.key, problem.text)


async def _look(plan: Plan, path: bytes, hidden: Iterable[Rule] = ()) -> Explanation:
    """Explain a path by what the host has there now, and at what links on the way lead to."""
    facts: dict[bytes, PathFact] = {}
    name: bytes | None = path
    while name is not None and name not in facts and len(facts) < _MAX_LINKS:
        facts |= await observe([name])
        name = _next_name(plan, name, facts[name])
    return explain(plan, facts, path, hidden)


def _next_name(plan: Plan, name: bytes, fact: PathFact) -> bytes | None:
    """Return where a name inside leads to."""
    by = deciding(plan, name)
    if isinstance(by, Symlink):
        return leads_to(by.dest, by.target) + name[len(by.dest) :]
    return fact.resolved if isinstance(by, Bind) else None


def _explained(explanation: Explanation, advice: Advice) -> Explained:
    by = explanation.by
    return Explained(
        path=explanation.path,
        state=explanation.state,
        dest=None if by is None else by.dest,
        source=None if by is None else source_of(by),
        mode=None if by is None else mode_word(by),
        layer=None if by is None else by.layer,
        why=explanation.why or None,
        setting=explanation.setting,
        origin=advice.origin,
        text="\n".join((f"{explanation.sentence}.", *advice.sentences)),
    )
