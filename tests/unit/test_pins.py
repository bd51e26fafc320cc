"""Executables pinned by descriptor: what they are called now, and what they are when somebody changes the
name."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ral_broker import pins, syscalls
from ral_broker.errors import HostLacks
from ral_broker.pins import Pin, extra_rights, is_pinned, names, take_bwrap, take_helper


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shutil.copy("/bin/true", tmp_path / "bwrap")
    return tmp_path


@pytest.fixture
def pin(directory: Path) -> Pin:
    return take_bwrap(os.fsencode(directory))


def run(pin: Pin) -> int:
    pid = os.posix_spawn(f"/proc/self/fd/{pin.fd}", [pin.argv0], {}, setsigmask=())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_pin_knows_its_file(pin: Pin, directory: Path) -> None:
    status = (directory / "bwrap").stat()
    assert (pin.device, pin.inode) == (status.st_dev, status.st_ino)
    assert pin.argv0 == os.fsencode(directory / "bwrap")
    assert names(pin) == pin.argv0
    assert is_pinned(pin, status)
    assert not pin.in_memory
    assert not os.get_inheritable(pin.fd)
    assert run(pin) == 0


def test_an_unlinked_file_has_no_name_and_still_runs(pin: Pin, directory: Path) -> None:
    (directory / "bwrap").unlink()
    assert names(pin) is None
    assert run(pin) == 0


def test_a_file_whose_name_ends_in_deleted_keeps_it(pin: Pin, directory: Path) -> None:
    (directory / "bwrap").rename(directory / "x (deleted)")
    assert names(pin) == os.fsencode(directory / "x (deleted)")


def test_a_replacement_by_rename_does_not_run(pin: Pin, directory: Path) -> None:
    shutil.copy("/bin/false", directory / "new")
    (directory / "new").rename(directory / "bwrap")
    assert names(pin) is None
    assert not is_pinned(pin, (directory / "bwrap").stat())
    assert run(pin) == 0
    assert run(take_bwrap(os.fsencode(directory))) == 1


def test_a_renamed_file_is_found_under_its_new_name(pin: Pin, directory: Path) -> None:
    (directory / "bwrap").rename(directory / "moved")
    assert names(pin) == os.fsencode(directory / "moved")


def test_a_hard_link_is_the_same_file(pin: Pin, directory: Path) -> None:
    (directory / "other").hardlink_to(directory / "bwrap")
    (directory / "bwrap").unlink()
    assert is_pinned(pin, (directory / "other").stat())
    assert names(pin) is None, "the kernel calls it bwrap (deleted), which is no name"
    assert run(pin) == 0


def test_bwrap_is_taken_from_the_first_absolute_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy("/bin/true", tmp_path / name / "bwrap")
    monkeypatch.chdir(tmp_path / "a")
    path = b":.:a:" + os.fsencode(tmp_path / "absent") + b":" + os.fsencode(tmp_path / "b")
    assert take_bwrap(path).argv0 == os.fsencode(tmp_path / "b" / "bwrap")


def test_a_symbolic_link_is_followed_and_the_name_is_the_targets(directory: Path) -> None:
    (directory / "bin").mkdir()
    (directory / "bin" / "bwrap").symlink_to("../bwrap")
    pin = take_bwrap(os.fsencode(directory / "bin"))
    assert pin.argv0 == os.fsencode(directory / "bin" / "bwrap")
    assert names(pin) == os.fsencode(directory / "bwrap")


def test_what_cannot_be_executed_is_passed_over_and_named(directory: Path, tmp_path: Path) -> None:
    for name in ("data", "dir", "fifo"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "bwrap").write_text("no program")
    (tmp_path / "dir" / "bwrap").mkdir()
    os.mkfifo(tmp_path / "fifo" / "bwrap")
    bad = b":".join(os.fsencode(tmp_path / name) for name in ("data", "dir", "fifo"))
    assert take_bwrap(bad + b":" + os.fsencode(directory)).argv0 == os.fsencode(directory / "bwrap")
    with pytest.raises(HostLacks) as caught:
        take_bwrap(bad)
    for name in ("data", "dir", "fifo"):
        assert f"{tmp_path}/{name}/bwrap: not an executable file" in caught.value.message


def test_a_missing_bwrap_is_named_with_the_path_and_the_package(tmp_path: Path) -> None:
    with pytest.raises(HostLacks) as caught:
        take_bwrap(os.fsencode(tmp_path))
    assert f"not found on PATH={tmp_path}" in caught.value.message
    assert "apt install bubblewrap" in caught.value.message


def test_no_descriptor_is_left_by_what_was_passed_over(tmp_path: Path) -> None:
    (tmp_path / "bwrap").write_text("no program")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(HostLacks):
        take_bwrap(os.fsencode(tmp_path))
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["trampoline", "holder"])
def test_a_helper_is_a_sealed_copy_in_memory(name: str) -> None:
    pin = take_helper(name)
    assert pin.in_memory
    assert names(pin) is None
    assert os.pread(pin.fd, 1 << 24, 0) == Path(os.fsdecode(pin.argv0)).read_bytes()
    seals = syscalls.F_SEAL_SEAL | syscalls.F_SEAL_SHRINK | syscalls.F_SEAL_GROW | syscalls.F_SEAL_WRITE
    assert fcntl.fcntl(pin.fd, syscalls.F_GET_SEALS) & seals == seals
    again = os.open(f"/proc/self/fd/{pin.fd}", os.O_RDWR | os.O_CLOEXEC)
    with pytest.raises(PermissionError):
        os.write(again, b"x")
    os.close(again)
    os.close(pin.fd)


def test_the_trampoline_pin_runs_and_refuses_without_orders() -> None:
    assert run(take_helper("trampoline")) == 126


def test_a_missing_helper_says_that_the_installation_is_incomplete() -> None:
    with pytest.raises(HostLacks, match="install ral again"):
        take_helper("absent")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"#!/bin/sh\n", "is no program"), (b"", "is no program"),
     (b"\x7fELF\x02\x01" + b"\0" * 12 + (243).to_bytes(2, "little"), "another machine")],
)  # fmt: skip
def test_a_helper_of_another_machine_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(HostLacks, match=words):
        pins._check_machine(content, b"/x")


@pytest.mark.root
def test_where_memory_files_cannot_be_executed_the_file_is_pinned() -> None:
    """vm.memfd_noexec belongs to a pid namespace: it is set in a fresh one."""
    script = (
        "open('/proc/sys/vm/memfd_noexec', 'w').write('2')\n"
        "import os\n"
        "from ral_broker.pins import names, take_helper\n"
        "pin = take_helper('trampoline')\n"
        "pid = os.posix_spawn(f'/proc/self/fd/{pin.fd}', ['t'], {})\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "print(pin.in_memory, names(pin) == os.path.realpath(pin.argv0), status)\n"
    )
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-I", "-c", script],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "False True 126\n"), done


def test_an_ordinary_file_gets_no_rights(pin: Pin) -> None:
    assert extra_rights(pin) is None


def test_a_file_setuid_to_this_user_gets_nothing_new(pin: Pin, directory: Path) -> None:
    (directory / "bwrap").chmod(0o4755)
    assert extra_rights(pin) is None


@pytest.mark.root
def test_setuid_setgid_and_capabilities_are_told(pin: Pin, directory: Path) -> None:
    os.chown(directory / "bwrap", 65534, 65534)
    (directory / "bwrap").chmod(0o4755)
    assert extra_rights(pin) == "setuid to uid 65534"
    (directory / "bwrap").chmod(0o2755)
    assert extra_rights(pin) == "setgid to gid 65534"
    (directory / "bwrap").chmod(0o755)
    # struct vfs_cap_data, revision 2, effective, CAP_SYS_ADMIN (linux/capability.h)
    os.setxattr(pin.fd, "security.capability", b"\1\0\0\2\0\0\x20\0" + b"\0" * 12)
    assert extra_rights(pin) == "installed with file capabilities"


def test_an_executable_memory_file_refuses_what_memfd_create_refuses() -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        syscalls.executable_memfd("x" * 300, b"")
