"""Drives the native programs directly, as the broker does: warrant, slots, packets of docs/protocol.md."""

from __future__ import annotations

import array
import fcntl
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

SECONDS = 10.0
PARKED = 300
"""Descriptors wait above the slots until they are put there: spawn actions run in order."""
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

READY, GO, STARTED, FAILED, STOPPED, CONTINUED, SIGNAL = range(1, 8)

EVERYTHING_VISIBLE = ("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp")
CONFINED = (
    "--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--as-pid-1",
    "--cap-drop", "ALL",
)  # fmt: skip


class Packet(NamedTuple):
    """One packet from the trampoline, the descriptors that came with it and the pid of its sender."""

    kind: int
    a: int
    b: int
    fds: list[int]
    pid: int


def program(name: str) -> Path:
    """The installed native program ``name``."""
    spec = importlib.util.find_spec("ral_helpers")
    assert spec is not None, "ral is not installed"
    assert spec.origin is not None
    path = Path(spec.origin).parent / name
    assert path.exists(), f"{path} was not built: run make develop"
    return path


def memfd(name: str, content: bytes, seals: int = SEALS) -> int:
    """A memfd with ``content`` and ``seals``."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(os.dup(fd), "wb") as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def spawn(path: str, argv: list[str], slots: dict[int, int], environment: dict[str, str]) -> int:
    """Start ``path`` with ``slots`` (number there: descriptor here) and nothing else; its pid."""
    parked = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, PARKED) for number, fd in slots.items()}
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in parked.items()]
    try:
        return os.posix_spawn(
            path,
            argv,
            environment,
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP},
        )
    finally:
        for fd in parked.values():
            os.close(fd)


def wait_status(pid: int, seconds: float = SECONDS) -> int:
    """Exit status of the child ``pid`` (128+n for signal n). AssertionError if it does not end in time."""
    pidfd = os.pidfd_open(pid)
    try:
        assert select.select([pidfd], [], [], seconds)[0], f"process {pid} did not end in {seconds} s"
    finally:
        os.close(pidfd)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


class Sandbox:
    """bwrap with the trampoline as pid 1. A context manager: leaving it closes the lease and reaps bwrap."""

    def __init__(
        self,
        warrant: bytes,
        *,
        seals: int = SEALS,
        options: Sequence[str] = EVERYTHING_VISIBLE,
        ruleset: int = -1,
    ) -> None:
        self.lease, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lease.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.master = -1
        self.init = -1
        """pidfd of the sandbox's pid 1, once it is ready."""
        self._status: int | None = None
        self.status_fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        warrant_fd = memfd("warrant", warrant, seals)
        trampoline_fd = memfd("trampoline", program("trampoline").read_bytes())
        slots = {
            0: null, 1: null, 2: self._errors, 99: warrant_fd, 100: theirs.fileno(), 102: trampoline_fd,
            105: self.status_fd,
        }  # fmt: skip
        if ruleset >= 0:
            slots[101] = ruleset
        argv = ["bwrap", *CONFINED, "--json-status-fd", "105", *options, "--", "/proc/self/fd/102"]
        self.pid = spawn("/usr/bin/bwrap", argv, slots, {})
        self.monitor = os.pidfd_open(self.pid)
        theirs.close()
        for fd in (null, warrant_fd, trampoline_fd):
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.lease.close()
        if self._status is None:
            self.wait()
        for fd in (self.master, self.init, self.monitor, self.status_fd, self._errors):
            if fd >= 0:
                os.close(fd)

    def receive(self, seconds: float = SECONDS) -> Packet | None:
        """The next packet; None when the other end is closed. AssertionError if neither happens in time."""
        assert select.select([self.lease], [], [], seconds)[0], f"no packet in {seconds} s; {self.errors()}"
        try:
            data, controls, flags, _ = self.lease.recvmsg(64, 512, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            # Pid 1 ended with a packet of ours unread.
            return None
        if not data:
            return None
        assert len(data) == 16, data
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        kind, a, b, zero = struct.unpack("<IiiI", data)
        assert zero == 0
        fds = array.array("i")
        pid = -1
        for _, what, content in controls:
            if what == socket.SCM_RIGHTS:
                fds.frombytes(content)
            elif what == socket.SCM_CREDENTIALS:
                pid = struct.unpack("iII", content)[0]
        return Packet(kind, a, b, list(fds), pid)

    def expect(self, kind: int, seconds: float = SECONDS) -> Packet:
        """The next packet, which has to be of ``kind``."""
        packet = self.receive(seconds)
        assert packet is not None, f"the trampoline ended with {self.wait()}: {self.errors()}"
        assert packet.kind == kind, f"{packet}; {self.errors()}"
        return packet

    def ready(self) -> Packet:
        """Wait until the trampoline is confined; takes the master if one came."""
        packet = self.expect(READY)
        self.init = os.pidfd_open(packet.pid)
        if packet.fds:
            [self.master] = packet.fds
        return packet

    def go(self, fds: Sequence[int] = ()) -> None:
        """Let the program start, with these descriptors."""
        self.send(GO, fds=fds)

    def send(self, kind: int, a: int = 0, fds: Sequence[int] = ()) -> None:
        """Send one packet."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.lease.sendmsg([struct.pack("<IiiI", kind, a, 0, 0)], rights)

    def signal(self, number: int) -> None:
        """Ask for a signal to the program's group."""
        self.send(SIGNAL, number)

    def wait(self, seconds: float = SECONDS) -> int:
        """Exit status of bwrap, which is that of the program."""
        if self._status is None:
            self._status = wait_status(self.pid, seconds)
        return self._status

    def ended(self, seconds: float) -> bool:
        """Whether pid 1 of the sandbox ends within this time."""
        return bool(select.select([self.init], [], [], seconds)[0])

    def errors(self) -> str:
        """What bwrap and the trampoline wrote to stderr."""
        return os.pread(self._errors, 65536, 0).decode(errors="backslashreplace")

    def exit_code(self) -> int | None:
        """What bwrap recorded in the status file."""
        for line in os.pread(self.status_fd, 65536, 0).decode().splitlines(keepends=True):
            if line.endswith("\n") and isinstance(code := json.loads(line).get("exit-code"), int):
                return code
        return None


class Output:
    """A pipe whose other end is for a program: reads what it writes."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        self.data = b""

    def close_write(self) -> None:
        """Close our copy of the program's end."""
        os.close(self.write_end)
        self.write_end = -1

    def until_end(self, seconds: float = SECONDS) -> bytes:
        """Everything until the last copy of the program's end is closed."""
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            assert left > 0, f"the pipe stayed open for {seconds} s: {self.data!r}"
            if not select.select([self.read_end], [], [], left)[0]:
                continue
            piece = os.read(self.read_end, 65536)
            if not piece:
                os.close(self.read_end)
                return self.data
            self.data += piece


class Ran(NamedTuple):
    """What became of a program."""

    status: int
    stdout: bytes
    stderr: bytes


def run(warrant: bytes, *, stdin: bytes = b"", options: Sequence[str] = EVERYTHING_VISIBLE) -> Ran:
    """Run a program without a terminal to its end."""
    with Sandbox(warrant, options=options) as sandbox:
        sandbox.ready()
        given = memfd("stdin", stdin)
        out, err = Output(), Output()
        sandbox.go([given, out.write_end, err.write_end])
        os.close(given)
        out.close_write()
        err.close_write()
        first = sandbox.receive()
        assert first is not None
        stdout, stderr = out.until_end(), err.until_end()
        if first.kind == FAILED:
            return Ran(sandbox.wait(), b"", f"failed {first.a} {first.b}".encode())
        assert first.kind == STARTED
        return Ran(sandbox.wait(), stdout, stderr)
