"""Sandboxes with a program in them, as the tests of the trampoline need them."""

from __future__ import annotations

import os
import re
import select
import time
from typing import Self

import pytest

from ral_broker.envelope.warrant import Warrant, encode
from support.native import STARTED, Output, Sandbox

PATH = b"PATH=/usr/bin:/bin"
PYTHON = "/usr/bin/python3"
ON_TERMINAL = (True, True, True)


def shell(
    script: str,
    *,
    umask: int = 0o022,
    limits: tuple[tuple[int, int, int], ...] = (),
    ruleset: bool = False,
    terminals: tuple[bool, bool, bool] = (False, False, False),
) -> bytes:
    """A warrant for a script."""
    warrant = Warrant(
        argv=(b"sh", b"-c", script.encode()),
        environment=(PATH, b"LC_ALL=C"),
        umask=umask,
        limits=limits,
        ruleset=ruleset,
        terminals=terminals,
    )
    return encode(warrant)


def python(script: str, *, terminals: tuple[bool, bool, bool] = (False, False, False)) -> bytes:
    """A warrant for a Python script."""
    argv = (PYTHON.encode(), b"-I", b"-u", b"-c", script.encode())
    return encode(Warrant(argv=argv, environment=(PATH,), terminals=terminals))


class Typed:
    """A sandbox with a terminal: what it shows."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.output = b""
        self._at = 0
        sandbox.ready()
        sandbox.go()
        sandbox.expect(STARTED)

    def type(self, text: bytes) -> None:
        os.write(self.sandbox.master, text)

    def expect(self, pattern: bytes, seconds: float = 10) -> re.Match[bytes]:
        deadline = time.monotonic() + seconds
        while not (match := re.compile(pattern, re.DOTALL).search(self.output, self._at)):
            left = deadline - time.monotonic()
            assert left > 0, f"not seen: {pattern!r} in {self.output[self._at :]!r}"
            if select.select([self.sandbox.master], [], [], left)[0]:
                try:
                    self.output += os.read(self.sandbox.master, 65536)
                except OSError:
                    pytest.fail(f"the terminal closed before {pattern!r}: {self.output[self._at :]!r}")
        self._at = match.end()
        return match


class Running:
    """A program without a terminal, its output as it comes."""

    def __init__(self, warrant: bytes) -> None:
        self.sandbox = Sandbox(warrant)
        self.sandbox.ready()
        self.out = Output()
        self.sandbox.go([self.sandbox.status_fd, self.out.write_end, self.out.write_end])
        self.out.close_write()
        self.sandbox.expect(STARTED)

    def line(self, seconds: float = 10) -> bytes:
        """The next line."""
        while b"\n" not in self.out.data:
            assert select.select([self.out.read_end], [], [], seconds)[0], f"no line: {self.out.data!r}"
            piece = os.read(self.out.read_end, 4096)
            assert piece, f"the program closed its output: {self.out.data!r}"
            self.out.data += piece
        first, _, self.out.data = self.out.data.partition(b"\n")
        return first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sandbox.__exit__(None, None, None)
        os.close(self.out.read_end)
