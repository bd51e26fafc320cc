"""The caller's terminal: raw mode, window size, and the pump between it and the session's pty master.

A program never holds the caller's terminal (docs/protocol.md, section 3), so its bytes pass through here.
Only
imported when one of 0, 1, 2 is a terminal.
"""

import _signal
import fcntl
import posix
import select
import sys
import termios
from errno import EINTR, EIO
from time import monotonic

OFLAG, CC = 1, 6
"""Places in what termios.tcgetattr returns: iflag, oflag, cflag, lflag, two speeds, control characters."""
CHUNK = 65536
BACKLOG = 1 << 18
"""Bytes of output that may wait for a slow terminal; beyond, the program waits."""
SMALL = 512
"""Bytes in one write to a descriptor that may block."""
LOOK_SECONDS = 0.5
"""How often to look whether we have come to the foreground: a shell's `fg` of a running job sends no
signal."""
REVIVE_SECONDS = 0.2
"""How often to look at a master whose last slave was closed: the program may open /dev/tty again."""
DRAIN_SECONDS = 2.0
S_IFMT, S_IFIFO, S_IFSOCK = 0o170000, 0o010000, 0o140000


class Screen:
    """The terminal among 0, 1, 2. Input is read only while that is right; modes are put back by
    ``leave``."""

    def __init__(self, terminals: "tuple[bool, ...]", always: bool = False) -> None:
        """``terminals`` says which of 0, 1, 2 are terminals; at least one is.

        Input is wanted if 0 is one and 1 is no pipe: in `ral run -- make | less` the terminal's input is
        less's.
        With ``always`` also then.
        """
        self._out_tty = 1 if terminals[1] else 2 if terminals[2] else 0
        self.tty = 0 if terminals[0] else self._out_tty
        piped = posix.fstat(1).st_mode & S_IFMT in (S_IFIFO, S_IFSOCK)
        self.wants_input = terminals[0] and (always or not piped)
        self.raw = False
        self._saved: list[int | list[bytes | int]] = []
        # Set for reading only in the background, where a read fails with EIO instead, and for writing with
        # `stty tostop`.
        for number in (_signal.SIGTTIN, _signal.SIGTTOU):
            _signal.signal(number, _signal.SIG_IGN)
        self.in_fd, _ = _reopen(0, posix.O_RDONLY) if self.wants_input else (-1, False)
        self.out_fd, self._blocks = _reopen(self._out_tty, posix.O_WRONLY)
        self._pending = b""

    def size(self) -> "list[int]":
        """Rows, columns, x and y pixels (ioctl_tty(2), TIOCGWINSZ)."""
        packed = fcntl.ioctl(self.tty, termios.TIOCGWINSZ, bytes(8))
        return [int.from_bytes(packed[at : at + 2], sys.byteorder) for at in (0, 2, 4, 6)]

    def modes(self) -> "list[int | bytes] | None":
        """Flags and control characters, as the session's terminal is to have them. None in the background.

        There they are those of the shell's line editor, which puts others back before it makes us the
        foreground.
        """
        if not self.foreground():
            return None
        attributes = termios.tcgetattr(self.tty)
        # tcgetattr gives VMIN and VTIME as numbers when the terminal is not canonical.
        cc = b"".join(bytes((c,)) if isinstance(c, int) else c for c in attributes[CC])
        return [*attributes[:4], cc]

    def gone(self) -> bool:
        """Whether the terminal was hung up."""
        try:
            termios.tcgetattr(self.tty)
        except termios.error:
            return True
        return False

    def foreground(self) -> bool:
        """Whether we may read the terminal. One that is not our controlling terminal has no job control:
        yes."""
        try:
            return posix.tcgetpgrp(self.tty) == posix.getpgrp()
        except OSError:
            return True

    def update(self) -> None:
        """Go raw if input is wanted and we are in the foreground."""
        if self.raw and not self.foreground():
            self.raw = False
        elif not self.raw and self.wants_input and self.foreground():
            try:
                self._saved = termios.tcgetattr(self.tty)
                _set_attributes(self.tty, raw_attributes(termios.tcgetattr(self.tty)))
            except termios.error:
                return
            self.raw = True

    def leave(self) -> None:
        """Put the modes back. In the background they are another's: our shell has set its own."""
        if self.raw and self.foreground():
            try:
                _set_attributes(self.tty, self._saved)
            except termios.error:
                pass
        self.raw = False

    def register(self, poller: "select.poll", reading: bool = True) -> "list[float]":
        """Register what to wait for; returns the times (time.monotonic) at which ``handle`` is to be called
        anyway.

        ``reading`` is false while what was typed before has nowhere to go.
        """
        wanted = {self.out_fd: select.POLLOUT} if self._pending else {}
        if reading and self.raw and self.wants_input:
            # The same number as for output, where nothing could be opened anew.
            wanted[self.in_fd] = wanted.get(self.in_fd, 0) | select.POLLIN
        for fd, events in wanted.items():
            poller.register(fd, events)
        return [monotonic() + LOOK_SECONDS] if self.wants_input and not self.raw else []

    def handle(self, ready: "dict[int, int]") -> bytes:
        """Write what waits and return what was typed."""
        if self._pending and ready.get(self.out_fd, 0) & ~select.POLLIN:
            self.flush()
        if self.raw and self.wants_input and ready.get(self.in_fd, 0) & ~select.POLLOUT:
            return self._read()
        return b""

    def _read(self) -> bytes:
        try:
            untrusted_input = posix.read(self.in_fd, CHUNK)
        except BlockingIOError:
            return b""
        except OSError as error:
            if error.errno == EIO and not self.foreground():
                self.raw = False
                return b""
            untrusted_input = b""
        if not untrusted_input:
            # Hung up. The modes of a terminal that is gone need no restoring, and it is not polled any more.
            self.wants_input = False
        return untrusted_input

    def write(self, data: bytes) -> None:
        """Queue output, and write what the terminal takes without waiting."""
        if self.out_fd >= 0:
            if not self.raw and self._adds_returns():
                data = data.replace(b"\r\n", b"\n")
            self._pending += data
            if not self._blocks:
                self.flush()

    def _adds_returns(self) -> bool:
        """Whether the caller's terminal does what the session's has done already: a CR before each NL."""
        try:
            oflag: int = termios.tcgetattr(self.tty)[OFLAG]
        except termios.error:
            return False
        return oflag & (termios.OPOST | termios.ONLCR) == termios.OPOST | termios.ONLCR

    def full(self) -> bool:
        """Whether so much waits for the terminal that no more is to be produced."""
        return len(self._pending) >= BACKLOG

    def flush(self) -> None:
        """Write once; where a write may block, only call this after POLLOUT."""
        try:
            written = posix.write(self.out_fd, self._pending[: SMALL if self._blocks else CHUNK])
        except BlockingIOError:
            return
        except OSError:
            # Hung up: the program goes on, as its own terminal's HUP decides.
            self.out_fd, self._pending = -1, b""
            return
        self._pending = self._pending[written:]

    def finish(self, deadline: float) -> None:
        """Write all that waits, until ``deadline`` (time.monotonic)."""
        while self._pending and self.out_fd >= 0 and (left := deadline - monotonic()) > 0:
            poller = select.poll()
            poller.register(self.out_fd, select.POLLOUT)
            if poller.poll(int(left * 1000) + 1):
                self.flush()


def raw_attributes(attributes: "list[int | list[bytes | int]]") -> "list[int | list[bytes | int]]":
    """What cfmakeraw(3) does: every byte goes through, nothing is echoed, no key is a signal."""
    iflag, oflag, cflag, lflag, ispeed, ospeed, cc = attributes
    assert isinstance(iflag, int) and isinstance(oflag, int) and isinstance(cflag, int)
    assert isinstance(lflag, int) and isinstance(cc, list)
    iflag &= ~(
        termios.IGNBRK | termios.BRKINT | termios.PARMRK | termios.ISTRIP
        | termios.INLCR | termios.IGNCR | termios.ICRNL | termios.IXON
    )  # fmt: skip
    lflag &= ~(termios.ECHO | termios.ECHONL | termios.ICANON | termios.ISIG | termios.IEXTEN)
    cflag = cflag & ~(termios.CSIZE | termios.PARENB) | termios.CS8
    cc = list(cc)
    cc[termios.VMIN], cc[termios.VTIME] = 1, 0
    return [iflag, oflag & ~termios.OPOST, cflag, lflag, ispeed, ospeed, cc]


def _set_attributes(fd: int, attributes: "list[int | list[bytes | int]]") -> None:
    while True:
        try:
            termios.tcsetattr(fd, termios.TCSADRAIN, attributes)
        except termios.error as error:
            if error.args[0] != EINTR:
                raise
        else:
            return


def _reopen(fd: int, mode: int) -> "tuple[int, bool]":
    """A non-blocking description of a terminal of our own, and False; else ``fd`` itself, and True: it may
    block.

    O_NONBLOCK belongs to the open file description, which the caller's shell shares: it is never set on
    that one.
    """
    try:
        name = b"/proc/self/fd/%d" % fd
        return posix.open(name, mode | posix.O_NONBLOCK | posix.O_NOCTTY), False
    except OSError:
        return fd, True


class Pump:
    """Carries bytes between a Screen and the pty master of a session."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.master_fd = -1
        self._input = b""
        self._look_at_master: float | None = None

    def start(self, master_fd: int) -> None:
        """Take over the master. The window may have changed since its size was sent."""
        self.master_fd = master_fd
        posix.set_blocking(master_fd, False)
        self.resume()

    def resize(self) -> bool:
        """Give the session's terminal the size of the caller's; False if it has that already."""
        try:
            packed = fcntl.ioctl(self.screen.tty, termios.TIOCGWINSZ, bytes(8))
            if fcntl.ioctl(self.master_fd, termios.TIOCGWINSZ, bytes(8)) == packed:
                return False
            fcntl.ioctl(self.master_fd, termios.TIOCSWINSZ, packed)
        except OSError:
            return False
        return True

    def resume(self) -> None:
        """After a start, a stop, or a change of the foreground."""
        self.screen.update()
        self.resize()

    def register(self, poller: "select.poll") -> "list[float]":
        """As Screen.register, and the master."""
        times = self.screen.register(poller, reading=not self._input)
        wanted = select.POLLOUT if self._input else 0
        if self._look_at_master is not None:
            times.append(self._look_at_master)
        elif not self.screen.full():
            wanted |= select.POLLIN
        if wanted:
            poller.register(self.master_fd, wanted)
        return times

    def handle(self, ready: "dict[int, int]") -> None:
        """Move what can be moved."""
        if self.screen.wants_input and not self.screen.raw and self.screen.foreground():
            self.resume()
        self._input += self.screen.handle(ready)
        if self._input:
            self._feed()
        if self._look_at_master is None:
            if ready.get(self.master_fd, 0) & ~select.POLLOUT and not self.screen.full():
                self._take()
        elif monotonic() >= self._look_at_master:
            self._take()

    def _feed(self) -> None:
        try:
            self._input = self._input[posix.write(self.master_fd, self._input) :]
        except BlockingIOError:
            return
        except OSError:
            self._input = b""

    def _take(self) -> bool:
        """Move output once; False if there is none for now."""
        try:
            untrusted_output = posix.read(self.master_fd, CHUNK)
        except BlockingIOError:
            self._look_at_master = None
            return False
        except OSError:
            untrusted_output = b""
        self._look_at_master = None if untrusted_output else monotonic() + REVIVE_SECONDS
        self.screen.write(untrusted_output)
        return bool(untrusted_output)

    def drain(self, seconds: float = DRAIN_SECONDS) -> None:
        """Move all output that is there, for at most ``seconds``: a blocked terminal must not keep a
        session."""
        deadline = monotonic() + seconds
        while monotonic() < deadline and self._take():
            self.screen.finish(deadline)
        self.screen.finish(deadline)
