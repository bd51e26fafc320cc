"""One running sandbox as the broker knows it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections import deque
from datetime import UTC, datetime

import trio

from ral_broker.errors import Refused
from ral_broker.sessions.records import StatusFile
from ral_protocol import exits
from ral_protocol.control import EventLine, SessionLine
from ral_protocol.records import SessionRecord

MAX_EVENTS = 256
"""Events that are kept for one session."""

KILL_GRACE_SECONDS = 5.0
"""Between TERM and KILL of ``ral kill``."""

_END_SECONDS = 10.0


def now_text() -> str:
    """Return the present time as RFC 3339, UTC, in seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def reap(pidfd: int) -> None:
    """Take the status of a child that has ended, so that no zombie stays; another broker's child is not
    ours."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)


class Session:
    """A live session: its record and the descriptors that make sure which processes it is about.

    Resource handling: owns the pidfds and the status descriptor; ``close`` closes them. ``holder_pidfd`` is
    -1 where there is no holder or another broker started it.
    """

    def __init__(self, record: SessionRecord, monitor_pidfd: int, init_pidfd: int, status_fd: int) -> None:
        self.record = record
        self.monitor_pidfd, self.init_pidfd, self.status_fd = monitor_pidfd, init_pidfd, status_fd
        self.holder_pidfd = -1
        self.ended = trio.Event()
        self.exit: int | None = None
        self.lost = False
        self.ended_at: str | None = None
        self.events: deque[EventLine] = deque(maxlen=MAX_EVENTS)
        self.event_added = trio.Event()
        self.events.append(EventLine(record.started, "started"))

    @property
    def id(self) -> str:
        """The session's id."""
        return self.record.id

    @property
    def detached(self) -> bool:
        """Whether a holder, and no client, holds the session."""
        return self.record.holder is not None

    def note(self, text: str) -> None:
        """Add an event."""
        self.events.append(EventLine(now_text(), text))
        event, self.event_added = self.event_added, trio.Event()
        event.set()

    def has_ended(self) -> bool:
        """Tell whether the monitor has ended, even if nothing has been made of it yet."""
        if self.ended.is_set() or self.monitor_pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self.monitor_pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def signal(self, number: int) -> None:
        """Send a signal to the sandbox's init, which forwards it to the program's group.

        Raises Refused if the session has ended or the signal is none.
        """
        if self.init_pidfd < 0:
            raise Refused(f"session {self.id} has ended", status=exits.FAILED)
        try:
            signal.pidfd_send_signal(self.init_pidfd, number)
        except ProcessLookupError as error:
            raise Refused(f"session {self.id} has ended", status=exits.FAILED) from error
        except OSError as error:
            raise Refused(
                f"signal {number} cannot be sent: {error.strerror}", status=exits.FAILED
            ) from error

    def kill(self) -> None:
        """End everything in the sandbox at once: the kernel ends a pid namespace with its init.

        A session that has ended and was closed meanwhile is left alone.
        """
        if self.init_pidfd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.init_pidfd, signal.SIGKILL)

    async def stop(self) -> None:
        """TERM, after KILL_GRACE_SECONDS KILL; return when the session has ended.

        Raises Refused if it has not within another ten seconds.
        """
        with contextlib.suppress(Refused):
            self.signal(signal.SIGTERM)
        with trio.move_on_after(KILL_GRACE_SECONDS):
            await self.ended.wait()
        if not self.ended.is_set():
            self.note("did not end on TERM: killed")
            self.kill()
            with trio.move_on_after(_END_SECONDS):
                await self.ended.wait()
        if not self.ended.is_set():
            raise Refused(f"session {self.id} does not end, not even on KILL", status=exits.FAILED)

    async def wait(self) -> None:
        """Wait for the end and make it true: when the monitor has gone, however it went, nothing inside
        lives on.

        A monitor that was killed leaves its sandbox running and no status; that status is lost.
        """
        await trio.lowlevel.wait_readable(self.monitor_pidfd)
        reap(self.monitor_pidfd)
        self.kill()
        with trio.move_on_after(_END_SECONDS):
            await trio.lowlevel.wait_readable(self.init_pidfd)
        code = StatusFile.exit_code(self.status_fd)
        self.exit, self.lost = (exits.LOST, True) if code is None else (code, False)
        self.ended_at = now_text()
        self.note(f"ended with status {self.exit}" + (" (lost)" if self.lost else ""))
        self.ended.set()

    async def wait_holder(self) -> None:
        """Wait for the end of the holder, which tells its clients how the session ended, and reap it."""
        if self.holder_pidfd >= 0:
            with trio.move_on_after(_END_SECONDS):
                await trio.lowlevel.wait_readable(self.holder_pidfd)
            reap(self.holder_pidfd)

    def line(self) -> SessionLine:
        """Describe the session for ``ral sessions``."""
        record = self.record
        state = "ended" if self.ended.is_set() else "detached" if self.detached else "live"
        return SessionLine(
            id=record.id, kind=record.kind, project=record.project, command=record.command,
            pid=record.init.pid, bwrap_pid=record.monitor.pid, started=record.started, state=state,
            guard="off", version=record.version, exit=self.exit, lost=self.lost, ended=self.ended_at,
        )  # fmt: skip

    def close(self) -> None:
        """Close the descriptors."""
        for name in ("monitor_pidfd", "init_pidfd", "status_fd", "holder_pidfd"):
            fd: int = getattr(self, name)
            if fd >= 0:
                setattr(self, name, -1)
                os.close(fd)
