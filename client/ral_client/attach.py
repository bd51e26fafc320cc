"""``ral attach``: the caller's terminal on a detached session (docs/protocol.md, section 4)."""

import _signal
import _socket
import posix
import select
import sys
from time import monotonic

from ral_client.call import (
    FALLBACK,
    Failure,
    ask,
    connect,
    escape,
    open_dir,
    reach,
    refusal,
    runtime_dir,
    say,
)
from ral_client.run import encode_argument
from ral_client.signals import Signals
from ral_client.terminal import DRAIN_SECONDS, Screen
from ral_protocol import exits

PACKET = 32768
"""Bytes of content in one packet at most."""
CTRL_C, CTRL_P, CTRL_Q = 0x03, 0x10, 0x11
RESET = (
    b"\x1b[?25h"  # cursor on
    b"\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1004l"  # no mouse and focus reports
    b"\x1b[?2004l"  # no bracketed paste
    b"\x1b[?1l\x1b>"  # cursor keys and keypad as usual
    b"\x1b7\x1b[r\x1b8\x1b[m"  # scroll the whole screen, which moves the cursor: put it back; plain text
)
"""Undoes the modes that a program may have left on a terminal which it no longer has."""
ALTERNATE = (b"\x1b[?1049", b"\x1b[?1047", b"\x1b[?47")
"""Beginnings of the sequences that enter (h) and leave (l) the alternate screen."""


class AlternateScreen:
    """Knows from the output whether the terminal shows its alternate screen. Leaving it where it is not
    shown would put the cursor where it was saved some other time."""

    def __init__(self) -> None:
        self.shown = False
        self._tail = b""

    def feed(self, output: bytes) -> None:
        """Look at the next piece of output."""
        text = self._tail + output
        last = -1
        for sequence in ALTERNATE:
            for letter, shown in ((b"h", True), (b"l", False)):
                at = text.rfind(sequence + letter)
                if at > last:
                    last, self.shown = at, shown
        self._tail = text[-8:]

    def leave(self) -> bytes:
        """What brings the main screen back, if it is away."""
        return b"\x1b[?1049l" if self.shown else b""


class DetachKeys:
    """Finds Ctrl-P Ctrl-Q in what is typed."""

    def __init__(self) -> None:
        self._held = False

    def feed(self, typed: bytes) -> "tuple[bytes, bool]":
        """Return what the program is to get, and whether the keys came. A Ctrl-P waits for the byte after
        it."""
        out = bytearray()
        for byte in typed:
            if self._held and byte == CTRL_Q:
                return bytes(out), True
            if self._held:
                out.append(CTRL_P)
            self._held = byte == CTRL_P
            if not self._held:
                out.append(byte)
        return bytes(out), False


def attach(options: "dict[str, str]", session: str, ignored: int) -> int:
    """Attach to a session; returns 0 after detaching, else the exit status of the program."""
    read_only = "read-only" in options
    terminals = tuple(posix.isatty(fd) for fd in (0, 1, 2))
    if not read_only and not (terminals[0] and terminals[1]):
        raise Failure(
            "not attached: input and output are not a terminal; --read-only shows the output anyway",
            exits.FAILED,
        )
    identity, holder_fd = find_holder(session)
    return Attached(identity, holder_fd, terminals, read_only, Signals(ignored)).wait()


def find_holder(prefix: str) -> "tuple[str, int]":
    """The id that ``prefix`` names and a connection to its holder, through the broker or, without one, by
    itself."""
    connection = reach(start=False)
    if connection is None:
        found = _find_socket(prefix)
        if found is not None:
            return found
    else:
        connection.close()
    _, answer = ask({"t": "attach", "session": prefix})
    if answer.kind != "attach_to":
        raise refusal(answer, exits.FAILED)
    if not answer.fds:
        raise Failure("not attached: the broker sent no connection to the session", exits.FAILED)
    return answer.text("id"), answer.fds[0]


def _open_sessions() -> "int | None":
    runtime = runtime_dir()
    if runtime.startswith(FALLBACK) and exits.RUNTIME_VARIABLE.encode() not in posix.environ:
        # On such a host only the socket is in /tmp; what describes sessions is in the home directory.
        import pwd

        try:
            home = encode_argument(pwd.getpwuid(posix.getuid()).pw_dir)
        except KeyError:
            home = posix.environ.get(b"HOME", b"/")
        state = posix.environ.get(b"XDG_STATE_HOME") or home + b"/.local/state"
        return open_dir(state + b"/ral/sessions")
    runtime_fd = open_dir(runtime)
    return None if runtime_fd is None else open_dir(exits.SESSIONS_DIR.encode(), runtime_fd)


def _find_socket(prefix: str) -> "tuple[str, int] | None":
    sessions_fd = _open_sessions()
    if sessions_fd is None:
        return None
    names = [
        name for name in posix.listdir(sessions_fd) if name.startswith(prefix) and name.endswith(".sock")
    ]
    if len(names) > 1:
        ids = ", ".join(escape(name[:-5]) for name in sorted(names))
        raise Failure(f"not attached: {prefix} is the beginning of more than one id: {ids}", exits.FAILED)
    sock = connect(sessions_fd, names[0].encode(), _socket.SOCK_SEQPACKET) if names else None
    posix.close(sessions_fd)
    return None if sock is None else (names[0][:-5], sock.detach())


class Attached:
    """One attachment. The terminal's modes are put back however it ends."""

    def __init__(
        self, identity: str, holder_fd: int, terminals: "tuple[bool, ...]", read_only: bool, signals: Signals
    ) -> None:
        self.identity = identity
        self.holder = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, holder_fd)
        self.read_only = read_only
        self.signals = signals
        signals.started = True
        self.screen = Screen(terminals, always=True) if True in terminals else None
        self.to_screen = terminals[1]
        self.keys = DetachKeys()
        self.alternate = AlternateScreen()
        self.status: int | None = None
        self.granted = self.detached = False

    def wait(self) -> int:
        """Attach and stay until the program ends, the user detaches or a signal comes; returns the exit
        status."""
        size = self.screen.size() if self.screen is not None else [0, 0, 0, 0]
        self.holder.send(b"A" + bytes((self.read_only,)) + _pack_size(size))
        try:
            while self.status is None:
                self._turn()
        finally:
            if self.screen is not None:
                if self.granted and self.to_screen:
                    self.screen.write(RESET + self.alternate.leave() + b"\r\n" * self.detached)
                self.screen.finish(monotonic() + DRAIN_SECONDS)
                self.screen.leave()
        if self.detached:
            say(f"detached from {self.identity}")
        return self.status

    def _turn(self) -> None:
        poller = select.poll()
        poller.register(self.signals.fd, select.POLLIN)
        screen = self.screen
        times = screen.register(poller) if screen is not None else []
        timeout = max(0, int(1000 * (min(times) - monotonic()) + 1)) if times else None
        if screen is None or not screen.full():
            poller.register(self.holder.fileno(), select.POLLIN)
        ready = dict(poller.poll(timeout))
        if self.signals.fd in ready:
            for number in self.signals.pending():
                self._signalled(number)
        if screen is not None:
            screen.update()
            typed = screen.handle(ready)
            if typed and self.status is None:
                self._typed(typed)
        if self.holder.fileno() in ready and self.status is None:
            self._packet()

    def _typed(self, typed: bytes) -> None:
        data, detach = self.keys.feed(typed)
        if self.read_only:
            # There is nobody to interrupt but the watcher.
            detach = detach or CTRL_C in data
            data = b""
        try:
            for at in range(0, len(data), PACKET):
                self.holder.send(b"I" + data[at : at + PACKET])
        except OSError:
            # Its last packets say why; they are still to be read.
            return
        if detach:
            self._detach(exits.OK)

    def _detach(self, status: int) -> None:
        self.status, self.detached = status, True

    def _line_end(self) -> str:
        return "\r\n" if self.screen is not None and self.screen.raw else "\n"

    def _signalled(self, number: int) -> None:
        if number == _signal.SIGWINCH and self.screen is not None and not self.read_only:
            try:
                self.holder.send(b"W" + _pack_size(self.screen.size()))
            except OSError:
                return
        elif number == _signal.SIGCONT and self.screen is not None:
            self.screen.update()
        elif number == _signal.SIGTSTP:
            if self.screen is not None:
                self.screen.leave()
            self.signals.suspend(posix.getpid(), _signal.SIGSTOP)
            if self.screen is not None:
                self.screen.update()
        elif number == _signal.SIGINT and self.read_only:
            self._detach(exits.OK)
        elif number in (_signal.SIGHUP, _signal.SIGINT, _signal.SIGTERM, _signal.SIGQUIT):
            self._detach(exits.SIGNALLED + number)

    def _packet(self) -> None:
        try:
            untrusted_packet = self.holder.recv(PACKET + 1)
        except ConnectionResetError:
            return
        kind, content = untrusted_packet[:1], untrusted_packet[1:]
        if kind == b"O":
            if self.screen is not None and self.to_screen:
                self.alternate.feed(content)
                self.screen.write(content)
            else:
                _put_all(content)
        elif kind == b"H" and content == b"\0":
            self.granted = True
            if self.screen is not None:
                self.screen.update()
        elif kind == b"H":
            raise Failure(
                f"not attached: another client has session {self.identity}; --read-only watches it",
                exits.FAILED,
            )
        elif kind == b"T":
            say("the program was stopped by a signal; `ral kill --signal CONT "
                f"{self.identity}` continues it", self._line_end())  # fmt: skip
        elif kind == b"X" and len(content) == 5:
            self.status = int.from_bytes(content[:4], sys.byteorder, signed=True)
            if content[4]:
                say(f"session {self.identity} lost: nobody could record its exit status", self._line_end())
        elif not untrusted_packet:
            self.status = exits.LOST
            say(f"session {self.identity} lost: its holder closed without an exit status", self._line_end())


def _put_all(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[posix.write(1, view) :]


def _pack_size(size: "list[int]") -> bytes:
    return b"".join(number.to_bytes(2, "little") for number in size)
