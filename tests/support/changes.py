"""A sandbox that waits for its go, and orders to the zygote as the broker does not write them."""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from support.native import SEALS, SECONDS, STARTED, Output, Sandbox, memfd, program, spawn, wait_status
from support.running import python, shell

MASK_FILE, MASK_DIRECTORY = 1, 2
CHILD, RESULTS = 1, 2
S_ORDER, S_NAMESPACE, S_HOST, S_OWNER = 1, 3, 4, 5


class Waiting:
    """A sandbox around a directory, before its program starts: the directory is writable inside, and the
    root is read-only. A context manager."""

    def __init__(self, directory: Path, script: str, *, hostile: bool = False) -> None:
        warrant = python(script) if hostile else shell(script)
        options = ("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp")
        place = str(directory)
        self.sandbox = Sandbox(warrant, options=(*options, "--bind", place, place, "--remount-ro", "/"))
        self.init_pid = self.sandbox.ready().pid
        self.namespace = os.open(f"/proc/{self.init_pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self.namespace)
        self.sandbox.__exit__(kind, error, traceback)

    def run(self) -> bytes:
        """Let the program go; what it writes to both outputs until its end."""
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        out = Output()
        self.sandbox.go([null, out.write_end, out.write_end])
        os.close(null)
        out.close_write()
        self.sandbox.expect(STARTED)
        return out.until_end(60)


class Answer(NamedTuple):
    """What became of an order: stage and errno of the whole, and of each item."""

    stage: int
    error: int
    results: list[tuple[int, int]]


def item(
    path: bytes,
    operation: int = MASK_FILE,
    *,
    flags: int = 0,
    device: int = 0,
    inode: int = 0,
    zero: int = 0,
) -> bytes:
    """One item of a list, sound or not."""
    major, minor = os.major(device), os.minor(device)
    return struct.pack("<IIIIQII", operation, flags, major, minor, inode, zero, len(path)) + path


def listed(*items: bytes, count: int | None = None, magic: bytes = b"ral-changes/1", size: int = 0) -> bytes:
    """A list of items, sound or not; ``size`` is added to what it says of its size."""
    body = b"".join(items)
    return struct.pack("<16sII", magic, 24 + len(body) + size, len(items) if count is None else count) + body


class Driven:
    """A zygote that is spoken to in packets. A context manager: it has to end by itself at its end."""

    def __init__(self) -> None:
        self.orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        slots = {0: null, 1: null, 2: null, 3: theirs.fileno()}
        self.pid = spawn(str(program("zygote")), ["ral-zygote"], slots, {})
        os.close(null)
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.orders.close()
        status = wait_status(self.pid)
        assert kind is not None or status == 0, f"the zygote ended with {status}"

    def send(self, packet: bytes, fds: Sequence[int]) -> None:
        """Send one packet with descriptors."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.orders.sendmsg([packet], rights)

    def order(
        self,
        namespace: int,
        content: bytes,
        *,
        seals: int = SEALS,
        milliseconds: int = 5000,
        packet: bytes | None = None,
        more: Sequence[int] = (),
        fewer: int = 0,
    ) -> Answer | None:
        """Give an order and wait for what becomes of it; None if its socket was closed without a word."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        list_fd = memfd("list", content, seals)
        fds = [theirs.fileno(), namespace, list_fd, *more]
        self.send(packet or struct.pack("<IIQ", 1, milliseconds, 0), fds[: len(fds) - fewer])
        theirs.close()
        os.close(list_fd)
        with ours:
            return self._answer(ours)

    def _answer(self, ours: socket.socket) -> Answer | None:
        while True:
            assert select.select([ours], [], [], SECONDS)[0], f"no answer in {SECONDS} s"
            data, controls, _, _ = ours.recvmsg(65536, 256, socket.MSG_CMSG_CLOEXEC)
            for _, _, content in controls:
                for fd in array.array("i", content):
                    os.close(fd)
            if not data:
                return None
            kind, stage, error, count = struct.unpack_from("<IIiI", data)
            if kind == RESULTS:
                results = list(struct.iter_unpack("<Ii", data[16:]))
                assert len(results) == count
                return Answer(stage, error, results)
            assert (kind, stage, error, count, len(controls)) == (CHILD, 0, 0, 0, 1)
