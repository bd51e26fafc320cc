"""One conversation with the broker: the runtime directory, the socket, frames with descriptors, answers.

On the path of every command, so it imports nothing that a bare interpreter does not already hold.
"""

import _socket
import posix
import sys

from ral_client.answer import Answer
from ral_protocol import exits, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT = 60.0
"""Seconds without a byte from the broker before it is given up. A launch behind a dead network file system
is slow."""
FALLBACK = b"/tmp/ral-"
"""Beginning of the runtime directory's name where the host has none for the user."""
RESTARTS = 50
"""Attempts, a fifth of a second apart, to reach a broker that executes itself anew."""


class Failure(Exception):
    """The command ends here: ``message`` goes to standard error (nothing if empty), ``status`` is the exit
    status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


def put(fd: int, data: bytes) -> None:
    """Write all of ``data``. Nobody there to read it is no error (the client ignores SIGPIPE).

    Raises Failure when standard output takes no more (a full disk): what was asked for is not there.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[posix.write(fd, view) :]
        except BrokenPipeError:
            return
        except OSError as error:
            if fd == 1:
                reason = posix.strerror(error.errno or 0)
                raise Failure(f"standard output cannot be written: {reason}", exits.FAILED) from None
            return


def escape(untrusted: "bytes | str") -> str:
    """Text for a terminal: what is not UTF-8, not printable, or changes the direction of writing becomes an
    escape."""
    text = untrusted if isinstance(untrusted, str) else untrusted.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def say(text: str, end: str = "\n") -> None:
    """Write one diagnostic to standard error."""
    lines = [escape(line) for line in text.split("\n")]
    put(2, f"ral: {end.join(lines)}{end}".encode())


class Connection:
    """Frames over the control socket (docs/protocol.md, section 1)."""

    def __init__(self, sock: "_socket.socket") -> None:
        self.sock = sock
        self.sock.settimeout(TIMEOUT)
        self._buffer = b""
        self._fds: list[int] = []

    def send(self, message: "dict[str, object]", fds: "tuple[int, ...]" = ()) -> None:
        """Send one frame; the descriptors are attached to its first byte. A peer that has gone is found by
        reading."""
        data = wire.frame(wire.pack(message), len(fds))
        rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
        ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if fds else []
        try:
            sent = self.sock.sendmsg([data], ancillary, _socket.MSG_NOSIGNAL)
            if sent < len(data):
                self.sock.sendall(data[sent:], _socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            return

    def fill(self) -> bool:
        """Receive what is there. False at the end of the stream; TimeoutError or BlockingIOError as set on
        the socket.

        ``socket.recv_fds`` drops its flags: descriptors must be received close-on-exec, so recvmsg it is.
        """
        try:
            data, ancillary, flags, _ = self.sock.recvmsg(
                65536, _socket.CMSG_SPACE(4 * wire.MAX_FDS), _socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return False
        for level, kind, rights in ancillary:
            if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                for at in range(0, len(rights) - 3, 4):
                    self._fds.append(int.from_bytes(rights[at : at + 4], sys.byteorder))
        if flags & _socket.MSG_CTRUNC:
            raise wire.WireError("more descriptors than a frame may carry")
        self._buffer += data
        return bool(data)

    def pop(self) -> "Answer | None":
        """The next message that has arrived whole."""
        if len(self._buffer) < wire.HEADER_BYTES:
            return None
        size, count = wire.parse_header(self._buffer[: wire.HEADER_BYTES])
        if count > len(self._fds):
            raise wire.WireError("a frame came without its descriptors")
        end = wire.HEADER_BYTES + size
        if len(self._buffer) < end:
            return None
        body, self._buffer = self._buffer[wire.HEADER_BYTES : end], self._buffer[end:]
        fds, self._fds = self._fds[:count], self._fds[count:]
        if self._fds and not self._buffer:
            raise wire.WireError("descriptors came without a frame")
        return Answer(wire.unpack(body), fds)

    def receive(self) -> Answer:
        """The next message. Raises Failure when the broker goes or says nothing for TIMEOUT seconds."""
        while True:
            answer = self.pop()
            if answer is not None:
                return answer
            try:
                alive = self.fill()
            except TimeoutError:
                raise Failure(
                    "no answer from the broker: it has said nothing for a minute; see `ral broker status`",
                    exits.UNAVAILABLE,
                ) from None
            if not alive:
                raise Failure(
                    "no answer from the broker: it closed the connection; see broker.log or the journal",
                    exits.UNAVAILABLE,
                )

    def close(self) -> None:
        """Close the socket; the broker ends a session whose client does that."""
        self.sock.close()


def runtime_dir() -> bytes:
    """The name of the runtime directory; it may not exist yet. The broker chooses by the same rule."""
    named = posix.environ.get(exits.RUNTIME_VARIABLE.encode(), b"")
    if named:
        if not named.startswith(b"/"):
            raise Failure(
                f"{exits.RUNTIME_VARIABLE} refused: {escape(named)} is not an absolute path",
                exits.UNAVAILABLE,
            )
        return named
    uid = posix.getuid()
    for base in (posix.environ.get(b"XDG_RUNTIME_DIR", b""), b"/run/user/%d" % uid):
        # After su and sudo the variable may name another user's.
        try:
            if base.startswith(b"/") and posix.stat(base).st_uid == uid:
                return base.rstrip(b"/") + b"/ral"
        except OSError:
            continue
    return b"%b%d" % (FALLBACK, uid)


def open_dir(path: bytes, dir_fd: "int | None" = None) -> "int | None":
    """Open a directory that must be ours alone; None if it does not exist. Raises Failure with the
    reason."""
    name = escape(path)
    try:
        fd = posix.open(path, posix.O_RDONLY | posix.O_DIRECTORY | posix.O_NOFOLLOW, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        # Late: the module costs more than everything else that is done here.
        from errno import EACCES, ELOOP, ENOTDIR

        reason = posix.strerror(error.errno or 0)
        if error.errno in (ENOTDIR, ELOOP):
            reason = "it is not a directory (a symbolic link is not followed)"
        elif error.errno == EACCES:
            reason = "permission denied; is it another user's?"
        raise Failure(f"runtime directory {name} refused: {reason}", exits.UNAVAILABLE) from None
    status = posix.fstat(fd)
    if status.st_uid != posix.getuid():
        reason = f"it belongs to uid {status.st_uid}, not to you (uid {posix.getuid()})"
    elif status.st_mode & 0o077:
        reason = f"others may enter it (mode {status.st_mode & 0o7777:04o}); chmod 700 it"
    else:
        return fd
    posix.close(fd)
    raise Failure(f"runtime directory {name} refused: {reason}", exits.UNAVAILABLE)


def connect(dir_fd: int, name: bytes, kind: int = _socket.SOCK_STREAM) -> "_socket.socket | None":
    """Connect to a socket in an opened directory; None if nobody listens there. Raises Failure."""
    sock = _socket.socket(_socket.AF_UNIX, kind)
    try:
        sock.connect(b"/proc/self/fd/%d/%b" % (dir_fd, name))
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise Failure(
            f"{escape(name)} cannot be reached: {posix.strerror(error.errno or 0)}", exits.UNAVAILABLE
        ) from None
    peer_uid = sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)[4:8]
    if int.from_bytes(peer_uid, sys.byteorder) != posix.getuid():
        sock.close()
        raise Failure(f"{escape(name)} refused: another user listens there", exits.UNAVAILABLE)
    return sock


def session_around() -> "str | None":
    """The id of the session this process runs inside of, or None."""
    try:
        return escape(posix.readlink(exits.SESSION_MARKER.encode()))
    except OSError:
        named = posix.environ.get(exits.SESSION_VARIABLE.encode())
        return escape(named) if named else None


def reach(start: bool = True) -> "Connection | None":
    """A connection to the broker, which is started if need be; without ``start`` None if there is none.

    Raises Failure: 78 inside a session, 69 if there is no way.
    """
    try:
        path = runtime_dir()
        dir_fd = open_dir(path)
        sock = None if dir_fd is None else connect(dir_fd, exits.SOCKET_NAME.encode())
        if dir_fd is not None:
            posix.close(dir_fd)
    except Failure as failure:
        if session_around() is None:
            raise
        path, sock, why = b"", None, f" ({failure.message})"
    else:
        why = ""
    if sock is None and start:
        session = session_around()
        if session is not None:
            raise Failure(
                f"not started: this is already inside session {session}, "
                f"where no broker can be reached{why}; "
                "run the command directly, or ral from outside",
                exits.REFUSED,
            )
        from ral_client.spawn import start_broker

        sock = start_broker(path)
    return None if sock is None else Connection(sock)


def ask(
    request: "dict[str, object]",
    fds: "tuple[int, ...]" = (),
    meanwhile: "Callable[[], object] | None" = None,
) -> "tuple[Connection, Answer]":
    """Say hello, send one request, return the connection and the first answer.

    ``meanwhile`` is called while the broker works.

    A broker that is older than this client executes itself anew and is asked again. A refusal is returned,
    not raised.
    """
    older = ""
    for attempt in range(RESTARTS):
        connection = reach(start=not older or attempt > RESTARTS // 2)
        if connection is not None:
            try:
                answer = _first_answer(connection, request, fds, meanwhile)
            except Failure:
                if not older:
                    raise
            else:
                if answer.kind != "restarting":
                    return connection, answer
                older = answer.text("version")
            connection.close()
        # Only an update of the package comes here, so the import is not on the common path.
        from time import sleep

        sleep(0.2)
    raise Failure(
        f"the broker is older than this client: {escape(older)} against {exits.VERSION}, "
        "also after it executed itself anew; see `ral broker stop`",
        exits.UNAVAILABLE,
    )


def _first_answer(
    connection: Connection,
    request: "dict[str, object]",
    fds: "tuple[int, ...]",
    meanwhile: "Callable[[], object] | None",
) -> Answer:
    connection.send({"t": "hello", "proto": exits.PROTOCOL, "version": exits.VERSION})
    connection.send(request, fds)
    if meanwhile is not None:
        meanwhile()
    return connection.receive()


def refusal(answer: Answer, status: "int | None" = None) -> Failure:
    """The Failure for a ``refused`` answer, or for one that this client does not know."""
    if answer.kind == "refused":
        return Failure(answer.text("message"), answer.number("status") if status is None else status)
    return Failure(
        f"the broker's answer is not understood: {escape(answer.kind)}", status or exits.UNAVAILABLE
    )
