"""A detached session: a sandbox whose terminal and lease a holder has, and clients of the holder."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import pytest

from ral_broker.envelope.warrant import Warrant, encode
from support.native import SECONDS, STARTED, Sandbox, memfd, program, spawn, wait_status

ID = "0badcafe"
ENVIRONMENT = (b"PATH=/usr/bin:/bin", b"TERM=xterm", b"PS1=$ ", b"LC_ALL=C")


class End(NamedTuple):
    """What the holder said of the session's end."""

    status: int
    lost: bool


class Viewer:
    """A client of the holder, on the level of packets."""

    def __init__(
        self,
        path: Path,
        *,
        read_only: bool = False,
        rows: int = 24,
        columns: int = 80,
        first: bytes | None = None,
    ) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(str(path))
        self.output = b""
        self.stops: list[int] = []
        self.end: End | None = None
        self.greeting: int | None = None
        self.closed = False
        self._expected = 0
        self.send(first or struct.pack("<cBHHHH", b"A", read_only, rows, columns, 0, 0))

    def send(self, packet: bytes) -> None:
        """Send one packet."""
        self.socket.send(packet)

    def type(self, text: bytes) -> None:
        """Send input."""
        self.send(b"I" + text)

    def resize(self, rows: int, columns: int) -> None:
        """Change the window."""
        self.send(struct.pack("<cHHHH", b"W", rows, columns, 0, 0))

    def take(self, seconds: float) -> bool:
        """Take one packet if one comes in time."""
        if self.closed or not select.select([self.socket], [], [], seconds)[0]:
            return False
        try:
            packet = self.socket.recv(65536)
        except ConnectionResetError:
            packet = b""
        kind, content = packet[:1], packet[1:]
        if not packet:
            self.closed = True
        elif kind == b"H":
            assert self.greeting is None
            [self.greeting] = content
        elif kind == b"O":
            assert self.greeting == 0
            self.output += content
        elif kind == b"T":
            self.stops.append(content[0])
        else:
            assert kind == b"X", packet
            status, lost = struct.unpack("<iB", content)
            self.end = End(status, bool(lost))
        return True

    def expect(self, pattern: bytes, seconds: float = SECONDS) -> re.Match[bytes]:
        """Wait for ``pattern`` in the output since the last match."""
        deadline = time.monotonic() + seconds
        while not (match := re.compile(pattern, re.DOTALL).search(self.output, self._expected)):
            left = deadline - time.monotonic()
            assert left > 0, (
                f"not seen in {seconds} s: {pattern!r} in {self.output[self._expected :][-2000:]!r}"
            )
            self.take(left)
            assert not self.closed, f"closed before {pattern!r}: {self.output[self._expected :][-2000:]!r}"
        self._expected = match.end()
        return match

    def wait_greeting(self) -> int:
        """What the holder answered: 0 attached."""
        while self.greeting is None:
            assert self.take(SECONDS), "no greeting"
            assert not self.closed, "closed without a greeting"
        return self.greeting

    def wait_end(self, seconds: float = SECONDS) -> End | None:
        """Read until the holder closes; what it said of the end."""
        deadline = time.monotonic() + seconds
        while not self.closed:
            left = deadline - time.monotonic()
            assert left > 0, f"the holder did not close in {seconds} s"
            self.take(left)
        return self.end

    def quiet(self, seconds: float) -> bytes:
        """What comes within this time."""
        before = len(self.output)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not self.closed:
            self.take(left)
        return self.output[before:]

    def close(self) -> None:
        """Detach."""
        self.socket.close()


class Detached:
    """A sandbox that runs ``argv`` on a terminal, given to a holder. A context manager that ends both."""

    def __init__(
        self,
        directory: Path,
        argv: Sequence[bytes],
        environment: Sequence[bytes] = ENVIRONMENT,
        status: bytes | None = None,
    ) -> None:
        """``status`` stands in for what bwrap writes to the status file."""
        self.directory = directory
        self.path = directory / f"{ID}.sock"
        self.log = directory / f"{ID}.log"
        warrant = Warrant(argv=tuple(argv), environment=tuple(environment), terminals=(True, True, True))
        self.sandbox = Sandbox(encode(warrant))
        self.sandbox.ready()
        self.sandbox.go()
        self.sandbox.expect(STARTED)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(self.path))
        self.listener.listen(16)
        written = self.sandbox.status_fd if status is None else memfd("status", status)
        self.status_fd = os.open(f"/proc/self/fd/{written}", os.O_RDONLY | os.O_CLOEXEC)
        if status is not None:
            os.close(written)
        self._viewers: list[Viewer] = []
        self._status: int | None = None
        directory_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self.errors_fd = memfd("errors", b"", 0)
        executable = os.open(program("holder"), os.O_PATH | os.O_CLOEXEC)
        slots = {
            0: null, 1: null, 2: self.errors_fd, 3: self.sandbox.master, 4: self.sandbox.lease.fileno(),
            5: self.sandbox.monitor, 6: self.sandbox.init, 7: self.status_fd, 8: self.listener.fileno(),
            9: directory_fd,
        }  # fmt: skip
        self.pid = spawn(f"/proc/self/fd/{executable}", ["ral-holder", ID], slots, {})
        for fd in (null, directory_fd, executable, self.status_fd):
            os.close(fd)
        self.listener.close()
        self.sandbox.lease.close()
        os.close(self.sandbox.master)
        self.sandbox.master = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for viewer in self._viewers:
            viewer.close()
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
        self.sandbox.__exit__(None, None, None)
        os.close(self.errors_fd)

    def attach(self, *, read_only: bool = False, rows: int = 24, columns: int = 80) -> Viewer:
        """Connect a client."""
        viewer = Viewer(self.path, read_only=read_only, rows=rows, columns=columns)
        self._viewers.append(viewer)
        return viewer

    def wait(self, seconds: float = SECONDS) -> int:
        """Exit status of the holder."""
        if self._status is None:
            self._status = wait_status(self.pid, seconds)
        return self._status

    def logged(self) -> bytes:
        """The newer log file."""
        try:
            return self.log.read_bytes()
        except FileNotFoundError:
            # Not made yet, or being rotated.
            return b""

    def wait_logged(self, pattern: bytes, seconds: float = SECONDS) -> None:
        """Wait until the program has written ``pattern``, going by the log."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.logged(), re.DOTALL):
            tail = self.logged()[-2000:]
            assert time.monotonic() < deadline, f"not logged in {seconds} s: {pattern!r} in {tail!r}"
            time.sleep(0.01)


class Sessions:
    """Starts detached sessions in a directory. A context manager: leaving it ends them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._opened: list[Detached] = []

    def __call__(self, script: str | None = None, *argv: bytes) -> Detached:
        """Run a script for sh, or without one ``argv``."""
        command = argv if script is None else (b"sh", b"-c", script.encode())
        self._opened.append(Detached(self._directory, command))
        return self._opened[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for session in self._opened:
            session.__exit__(None, None, None)


def attach_when_free(session: Detached) -> Viewer:
    """Attach after another client has left, which the holder sees a moment later."""
    for _ in range(100):
        viewer = session.attach()
        if viewer.wait_greeting() == 0:
            return viewer
        time.sleep(0.01)
    pytest.fail("the place of the writer did not become free")
