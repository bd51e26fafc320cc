"""A plan: the ordered operations that make a sandbox's mounts, as data. Pure.

A plan holds no descriptor. It can be printed, compared, stored in a session record and sent over the wire;
every front end produces one and nothing downstream knows which. Later operations lie over earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

Layer = Literal["system", "scratch", "home", "project", "protect", "mask", "kernel", "final"]
"""Where an operation belongs. What is shown (system to protect) is ordered by depth, so that what is named
more precisely lies on top; then the others follow in this order."""

PinName = Literal["bwrap", "trampoline", "holder", "zygote"]
"""Files that the broker executes by a descriptor it opened at its start."""


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """Device and inode of the object that a plan was made for (stat(2))."""

    device: int
    inode: int


class _Operation(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", forbid_unknown_fields=True):
    """What is done at ``dest``, an absolute path inside. ``why`` names the setting or rule that put it
    there."""

    dest: bytes
    layer: Layer
    why: str


class Bind(_Operation, frozen=True, kw_only=True, tag="bind"):
    """Show the object at ``source`` (a canonical path in the host), nosuid and nodev.

    ``identity`` is what the source was when the plan was made; another object there is refused. An absent
    source is dropped. ``required``: an unreachable source (EACCES) or an absent one refuses instead.
    """

    source: bytes
    writable: bool
    identity: Identity | None = None
    required: bool = False


class Pinned(_Operation, frozen=True, kw_only=True, tag="pinned"):
    """Lay a file that the broker holds open read-only over its own name, so that it cannot be replaced."""

    pin: PinName


class Tmpfs(_Operation, frozen=True, kw_only=True, tag="tmpfs"):
    """A fresh, empty, writable file system in memory with these permissions."""

    mode: int = 0o755


class Directory(_Operation, frozen=True, kw_only=True, tag="directory"):
    """A directory in a file system of the sandbox's own. Never below a bind: there it would be made in the
    host."""

    mode: int = 0o700


class Copy(_Operation, frozen=True, kw_only=True, tag="copy"):
    """A file in a file system of the sandbox's own with the content of the host's regular file at
    ``source``, at most MAX_COPY bytes. Never below a bind: there it would be made in the host.

    ``source`` is canonical; another object than ``identity`` there is refused, an absent one dropped.
    """

    source: bytes
    mode: int
    identity: Identity | None = None


class Data(_Operation, frozen=True, kw_only=True, tag="data"):
    """A read-only file with this content, laid over a file."""

    content: bytes


class Device(_Operation, frozen=True, kw_only=True, tag="device"):
    """The host's device node at ``source``, usable as a device. ``device`` is the number of the device
    (st_rdev, stat(2)): another one there is refused, an absent one dropped."""

    source: bytes
    device: int
    identity: Identity | None = None


class Symlink(_Operation, frozen=True, kw_only=True, tag="symlink"):
    """A symbolic link with this text."""

    target: bytes


class Proc(_Operation, frozen=True, kw_only=True, tag="proc"):
    """A fresh proc(5) of the sandbox's pid namespace."""


class Dev(_Operation, frozen=True, kw_only=True, tag="dev"):
    """A minimal /dev with its own devpts."""


class Mask(_Operation, frozen=True, kw_only=True, tag="mask"):
    """Hide what is at ``dest``: an empty read-only file over a file, an empty read-only directory over a
    directory. ``identity`` is what was there when the plan was made; whoever mounts by a descriptor refuses
    another object there."""

    directory: bool
    identity: Identity | None = None


class ReadOnly(_Operation, frozen=True, kw_only=True, tag="readonly"):
    """Make the mount at ``dest`` read-only, not those below it."""


Operation = Bind | Pinned | Tmpfs | Directory | Copy | Data | Device | Symlink | Proc | Dev | Mask | ReadOnly

MAX_COPY = 1024 * 1024
"""Bytes of a file that a session gets a copy of."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the kernel has to hold for one sandbox. ``cwd`` is the program's first directory,
    inside."""

    operations: tuple[Operation, ...]
    cwd: bytes
    share_network: bool = True
    share_ipc: bool = False
    nested_user_namespaces: bool = False


def is_under(path: bytes, ancestor: bytes) -> bool:
    """Tell whether ``path`` equals ``ancestor`` or lies below it, by component. Both absolute and normal."""
    return ancestor == b"/" or path == ancestor or path.startswith(ancestor + b"/")


def shown_names(operations: tuple[Operation, ...], source: bytes) -> Iterator[bytes]:
    """Yield every name inside at which a bind of ``operations`` gives the host's ``source``."""
    seen: set[bytes] = set()
    for operation in operations:
        if isinstance(operation, Bind) and is_under(source, operation.source):
            base = b"" if operation.source == b"/" else operation.source
            name = (b"" if operation.dest == b"/" else operation.dest) + source[len(base) :]
            if (name or b"/") not in seen:
                seen.add(name or b"/")
                yield name or b"/"


def op_word(operation: Operation) -> str:
    """Return the name of an operation's kind, for tables of a plan."""
    return type(operation).__name__.lower()


def mode_word(operation: Operation) -> str:
    """Return ``ro``, ``rw`` or ``-`` for tables of a plan."""
    match operation:
        case Bind(writable=True) | Tmpfs() | Directory() | Copy() | Device():
            return "rw"
        case Symlink() | ReadOnly():
            return "-"
        case _:
            return "ro"


def source_of(operation: Operation) -> bytes | None:
    """Return the host path or link text that an operation shows, for tables of a plan."""
    match operation:
        case Bind(source=source) | Copy(source=source) | Device(source=source):
            return source
        case Symlink(target=target):
            return target
        case _:
            return None
