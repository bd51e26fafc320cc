"""The command ``ral``: what it hands on to the client, and what it refuses."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from ral_protocol import exits
from support.installed import ROOT, ral_path
from support.launcher import SITE, Prefix, mask_of, parsed, sentence, supported_versions


@pytest.fixture
def prefix(tmp_path: Path) -> Prefix:
    return Prefix(tmp_path / "prefix")


# ----------------------------------------------------------------------------------------- what is handed on


def test_arguments_arrive_byte_for_byte(prefix: Prefix) -> None:
    arguments = [
        b"",
        b" two  blanks ",
        b"*",
        b"a\nb\n",
        b"$(id)`id`\\",
        b"-e",
        b"--",
        bytes(range(1, 256)),
        b"-",
    ]
    assert prefix.run(*arguments).arguments == arguments


def test_the_interpreter_is_isolated_and_decodes_arguments_without_loss(prefix: Prefix) -> None:
    """What is decoded as EUC-JP, Big5 or GB18030 cannot always be encoded again; as UTF-8 it can."""
    prefix.start.write_text(
        "import sys\nprint(sys.flags.isolated, sys.flags.no_site, sys.flags.utf8_mode)\n"
    )
    assert prefix.try_run(environment={"LC_ALL": "C", "PYTHONUTF8": "0"}).stdout == b"1 1 1\n"


@pytest.mark.parametrize(
    "argv",
    [[], [b""], [b"-ral"], [b"/nonexistent/ral", b"run"], [b"x"] * 70000],
    ids=["none", "empty", "login", "other", "many"],
)
def test_the_name_that_the_caller_gives_does_not_matter(prefix: Prefix, argv: list[bytes]) -> None:
    assert prefix.run_raw(argv).arguments == argv[1:]


def test_the_environment_arrives_entry_for_entry(prefix: Prefix) -> None:
    """Also what a shell drops or changes: names that are no identifiers, a name twice, no name, no value."""
    environment = [
        b"BASH_FUNC_module%%=() {  eval `/usr/bin/modulecmd bash $*`\n}", b"PATH=/usr/bin", b"a b=1",
        b"1=one", b"x.y-z=2", b"TWICE=1", b"TWICE=2", b"=nameless", b"no-assignment", b"", b"EMPTY=",
        b"LC_CTYPE=C", b"_=/usr/bin/env", b"BYTES=" + bytes(range(1, 256)),
    ]  # fmt: skip
    assert prefix.run_raw(environment=environment).environment == environment


@pytest.mark.parametrize(
    "ignored",
    [
        set(),
        *({number} for number in (1, 2, 3, 13, 17, 25, 64)),
        {1, 13, 15, 25, 31},
        {32, 33, 34, 63, 64},
        set(range(1, 65)) - {9, 19},
    ],
    ids=lambda ignored: hex(mask_of(ignored)),
)
def test_every_ignored_signal_is_reported_and_no_other(prefix: Prefix, ignored: set[int]) -> None:
    # 32 and 33 are the C library's own.
    assert prefix.run_raw(ignored=ignored).ignored == mask_of(ignored - {32, 33})


def test_descriptors_are_handed_on(prefix: Prefix) -> None:
    prefix.start.write_text("import posix\nposix.write(1, posix.read(int(posix.environ[b'FD']), 9))\n")
    reader, writer = os.pipe()
    os.write(writer, b"through\n")
    os.close(writer)
    done = prefix.try_run(environment={"FD": str(reader)}, pass_fds=[reader])
    os.close(reader)
    assert (done.stdout, done.stderr) == (b"through\n", b"")


@pytest.mark.parametrize("closed", [(0,), (2,), (0, 2)])
def test_closed_descriptors_are_for_the_client_to_fill(prefix: Prefix, closed: tuple[int, ...]) -> None:
    def close() -> None:
        for fd in closed:
            os.close(fd)

    assert parsed(prefix.try_run(before=close).stdout).start == str(prefix.start)


def test_it_is_the_same_process(prefix: Prefix) -> None:
    """A fork costs more than everything else here."""
    if os.getuid() == 0:
        pytest.skip("needs an ordinary user: RLIMIT_NPROC does not bind uid 0")
    done = prefix.try_run(before=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (0, 0)))
    assert (done.returncode, done.stderr) == (0, b"")


# ------------------------------------------------------------------------------------------- what is refused


def test_without_its_modules_it_says_where_they_are_not(prefix: Prefix) -> None:
    prefix.start.unlink()
    assert sentence(prefix.try_run()) == (
        f"ral: not started: its Python modules are not below {prefix.root}; install ral again "
        "(in a checkout: make develop)"
    )


def test_a_name_in_a_refusal_gives_no_orders_to_the_terminal(tmp_path: Path) -> None:
    prefix = Prefix(tmp_path / os.fsdecode("\x1b[2J\né\\".encode()))
    prefix.start.unlink()
    assert rf"not below {tmp_path}/\x1b[2J\x0a\xc3\xa9\x5c; install" in sentence(prefix.try_run())


@pytest.mark.parametrize("hidden", ["lib", SITE, f"{SITE}/ral_client/start.py"])
def test_modules_that_may_not_be_read_are_named(prefix: Prefix, hidden: str) -> None:
    if os.getuid() == 0:
        pytest.skip("needs an ordinary user: nothing is unreadable to uid 0")
    (prefix.root / hidden).chmod(0)
    try:
        said = sentence(prefix.try_run())
    finally:
        (prefix.root / hidden).chmod(0o755)
    assert said.startswith("ral: not started: its Python modules cannot be read: ")
    assert str(prefix.root / "lib") in said
    assert said.endswith(
        ": permission denied; have them made readable, or ral installed again with umask 022"
    )


def test_without_the_interpreter_of_its_modules_it_says_which(tmp_path: Path) -> None:
    missing = [
        version
        for version in supported_versions()
        if not shutil.which(version, path="/usr/bin:/usr/local/bin")
    ]
    assert missing, "every Python that ral supports is installed here, so none can be missed"
    prefix = Prefix(tmp_path / "prefix", f"lib/{missing[0]}/site-packages")
    assert sentence(prefix.try_run()) == (
        f"ral: not started: {missing[0]}, for which it was installed, is neither in its directory nor in "
        "/usr/bin or /usr/local/bin; install that Python, or ral again"
    )


def test_a_virtual_environment_without_its_interpreter_is_not_run_with_another(prefix: Prefix) -> None:
    prefix.make_environment()
    (prefix.bin / "python3").unlink()
    (prefix.bin / "python3").symlink_to("/nonexistent/python3")
    assert sentence(prefix.try_run()) == (
        f"ral: not started: the interpreter for which it was installed, {prefix.bin}/python3, cannot be "
        "executed: it does not exist; install that Python, or ral again"
    )


def test_an_interpreter_that_cannot_be_executed_is_named_with_the_reason(prefix: Prefix) -> None:
    prefix.make_environment()
    python = prefix.bin / "python3"
    python.unlink()
    python.write_bytes(b"not a program\n")
    assert f", {python}, cannot be executed: permission denied; " in sentence(prefix.try_run())
    python.chmod(0o755)
    assert f", {python}, cannot be executed: it is not a program for this machine; " in sentence(
        prefix.try_run()
    )


@pytest.mark.parametrize("fd", [0, 1, 2])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH], ids=["open", "handle"])
def test_a_directory_as_standard_descriptor_is_refused(prefix: Prefix, fd: int, flags: int) -> None:
    stdio = [subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE]
    stdio[fd] = os.open("/etc", flags | os.O_DIRECTORY)
    try:
        done = prefix.try_run(b"run", b"true", stdio=stdio)
    finally:
        os.close(stdio[fd])
    assert (done.returncode, done.stdout or b"") == (exits.REFUSED, b"")
    assert fd == 2 or done.stderr.decode() == (
        f"ral: standard {('input', 'output')[fd]} is a directory: the program could open everything below "
        "it; redirect it elsewhere\n"
    )


def test_an_argument_list_that_leaves_no_room_is_refused_with_a_sentence(prefix: Prefix) -> None:
    """The kernel limits the sum of arguments and environment, and the interpreter needs some of it."""

    def attempt(size: int) -> subprocess.CompletedProcess[bytes] | None:
        whole, part = divmod(size, 100_000)
        try:
            return prefix.try_run(*[b"x" * 100_000] * whole, b"x" * part)
        except OSError:
            return None

    fits, too_large = 0, 16 << 20
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if attempt(middle) is None:
            too_large = middle
        else:
            fits = middle
    refused = attempt(fits)
    assert refused is not None
    assert "leave no room for the interpreter's own; shorten them" in sentence(refused)


# -------------------------------------------------------------------------------------------------- the file


def test_the_installed_launcher_is_this_one(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("build_native", ROOT / "helpers/build_native.py")
    assert spec is not None
    assert spec.loader is not None
    build_native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build_native)
    [built] = build_native.compile_programs(tmp_path, ["launcher"])
    assert ral_path().read_bytes() == built.read_bytes()


def test_it_needs_no_library_and_no_loader() -> None:
    shown = subprocess.run(
        ["readelf", "--program-headers", "--dynamic", "--relocs", "--wide", ral_path()],
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    ).stdout
    assert "There are no relocations in this file." in shown
    assert not re.search(r"INTERP|NEEDED|RUNPATH|RPATH|RWE", shown)
