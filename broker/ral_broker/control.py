"""What the user's door offers: one handler per request, thin. Everything here speaks for the user of this
uid."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime

from ral_broker.config_request import ConfigRequests
from ral_broker.equipment import Equipment
from ral_broker.errors import Refused, RequestError
from ral_broker.frames import Descriptors
from ral_broker.listen import Connection
from ral_broker.run_request import RunRequests
from ral_broker.runtime import RuntimeDir
from ral_broker.sessions import records
from ral_broker.sessions.launch import Launcher
from ral_broker.sessions.registry import Ended, Registry
from ral_protocol import exits
from ral_protocol.control import (
    Attach,
    AttachTo,
    BrokerStatus,
    Config,
    Done,
    EventLine,
    Explain,
    Kill,
    LogFiles,
    Logs,
    Request,
    Run,
    Sessions,
    Status,
    Stop,
)

_MAX_SIGNAL = 64


class Control:
    """Answers requests with one broker's registry and equipment. ``stop`` ends the broker."""

    def __init__(
        self, runtime: RuntimeDir, equipment: Equipment, registry: Registry, launcher: Launcher,
        stop: Callable[[], None], *, activated: bool,
    ) -> None:  # fmt: skip
        self._runtime, self._registry, self._launcher = runtime, registry, launcher
        self._run = RunRequests(runtime, equipment, registry, launcher)
        self._config = ConfigRequests(launcher.planner, registry)
        self._stop, self._activated = stop, activated
        self._started = time.time()

    async def wait_idle(self) -> None:
        """Wait until no launch is half done."""
        await self._run.wait_idle()

    async def handle(self, connection: Connection, request: Request, fds: Descriptors) -> None:
        """Answer one request. Raises what listen.py sorts by fault."""
        if len(fds) and not isinstance(request, Run | Config | Explain):  # wall
            raise RequestError("this request takes no descriptors")
        match request:
            case Run():
                await self._run.run(connection, request, fds)
            case Config():
                await self._config.config(connection, request, fds)
            case Explain():
                await self._config.explain(connection, request, fds)
            case Sessions():
                await self._sessions(connection, request)
            case Kill():
                await self._kill(connection, request)
            case Logs():
                await self._logs(connection, request)
            case Attach():
                await self._attach(connection, request)
            case Status():
                await self._status(connection)
            case Stop():
                await connection.answer(Done())
                self._stop()

    async def _sessions(self, connection: Connection, request: Sessions) -> None:
        self._registry.prune()
        for session in list(self._registry.live()):
            await connection.answer(session.line())
        if request.ended:
            for ended in list(self._registry.ended()):
                await connection.answer(ended.line)
        await connection.answer(Done())

    async def _kill(self, connection: Connection, request: Kill) -> None:
        session = self._registry.find_live(request.session)
        if request.signal is None:
            await session.stop()
        elif request.signal == signal.SIGSTOP:
            raise Refused(
                "STOP would stop the sandbox's own init and not the program; use --signal TSTP",
                status=exits.FAILED,
            )
        elif 1 <= request.signal <= _MAX_SIGNAL:
            session.signal(request.signal)
        else:
            raise Refused(f"{request.signal} is no signal", status=exits.FAILED)
        await connection.answer(Done())

    async def _logs(self, connection: Connection, request: Logs) -> None:
        found = self._registry.find(request.session)
        name = found.line.id if isinstance(found, Ended) else found.id
        sent: list[EventLine] = []
        for event in list(found.events):
            await connection.answer(event)
            sent.append(event)
        with contextlib.ExitStack() as stack:
            files: list[int] = []
            for suffix in records.LOGS:
                with contextlib.suppress(FileNotFoundError):
                    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
                    files.append(os.open(name + suffix, flags, dir_fd=self._runtime.sessions_fd))
                    stack.callback(os.close, files[-1])
            await connection.answer(LogFiles(len(files)), tuple(files))
        if request.follow and not isinstance(found, Ended):
            while not found.ended.is_set():
                await found.event_added.wait()
                for event in list(found.events)[-16:]:
                    if event not in sent:
                        await connection.answer(event)
                        sent.append(event)
        await connection.answer(Done())

    async def _attach(self, connection: Connection, request: Attach) -> None:
        session = self._registry.find_live(request.session)
        if not session.detached:
            raise Refused(
                f"session {session.id} belongs to the terminal it was started from; only sessions started "
                "with --detach can be attached",
                status=exits.FAILED,
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as holder:
            try:
                holder.connect(f"/proc/self/fd/{self._runtime.sessions_fd}/{session.id}{records.ATTACH}")
            except OSError as error:
                raise Refused(
                    f"session {session.id} has no holder that answers: {error.strerror}", status=exits.FAILED
                ) from error
            await connection.answer(AttachTo(session.id), (holder.fileno(),))

    async def _status(self, connection: Connection) -> None:
        started = datetime.fromtimestamp(self._started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        await connection.answer(
            BrokerStatus(
                version=exits.VERSION, pid=os.getpid(), started=started,
                sessions=len(list(self._registry.live())), activated=self._activated,
                runtime_dir=self._runtime.path, stages=self._launcher.last_stages,
            )
        )  # fmt: skip
