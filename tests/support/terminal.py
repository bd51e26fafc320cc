"""A command on a terminal of its own, driven as a person would: send, expect, resize."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SECONDS = 10.0


class Terminal:
    """Starts ``command`` as the leader of a session whose controlling terminal is a new pty.

    A context manager: on the way out the command is killed and reaped and the pty closed, which hangs up on
    its children.
    """

    def __init__(
        self,
        command: Sequence[str | bytes],
        *,
        cwd: Path,
        env: Mapping[str, str],
        rows: int = 24,
        columns: int = 80,
    ) -> None:
        self.output = b""
        """Everything the command wrote so far."""
        self._expected = 0
        self._status: int | None = None
        self.master, slave = os.openpty()
        self.slave = os.ttyname(slave)
        os.close(slave)
        self.resize(rows, columns)
        # The slave is opened after setsid, which makes it the controlling terminal. env changes the
        # directory, posix_spawn cannot.
        self.pid = os.posix_spawn(
            "/usr/bin/env",
            ["env", "-C", str(cwd), "--", *command],
            dict(env),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, self.slave, os.O_RDWR, 0),
                (os.POSIX_SPAWN_DUP2, 0, 1),
                (os.POSIX_SPAWN_DUP2, 0, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.master)

    def resize(self, rows: int, columns: int) -> None:
        """Change the window; the foreground process group gets SIGWINCH."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def modes(self) -> list[int]:
        """iflag, oflag, cflag and lflag of the terminal (termios(3))."""
        iflag, oflag, cflag, lflag = termios.tcgetattr(self.master)[:4]
        return [iflag, oflag, cflag, lflag]

    def send(self, text: bytes) -> None:
        """Type ``text``."""
        while text:
            text = text[os.write(self.master, text) :]

    def expect(self, pattern: bytes, seconds: float = SECONDS) -> re.Match[bytes]:
        """Wait for ``pattern`` in what came since the last match. AssertionError if it does not come."""
        deadline = time.monotonic() + seconds
        while not (match := re.compile(pattern).search(self.output, self._expected)):
            left = deadline - time.monotonic()
            unseen = self.output[self._expected :]
            assert left > 0, f"not seen in {seconds} s: {pattern!r} in {unseen!r}"
            assert self._read(left), f"the terminal was closed before {pattern!r}: {unseen!r}"
        self._expected = match.end()
        return match

    def _read(self, seconds: float) -> bool:
        if not select.select([self.master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.master, 65536)
        except OSError:
            # EIO: nobody has the slave open.
            return False
        self.output += data
        return bool(data)

    def wait(self, seconds: float = SECONDS) -> int:
        """Read until the command has ended; its exit status, 128+n for signal n, or AssertionError."""
        deadline = time.monotonic() + seconds
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self._status = code if code >= 0 else 128 - code
                break
            assert time.monotonic() < deadline, f"not ended in {seconds} s; its output: {self.output!r}"
            self._read(0.02)
        while select.select([self.master], [], [], 0)[0] and self._read(0):
            pass
        return self._status
