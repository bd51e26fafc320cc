"""The request ``run``: checks what the client sent, launches, and stays with the session as long as its
client does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator

import trio

from ral_broker.envelope.plan import mode_word, op_word, source_of
from ral_broker.equipment import Equipment
from ral_broker.errors import Refused, StartFailed
from ral_broker.frames import Descriptors
from ral_broker.listen import Connection
from ral_broker.log import shown
from ral_broker.runtime import RuntimeDir
from ral_broker.sessions import records
from ral_broker.sessions.caller import check_habits, habits_of, read_payload, take_stdio
from ral_broker.sessions.handshake import wait_started
from ral_broker.sessions.holder import start_holder
from ral_broker.sessions.launch import Launched, Launcher, Stages
from ral_broker.sessions.placeholders import remove_placeholders
from ral_broker.sessions.prepared import Prepared
from ral_broker.sessions.registry import Registry
from ral_protocol.control import Done, PlanArgv, PlanLine, Run, Started


class RunRequests:
    """Serves run requests; they share nothing but the registry."""

    def __init__(
        self, runtime: RuntimeDir, equipment: Equipment, registry: Registry, launcher: Launcher
    ) -> None:
        self._runtime, self._equipment, self._registry, self._launcher = (
            runtime,
            equipment,
            registry,
            launcher,
        )
        self._launching = 0
        self._idle = trio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no launch is half done."""
        await self._idle.wait()

    @contextlib.contextmanager
    def _launch(self) -> Iterator[str]:
        """Count a launch and reserve its session's id."""
        session = self._registry.new_id()
        if self._launching == 0:
            self._idle = trio.Event()
        self._launching += 1
        try:
            yield session
        finally:
            self._registry.release(session)
            self._launching -= 1
            if self._launching == 0:
                self._idle.set()

    async def run(self, connection: Connection, request: Run, fds: Descriptors) -> None:
        """Serve one request. Raises what listen.py sorts by fault; then nothing of the launch is left."""
        stages = Stages()
        with self._launch() as session, contextlib.ExitStack() as stack:
            payload = read_payload(fds.take())
            cwd_fd = fds.take()
            stack.callback(os.close, cwd_fd)
            project_fd = fds.take()
            stack.callback(os.close, project_fd)
            stdio = take_stdio(request, fds)
            with contextlib.ExitStack() as until_launch:
                for fd in stdio:
                    until_launch.callback(os.close, fd)
                habits = habits_of(connection.peer)
                check_habits(habits)
                client = None if request.detach else records.process_mark(connection.peer.pid)
                stages.mark("request")
                prepared = await self._launcher.prepare(session, request, payload, cwd_fd, project_fd)
                stages.mark("plan")
                if request.dry_run:
                    await self._show_plan(connection, prepared)
                    return
                warnings = [*self._warnings(), *prepared.warnings]
                notices = _notices(prepared)
                until_launch.pop_all()
                # A launch that fails leaves nothing in the host.
                failed = stack.enter_context(contextlib.ExitStack())
                failed.callback(remove_placeholders, prepared.placeholders)
            launched = await self._launcher.launch(prepared, request, habits, client, stdio, stages)
            failed.pop_all()
            # Nothing is awaited between the launch and this: a session that runs is watched.
            self._launcher.last_stages = stages.microseconds
            if not request.detach:
                self._registry.add(launched.session)
            else:
                await self._detach(launched, shown(payload.argv[0]))
        if request.detach:
            await connection.answer(
                Started(
                    launched.session.id, detached=True, terminal=True, notices=notices, warnings=warnings
                )
            )
        else:
            await self._attend(connection, launched, notices, warnings)

    def _warnings(self) -> list[str]:
        warnings = list(self._equipment.notices)
        if self._equipment.facts is not None and not self._equipment.facts.fresh_proc:
            warnings.append(
                "this host refuses a fresh /proc: the host's processes are listed inside (see ral doctor)"
            )
        return warnings

    async def _attend(
        self, connection: Connection, launched: Launched, notices: list[str], warnings: list[str]
    ) -> None:
        """Give the client everything it needs to go on without us; end the session when the client
        leaves."""
        session = launched.session
        fds = [session.status_fd, session.monitor_pidfd, session.init_pidfd, launched.lease.fileno()]
        if launched.master_fd is not None:
            fds.append(launched.master_fd)
        started = Started(
            session.id, terminal=launched.master_fd is not None, notices=notices, warnings=warnings
        )
        with launched:
            try:
                await connection.answer(started, tuple(fds))
            except BaseException:
                session.kill()
                raise
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_after, session.ended.wait, nursery.cancel_scope)
            await connection.channel.wait_closed()
            nursery.cancel_scope.cancel()
            if not session.has_ended():
                # The lease has ended it already, unless a copy of it lives in some other process.
                session.note("its client left: ended")
                session.kill()

    async def _detach(self, launched: Launched, command: str) -> None:
        """Wait for the program's start and give the session to a holder."""
        session = launched.session
        with launched:
            try:
                await wait_started(launched.lease, command)
                if launched.master_fd is None or self._equipment.holder is None:
                    raise Refused("the session has no terminal that could be held")
                session.record = start_holder(
                    self._runtime, self._equipment.holder, session, launched.lease.fileno(),
                    launched.master_fd,
                    self._equipment.null_fd,
                )  # fmt: skip
            except BaseException as error:
                session.kill()
                if isinstance(error, StartFailed):
                    session.note(error.message)
                raise
            finally:
                self._registry.add(session)

    async def _show_plan(self, connection: Connection, prepared: Prepared) -> None:
        argv, options = self._launcher.render(prepared)
        await connection.answer(PlanArgv(argv, options))
        for operation in prepared.plan.operations:
            line = PlanLine(
                op_word(operation), operation.dest, source_of(operation), mode_word(operation),
                operation.layer,
                operation.why,
            )  # fmt: skip
            await connection.answer(line)
        await connection.answer(Done())


def _notices(prepared: Prepared) -> list[str]:
    notices = list(prepared.notices)
    if prepared.blocked_variables and not prepared.quiet:
        notices.append(
            f"{prepared.blocked_variables} environment variables that may hold secrets are not passed on"
        )
    return notices


async def _cancel_after(wait: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
    await wait()
    scope.cancel()
