"""Connections to the control socket: who may ask, frame by frame, and what becomes of each kind of error."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

import msgspec
import trio

from ral_broker.errors import RalError, RequestError
from ral_broker.frames import Channel, Descriptors
from ral_broker.log import logger
from ral_broker.peers import Peer, identified, own_namespaces
from ral_protocol import exits, wire
from ral_protocol.control import Answer, Hello, Refused, Request, Restarting

HELLO_SECONDS = 5.0
"""Deadline of a connection's first frames: a client sends them at once."""

SEND_SECONDS = 10.0
"""Deadline of one answer: a client that does not read is dropped."""

MAX_CONNECTIONS = 512

_decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_encode = msgspec.msgpack.Encoder().encode


class Connection:
    """One client: its channel, and who it is."""

    def __init__(self, channel: Channel, peer: Peer) -> None:
        self.channel, self.peer = channel, peer

    async def answer(self, message: Answer, fds: tuple[int, ...] = ()) -> None:
        """Send one answer with copies of ``fds``.

        Raises trio.BrokenResourceError if the client is gone, trio.TooSlowError if it does not read.
        """
        with trio.fail_after(SEND_SECONDS):
            await self.channel.send(_encode(message), fds)


Handler = Callable[[Connection, Request, Descriptors], Awaitable[None]]


class Listener:
    """Serves the control socket until its scope is cancelled."""

    def __init__(self, handle: Handler, restart: Callable[[], None]) -> None:
        self._handle, self._restart = handle, restart
        self._own = own_namespaces()
        self._room = trio.CapacityLimiter(MAX_CONNECTIONS)

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections for ever; a lack of descriptors or memory is waited out."""
        await trio.serve_listeners(
            self._serve_one, [trio.SocketListener(trio.socket.from_stdlib_socket(listener))]
        )

    async def _serve_one(self, stream: trio.SocketStream) -> None:
        channel = Channel(stream)
        try:
            async with self._room:
                await self._converse(channel)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            pass  # the client is gone or does not read: nobody is left to be told
        # The one place where a fault of ours is caught: it must end this connection and no other.
        except Exception:  # noqa: BLE001
            logger.exception("a fault of the broker; the connection is dropped")
            with trio.move_on_after(1):
                await _tell(
                    channel, Refused("internal", "a fault of the broker; its log has more", exits.REFUSED)
                )
        finally:
            channel.close()

    async def _converse(self, channel: Channel) -> None:
        try:
            with identified(channel.peer_socket, self._own) as peer:
                connection = Connection(channel, peer)
                with trio.fail_after(HELLO_SECONDS):
                    if not await self._greet(connection):
                        return
                    received = await channel.receive()
                while received is not None:
                    untrusted_body, fds = received
                    with fds:
                        await self._handle(connection, _decode(untrusted_body), fds)
                    received = await channel.receive()
        except (RequestError, wire.WireError) as error:
            logger.warning("a client is at fault: %s", error)
            await _tell(channel, Refused("request", str(error), exits.REFUSED))
        except RalError as error:
            logger.info("refused: %s", error)
            await _tell(channel, Refused(error.kind, error.message, error.status))

    async def _greet(self, connection: Connection) -> bool:
        received = await connection.channel.receive()
        if received is None:
            return False
        untrusted_body, fds = received
        with fds:
            try:
                hello = _decode_hello(untrusted_body)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                raise RequestError(f"the first frame is no greeting: {error}") from error
        if version_key(hello.version) > version_key(exits.VERSION):
            await connection.answer(Restarting(exits.VERSION))
            logger.info("a client of version %s asks for a restart", hello.version)
            self._restart()
            return False
        if hello.proto != exits.PROTOCOL:
            raise RequestError(
                f"this broker speaks protocol {exits.PROTOCOL} (version {exits.VERSION}) and the client "
                f"{hello.proto}; install one version of ral, or run ral broker stop"
            )
        return True


def version_key(version: str) -> tuple[int, ...]:
    """Return the numbers of a version for comparison. Raises RequestError."""
    try:
        return tuple(int(part) for part in version.split("."))
    except ValueError as error:
        raise RequestError(f"{version[:64]!r} is no version") from error


def _decode(untrusted_body: bytes) -> Request:
    try:
        return _decode_request(untrusted_body)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise RequestError(f"the request cannot be decoded: {error}") from error


async def _tell(channel: Channel, refused: Refused) -> None:
    try:
        with trio.move_on_after(SEND_SECONDS):
            await channel.send(_encode(refused))
    except trio.BrokenResourceError:
        pass
