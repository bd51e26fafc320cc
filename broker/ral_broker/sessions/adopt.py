"""A new broker finds the sessions of the one before: by record, and then only by what the kernel says."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

import trio

from ral_broker.errors import Refused
from ral_broker.log import logger
from ral_broker.runtime import RuntimeDir
from ral_broker.sessions import records
from ral_broker.sessions.lineage import check_lineage, check_parent
from ral_broker.sessions.registry import KEEP_SECONDS, Ended, Registry
from ral_broker.sessions.session import Session, now_text
from ral_protocol import exits
from ral_protocol.control import SessionLine
from ral_protocol.records import ProcessMark, SessionRecord


def adopt_sessions(registry: Registry, nursery: trio.Nursery) -> None:
    """Take up every session whose processes still run; report and prune those that ended meanwhile.

    One record that fails does not stop the others.
    """
    runtime = registry.runtime
    here = (records.boot_id(), records.own_pid_namespace())
    _load_ended(registry)
    for record in list(records.read_sessions(runtime.sessions_fd)):
        if record.host != records.host_name():  # wall
            continue  # another host shares this directory: its sessions are neither ours nor ended
        if record.boot_id == here[0] and record.pid_namespace != here[1]:
            continue  # of a broker in another container that shares this directory
        try:
            session = _adopt(runtime, record) if record.boot_id == here[0] else None
        except (OSError, Refused) as error:
            logger.warning("session %s cannot be adopted: %s", record.id, error)
            continue
        if session is None:
            registry.remember(_ended_meanwhile(runtime, record))
            registry.remove_later(record)
            continue
        session.note("found again by a new broker")
        registry.add(session)
        if record.client is not None:
            nursery.start_soon(_end_with_client, session, record.client)
    _remove_strays(registry)
    nursery.start_soon(registry.remove_placeholders)


def _adopt(runtime: RuntimeDir, record: SessionRecord) -> Session | None:
    """Return the session if both its processes are what the record says; None if it has ended.

    A sandbox whose monitor is gone has nobody to record its status: it is ended. Raises Refused for a record
    that the kernel contradicts: what it names is not touched. OSError if something cannot be looked at.
    """
    with contextlib.ExitStack() as stack:
        init = _pidfd(record.init)
        if init is None:
            return None
        stack.callback(os.close, init)
        monitor = _pidfd(record.monitor)
        if monitor is not None:
            stack.callback(os.close, monitor)
        try:
            check_lineage(record)
            check_parent(record, monitor_runs=monitor is not None)
        except (Refused, OSError):
            if _has_ended(init):
                return None
            raise
        try:
            status = records.StatusFile.open(runtime.sessions_fd, record.id)
        except OSError:
            status = None
        if monitor is None or status is None:
            # Nobody can follow it any more.
            _kill(init)
            if status is not None:
                os.close(status)
            return None
        stack.pop_all()
        session = Session(record, monitor, init, status)
        if record.holder is not None:
            # A child of ours where this process executed itself anew.
            session.holder_pidfd = _pidfd(record.holder) or -1
        return session


def _kill(pidfd: int) -> None:
    """KILL the process behind a pidfd if it still runs."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _pidfd(mark: ProcessMark) -> int | None:
    """Return a pidfd of a running process that has this pid and start time; a zombie does not run."""
    try:
        pidfd = os.pidfd_open(mark.pid)
    except OSError:
        return None
    if not records.is_same_process(mark) or _has_ended(pidfd):  # wall
        os.close(pidfd)
        return None
    return pidfd


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


async def _end_with_client(session: Session, client: ProcessMark) -> None:
    """End an adopted session when the client that holds it ends. Its lease does the same; this is the second
    wall."""
    pidfd = _pidfd(client)
    if pidfd is None:
        session.note("its client is gone: ended")
        session.kill()
        return
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when, session.ended, nursery.cancel_scope)
            await trio.lowlevel.wait_readable(pidfd)
            session.kill()
            nursery.cancel_scope.cancel()
    finally:
        os.close(pidfd)


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _ended_meanwhile(runtime: RuntimeDir, record: SessionRecord) -> Ended:
    code = None
    with contextlib.suppress(OSError):
        status_fd = records.StatusFile.open(runtime.sessions_fd, record.id)
        try:
            code = records.StatusFile.exit_code(status_fd)
        finally:
            os.close(status_fd)
    line = SessionLine(
        id=record.id, kind=record.kind, project=record.project, command=record.command, pid=record.init.pid,
        bwrap_pid=record.monitor.pid, started=record.started, state="ended", guard="off",
        version=record.version,
        exit=exits.LOST if code is None else code, lost=code is None, ended=now_text(),
    )  # fmt: skip
    if record.holder is not None:
        records.write_ended(runtime.sessions_fd, record, line)
    records.remove_session_files(runtime.sessions_fd, record.id, keep_logs=record.holder is not None)
    logger.info("session %s ended while no broker ran: status %s", record.id, line.exit)
    return Ended(line, (), time.time())


def _load_ended(registry: Registry) -> None:
    for record in sorted(records.read_ended(registry.runtime.sessions_fd), key=lambda r: r.ended_epoch):
        if not records.ended_within(record, time.time(), KEEP_SECONDS):
            records.remove_session_files(registry.runtime.sessions_fd, record.id, keep_logs=False)
            continue
        line = SessionLine(
            id=record.id, kind=record.kind, project=record.project, command=record.command, pid=record.pid,
            bwrap_pid=record.bwrap_pid, started=record.started, state="ended", guard="off",
            version=record.version,
            exit=record.exit, lost=record.lost, ended=record.ended,
        )  # fmt: skip
        registry.remember(Ended(line, (), record.ended_epoch))


def _remove_strays(registry: Registry) -> None:
    """Remove files of launches that were never recorded: a broker died between the two."""
    known = {session.id for session in registry.live()} | {ended.line.id for ended in registry.ended()}
    fd = registry.runtime.sessions_fd
    recorded = {name.partition(".")[0] for name in os.listdir(fd) if name.endswith(records.RECORD)}
    for name in os.listdir(fd):
        session = name.removeprefix(".").partition(".")[0]
        if len(session) == 8 and session not in known and session not in recorded:
            records.remove(fd, name)
