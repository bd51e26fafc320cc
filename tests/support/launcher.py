"""An installation of the command ``ral`` whose client only says how it was started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ral_protocol import exits
from support.installed import ROOT, ral_path

REPORT = b"""
import posix
command = open("/proc/self/cmdline", "rb").read().split(b"\\0")[:-1]
posix.write(1, b"\\0".join([b"%d" % (len(command) - 6), command[0], *command[4:]]) + b"\\0")
posix.write(1, open("/proc/self/environ", "rb").read())
"""
"""Stands where start.py is: says with what it was started, before Python set LC_CTYPE (PEP 538)."""

EXECUTE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
ignored, argc, path, *words = int(sys.argv[1]), int(sys.argv[2]), *map(os.fsencode, sys.argv[3:])
for number in range(1, 65):
    # The kernel's structure (handler, flags, restorer, mask): glibc's own function refuses 32 and 33.
    action = (ctypes.c_ulong * 4)(ignored >> (number - 1) & 1, 0, 0, 0)
    libc.syscall({"x86_64": 13, "aarch64": 134}[os.uname().machine], number, action, None, 8)
array = lambda items: (ctypes.c_char_p * (len(items) + 1))(*items, None)
libc.execve(path, array(words[:argc]), array(words[argc:]))
sys.exit(os.strerror(ctypes.get_errno()))
"""
"""Executes a file with dispositions, argv and environment that Python's own functions do not let through."""

PYTHON = Path("/usr/bin/python3").resolve()
SITE = f"lib/{PYTHON.name}/site-packages"


class Started(NamedTuple):
    """With what the client was started."""

    python: str
    start: str
    ignored: int
    arguments: list[bytes]
    environment: list[bytes]


def parsed(report: bytes) -> Started:
    untrusted_count, python, start, mask, *rest = report.split(b"\0")
    count = int(untrusted_count)
    assert re.fullmatch(rb"0x[0-9a-f]+", mask)
    assert rest.pop() == b""
    return Started(os.fsdecode(python), os.fsdecode(start), int(mask, 16), rest[:count], rest[count:])


class Prefix:
    """An installation prefix with the launcher, and REPORT in a place where packages are installed."""

    def __init__(self, root: Path, site: str = SITE) -> None:
        self.root = root
        self.site = site
        self.add(site)
        self.bin.mkdir()
        shutil.copy(ral_path(), self.launcher)

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def launcher(self) -> Path:
        return self.bin / "ral"

    @property
    def start(self) -> Path:
        return self.root / self.site / "ral_client/start.py"

    def add(self, site: str) -> None:
        """Install REPORT in another place below the prefix."""
        package = self.root / site / "ral_client"
        package.mkdir(parents=True, exist_ok=True)
        (package / "start.py").write_bytes(REPORT)

    @property
    def byte_code(self) -> Path:
        """Where the installer puts the byte code of start.py."""
        tag = PYTHON.name.replace("python", "cpython-").replace(".", "")
        return self.start.parent / f"__pycache__/start.{tag}.pyc"

    def compile(self) -> None:
        """Make the byte code, as an installer does."""
        subprocess.run([PYTHON, "-I", "-m", "py_compile", self.start], check=True, timeout=20)
        assert self.byte_code.exists()

    def make_environment(self) -> None:
        """Make a virtual environment of it."""
        (self.root / "pyvenv.cfg").write_text(f"home = {PYTHON.parent}\n")
        (self.bin / "python3").symlink_to(PYTHON)

    def try_run(
        self,
        *arguments: bytes,
        name: Path | None = None,
        environment: dict[str, str] | None = None,
        before: Callable[[], None] | None = None,
        stdio: Sequence[int] = (subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE),
        pass_fds: Sequence[int] = (),
    ) -> subprocess.CompletedProcess[bytes]:
        """Execute the launcher, or the file ``name``. ``stdio``: what the standard descriptors shall be."""
        return subprocess.run(
            ["ral", *arguments],
            executable=name or self.launcher,
            env={} if environment is None else environment,
            cwd="/",
            timeout=20,
            preexec_fn=before,
            stdin=stdio[0],
            stdout=stdio[1],
            stderr=stdio[2],
            pass_fds=pass_fds,
        )

    def run(
        self, *arguments: bytes, name: Path | None = None, environment: dict[str, str] | None = None
    ) -> Started:
        done = self.try_run(*arguments, name=name, environment=environment)
        assert (done.returncode, done.stderr) == (0, b"")
        return parsed(done.stdout)

    def run_raw(
        self,
        argv: Sequence[bytes] = (b"ral",),
        environment: Sequence[bytes] = (),
        ignored: Iterable[int] = (),
        name: str | None = None,
    ) -> Started:
        """Run ``name``, just as it is, in the directory of the launcher, with argv and environment of any
        form, with these signals ignored and no other."""
        numbers = (str(mask_of(ignored)), str(len(argv)))
        done = subprocess.run(
            [
                sys.executable,
                "-I",
                "-S",
                "-c",
                EXECUTE,
                *numbers,
                name or self.launcher,
                *argv,
                *environment,
            ],
            cwd=self.bin,
            capture_output=True,
            timeout=20,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        return parsed(done.stdout)


def mask_of(numbers: Iterable[int]) -> int:
    return sum(1 << number - 1 for number in numbers)


def sentence(refused: subprocess.CompletedProcess[bytes]) -> str:
    """What a refusal says: one line, of printable ASCII whatever the names in it."""
    assert (refused.returncode, refused.stdout) == (exits.REFUSED, b"")
    line, end, rest = refused.stderr.decode("ascii").partition("\n")
    assert (end, rest) == ("\n", "")
    assert line.isprintable()
    return line


def supported_versions() -> list[str]:
    """Names of the interpreters that the package supports, the newest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"])
    assert bounds
    return [f"python3.{minor}" for minor in range(int(bounds[2]) - 1, int(bounds[1]) - 1, -1)]
