"""The trampoline's orders as bytes (docs/protocol.md, section 2). Pure: the decoder is
helpers/native/trampoline.c."""

from __future__ import annotations

import struct

import msgspec

from ral_broker.errors import Refused

MAGIC = b"ral-warrant/1\0\0\0"
MAX_WARRANT = 8 << 20
"""Bytes of a warrant at most."""
MAX_STRINGS = 1 << 20
"""Arguments at most, and environment entries at most."""
MAX_LIMITS = 16
"""Limits at most; also the number of resources that exist (getrlimit(2))."""
MAX_PROCESSORS = 8 * 1024
"""Processors in an affinity mask at most."""
UNLIMITED = (1 << 64) - 1
"""RLIM_INFINITY."""

RULESET = 1
TERMINAL = 2
TERMINAL_SLOTS = (4, 8, 16)
AFFINITY = 32

_HEADER = struct.Struct("<16sIIIiQIIII")
_LIMIT = struct.Struct("<IIQQ")
_NEVER_IGNORED = frozenset({9, 19})  # SIGKILL, SIGSTOP


class WarrantError(Refused, ValueError):
    """The orders cannot be written down; the message says which of them and why."""


class Warrant(msgspec.Struct, frozen=True, kw_only=True):
    """What the trampoline is to do for its caller.

    ``limits`` are (resource, soft, hard) of getrlimit(2) with UNLIMITED for no limit; ``ignored`` are signal
    numbers; ``affinity`` are processor numbers, None to leave it alone; ``ruleset`` says that a Landlock
    ruleset waits on its slot; ``terminals`` says which of 0, 1, 2 are to be the sandbox's own terminal.
    """

    argv: tuple[bytes, ...]
    environment: tuple[bytes, ...] = ()
    umask: int = 0o022
    nice: int = 0
    ignored: frozenset[int] = frozenset()
    limits: tuple[tuple[int, int, int], ...] = ()
    affinity: frozenset[int] | None = None
    ruleset: bool = False
    terminals: tuple[bool, bool, bool] = (False, False, False)


def encode(warrant: Warrant) -> bytes:
    """Return the warrant as the trampoline reads it.

    Raises WarrantError for what the format cannot say: a NUL, a number out of its range, more than
    MAX_WARRANT bytes.
    """
    if not 0 <= warrant.umask <= 0o777:
        raise WarrantError(f"the umask {warrant.umask:#o} is refused: it must lie between 0 and 0o777")
    if not -20 <= warrant.nice <= 19:
        raise WarrantError(f"the nice value {warrant.nice} is refused: it must lie between -20 and 19")
    flags = RULESET if warrant.ruleset else 0
    if any(warrant.terminals):
        flags |= TERMINAL
        flags |= sum(bit for bit, wanted in zip(TERMINAL_SLOTS, warrant.terminals, strict=True) if wanted)
    affinity = b""
    if warrant.affinity is not None:
        flags |= AFFINITY
        affinity = _affinity(warrant.affinity)
    strings = _strings(warrant.argv, warrant.environment)
    body = _limits(warrant.limits) + affinity + strings
    size = _HEADER.size + len(body)
    if size > MAX_WARRANT:
        raise WarrantError(
            f"command and environment are refused: they need {size} bytes and {MAX_WARRANT} are allowed; "
            "pass long arguments in a file"
        )
    header = _HEADER.pack(
        MAGIC,
        size,
        flags,
        warrant.umask,
        warrant.nice,
        _ignored(warrant.ignored),
        len(warrant.limits),
        len(affinity),
        len(warrant.argv),
        len(warrant.environment),
    )
    return header + body


def _strings(argv: tuple[bytes, ...], environment: tuple[bytes, ...]) -> bytes:
    if not argv:
        raise WarrantError("a launch without a command is refused: name the program to run")
    for what, strings in (("arguments", argv), ("environment entries", environment)):
        if len(strings) > MAX_STRINGS:
            raise WarrantError(f"{len(strings)} {what} are refused: {MAX_STRINGS} are allowed")
        for number, text in enumerate(strings):
            if b"\0" in text:
                raise WarrantError(f"number {number} of the {what} is refused: it contains a NUL byte")
    return b"".join(text + b"\0" for text in (*argv, *environment))


def _ignored(numbers: frozenset[int]) -> int:
    mask = 0
    for number in numbers:
        if not 1 <= number <= 64 or number in _NEVER_IGNORED:
            raise WarrantError(
                f"signal {number} is refused: it does not exist or cannot be ignored (signal(7))"
            )
        mask |= 1 << (number - 1)
    return mask


def _limits(limits: tuple[tuple[int, int, int], ...]) -> bytes:
    packed = bytearray()
    last = -1
    for resource, soft, hard in sorted(limits):
        if not 0 <= resource < MAX_LIMITS:
            raise WarrantError(f"limit {resource} is refused: there is no such resource (getrlimit(2))")
        if resource == last:
            raise WarrantError(f"limit {resource} is refused: it is given twice")
        if not 0 <= soft <= hard <= UNLIMITED:
            raise WarrantError(
                f"limit {resource} is refused: soft {soft} and hard {hard} are not a pair of limits"
            )
        packed += _LIMIT.pack(resource, 0, soft, hard)
        last = resource
    return bytes(packed)


def _affinity(processors: frozenset[int]) -> bytes:
    if not processors:
        raise WarrantError("an affinity without a processor is refused: the program could run nowhere")
    mask = 0
    for number in processors:
        if not 0 <= number < MAX_PROCESSORS:
            raise WarrantError(
                f"processor {number} is refused: it must lie between 0 and {MAX_PROCESSORS - 1}"
            )
        mask |= 1 << number
    words = (max(processors) // 64) + 1
    return mask.to_bytes(words * 8, "little")
