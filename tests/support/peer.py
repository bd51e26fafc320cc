"""A scripted broker: real frames on a real socket, real processes, no sandbox. For tests of the client
alone.

The process tree of a session is kept: a monitor that records the status of an init, which runs the program
on a pty
or on the client's descriptors, holds the far end of the lease and forwards signals, as docs/protocol.md
says.
"""

from __future__ import annotations

import array
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from ral_protocol import wire

INIT = r"""
import fcntl, os, select, signal, socket, struct, sys, termios
lease = socket.socket(fileno=int(sys.argv[1]))
slave, step, error = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
report = int(sys.argv[5])
argv = sys.argv[6:]
FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
             signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH}
for number in range(1, 32):
    if number not in (9, 19):
        signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD, signal.SIGTTOU})
os.setsid()
os.write(report, b"%d\n" % os.getpid())
os.close(report)
if slave:
    terminal = os.open(slave, os.O_RDWR)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
lease.recv(16)
if step < 0:
    sys.exit(1)
if step:
    lease.send(struct.pack("=Iiii", 4, step, error, 0))
    sys.exit(127)
program = os.fork()
if program == 0:
    os.setpgid(0, 0)
    if slave:
        os.tcsetpgrp(terminal, os.getpid())
        os.close(terminal)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    lease.close()
    # Where a sandbox has its pid namespace.
    os.execvp("setpriv", ["setpriv", "--pdeathsig", "KILL", "--", *argv])
if slave:
    os.close(terminal)
null = os.open("/dev/null", os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
lease.send(struct.pack("=Iiii", 3, 0, 0, 0))
# Outlives nobody: the far end of the lease closed ends the session.
poller = select.poll()
poller.register(lease, select.POLLIN)
while True:
    info = signal.sigtimedwait(FORWARDED | {signal.SIGCHLD}, 0.01)
    if info is not None and info.si_signo in FORWARDED:
        try:
            os.killpg(program, info.si_signo)
        except ProcessLookupError:
            pass
    while True:
        pid, status = os.waitpid(program, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if not pid:
            break
        if os.WIFSTOPPED(status):
            lease.send(struct.pack("=Iiii", 5, os.WSTOPSIG(status), 0, 0))
        elif os.WIFCONTINUED(status):
            lease.send(struct.pack("=Iiii", 6, 0, 0, 0))
        else:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
    if poller.poll(0):
        os.killpg(program, signal.SIGKILL)
        os._exit(1)
"""

MONITOR = r"""
import os, subprocess, sys
os.chdir(os.environ["DIRECTORY"])
status = int(sys.argv[1])
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", os.environ["INIT"], *sys.argv[2:]],
close_fds=False)
os.closerange(0, status)
os.closerange(status + 1, 64)
os.write(status, b'{ "child-pid": %d }\n' % child.pid)
code = child.wait()
os.write(status, b'{ "exit-code": %d }\n' % (code if code >= 0 else 128 - code))
"""


class Incoming:
    """One connection of a client: what it sent, and how to answer."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""
        self._fds: list[int] = []

    def receive(self) -> tuple[dict[str, object], list[int]] | None:
        """The next message and its descriptors, None at the end of the stream."""
        while True:
            if len(self._buffer) >= wire.HEADER_BYTES:
                size, count = wire.parse_header(self._buffer[: wire.HEADER_BYTES])
                end = wire.HEADER_BYTES + size
                if len(self._buffer) >= end:
                    body, self._buffer = self._buffer[wire.HEADER_BYTES : end], self._buffer[end:]
                    fds, self._fds = self._fds[:count], self._fds[count:]
                    assert len(fds) == count
                    message = wire.unpack(body)
                    assert isinstance(message, dict)
                    return message, fds
            data, ancillary, _, _ = self.sock.recvmsg(65536, 1024, socket.MSG_CMSG_CLOEXEC)
            for _, _, rights in ancillary:
                numbers = array.array("i")
                numbers.frombytes(rights[: len(rights) - len(rights) % numbers.itemsize])
                self._fds += numbers
            if not data:
                return None
            self._buffer += data

    def answer(self, message: dict[str, object], fds: Iterable[int] = ()) -> None:
        """Send one frame."""
        numbers = list(fds)
        data = wire.frame(wire.pack(message), len(numbers))
        socket.send_fds(self.sock, [data], numbers) if numbers else self.sock.sendall(data)


Handler = Callable[[Incoming, dict[str, object], list[int]], None]


class Peer:
    """Listens at ``control.sock`` of a runtime directory and gives each request to a handler, in a
    thread."""

    def __init__(self, runtime: Path, handler: Handler) -> None:
        self.requests: list[dict[str, object]] = []
        self.hellos: list[dict[str, object]] = []
        self.faults: list[BaseException] = []
        self.connections: list[Incoming] = []
        self._handler = handler
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(runtime / "control.sock"))
        self._listener.listen(8)
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._listener.fileno(), self._stop_read], [], [])
            if self._stop_read in ready:
                return
            sock, _ = self._listener.accept()
            incoming = Incoming(sock)
            self.connections.append(incoming)
            try:
                hello = incoming.receive()
                request = incoming.receive()
                if hello is None or request is None:
                    continue
                self.hellos.append(hello[0])
                self.requests.append(request[0])
                self._handler(incoming, *request)
            except BaseException as fault:
                self.faults.append(fault)
                sock.close()

    def close(self) -> None:
        """Stop listening, close every connection; raises what a handler raised."""
        os.write(self._stop_write, b"x")
        self._thread.join()
        self._listener.close()
        os.close(self._stop_read)
        os.close(self._stop_write)
        for incoming in self.connections:
            incoming.sock.close()
        if self.faults:
            raise self.faults[0]


class Session:
    """Starts the program of a ``run`` request. A handler for Peer."""

    def __init__(self, fail: tuple[int, int] = (0, 0), notices: list[str] | None = None) -> None:
        self.fail = fail
        self.notices = notices or []
        self.payload: list[list[bytes]] = []
        self.fds: list[int] = []
        self.monitor: subprocess.Popen[bytes] | None = None
        self.init_pid = 0
        self.slave = ""
        self.status_path: Path | None = None
        self.before_answer: Callable[[Incoming], None] = lambda incoming: None

    def __call__(self, incoming: Incoming, request: dict[str, object], fds: list[int]) -> None:
        payload_fd, cwd_fd, _, *kept = fds
        payload = wire.unpack(os.pread(payload_fd, 6 << 20, 0))
        assert isinstance(payload, list)
        self.payload = payload
        terminals = request["terminals"]
        assert isinstance(terminals, list)
        master = slave = -1
        if any(terminals):
            master, slave = os.openpty()
            self.slave = os.ttyname(slave)
            self._dress(slave, request)
        numbers = iter(kept)
        standard = {fd: slave if terminals[fd] else next(numbers) for fd in (0, 1, 2)}
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        directory = os.readlink(f"/proc/self/fd/{cwd_fd}")
        status_file = Path(directory) / ".status"
        status_write = os.open(status_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        status_read = os.open(status_file, os.O_RDONLY)
        status_file.unlink()
        report_read, report_write = os.pipe()
        ours = {9: status_write, 10: far.fileno(), 11: report_write}
        lifted = {number: os.dup(fd) for number, fd in (standard | ours).items()}
        moved = {number: self._lift(fd) for number, fd in lifted.items()}
        monitor_pid = os.posix_spawn(
            "/usr/bin/python3",
            [
                "python3",
                "-I",
                "-S",
                "-c",
                MONITOR,
                "9",
                "10",
                self.slave,
                str(self.fail[0]),
                str(self.fail[1]),
                "11",
                *(os.fsdecode(a) for a in self.payload[0]),
            ],
            {**os.environ, "INIT": INIT, "DIRECTORY": directory},
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in moved.items()],
            setsid=True,
        )
        for fd in (*moved.values(), *lifted.values(), status_write, report_write, *kept, payload_fd, cwd_fd):
            os.close(fd)
        far.close()
        if slave >= 0:
            os.close(slave)
        self.monitor_pid = monitor_pid
        with os.fdopen(report_read, "rb") as report:
            self.init_pid = int(report.readline())
        monitor_fd, init_fd = os.pidfd_open(monitor_pid), os.pidfd_open(self.init_pid)
        near.send(struct.pack("=Iiii", 2, 0, 0, 0))
        out = [status_read, monitor_fd, init_fd, near.fileno(), *([master] if master >= 0 else [])]
        started: dict[str, object] = {
            "t": "started",
            "id": "0123abcd",
            "detached": False,
            "terminal": master >= 0,
            "notices": self.notices,
        }
        try:
            self.before_answer(incoming)
            incoming.answer(started, out)
        finally:
            near.detach()
            for fd in out:
                os.close(fd)

    @staticmethod
    def _lift(fd: int) -> int:
        """The same description above every number that is to be set."""
        import fcntl

        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)

    @staticmethod
    def _dress(slave: int, request: dict[str, object]) -> None:
        import fcntl
        import termios

        size, modes = request["size"], request["modes"]
        assert isinstance(size, list)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size))
        if modes is None:
            return
        assert isinstance(modes, list)
        attributes = termios.tcgetattr(slave)
        attributes[:4] = modes[:4]
        attributes[6] = [modes[4][at : at + 1] for at in range(len(attributes[6]))]
        termios.tcsetattr(slave, termios.TCSANOW, attributes)

    def reap(self) -> int:
        """Wait for the monitor; its exit status."""
        return os.waitstatus_to_exitcode(os.waitpid(self.monitor_pid, 0)[1])

    def kill_monitor(self) -> None:
        """As an out-of-memory killer would."""
        os.kill(self.monitor_pid, signal.SIGKILL)


def client_command(*arguments: str, ignored: int = 0) -> list[str]:
    """The client without its launcher, as an isolated interpreter without site."""
    import ral_client

    directory = Path(ral_client.__path__[0])
    return [sys.executable, "-I", "-S", str(directory / "start.py"), hex(ignored), *arguments]
