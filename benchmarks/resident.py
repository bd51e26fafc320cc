"""A client that stays: what a library would do for each launch, without an interpreter's start."""

from __future__ import annotations

import array
import os
import select
import socket
from collections.abc import Sequence

import msgspec

from ral_protocol import exits, wire
from ral_protocol.control import AnswerUnion, Started

_decode = msgspec.msgpack.Decoder(AnswerUnion).decode


class Resident:
    """Launches programs in one project through one broker."""

    def __init__(self, runtime: str, project: str) -> None:
        self._path = f"{runtime}/{exits.SOCKET_NAME}"
        self._project = project.encode()
        self._directory = os.open(project, os.O_PATH)
        self._null = os.open("/dev/null", os.O_RDWR)

    def run(self, argv: Sequence[bytes], environment: Sequence[bytes] = (b"PATH=/usr/bin:/bin",)) -> int:
        """Run a program to its end; its exit status."""
        payload = os.memfd_create("payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(payload, wire.pack([list(argv), list(environment)]))
        request = {
            "t": "run",
            "project": self._project,
            "cwd": self._project,
            "terminals": [False, False, False],
        }
        fds = array.array(
            "i", [payload, self._directory, self._directory, self._null, self._null, self._null]
        )
        hello = {"t": "hello", "proto": exits.PROTOCOL, "version": exits.VERSION}
        with socket.socket(socket.AF_UNIX) as broker:
            broker.connect(self._path)
            broker.sendall(wire.frame(wire.pack(hello)))
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)
            broker.sendmsg([wire.frame(wire.pack(request), len(fds))], [rights])
            os.close(payload)
            return self._wait(broker)

    def _wait(self, broker: socket.socket) -> int:
        data, ancillary, _, _ = broker.recvmsg(1 << 16, 256, socket.MSG_CMSG_CLOEXEC)
        answer = _decode(data[wire.HEADER_BYTES :])
        if not isinstance(answer, Started):
            raise SystemExit(f"the broker answered {answer}")
        received = array.array("i")
        received.frombytes(ancillary[0][2])
        status, monitor, init, lease = received
        poll = select.poll()
        poll.register(monitor, select.POLLIN)
        poll.poll()
        last = os.pread(status, 4096, 0).splitlines()[-1]
        for fd in (status, monitor, init, lease):
            os.close(fd)
        code: int = msgspec.json.decode(last)["exit-code"]
        return code
