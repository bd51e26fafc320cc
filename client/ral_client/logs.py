"""``ral logs``: events of a session on standard error, what its program wrote on standard output."""

import posix
import select
from time import monotonic

from ral_client.answer import Answer
from ral_client.call import Connection, ask, escape, put, refusal
from ral_client.show import stream
from ral_protocol import exits

LOOK_MILLISECONDS = 100
ASK_SECONDS = 1.0
"""How often at most the broker is asked for a newer file."""
CHUNK = 1 << 16


def logs(options: "dict[str, str]", session: str) -> int:
    """Show the log of a session; with ``follow`` until it has ended."""
    follow = "follow" in options
    connection, answer = ask({"t": "logs", "session": session, "follow": follow})
    if not follow:
        for line in stream(connection, answer):
            _show(line)
            if line.kind == "log_files":
                for fd in line.fds:
                    _copy(fd, 0)
                line.close()
        return exits.OK
    _follow(connection, answer, session)
    return exits.OK


def _show(line: Answer) -> None:
    if line.kind == "event":
        put(2, f"{escape(line.text('time'))}  {escape(line.text('text'))}\n".encode())


def _copy(fd: int, at: int) -> int:
    """Print a file from an offset on; returns the new offset. A closed standard output ends the command."""
    while untrusted_output := posix.pread(fd, CHUNK, at):
        view = memoryview(untrusted_output)
        while view:
            view = view[posix.write(1, view) :]
        at += len(untrusted_output)
    return at


class Tail:
    """The newest of a session's log files, and how much of it was printed."""

    def __init__(self) -> None:
        self.fd: int | None = None
        self.at = 0
        self._ask_at = 0.0

    def take(self, fds: "list[int]") -> None:
        """Print what is new in ``fds`` (oldest first) and keep the newest. Closes the others."""
        known = None if self.fd is None else posix.fstat(self.fd).st_ino
        inodes = [posix.fstat(fd).st_ino for fd in fds]
        if self.fd is not None:
            self.at = _copy(self.fd, self.at)
        # What was renamed away twice in between is not among them: then all of them are new.
        new = fds[inodes.index(known) + 1 :] if known in inodes else fds
        for fd in new:
            if self.fd is not None:
                posix.close(self.fd)
            self.fd, self.at = posix.dup(fd), _copy(fd, 0)
        for fd in fds:
            posix.close(fd)

    def more(self) -> bool:
        """Print what was appended; True if it is time to ask for a newer file."""
        renamed = True
        if self.fd is not None:
            self.at = _copy(self.fd, self.at)
            # The kernel follows renames, and a log that is full becomes ID.log.1.
            renamed = not posix.readlink(b"/proc/self/fd/%d" % self.fd).endswith(b"log")
        if not renamed or monotonic() < self._ask_at:
            return False
        self._ask_at = monotonic() + ASK_SECONDS
        return True


def _follow(connection: Connection, answer: Answer, session: str) -> None:
    tail = Tail()
    poller = select.poll()
    poller.register(connection.sock.fileno(), select.POLLIN)
    waiting: Answer | None = answer
    open_ = True
    while True:
        while waiting is not None:
            if waiting.kind == "refused":
                raise refusal(waiting, exits.FAILED)
            if waiting.kind == "done":
                _again(tail, session)
                return
            _show(waiting)
            if waiting.kind == "log_files":
                tail.take(waiting.fds)
            waiting = connection.pop()
        if not open_:
            _again(tail, session)
            return
        if tail.more():
            _again(tail, session)
        if poller.poll(LOOK_MILLISECONDS):
            open_ = connection.fill()
            waiting = connection.pop()


def _again(tail: Tail, session: str) -> None:
    """Ask for the files anew: the log may have been rotated, and the last words come at the end."""
    connection, answer = ask({"t": "logs", "session": session, "follow": False})
    for line in stream(connection, answer):
        if line.kind == "log_files":
            tail.take(line.fds)
    connection.close()
