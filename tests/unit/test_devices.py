"""Globs of devices on the real /dev. /dev/shm is where an ordinary user can plant names below it."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ral_broker.config.settings import Settings
from ral_broker.envelope.devices import Devices, expand_devices

BUILT_IN = Settings().devices_blacklist


@pytest.fixture
def planted() -> Iterator[Path]:
    """A directory below /dev with links of all kinds."""
    directory = Path(tempfile.mkdtemp(prefix="ral-t-", dir="/dev/shm"))
    (directory / "good").symlink_to("/dev/null")
    (directory / "console").symlink_to("../../console")
    (directory / "out").symlink_to("/etc/passwd")
    (directory / "dangling").symlink_to("gone")
    (directory / "loop").symlink_to("loop")
    (directory / "file").write_bytes(b"")
    (directory / "below").mkdir()
    yield directory
    shutil.rmtree(directory)


def expand(*patterns: str, blacklist: tuple[str, ...] = BUILT_IN) -> Devices:
    return expand_devices(patterns, blacklist)


def test_matches_are_sorted_and_named_once() -> None:
    found = expand("/dev/z*o", "/dev/null", "/dev/[nf]ull", "/dev/nothing*", "/dev/gone")
    assert found.names == (b"/dev/full", b"/dev/null", b"/dev/zero")
    assert found.notices == ()


def test_a_star_stays_within_one_directory() -> None:
    assert all(name.count(b"/") == 2 for name in expand("/dev/*").names)


def test_the_blacklist_wins_and_says_so_once() -> None:
    found = expand("/dev/tty", "/dev/tt[y]", "/dev/null")
    assert found.names == (b"/dev/null",)
    assert found.notices == ("devices: /dev/tty is blacklisted, skipping",)
    # The control: without a blacklist it is shown.
    assert expand("/dev/tty", blacklist=()).names == (b"/dev/tty",)


def test_a_pattern_of_the_blacklist_reaches_below() -> None:
    assert expand("/dev/null", blacklist=("/dev*",)).names == ()


def test_a_link_is_judged_by_what_it_leads_to(planted: Path) -> None:
    found = expand(f"{planted}/*")
    assert found.names == (b"/dev/null",)
    assert sorted(found.notices) == sorted(
        [
            f"devices: {planted}/below is a directory; write {planted}/below/* for what is in it, skipping",
            f"devices: {planted}/console (/dev/console) is blacklisted, skipping",
            f"devices: {planted}/dangling cannot be reached (No such file or directory), skipping",
            f"devices: {planted}/file is no device, skipping",
            f"devices: {planted}/loop cannot be reached (Too many levels of symbolic links), skipping",
            f"devices: {planted}/out (/etc/passwd) leads out of /dev, skipping",
        ]
    )
    names = [f"{planted}/good"]
    assert expand(*names, blacklist=("/dev/null",)).names == ()
    assert expand(*names, blacklist=(names[0],)).names == ()


@pytest.mark.parametrize(
    "pattern",
    [
        "/etc/passwd",
        "/dev/../etc/passwd",
        "/dev/x/../null",
        "/dev",
        "/dev/",
        "null",
        "/dev//null",
        "/dev/./null",
    ],
)
def test_a_name_that_is_not_below_dev_is_refused(pattern: str) -> None:
    found = expand(pattern)
    assert found.names == ()
    assert found.notices == (f"devices: {pattern} is not the name of something below /dev, skipping",)


def test_block_devices_are_never_shown() -> None:
    blocks = [name for name in os.listdir("/dev") if stat.S_ISBLK(os.stat(f"/dev/{name}").st_mode)]
    if not blocks:
        pytest.skip("needs a block device in /dev")
    found = expand(f"/dev/{blocks[0]}", blacklist=())
    assert found.names == ()
    assert "is a block device" in found.notices[0]


@pytest.mark.root
def test_a_second_node_of_a_blacklisted_device_is_that_device(planted: Path) -> None:
    os.mknod(planted / "mine", 0o600 | stat.S_IFCHR, os.stat("/dev/tty").st_rdev)
    os.mknod(planted / "disk", 0o600 | stat.S_IFBLK, os.makedev(7, 0))
    found = expand(f"{planted}/mine", f"{planted}/disk")
    assert found.names == ()
    assert "is the same device as one that is blacklisted, skipping" in found.notices[0]
    assert "is a block device" in found.notices[1]
    # The control.
    assert expand(f"{planted}/mine", blacklist=()).names == (os.fsencode(planted / "mine"),)
