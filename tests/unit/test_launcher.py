"""client/bin/ral, the shell script that starts the client: what it hands on and what it finds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from ral_protocol import exits
from support.installed import ROOT, ral_path

REPORT = b"""
import posix
command = open("/proc/self/cmdline", "rb").read().split(b"\\0")
posix.write(1, posix.readlink(b"/proc/self/exe") + b"\\0" + b"\\0".join(command[3:]))
posix.write(1, open("/proc/self/environ", "rb").read())
"""
"""Stands where start.py is: says with what it was started, before Python set LC_CTYPE (PEP 538)."""

PYTHON = Path("/usr/bin/python3").resolve()


class Prefix:
    """An installation prefix with the launcher, and REPORT in a place where packages are installed."""

    def __init__(self, root: Path, site: str, name: str = "ral") -> None:
        self.bin = root / "bin"
        self.launcher = self.bin / name
        self.start = root / "lib" / site / "ral_client" / "start.py"
        self.bin.mkdir(parents=True)
        self.start.parent.mkdir(parents=True)
        self.start.write_bytes(REPORT)
        shutil.copy(ROOT / "client/bin/ral", self.launcher)

    def run(
        self, *arguments: bytes, launcher: Path | str | None = None, **environment: str
    ) -> tuple[str, str, int, list[bytes], set[bytes]]:
        """Interpreter, start.py, mask, arguments and environment that the client was given."""
        done = subprocess.run(
            [str(launcher or self.launcher), *arguments],
            env={"PATH": "/usr/bin:/bin", **environment},
            cwd=self.bin,
            capture_output=True,
            timeout=10,
            check=True,
            restore_signals=True,
        )
        python, start, mask, *rest = done.stdout.split(b"\0")
        count = len(arguments)
        return python.decode(), start.decode(), int(mask), rest[:count], set(rest[count:])


def site_packages() -> str:
    return f"{PYTHON.name}/site-packages"


@pytest.fixture
def prefix(tmp_path: Path) -> Prefix:
    return Prefix(tmp_path / "prefix", site_packages())


def test_arguments_arrive_byte_for_byte(prefix: Prefix) -> None:
    every_byte = bytes(range(1, 256))
    arguments = [
        b"",
        b" two  blanks ",
        b"*",
        b"a\nb\n",
        b"$(id)`id`\\",
        b"-e",
        b"--",
        every_byte,
        b"\xff\x81\x88",
    ]
    assert prefix.run(*arguments)[3] == arguments


@pytest.mark.parametrize(
    "name",
    ["ral", "a b", "r) S 1", "x) R 1 2 3\n) Z 9", ")", "long-name-of-more-than-fifteen-bytes) S"],
)
def test_ignored_signals_are_read_whatever_the_script_is_called(tmp_path: Path, name: str) -> None:
    prefix = Prefix(tmp_path / "prefix", site_packages(), name)
    ignored = [signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM, signal.SIGXFSZ, signal.SIGSYS]
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        done = subprocess.run(
            [prefix.launcher], capture_output=True, timeout=10, check=True, restore_signals=False
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert int(done.stdout.split(b"\0")[2]) == sum(1 << number - 1 for number in ignored)


def test_no_signal_is_called_ignored_that_is_not(prefix: Prefix) -> None:
    assert prefix.run()[2] == 0


def test_hostile_variables_change_nothing(prefix: Prefix) -> None:
    hostile = {
        "IFS": "0123456789/ral",
        "ENV": "/nonexistent",
        "BASH_ENV": "/nonexistent",
        "CDPATH": "/:/usr",
    }
    python, start, mask, arguments, environment = prefix.run(b"x y", **hostile, PYTHONHOME="/nonexistent")
    assert (Path(python), Path(start).resolve(), mask, arguments) == (PYTHON, prefix.start, 0, [b"x y"])
    assert {b"ENV=/nonexistent", b"CDPATH=/:/usr", b"PYTHONHOME=/nonexistent"} <= environment


def test_the_environment_is_handed_on(prefix: Prefix) -> None:
    """Names of the launcher's own variables included; the shell adds PWD."""
    given = {
        "dir": "1",
        "site": "2",
        "mask": "3",
        "python": "4",
        "line": "5",
        "version": "\udcff",
        "EMPTY": "",
    }
    environment = prefix.run(**given)[4]
    assert {os.fsencode(f"{name}={value}") for name, value in given.items()} <= environment
    assert {entry.split(b"=")[0].decode() for entry in environment if entry} <= given.keys() | {
        "PATH",
        "PWD",
        "_",
    }


@pytest.mark.parametrize(
    "site",
    [site_packages(), f"{PYTHON.name}/dist-packages", "python3/dist-packages"],
    ids=["prefix", "debian-local", "debian"],
)
def test_the_interpreter_is_the_one_the_modules_are_for(tmp_path: Path, site: str) -> None:
    prefix = Prefix(tmp_path / "prefix", site)
    python, start, *_ = prefix.run()
    assert (Path(python), Path(start).resolve()) == (PYTHON, prefix.start)


def test_a_virtual_environment_brings_its_own_interpreter(prefix: Prefix) -> None:
    (prefix.bin.parent / "pyvenv.cfg").write_text(f"home = {PYTHON.parent}\n")
    own = prefix.bin / "python3"
    shutil.copy(PYTHON, own)
    assert prefix.run()[0] == str(own)


def test_make_install_puts_a_virtual_environment_below_the_prefix(tmp_path: Path) -> None:
    inner = Prefix(tmp_path / "prefix/lib/ral", site_packages())
    (inner.bin.parent / "pyvenv.cfg").write_text(f"home = {PYTHON.parent}\n")
    (inner.bin / "python3").symlink_to(PYTHON)
    outer = tmp_path / "prefix/bin"
    outer.mkdir()
    (outer / "ral").symlink_to("../lib/ral/bin/ral")
    assert Path(inner.run(launcher=outer / "ral")[1]).resolve() == inner.start


@pytest.mark.parametrize(
    "way", ["absolute link", "relative link", "link of a link", "relative name", "on PATH"]
)
def test_it_finds_its_modules_from_anywhere(prefix: Prefix, tmp_path: Path, way: str) -> None:
    link = tmp_path / "link"
    path = "/usr/bin:/bin"
    launcher: str = str(link)
    match way:
        case "absolute link":
            link.symlink_to(prefix.launcher)
        case "relative link":
            link.symlink_to("prefix/bin/ral")
        case "link of a link":
            (tmp_path / "other").symlink_to("prefix/bin/ral")
            link.symlink_to("other")
        case "relative name":
            launcher = "../bin/ral"
        case _:
            launcher, path = "ral", f"{prefix.bin}:{path}"
            assert shutil.which(launcher, path=path) == str(prefix.launcher)
            launcher = str(prefix.launcher)
    assert Path(prefix.bin, prefix.run(launcher=launcher, PATH=path)[1]).resolve() == prefix.start


def test_without_its_modules_it_refuses_with_a_sentence(prefix: Prefix) -> None:
    prefix.start.unlink()
    done = subprocess.run([prefix.launcher], capture_output=True, timeout=10)
    assert done.returncode == exits.REFUSED
    said = f"ral: not started: its Python modules are not below {prefix.bin.parent}; install ral again\n"
    assert done.stderr.decode() == said


def test_without_its_interpreter_it_refuses_with_a_sentence(tmp_path: Path) -> None:
    prefix = Prefix(tmp_path / "prefix", "python3.99/site-packages")
    done = subprocess.run([prefix.launcher], capture_output=True, timeout=10)
    assert done.returncode == exits.REFUSED
    assert done.stderr.startswith(
        b"ral: not started: python3.99, for which it was installed, does not exist"
    )


def test_it_starts_no_other_process(prefix: Prefix) -> None:
    """A fork costs as much as the script. The process limit of 0 applies to ordinary users only."""
    if os.getuid() == 0:
        pytest.skip("needs an ordinary user: RLIMIT_NPROC does not bind uid 0")
    done = subprocess.run(
        ["/bin/sh", "-c", 'ulimit -p 0 2>/dev/null || ulimit -u 0; exec "$0"', prefix.launcher],
        capture_output=True,
        timeout=10,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_installed_launcher_is_this_one() -> None:
    assert ral_path().read_bytes() == (ROOT / "client/bin/ral").read_bytes()
