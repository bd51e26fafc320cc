"""What the broker writes to its own directory and reads back after a restart. Every file carries its schema.

Only processes of the user can write there, but a record is data all the same: every field is checked against
the kernel before anything is done with it.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

SCHEMA: Final = 1
MAX_RECORD = 4 << 20
"""Bytes of a record file, at most."""

Pid = Annotated[int, msgspec.Meta(gt=1, le=1 << 30)]
Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{8}$")]


class ProcessMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process: pid and start time in clock ticks since boot (proc_pid_stat(5), field 22)."""

    pid: Pid
    start: Annotated[int, msgspec.Meta(ge=0)]


class Placeholder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty file or directory that a launch made in the host to have something to mask; device and inode
    tell it from what comes to its place."""

    path: bytes
    device: int
    inode: int
    directory: bool


class SessionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A running sandbox. ``host``, ``boot_id`` and ``pid_namespace`` say where the pids
    count.

    ``client`` is the process whose end ends the session; None for a detached one, whose ``holder`` lives
    instead. ``placeholders`` are those to remove at its end. Paths and arguments are bytes, base64 in the
    JSON of the file.
    """

    schema: Literal[1] = SCHEMA
    id: Id
    uid: int
    host: Annotated[str, msgspec.Meta(max_length=256)]
    boot_id: Annotated[str, msgspec.Meta(max_length=64)]
    pid_namespace: int
    version: Annotated[str, msgspec.Meta(max_length=64, pattern="^[0-9A-Za-z.+-]+$")]
    kind: Literal["session"]
    project: bytes
    command: list[bytes]
    started: Annotated[str, msgspec.Meta(max_length=64)]
    monitor: ProcessMark
    init: ProcessMark
    mount_namespace: int
    user_namespace: int
    client: ProcessMark | None
    holder: ProcessMark | None
    plan: msgspec.Raw
    placeholders: list[Placeholder] = []


class EndedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A detached session that has ended: kept a day with its log."""

    schema: Literal[1] = SCHEMA
    id: Id
    uid: int
    version: str
    kind: Literal["session"]
    project: bytes
    command: list[bytes]
    started: str
    ended: str
    ended_epoch: int
    pid: int
    bwrap_pid: int
    exit: int
    lost: bool
