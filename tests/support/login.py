"""Users of a whole system, with systemd as PID 1: what they run in a login of theirs and without one."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from support.broker import Completed
from support.terminal import Terminal

SOCKET, SERVICE = "ral-broker.socket", "ral-broker.service"
SECONDS = 60.0
"""For a command: without KVM a login alone takes a second."""
_UNTIL = 30.0
_OURS = r"ral_broker|ral_client|ral-holder|bwrap|trampoline"


def wait_until(condition: Callable[[], object], what: str, seconds: float = _UNTIL) -> None:
    """Poll until ``condition`` holds; AssertionError that says ``what`` did not happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


def has_ended(pid: int) -> bool:
    """Tell whether a process is gone, or only its status is left (the test run adopts orphans)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


class User:
    """An account made for tests, with a project directory. Only root can make one."""

    def __init__(self, name: str, *, linger: bool) -> None:
        self.name = name
        _root("useradd", "--create-home", "--shell", "/bin/sh", name)
        self.uid = int(_root("id", "-u", name))
        self.home = Path("/home", name)
        self.project = self.home / "project"
        self.manager = Path(f"/run/user/{self.uid}")
        """Runtime directory that logind makes; it is there while the user has a login or lingers."""
        self.runtime = self.manager / "ral"
        self.bare("mkdir project")
        if linger:
            _root("loginctl", "enable-linger", name)
            wait_until((self.manager / "systemd/private").exists, "the user manager runs")

    def login(self, script: str, seconds: float = SECONDS) -> Completed:
        """Run a shell script in the project as ``su -`` does it: a session of logind, and PAM's
        environment."""
        return self.start(script).finish(seconds)

    def start(self, script: str, stdin: int | IO[bytes] = subprocess.DEVNULL) -> Login:
        """Start what ``login`` runs."""
        return Login(["su", "-", self.name, "-c", f"cd project && {script}"], stdin)

    def terminal(self) -> Terminal:
        """Log in on a terminal, with the user's shell in the project. A context manager."""
        terminal = Terminal(
            ["su", "--pty", "-", self.name], cwd=Path("/"), env={"PATH": "/usr/bin:/bin", "TERM": "xterm"}
        )
        # In two pieces, so that the terminal's echo is not taken for the prompt.
        terminal.send(b"cd project; PS1='rea''dy> '\n")
        terminal.expect(rb"ready> ", SECONDS)
        return terminal

    def bare(
        self, script: str, environment: Mapping[str, str] | None = None, seconds: float = SECONDS
    ) -> Completed:
        """Run a shell script in the home directory as cron would: neither PAM nor a login, three
        variables."""
        variables = {
            "HOME": f"/home/{self.name}",
            "SHELL": "/bin/sh",
            "PATH": "/usr/local/bin:/usr/bin:/bin",
        }
        settings = [f"{name}={value}" for name, value in (variables | dict(environment or {})).items()]
        command = ["setpriv", f"--reuid={self.name}", f"--regid={self.name}", "--init-groups"]
        command += ["env", "-i", "-C", variables["HOME"], *settings, "sh", "-c", script]
        return Login(command, subprocess.DEVNULL).finish(seconds)

    def ral(self, *arguments: str, seconds: float = SECONDS) -> Completed:
        """Run ``ral`` in a login."""
        return self.login(shlex.join(["ral", *arguments]), seconds)

    def _ask(self, *arguments: str) -> Completed:
        """Run ``ral`` without a login, with the directory of one: quick enough to look often."""
        return self.bare(shlex.join(["ral", *arguments]), {"XDG_RUNTIME_DIR": str(self.manager)})

    def sessions(self) -> dict[str, dict[str, object]]:
        """The sessions that run, by id. Starts a broker if there is none."""
        listed = self._ask("sessions", "--json")
        assert listed.status == 0, listed
        return {line["id"]: line for line in json.loads(listed.stdout)}

    def broker(self) -> dict[str, object]:
        """What the broker says of itself."""
        found: dict[str, object] = json.loads(self._ask("broker", "status", "--json").stdout)
        return found

    def systemctl(self, *arguments: str, seconds: float = SECONDS) -> Completed:
        """Run ``systemctl --user``, without a login."""
        environment = {"XDG_RUNTIME_DIR": str(self.manager)}
        return self.bare(shlex.join(["systemctl", "--user", *arguments]), environment, seconds)

    def unit(self, name: str, key: str) -> str:
        """A property of a unit of the user manager."""
        return self.systemctl("show", "--value", "-p", key, name).stdout.decode().strip()

    def drop_in(self, unit: str, text: str) -> None:
        """Change a unit until ``clean``."""
        path = self.home / f".config/systemd/user/{unit}.d/test.conf"
        self.bare(f"mkdir -p {path.parent}; cat >{path} <<'END'\n{text}\nEND")
        assert self.systemctl("daemon-reload").status == 0

    def processes(self) -> list[str]:
        """Everything of ral's that runs for this user; zombies do not."""
        found = subprocess.run(
            ["pgrep", "-u", self.name, "-r", "R,S,D,T", "-f", "-a", _OURS],
            capture_output=True, check=False, text=True,
        )  # fmt: skip
        return found.stdout.splitlines()

    def clean(self) -> None:
        """End what runs, undo what was set. AssertionError if a process is left when all was ended."""
        try:
            if self.processes():
                for session in self.sessions():
                    self._ask("kill", session)
                wait_until(lambda: not self.sessions(), "the last session ended")
        finally:
            self.systemctl("stop", SOCKET, SERVICE)
            if self.processes():
                self.bare("ral broker stop")
            if (self.home / ".config/systemd").exists():
                shutil.rmtree(self.home / ".config/systemd")
                self.systemctl("daemon-reload")
            self.systemctl("reset-failed")
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not self.processes(), "everything has ended", 10)
            left = self.processes()
            for line in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line.split()[0]), signal.SIGKILL)
            for directory in (self.runtime, Path(f"/tmp/ral-{self.uid}")):
                shutil.rmtree(directory, ignore_errors=True)
        assert left == []


class Login:
    """A command that was started; its output is collected."""

    def __init__(self, command: list[str], stdin: int | IO[bytes]) -> None:
        self.process = subprocess.Popen(
            command,
            cwd="/",
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def line(self) -> bytes:
        """The next line of its standard output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def finish(self, seconds: float = SECONDS, text: bytes | None = None) -> Completed:
        """Write ``text``, read the rest and wait. subprocess.TimeoutExpired, with the command killed, also
        where something that the command left behind has its output open."""
        try:
            stdout, stderr = self.process.communicate(text, seconds)
        except BaseException:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()
            raise
        return Completed(self.process.returncode, stdout, stderr)


def _root(*command: str) -> str:
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
