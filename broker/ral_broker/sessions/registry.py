"""Every session of this user on this host: the truth is in memory, the records on disk are for the next
broker."""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator

import trio

from ral_broker.errors import Refused
from ral_broker.log import logger
from ral_broker.runtime import RuntimeDir
from ral_broker.sessions import records
from ral_broker.sessions.placeholders import remove_placeholders
from ral_broker.sessions.session import Session
from ral_protocol import exits
from ral_protocol.control import EventLine, SessionLine
from ral_protocol.records import Placeholder, SessionRecord

KEEP_SECONDS = 24 * 3600
"""How long an ended session is listed, and a detached one's log kept."""

MAX_ENDED = 256
"""Ended sessions that are listed at most; the oldest go first."""


class Ended:
    """What is kept of a session that has ended."""

    def __init__(self, line: SessionLine, events: tuple[EventLine, ...], epoch: float) -> None:
        self.line, self.events, self.epoch = line, events, epoch


class Registry:
    """Live and lately ended sessions. ``nursery`` holds one watching task per live session."""

    def __init__(self, runtime: RuntimeDir, nursery: trio.Nursery) -> None:
        self.runtime = runtime
        self._nursery = nursery
        self._live: dict[str, Session] = {}
        self._reserved: set[str] = set()
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._placeholders: list[Placeholder] = []

    def new_id(self) -> str:
        """Return an id that no session has; it stays reserved until ``add`` or ``release``."""
        while True:
            session = secrets.token_hex(4)
            if session not in self._live and session not in self._ended and session not in self._reserved:
                self._reserved.add(session)
                return session

    def release(self, session: str) -> None:
        """Give back a reserved id."""
        self._reserved.discard(session)

    def add(self, session: Session) -> None:
        """Take up a live session and watch it until it ends."""
        self._reserved.discard(session.id)
        self._live[session.id] = session
        self._nursery.start_soon(self._watch, session, name=f"session {session.id}")

    async def _watch(self, session: Session) -> None:
        try:
            await session.wait()
            self.finish(session)
            self._live.pop(session.id, None)
            await session.wait_holder()
        finally:
            self._live.pop(session.id, None)
            session.close()
        await self.remove_placeholders()

    def remove_later(self, record: SessionRecord) -> None:
        """Remember what an ended session had made in the host; it goes when no session lives any more."""
        self._placeholders += record.placeholders

    async def remove_placeholders(self) -> None:
        """Remove what ended sessions had made in the host to mask it, once no session can show it."""
        if self._placeholders and not self._live and not self._reserved:
            placeholders, self._placeholders = self._placeholders, []
            # In a thread: a file system may be slow.
            for text in await trio.to_thread.run_sync(remove_placeholders, placeholders):
                logger.info("%s", text)

    def finish(self, session: Session) -> None:
        """Remember how a session ended and remove its files; a detached one keeps its log for a day."""
        line = session.line()
        fd = self.runtime.sessions_fd
        self.remove_later(session.record)
        if session.detached:
            records.write_ended(fd, session.record, line)
        records.remove_session_files(fd, session.id, keep_logs=session.detached)
        self.remember(Ended(line, tuple(session.events), time.time()))
        level = logging.WARNING if line.lost else logging.INFO if session.detached else logging.DEBUG
        logger.log(level, "session %s ended with status %s%s", session.id, line.exit, " (lost)" * line.lost)

    def remember(self, ended: Ended) -> None:
        """List an ended session for a day."""
        self._ended[ended.line.id] = ended
        self.prune()

    def prune(self) -> None:
        """Forget what ended more than a day ago, and the oldest beyond MAX_ENDED."""
        limit = time.time() - KEEP_SECONDS
        for name in list(self._ended):
            if self._ended[name].epoch > limit and len(self._ended) <= MAX_ENDED:
                break
            del self._ended[name]
            records.remove_session_files(self.runtime.sessions_fd, name, keep_logs=False)

    def live(self) -> Iterator[Session]:
        """Yield the live sessions, oldest first."""
        yield from self._live.values()

    def ended(self) -> Iterator[Ended]:
        """Yield the ended sessions, oldest first."""
        yield from self._ended.values()

    def find(self, untrusted_prefix: str) -> Session | Ended:
        """Return the one session whose id begins with the prefix. Raises Refused: none, or several."""
        if not untrusted_prefix or any(c not in "0123456789abcdef" for c in untrusted_prefix):
            raise Refused(
                "a session is named by its id, up to 8 hexadecimal digits (see ral sessions)",
                status=exits.FAILED,
            )
        live = [s for name, s in self._live.items() if name.startswith(untrusted_prefix)]
        ended = [s for name, s in self._ended.items() if name.startswith(untrusted_prefix)]
        found: list[Session | Ended] = [*live] or [*ended]
        if len(found) == 1:
            return found[0]
        if not found:
            raise Refused(f"there is no session {untrusted_prefix} (see ral sessions)", status=exits.FAILED)
        names = ", ".join(sorted(s.id if isinstance(s, Session) else s.line.id for s in found))
        raise Refused(
            f"{untrusted_prefix} fits several sessions: {names}; give more digits", status=exits.FAILED
        )

    def find_live(self, untrusted_prefix: str) -> Session:
        """Return the one live session whose id begins with the prefix. Raises Refused."""
        found = self.find(untrusted_prefix)
        if isinstance(found, Ended):
            raise Refused(
                f"session {found.line.id} ended with status {found.line.exit} at {found.line.ended}",
                status=exits.FAILED,
            )
        return found
