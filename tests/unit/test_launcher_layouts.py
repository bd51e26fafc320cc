"""The command ``ral``: where it finds the modules of the client and the interpreter they are for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.installed import ROOT
from support.launcher import PYTHON, SITE, Prefix, supported_versions


@pytest.fixture
def prefix(tmp_path: Path) -> Prefix:
    return Prefix(tmp_path / "prefix")


@pytest.mark.parametrize("packages", ["site-packages", "dist-packages"])
@pytest.mark.parametrize("python", [PYTHON.name, "python3"])
@pytest.mark.parametrize("library", ["lib", "lib64"])
def test_the_interpreter_is_the_one_the_modules_are_for(
    tmp_path: Path, library: str, python: str, packages: str
) -> None:
    prefix = Prefix(tmp_path / "prefix", f"{library}/{python}/{packages}")
    assert prefix.run()[:2] == (f"/usr/bin/{python}", str(prefix.start))


def test_an_interpreter_beside_it_comes_before_the_system_s(prefix: Prefix) -> None:
    own = prefix.bin / PYTHON.name
    own.symlink_to(PYTHON)
    assert prefix.run().python == str(own)


def test_every_supported_version_is_looked_for(tmp_path: Path) -> None:
    for version in supported_versions():
        prefix = Prefix(tmp_path / version, f"lib/{version}/site-packages")
        (prefix.bin / version).symlink_to(PYTHON)
        assert prefix.run()[:2] == (str(prefix.bin / version), str(prefix.start))


def test_of_several_versions_the_newest_that_can_be_run_is_taken(prefix: Prefix) -> None:
    """As after an upgrade of Python: the modules for the version that is gone are still there."""
    versions = supported_versions()
    for version in versions:
        prefix.add(f"lib/{version}/site-packages")
    here = next(version for version in versions if shutil.which(version, path="/usr/bin:/usr/local/bin"))
    assert f"/{here}/" in prefix.run().start
    (prefix.bin / versions[0]).symlink_to(PYTHON)
    assert f"/{versions[0]}/" in prefix.run().start


def test_a_virtual_environment_brings_its_own_interpreter_and_may_be_moved(prefix: Prefix) -> None:
    prefix.make_environment()
    assert prefix.run()[:2] == (str(prefix.bin / "python3"), str(prefix.start))
    prefix.root = prefix.root.rename(prefix.root.with_name("moved"))
    assert prefix.run()[:2] == (str(prefix.bin / "python3"), str(prefix.start))


def test_make_install_puts_a_virtual_environment_below_the_prefix(tmp_path: Path) -> None:
    inner = Prefix(tmp_path / "prefix/lib/ral")
    inner.make_environment()
    outer = tmp_path / "prefix/bin/ral"
    outer.parent.mkdir()
    outer.symlink_to("../lib/ral/bin/ral")
    assert inner.run(name=outer)[:2] == (str(inner.bin / "python3"), str(inner.start))


@pytest.mark.parametrize(
    "target",
    ["absolute", "prefix/bin/ral", "other"],
    ids=["absolute link", "relative link", "link of a link"],
)
def test_links_lead_to_it(prefix: Prefix, tmp_path: Path, target: str) -> None:
    (tmp_path / "other").symlink_to("prefix/bin/ral")
    link = tmp_path / "link"
    link.symlink_to(prefix.launcher if target == "absolute" else target)
    assert prefix.run(name=link).start == str(prefix.start)


@pytest.mark.parametrize("name", ["ral", "./ral", "../bin/ral"])
def test_names_relative_to_the_working_directory_work(prefix: Prefix, name: str) -> None:
    assert prefix.run_raw(name=name).start == str(prefix.start)


@pytest.mark.parametrize("name", ["linked", "./linked", "absolute"])
def test_an_installer_may_link_the_file_to_its_cache(prefix: Prefix, tmp_path: Path, name: str) -> None:
    cached = tmp_path / "cache/archive"
    cached.parent.mkdir()
    prefix.launcher.rename(cached)
    (prefix.bin / "linked").symlink_to(cached)
    started = prefix.run_raw(name=str(prefix.bin / "linked") if name == "absolute" else name)
    assert Path(prefix.bin, started.start).resolve() == prefix.start


def test_what_is_installed_comes_before_what_lies_around_a_link(prefix: Prefix, tmp_path: Path) -> None:
    trap = Prefix(tmp_path / "trap")
    trap.launcher.unlink()
    trap.launcher.symlink_to(prefix.launcher)
    assert prefix.run(name=trap.launcher).start == str(prefix.start)


def test_the_name_of_the_prefix_may_be_any(tmp_path: Path) -> None:
    prefix = Prefix(tmp_path / os.fsdecode(b"\xff (deleted)\n\\ '\"$"))
    assert prefix.run().start == str(prefix.start)


def test_directories_need_not_be_readable_on_the_way(prefix: Prefix) -> None:
    for directory in (prefix.root, prefix.bin, prefix.root / "lib", prefix.root / "lib" / PYTHON.name):
        directory.chmod(0o111)
    try:
        assert prefix.run().start == str(prefix.start)
    finally:
        for directory in (prefix.root, prefix.bin, prefix.root / "lib", prefix.root / "lib" / PYTHON.name):
            directory.chmod(0o755)


def test_no_variable_chooses_what_is_run(prefix: Prefix, tmp_path: Path) -> None:
    trap = Prefix(tmp_path / "trap")
    for name in ("python", "python3", PYTHON.name):
        (trap.bin / name).symlink_to("/bin/false")
    names = (
        "HOME", "PATH", "PREFIX", "PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE", "PYTHONEXECUTABLE",
        "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "BASH_ENV", "ENV", "CDPATH",
    )  # fmt: skip
    started = prefix.run(environment={**dict.fromkeys(names, str(trap.bin)), "IFS": "/ral"})
    assert started[:2] == (str(PYTHON), str(prefix.start))


@pytest.mark.needs("bubblewrap")
def test_without_proc_it_goes_by_its_name(prefix: Prefix) -> None:
    prefix.start.write_text("print(*__import__('sys').argv)\n")
    done = subprocess.run(
        ["bwrap", "--dev-bind", "/", "/", "--tmpfs", "/proc", "--", prefix.launcher, "argument"],
        capture_output=True,
        timeout=20,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == os.fsencode(f"{prefix.bin}/../{SITE}/ral_client/start.py 0x0 argument\n")


# ----------------------------------------------------------------------------------------- byte code


def test_fresh_byte_code_of_the_script_is_run(prefix: Prefix) -> None:
    prefix.compile()
    assert prefix.run(b"run", b"--", b"true")[:2] == (str(PYTHON), str(prefix.byte_code))
    assert prefix.run(b"run", b"--", b"true").arguments == [b"run", b"--", b"true"]


def test_byte_code_of_a_virtual_environment_is_its_interpreter_s(prefix: Prefix) -> None:
    prefix.make_environment()
    prefix.compile()
    assert prefix.run()[:2] == (str(prefix.bin / "python3"), str(prefix.byte_code))


@pytest.mark.parametrize("python", ["python3", PYTHON.name])
def test_the_version_of_a_shared_directory_is_the_interpreter_s(tmp_path: Path, python: str) -> None:
    prefix = Prefix(tmp_path / "prefix", f"lib/{python}/dist-packages")
    prefix.compile()
    assert prefix.run()[:2] == (f"/usr/bin/{python}", str(prefix.byte_code))


@pytest.mark.parametrize(
    "how", ["older", "shorter", "foreign", "hashed", "torn", "unreadable", "a directory", "elsewhere"]
)
def test_the_script_itself_is_run_where_its_byte_code_is_not_fresh(prefix: Prefix, how: str) -> None:
    prefix.compile()
    content = bytearray(prefix.byte_code.read_bytes())
    status = prefix.start.stat()
    match how:
        case "older":
            os.utime(prefix.start, (1, 1))
        case "shorter":
            prefix.start.write_bytes(prefix.start.read_bytes() + b"\n")
            os.utime(prefix.start, ns=(status.st_atime_ns, status.st_mtime_ns))
        case "foreign":
            content[0] ^= 1
        case "hashed":
            content[4] = 3
        case "torn":
            del content[15:]
        case "unreadable":
            if os.getuid() == 0:
                pytest.skip("needs an ordinary user: nothing is unreadable to uid 0")
            prefix.byte_code.chmod(0)
        case "a directory":
            prefix.byte_code.unlink()
            prefix.byte_code.mkdir()
        case _:
            prefix.byte_code.rename(prefix.byte_code.with_name("start.cpython-399.pyc"))
    if prefix.byte_code.is_file() and how in ("foreign", "hashed", "torn"):
        prefix.byte_code.write_bytes(content)
    assert prefix.run().start == str(prefix.start)


def test_byte_code_for_the_version_that_a_link_names_is_not_given_to_another(tmp_path: Path) -> None:
    """As after an upgrade: the link has the old name, and leads to what is installed now."""
    other = next(version for version in supported_versions() if version != PYTHON.name)
    prefix = Prefix(tmp_path / "prefix", f"lib/{other}/site-packages")
    (prefix.bin / other).symlink_to(PYTHON)
    prefix.compile()
    tag = other.removeprefix("python").replace(".", "")
    prefix.byte_code.rename(prefix.byte_code.with_name(f"start.cpython-{tag}.pyc"))
    assert prefix.run()[:2] == (str(prefix.bin / other), str(prefix.start))
    prefix.compile()
    assert prefix.run()[:2] == (str(prefix.bin / other), str(prefix.byte_code))


def test_every_supported_version_has_its_magic_number() -> None:
    table = dict(
        re.findall(
            r'\{"(3\.\d+)", (\d+)\}', (ROOT / "helpers/native/launcher.c").read_text(encoding="utf-8")
        )
    )
    assert [f"python{version}" for version in table] == supported_versions()
    for version, magic in table.items():
        python = shutil.which(f"python{version}", path="/usr/bin:/usr/local/bin")
        if python is not None:
            code = "import importlib.util as u; print(int.from_bytes(u.MAGIC_NUMBER[:2], 'little'))"
            asked = subprocess.run([python, "-I", "-c", code], capture_output=True, check=True, timeout=20)
            assert int(asked.stdout) == int(magic)
