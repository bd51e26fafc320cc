"""The user database that a session sees: system accounts and the user, nobody else. Pure: the bytes of the
host's files → files for the session (passwd(5), group(5), nsswitch.conf(5))."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import msgspec

from ral_broker.envelope.policy import Text

PASSWD, GROUP, NSSWITCH = b"/etc/passwd", b"/etc/group", b"/etc/nsswitch.conf"

MAX_BYTES = 4 << 20
"""Of each of the host's files; a larger one is not filtered."""

_WHY = "filter_passwd"
_FIRST_USER = 1000
_NOBODY = 65534
_NUMBER = re.compile(rb"[0-9]{1,10}")
_DATABASE = re.compile(rb"[ \t]*(passwd|group|initgroups)[ \t]*:")


class Account(msgspec.Struct, frozen=True):
    """What the directory service says of a user (getpwuid(3)), for one who is in no file."""

    name: bytes
    gid: int
    comment: bytes
    home: bytes
    shell: bytes


def filter_accounts(
    *,
    passwd: bytes | None,
    group: bytes | None,
    nsswitch: bytes | None,
    uid: int,
    gids: Collection[int],
    account: Account | None = None,
    groups: Collection[tuple[bytes, int]] = (),
    home: bytes = b"/",
) -> tuple[Text, ...]:
    """Return the files of a session for ``uid``, who is in the groups ``gids``.

    The content of a host's file is None where there is none: then none is made. ``account``, ``groups``:
    what the directory service knows of the user and of ``gids``, for what the files lack; a user that nobody
    knows gets a record with the number for a name and ``home``.
    """
    texts: list[Text] = []
    unknown = Account(b"%d" % uid, min(gids, default=uid), b"", home, b"/bin/sh")
    own = _record(uid, account or unknown)
    names = {own[0]}
    if passwd is not None:
        lines = list(_users(passwd, uid))
        if not any(int(line[2]) == uid for line in lines):
            lines.append(own)
        names = {line[0] for line in lines}
        texts.append(Text(PASSWD, _joined(lines), _WHY))
    if group is not None:
        lines = list(_groups(group, frozenset(gids), names))
        known = {int(line[2]) for line in lines}
        for name, gid in groups:
            if gid in gids and gid not in known:
                known.add(gid)
                lines.append([_plain(name), b"x", b"%d" % gid, b""])
        texts.append(Text(GROUP, _joined(lines), _WHY))
    if nsswitch is not None:
        texts.append(Text(NSSWITCH, _local_only(nsswitch), _WHY))
    return tuple(texts)


def _joined(lines: list[list[bytes]]) -> bytes:
    return b"".join(b":".join(line) + b"\n" for line in lines)


def _records(content: bytes, fields: int) -> Iterator[list[bytes]]:
    """Yield the well-formed records, without comments, NIS entries and whatever else is no record."""
    for line in content.split(b"\n"):
        parts = line.split(b":")
        named = parts[0] and parts[0][:1] not in b"#+-"
        if len(parts) == fields and named and _NUMBER.fullmatch(parts[2]):
            yield parts


def _kept(number: int) -> bool:
    return number < _FIRST_USER or number == _NOBODY


def _users(content: bytes, uid: int) -> Iterator[list[bytes]]:
    for name, _, number, gid, comment, home, shell in _records(content, 7):
        if (_kept(int(number)) or int(number) == uid) and _NUMBER.fullmatch(gid):  # wall
            yield [name, b"x", number, gid, comment, home, shell]


def _record(uid: int, account: Account) -> list[bytes]:
    fields = [account.comment, account.home, account.shell]
    return [_plain(account.name), b"x", b"%d" % uid, b"%d" % account.gid, *map(_plain, fields)]


def _plain(untrusted_field: bytes) -> bytes:
    """Return a field that is one: a directory service may send anything."""
    return re.sub(rb"[:\n\0]", b"_", untrusted_field)  # wall


def _groups(content: bytes, gids: frozenset[int], names: Collection[bytes]) -> Iterator[list[bytes]]:
    for name, _, number, members in _records(content, 4):
        if _kept(int(number)) or int(number) in gids:  # wall
            known = [member for member in members.split(b",") if member in names]  # wall
            yield [name, b"x", number, b",".join(known)]


def _local_only(content: bytes) -> bytes:
    """Let users and groups come from the files alone: a directory service would name everybody."""
    lines = [line for line in content.split(b"\n") if not _DATABASE.match(line)]
    while lines and not lines[-1]:
        lines.pop()
    return b"\n".join([b"passwd: files", b"group: files", *lines, b""])
