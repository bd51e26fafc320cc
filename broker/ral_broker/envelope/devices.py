"""Which devices of the host a session gets: the globs of ``devices`` on the host's /dev, without what
``devices_blacklist`` names."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterable, Iterator

import msgspec

from ral_broker.envelope.facts import canonical_name
from ral_broker.log import shown

_DEV = b"/dev"
_MAX_DEVICES = 256
_MAGIC = frozenset(b"*?[")


class Devices(msgspec.Struct, frozen=True):
    """``names``: canonical paths below /dev, sorted. ``notices``: a sentence for each that was asked for and
    is not shown."""

    names: tuple[bytes, ...]
    notices: tuple[str, ...]


def expand_devices(patterns: Iterable[str], blacklist: Iterable[str]) -> Devices:
    """Find the character devices that the patterns name (glob(7), ``*`` within one directory).

    A link is followed and what it leads to is judged. A pattern that matches nothing says nothing. Where a
    ``*`` of the blacklist stands a ``/`` may be too; a second node of a device that it names is that device.
    """
    denied = [os.fsencode(pattern) for pattern in blacklist]
    names: set[bytes] = set()
    notices: dict[str, None] = {}
    numbers: set[int] | None = None
    for pattern in patterns:
        parts = os.fsencode(pattern).split(b"/")
        if parts[:2] != [b"", b"dev"] or len(parts) < 3 or {b"", b".", b".."} & set(parts[2:]):  # wall
            notices[f"devices: {shown(pattern)} is not the name of something below /dev, skipping"] = None
            continue
        for name in _matches(_DEV, parts[2:]):
            if numbers is None:
                numbers = _numbers(denied)
            found = _judge(name, denied, numbers)
            if isinstance(found, str):
                notices[found] = None
            elif len(names) == _MAX_DEVICES and found not in names:
                notices[f"devices: more than {_MAX_DEVICES} match, skipping the others"] = None
            else:
                names.add(found)
    return Devices(tuple(sorted(names)), tuple(notices))


def _matches(directory: bytes, parts: list[bytes]) -> Iterator[bytes]:
    """Yield the existing names that match, a component of the pattern for each directory."""
    part, *rest = parts
    if not _MAGIC & set(part):
        candidates = [part]
    else:
        try:
            entries = os.listdir(directory)
        except OSError:
            return
        # As in a shell, only a pattern with a dot at its start finds a hidden name.
        candidates = sorted(
            entry
            for entry in entries
            if fnmatch.fnmatchcase(entry, part) and (part[:1] == b"." or entry[:1] != b".")
        )
    for candidate in candidates:
        path = directory + b"/" + candidate
        if rest:
            yield from _matches(path, rest)
        elif os.path.lexists(path):
            yield path


def _judge(name: bytes, denied: list[bytes], numbers: set[int]) -> bytes | str:
    """Return what a name leads to, or the sentence why it is not shown."""
    try:
        fd = os.open(name, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        return f"devices: {shown(name)} cannot be reached ({error.strerror}), skipping"
    try:
        real, status = canonical_name(fd), os.fstat(fd)
    finally:
        os.close(fd)
    spelled = shown(name) if real == name else f"{shown(name)} ({shown(real)})"
    if _is_named(name, denied) or _is_named(real, denied):  # wall
        return f"devices: {spelled} is blacklisted, skipping"
    if not real.startswith(_DEV + b"/"):  # wall
        return f"devices: {spelled} leads out of /dev, skipping"
    if stat.S_ISBLK(status.st_mode):  # wall
        return (
            f"devices: {spelled} is a block device, by which every file on it could be read past its "
            "permissions and masks, skipping"
        )
    if stat.S_ISDIR(status.st_mode):
        return f"devices: {spelled} is a directory; write {shown(name)}/* for what is in it, skipping"
    if not stat.S_ISCHR(status.st_mode):  # wall
        return f"devices: {spelled} is no device, skipping"
    if status.st_rdev in numbers:  # wall
        return f"devices: {spelled} is the same device as one that is blacklisted, skipping"
    return real


def _is_named(path: bytes, patterns: list[bytes]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _numbers(denied: list[bytes]) -> set[int]:
    """Return the device numbers of the character devices that the blacklist names."""
    numbers: set[int] = set()
    for pattern in denied:
        parts = pattern.split(b"/")
        if parts[:2] != [b"", b"dev"] or len(parts) < 3:
            continue
        for name in _matches(_DEV, parts[2:]):
            try:
                status = os.stat(name)
            except OSError:
                continue
            if stat.S_ISCHR(status.st_mode):
                numbers.add(status.st_rdev)
    return numbers
