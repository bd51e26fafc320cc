"""A real broker in a runtime directory of its own, and the installed client that talks to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import IO, NamedTuple

from support.installed import python_path, ral_path, session_environment
from support.processes import STOP_SECONDS, end, reap, wait_without
from support.terminal import Terminal


class Completed(NamedTuple):
    """How a command ended. ``status`` is -n if signal n ended the client itself."""

    status: int
    stdout: bytes
    stderr: bytes


class Ral:
    """The installed client, as a shell would run it."""

    def __init__(self, runtime: Path, directory: Path) -> None:
        self.directory = directory
        self.environment = session_environment(runtime)
        self._started: list[subprocess.Popen[bytes]] = []

    def __call__(
        self,
        *arguments: str | bytes,
        stdin: bytes | IO[bytes] | None = None,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        seconds: float = 20,
    ) -> Completed:
        """Run ``ral ARGUMENTS`` in ``cwd`` (the project without one) and wait for it.

        ``stdin`` is what it reads: bytes, a file, or nothing at all. ``env`` is added to the environment.
        subprocess.TimeoutExpired after ``seconds``, with the client killed.
        """
        text = stdin if isinstance(stdin, bytes) else None
        source = subprocess.PIPE if isinstance(stdin, bytes) else stdin or subprocess.DEVNULL
        with subprocess.Popen(
            [str(ral_path()), *arguments],
            cwd=cwd or self.directory,
            env=self.environment | (env or {}),
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as client:
            try:
                stdout, stderr = client.communicate(text, seconds)
            except BaseException:
                client.kill()
                raise
        return Completed(client.returncode, stdout, stderr)

    def start(self, *arguments: str | bytes, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start ``ral ARGUMENTS`` with pipes for 0, 1 and 2. The fixture ends what the test does not."""
        client = subprocess.Popen(
            [str(ral_path()), *arguments],
            cwd=self.directory,
            env=self.environment | (env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._started.append(client)
        return client

    def end(self) -> None:
        """Kill the clients that still run and close all pipes."""
        for client in self._started:
            client.kill()
            for pipe in (client.stdin, client.stdout, client.stderr):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            client.wait(STOP_SECONDS)

    def live(self) -> list[str]:
        """Identifiers of the sessions that run."""
        listed = self("sessions", "--json")
        assert listed.status == 0, listed
        return [line["id"] for line in json.loads(listed.stdout) if line["state"] != "ended"]


class OnTerminal:
    """Runs the installed client on a terminal of its own."""

    def __init__(self, ral: Ral) -> None:
        self.ral = ral
        self.opened = contextlib.ExitStack()

    def __call__(self, *arguments: str, rows: int = 24, columns: int = 80) -> Terminal:
        """Start ``ral ARGUMENTS`` in the project; the fixture ends it."""
        terminal = Terminal(
            [str(ral_path()), *arguments],
            cwd=self.ral.directory,
            env=self.ral.environment,
            rows=rows,
            columns=columns,
        )
        return self.opened.enter_context(terminal)


class Broker:
    """One broker process. Ready when its socket accepts; stopped it has ended with 0 and left nothing."""

    def __init__(self, runtime: Path, log: Path) -> None:
        self.runtime = runtime
        self.socket = runtime / "control.sock"
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running broker."""
        assert self.process is not None, "the broker does not run"
        return self.process.pid

    def start(self) -> None:
        """Start it and wait until it accepts connections, or has died, or the time is up."""
        assert self.process is None, "the broker runs already"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(python_path()), "-I", "-m", "ral_broker", "run"],
                cwd="/",
                env=session_environment(self.runtime),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + STOP_SECONDS
        while not self._accepts():
            status = self.process.poll()
            assert status is None, f"the broker ended with {status} before it was ready:\n{self.said()}"
            assert time.monotonic() < deadline, f"the broker was not ready in time:\n{self.said()}"
            time.sleep(0.01)

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self.socket))
            except (FileNotFoundError, ConnectionRefusedError):
                return False
        return True

    def crash(self) -> None:
        """kill -9, as an out-of-memory killer would."""
        assert self.process is not None, "the broker does not run"
        self.process.kill()
        self.process.wait(STOP_SECONDS)
        self.process = None

    def stop(self) -> None:
        """SIGTERM; it has to end with 0 and take its socket away."""
        assert self.process is not None, "the broker does not run"
        process, self.process = self.process, None
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)
            status = None
        assert status == 0, f"the broker ended with {status}:\n{self.said()}"
        assert not self.socket.exists(), "the broker left its socket"

    def said(self) -> str:
        """What it logged so far."""
        return self.log.read_text(errors="backslashreplace")


def assert_nothing_left(runtime: Path, known: set[int], seconds: float = STOP_SECONDS) -> None:
    """No process, no mount and no socket of a test is left. What is left is removed before this raises."""
    left = wait_without(known, seconds)
    end(left)
    reap(known)
    shown = "\n".join(f"  {p.pid} {p.command}" for p in left)
    assert not left, f"processes left:\n{shown}"
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(runtime) in line]
    assert not mounts, f"mounts left: {mounts}"
    sockets = [name for directory, _, names in os.walk(runtime) for name in names if name.endswith(".sock")]
    assert not sockets, f"sockets left: {sockets}"
