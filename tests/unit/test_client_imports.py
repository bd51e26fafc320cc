"""The client starts fast because it imports next to nothing: exact lists, which no machine makes flaky."""

from __future__ import annotations

import importlib.util
import marshal
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ral_client import start
from ral_protocol.exits import VERSION
from support.peer import Peer, Session, client_command
from support.terminal import Terminal

COMMON = {
    "_signal",
    "_socket",
    "errno",
    "posix",
    "select",
    "sys",
    "time",
    "ral_client",
    "ral_client.answer",
    "ral_client.call",
    "ral_client.main",
    "ral_client.run",
    "ral_client.signals",
    "ral_client.standby",
    "ral_protocol",
    "ral_protocol.exits",
    "ral_protocol.wire",
}
ON_A_TERMINAL = {"fcntl", "termios", "ral_client.terminal"}

# Prints sys.modules at the end of a run, at the point where the client leaves.
LIST = """
import posix, sys
before = set(sys.modules)
leave = posix._exit
def report(status):
    posix.write(3, " ".join(sorted(set(sys.modules) - before)).encode())
    leave(status)
posix._exit = report
sys.argv = sys.argv[1:]
sys.path.append(sys.argv[0].rpartition("/ral_client/")[0])
from ral_client.main import main
main(sys.argv)
"""


def bare_modules() -> set[str]:
    listed = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import sys; print(*sys.modules)"],
        capture_output=True,
        check=True,
    )
    return set(listed.stdout.decode().split())


def listing_command(*arguments: str) -> list[str]:
    python, isolated, no_site, *rest = client_command(*arguments)
    return [python, isolated, no_site, "-c", LIST, *rest]


def test_a_run_without_a_terminal_imports_exactly_this(runtime: Path, project: Path) -> None:
    session = Session()
    peer = Peer(runtime, session)
    listed = project / "modules"
    try:
        command = ["sh", "-c", 'exec 3>"$0" "$@"', str(listed), *listing_command("run", "true")]
        environment = {"PATH": os.environ["PATH"], "RAL_RUNTIME_DIR": str(runtime)}
        ended = subprocess.run(
            command, cwd=project, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=20
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
        session.reap()
    finally:
        peer.close()
    assert set(listed.read_text().split()) == COMMON - bare_modules()


def test_a_run_on_a_terminal_imports_exactly_this(runtime: Path, project: Path) -> None:
    session = Session()
    peer = Peer(runtime, session)
    listed = project / "modules"
    try:
        command = ["sh", "-c", 'exec 3>"$0" "$@"', str(listed), *listing_command("run", "true")]
        environment = {"PATH": os.environ["PATH"], "RAL_RUNTIME_DIR": str(runtime)}
        with Terminal(command, cwd=project, env=environment) as terminal:
            assert terminal.wait() == 0, terminal.output
        session.reap()
    finally:
        peer.close()
    assert set(listed.read_text().split()) == (COMMON | ON_A_TERMINAL) - bare_modules()


def test_all_that_a_run_needs_before_it_asks_is_loaded_by_the_start() -> None:
    """In that order, so that nothing is searched for; the rest is imported while the broker works."""
    needed = {name for name in COMMON if name.startswith("ral_")} - {"ral_client.standby"}
    assert set(start.ALWAYS + start.RUN) == needed
    assert set(start.TERMINAL) == {name for name in ON_A_TERMINAL if name.startswith("ral_")}


class Copy:
    """The client's modules, compiled, in a directory of their own. The sources say another version."""

    def __init__(self, site: Path) -> None:
        self.site = site
        for package in ("ral_client", "ral_protocol"):
            found = sys.modules[package].__path__[0]
            shutil.copytree(found, site / package, ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run([sys.executable, "-I", "-m", "compileall", "-q", site], check=True, timeout=60)
        self.start = self.byte_code("ral_client/start.py")
        self.exits = site / "ral_protocol/exits.py"
        before = self.exits.stat()
        self.exits.write_text(self.exits.read_text().replace(f'"{VERSION}"', f'"{OTHER}"'))
        os.utime(self.exits, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert self.exits.stat().st_size == before.st_size

    def byte_code(self, source: str) -> Path:
        directory, _, name = source.rpartition("/")
        tag = sys.implementation.cache_tag
        return self.site / directory / "__pycache__" / name.replace(".py", f".{tag}.pyc")

    def version(self, file: Path) -> str:
        """What `--version` says; nothing is compiled into the directory."""
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-B", file, "0", "--version"],
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()


OTHER = VERSION.translate(str.maketrans("0123456789", "9876543210"))


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path / "site")


def test_the_start_takes_byte_code_that_is_fresh(copy: Copy) -> None:
    assert copy.version(copy.start) == f"ral {VERSION}"
    assert copy.version(copy.site / "ral_client/start.py") == f"ral {VERSION}"


def test_the_start_looks_nowhere_else_for_a_module(copy: Copy) -> None:
    for source in copy.site.rglob("*.py"):
        before = source.stat()
        source.write_bytes(b"!" * before.st_size)
        os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert copy.version(copy.start) == f"ral {VERSION}"
    (copy.site / "ral_client").chmod(0o311)
    (copy.site / "ral_protocol").chmod(0o311)
    try:
        assert copy.version(copy.start) == f"ral {VERSION}"
    finally:
        (copy.site / "ral_client").chmod(0o755)
        (copy.site / "ral_protocol").chmod(0o755)


@pytest.mark.parametrize(
    "how", ["older", "shorter", "another Python's", "checked by hash", "missing", "too long"]
)
def test_the_start_takes_the_source_where_the_byte_code_is_not_its_own(copy: Copy, how: str) -> None:
    """As import would: all of these are compiled anew."""
    cached = copy.byte_code("ral_protocol/exits.py")
    content = bytearray(cached.read_bytes())
    match how:
        case "older":
            os.utime(copy.exits, (1, 1))
        case "shorter":
            status = copy.exits.stat()
            copy.exits.write_text(copy.exits.read_text() + "#")
            os.utime(copy.exits, ns=(status.st_atime_ns, status.st_mtime_ns))
        case "another Python's":
            content[0] ^= 1
            cached.write_bytes(content)
        case "checked by hash":
            content[4] = 3
            cached.write_bytes(content)
        case "missing":
            cached.unlink()
        case _:
            # Code that does not fit is not executed in part.
            copy.exits.write_text(copy.exits.read_text() + f"X = {bytes(start.MOST)!r}\n")
            subprocess.run([sys.executable, "-I", "-m", "py_compile", copy.exits], check=True, timeout=20)
            assert cached.stat().st_size > start.MOST
    assert copy.version(copy.start) == f"ral {OTHER}"


def test_the_modules_of_a_run_fit_into_one_read() -> None:
    """Otherwise they would be imported as others are, which nobody would notice."""
    for name in (*start.ALWAYS, *start.RUN, *start.TERMINAL):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        code = compile(Path(spec.origin).read_bytes(), spec.origin, "exec")
        assert len(marshal.dumps(code)) < start.MOST - 16
