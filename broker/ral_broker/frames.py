"""Frames and their descriptors on a stream socket (docs/protocol.md, section 1)."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Self

import trio

from ral_broker.errors import RequestError
from ral_protocol import wire

_READ_BYTES = 8192
"""Of one read: a request is small, what is large in it travels in a memory file."""
_ANCILLARY = socket.CMSG_SPACE(wire.MAX_FDS * array.array("i").itemsize)


class Descriptors:
    """The descriptors of one frame. Those that nobody took are closed on exit."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds: deque[int] = deque(fds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._fds:
            os.close(self._fds.popleft())

    def __len__(self) -> int:
        return len(self._fds)

    def take(self) -> int:
        """Return the next descriptor, which is the caller's from now on. RequestError if there is none."""
        if not self._fds:
            raise RequestError("the request came with fewer descriptors than it needs")
        return self._fds.popleft()


class Channel:
    """One connection. Received bytes are untrusted; nothing is decoded here.

    Resource handling: ``close`` closes the socket and every descriptor that was received and not handed out.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._socket = stream.socket
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    @property
    def peer_socket(self) -> trio.socket.SocketType:
        """The socket, for questions about its peer."""
        return self._socket

    async def receive(self) -> tuple[bytes, Descriptors] | None:
        """Return the next frame's body and descriptors; None at the end of the connection.

        Raises RequestError: over-long, truncated, or descriptors that do not add up. wire.WireError: bad
        header.
        """
        while len(self._buffer) < wire.HEADER_BYTES:
            if not await self._read():
                return None
        size, count = wire.parse_header(bytes(self._buffer[: wire.HEADER_BYTES]))
        end = wire.HEADER_BYTES + size
        while len(self._buffer) < end:
            if not await self._read():
                raise RequestError("the connection ended within a frame")
        if count > len(self._fds):
            raise RequestError("a frame announced descriptors that did not come with it")
        untrusted_body = bytes(self._buffer[wire.HEADER_BYTES : end])
        del self._buffer[:end]
        fds = [self._fds.popleft() for _ in range(count)]
        if self._fds and not self._buffer:
            for fd in fds:
                os.close(fd)
            raise RequestError("descriptors came that no frame announced")
        return untrusted_body, Descriptors(fds)

    async def _read(self) -> bool:
        # Not socket.recv_fds: it drops its flags, and the descriptors would be inherited by the next
        # sandbox.
        wanted = socket.MSG_CMSG_CLOEXEC  # wall
        try:
            data, ancillary, flags, _ = await self._socket.recvmsg(_READ_BYTES, _ANCILLARY, wanted)
        except (ConnectionError, trio.ClosedResourceError):
            return False
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                self._fds.extend(numbers)
        if flags & socket.MSG_CTRUNC or len(self._fds) > 2 * wire.MAX_FDS:
            raise RequestError(f"more than {wire.MAX_FDS} descriptors came with one frame")
        self._buffer += data
        return bool(data)

    async def wait_closed(self) -> None:
        """Return when the peer has closed the connection; what it still sends is thrown away."""
        while True:
            self._buffer.clear()
            self._drop_fds()
            if not await self._read():
                return

    async def send(self, body: bytes, fds: Sequence[int] = ()) -> None:
        """Send one frame with copies of ``fds``. The peer may be gone: trio.BrokenResourceError."""
        data = memoryview(wire.frame(body, len(fds)))
        try:
            if fds:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                data = data[await self._socket.sendmsg([data], [rights]) :]
            while data:
                data = data[await self._socket.send(data) :]
        except OSError as error:
            raise trio.BrokenResourceError from error

    def _drop_fds(self) -> None:
        while self._fds:
            os.close(self._fds.popleft())

    def close(self) -> None:
        """Close the connection."""
        self._drop_fds()
        self._socket.close()
