"""Stands by a running program until its end, with or without a broker (docs/protocol.md, section 1)."""

import _signal
import posix
import select
import sys
from errno import EACCES, ECONNRESET, ENOENT, ENOTDIR
from time import monotonic

from ral_client.answer import Answer
from ral_client.call import Connection, escape, say
from ral_client.signals import Signals
from ral_protocol import exits, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ral_client.terminal import Pump

STARTED, FAILED, STOPPED = 3, 4, 5
"""Kinds of packets on the lease (docs/protocol.md, section 3)."""
STEPS = {
    1: "warrant",
    2: "terminal",
    3: "Landlock",
    4: "limits",
    5: "descriptors",
    6: "fork",
    9: "working directory",
}
PATH_LOOKUP, EXEC = 7, 8
STOP_SECONDS = 0.1
"""How long a program may take to stop before its client stops without it."""
HANGUP_SECONDS = 3.0
"""How long a program may go on when the terminal that it was started from is gone."""
END_SECONDS = 2.0
"""How long the sandbox of a program that was not executed may take to end."""


class Standby:
    """Waits for the end of a program and forwards signals to it. Needs no broker (docs/protocol.md, section
    1)."""

    def __init__(
        self, connection: Connection, started: Answer, signals: Signals, pump: "Pump | None", command: str
    ) -> None:
        if len(started.fds) != 4 + started.flag("terminal"):
            raise wire.WireError("a session started without the descriptors that belong to it")
        self.status_fd, self.monitor_fd, self.init_fd, self.lease_fd = started.fds[:4]
        self.connection: Connection | None = connection
        self.deaf_to: Connection | None = None
        connection.sock.settimeout(0)
        self.signals = signals
        self.name, self.command = command, escape(command)
        self.pump = pump if started.flag("terminal") else None
        self.master_fd = started.fds[4] if self.pump is not None else -1
        signals.started = True
        self.executed = self.ended = self.hung_up = False
        self.failed: tuple[int, int] | None = None
        self.stop_at: float | None = None
        self.end_at: float | None = None

    def wait(self) -> int:
        """Stand by until the end; returns the exit status. The caller's terminal is as it was, however this
        ends."""
        _release_pipes()
        try:
            if self.pump is not None:
                self.pump.start(self.master_fd)
            while not self._turn():
                pass
            self.ended = True
            while self._lease_packet():
                pass
            status = self._read_exit_status()
            if status is None:
                self._send(_signal.SIGKILL)
                _wait_readable(self.init_fd, END_SECONDS)
            if self.pump is not None:
                self.pump.drain()
        finally:
            if self.pump is not None:
                self.pump.screen.leave()
        return self._verdict(status)

    def _turn(self) -> bool:
        """Wait for something and handle it. True once the session has ended."""
        poller = select.poll()
        connection = self.connection
        for fd in (
            self.signals.fd,
            self.monitor_fd,
            self.lease_fd,
            connection.sock.fileno() if connection else -1,
        ):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        times = [at for at in (self.stop_at, self.end_at) if at is not None]
        if self.pump is not None:
            times += self.pump.register(poller)
        timeout = max(0, int(1000 * (min(times) - monotonic()) + 1)) if times else None
        ready = dict(poller.poll(timeout))
        if self.pump is not None:
            self.pump.handle(ready)
        if self.signals.fd in ready:
            for number in self.signals.pending():
                self._forward(number)
        if self.lease_fd in ready:
            self._lease_packet()
        if connection is not None and connection.sock.fileno() in ready:
            self._hear(connection)
        now = monotonic()
        if self.stop_at is not None and now >= self.stop_at:
            self._suspend(_signal.SIGSTOP)
        return self.monitor_fd in ready or (self.end_at is not None and now >= self.end_at)

    def _hear(self, connection: Connection) -> None:
        """Notices of the broker. Its end means nothing: another one finds the session."""
        try:
            alive = connection.fill()
            while (answer := connection.pop()) is not None:
                if answer.kind == "notice":
                    say(
                        answer.text("text"),
                        "\r\n" if self.pump is not None and self.pump.screen.raw else "\n",
                    )
                answer.close()
        except BlockingIOError:
            return
        except wire.WireError:
            # Not listened to any more, but kept open: closing it would end the session.
            self.deaf_to = connection
            alive = False
        if not alive:
            self.connection = None

    def _lease_packet(self) -> bool:
        """Take one packet of the lease if there is one; False at its end."""
        if self.lease_fd < 0 or not _wait_readable(self.lease_fd, 0):
            return False
        try:
            untrusted_packet = posix.read(self.lease_fd, 16)
        except OSError as error:
            # The other end closed with something unread; what it sent before is still there.
            untrusted_packet = b""
            if error.errno == ECONNRESET:
                return True
        if len(untrusted_packet) != 16:
            posix.close(self.lease_fd)
            self.lease_fd = -1
            return False
        kind, a, b = (
            int.from_bytes(untrusted_packet[at : at + 4], sys.byteorder, signed=True) for at in (0, 4, 8)
        )
        if kind == STARTED:
            self.executed = True
        elif kind == FAILED:
            self.failed = (a, b)
            self.end_at = monotonic() + END_SECONDS
        elif kind == STOPPED and not self.ended:
            self._suspend(a)
        return True

    def _send(self, number: int) -> None:
        try:
            _signal.pidfd_send_signal(self.init_fd, number)
        except ProcessLookupError:
            return

    def _forward(self, number: int) -> None:
        raw = self.pump is not None and self.pump.screen.raw
        if number == _signal.SIGWINCH:
            # A size that has changed raises the signal inside by itself.
            if self.pump is None or not self.pump.resize():
                self._send(number)
            return
        if number == _signal.SIGHUP and self.pump is not None and self.pump.screen.gone():
            self.hung_up = True
            self.end_at = monotonic() + HANGUP_SECONDS
        if number == _signal.SIGCONT and self.pump is not None:
            self.pump.resume()
        self._send(number)
        if number == _signal.SIGTSTP and not raw:
            self.stop_at = monotonic() + STOP_SECONDS

    def _suspend(self, stopped_by: int) -> None:
        """The program stopped: so does the client, as its shell expects of a job, and goes on when it is
        continued."""
        raw = self.pump is not None and self.pump.screen.raw
        self.stop_at = None
        if self.pump is not None and raw:
            self.pump.drain(0.2)
            self.pump.screen.leave()
            continued = self.signals.suspend(0, _signal.SIGTSTP)
            self.pump.resume()
            if not continued and stopped_by == _signal.SIGSTOP:
                return
        else:
            self.signals.suspend(posix.getpid(), _signal.SIGSTOP)
            if self.pump is not None:
                self.pump.resume()
        self._send(_signal.SIGCONT)

    def _read_exit_status(self) -> "int | None":
        """The status that bwrap's monitor recorded, or None: it was killed. A line without its end is not
        there."""
        untrusted_text = b""
        while part := posix.pread(self.status_fd, 65536, len(untrusted_text)):
            untrusted_text += part
        status = None
        for line in untrusted_text.split(b"\n")[:-1]:
            before, found, after = line.partition(b'"exit-code":')
            digits = after.strip(b" }")
            if found and before.strip() == b"{" and digits.isdigit():
                status = int(digits)
        return status

    def _verdict(self, status: "int | None") -> int:
        if self.failed is not None:
            return self._failure(*self.failed)
        if self.hung_up and status is None:
            return exits.SIGNALLED + _signal.SIGHUP
        if not self.executed:
            say(f"{self.command}: not started: its sandbox ended without a report; see `ral doctor`")
            return exits.REFUSED
        if status is None:
            say(f"{self.command}: lost: the monitor of its sandbox was killed, and with it the exit status")
            return exits.LOST
        return status

    def _failure(self, step: int, number: int) -> int:
        reason = posix.strerror(number)
        if step == PATH_LOOKUP:
            outside = _find_outside(self.name)
            if outside is not None:
                say(
                    f"{self.command}: not found inside the sandbox: it is {escape(outside)} outside, which "
                    "is not shown inside; install it below /usr or in the project"
                )
                return exits.NOT_FOUND
            say(
                f"{self.command}: not found inside the sandbox: no such program on its PATH; "
                "`ral run -- ls DIRECTORY` shows what is there"
            )
            return exits.NOT_FOUND
        if step != EXEC:
            say(f"{self.command}: not started: {STEPS.get(step, str(step))}: {reason}; see `ral doctor`")
            return exits.REFUSED
        if number not in (ENOENT, ENOTDIR):
            advice = (
                "; it needs execute permission, on a file system that allows it" if number == EACCES else ""
            )
            say(f"{self.command}: cannot be executed inside the sandbox: {reason}{advice}")
            return exits.CANNOT_EXECUTE
        if "/" not in self.command:
            what = "its interpreter (the `#!` line or the ELF loader) does not exist there"
        else:
            what = "the file, or the interpreter that it names, does not exist there"
        say(f"{self.command}: not found inside the sandbox: {what}")
        return exits.NOT_FOUND


def _release_pipes() -> None:
    """Let go of the caller's 0 and 1: at their other ends somebody waits for the program to close them.

    Standard error stays, for what is to be said to the user.
    """
    null = posix.open("/dev/null", posix.O_RDWR)
    for fd in (0, 1):
        if not posix.isatty(fd):
            posix.dup2(null, fd, False)
    posix.close(null)


def _find_outside(name: str) -> "str | None":
    """Where the caller's own PATH has the program, if it has."""
    path = posix.environ.get(b"PATH", b"").decode("utf-8", "surrogateescape")
    for directory in path.split(":"):
        if directory and posix.access(f"{directory}/{name}", posix.X_OK):
            return f"{directory}/{name}"
    return None


def _wait_readable(fd: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(int(seconds * 1000)))
