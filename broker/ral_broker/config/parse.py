"""Turns TOML into plain values with the line of every key, in a child whose answer is not believed.

The child is helpers/ral_helpers/toml_reader.py: no environment, no descriptors but the two it talks through,
limits on time and memory, and it ends with the answer.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import signal
import sys
from collections.abc import Sequence
from typing import Literal

import msgspec
import trio

from ral_broker import spawn, syscalls
from ral_broker.config.values import Malformed, Other, ParsedFile, Value
from ral_broker.errors import Refused
from ral_broker.log import shown

__all__ = ["Malformed", "Other", "ParsedFile", "Reader", "Value", "decode_answer", "parse"]

READ_SECONDS = 5.0
"""Deadline of one child."""
MAX_ANSWER = 32 << 20
"""Bytes; what the largest files that are read can come to."""
MAX_KEYS = 10_000
"""Keys of one file."""
_MAX_DEPTH = 8
_CHUNK = 1 << 18


class _Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    path: tuple[str, ...]
    line: int
    kind: Literal["boolean", "integer", "string", "array", "table", "other"]
    value: bool | int | str | tuple[str, ...] | None


class _Values(msgspec.Struct, frozen=True, array_like=True, tag="values", forbid_unknown_fields=True):
    entries: list[_Entry]


class _Malformed(msgspec.Struct, frozen=True, array_like=True, tag="malformed", forbid_unknown_fields=True):
    line: int
    text: str


_decode_answer = msgspec.json.Decoder(list[_Values | _Malformed]).decode
_KINDS: dict[str, type] = {
    "boolean": bool, "integer": int, "string": str, "array": tuple, "table": type(None), "other": str,
}  # fmt: skip


class Reader:
    """Starts the child, once for all files that have to be read. ``program`` is the file it runs."""

    def __init__(self, program: str | None = None, *, deadline: float = READ_SECONDS) -> None:
        self._program = program or str(importlib.resources.files("ral_helpers").joinpath("toml_reader.py"))
        self._deadline = deadline

    async def read(self, contents: Sequence[bytes]) -> list[ParsedFile | Malformed]:
        """Return the values of each file, in order.

        Raises Refused if the child fails, takes too long, or answers anything but what was asked for.
        """
        frames = b"".join(len(content).to_bytes(4, "big") + content for content in contents)
        untrusted_answer = await self._ask(frames)
        return decode_answer(untrusted_answer, contents)

    async def _ask(self, frames: bytes) -> bytes:
        with contextlib.ExitStack() as stack:
            answer, status = b"", None
            try:
                answer_fd, answer_end = os.pipe2(os.O_CLOEXEC)
                stack.callback(os.close, answer_fd)
                # Ours only: the child waits for room, and an answer is often longer than a pipe holds.
                os.set_blocking(answer_fd, False)
                with contextlib.ExitStack() as until_started:
                    until_started.callback(os.close, answer_end)
                    child = self._start(frames, answer_end)
                pidfd = os.pidfd_open(child)
                stack.callback(os.close, pidfd)
            except OSError as error:
                raise _refusal(f"cannot be started: {error.strerror}") from error
            try:
                with trio.move_on_after(self._deadline):
                    answer = await _read_all(answer_fd)
                    await trio.lowlevel.wait_readable(pidfd)
                    status = 0
            finally:
                # A session leader: its group is all that it may have started. Not yet collected, it keeps
                # the number of the group.
                os.killpg(child, signal.SIGKILL)
                ended = _reap(child)
            if status is None or ended == -signal.SIGXCPU:
                raise _refusal(f"did not finish within {self._deadline:g} seconds")
            if ended != 0:
                raise _refusal(f"ended by signal {-ended}" if ended < 0 else f"ended with status {ended}")
            return answer

    def _start(self, frames: bytes, answer_end: int) -> int:
        """Start the child and return its pid. OSError."""
        with contextlib.ExitStack() as stack:
            descriptors = {
                0: syscalls.sealed_memfd("ral-config", frames), 1: answer_end,
                2: os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC),
            }  # fmt: skip
            stack.callback(os.close, descriptors[0])
            stack.callback(os.close, descriptors[2])
            python = os.open(sys.executable, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, python)
            argv = [sys.executable, "-I", "-S", self._program]
            return spawn.spawn(python, [os.fsencode(word) for word in argv], {}, descriptors)


def _reap(child: int) -> int:
    """Collect a child that has ended, or is about to after SIGKILL."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def parse(content: bytes, label: str, reader: Reader | None = None) -> ParsedFile:
    """Return the values of one file. Raises Refused, naming ``label`` and the line, if it is malformed."""
    (parsed,) = await (reader or Reader()).read([content])
    if isinstance(parsed, Malformed):
        place = label if parsed.line is None else f"{label}:{parsed.line}"
        raise Refused(f"{place}: {parsed.text}; mend the file")
    return parsed


async def _read_all(fd: int) -> bytes:
    """Read to the end of the pipe. Raises Refused beyond MAX_ANSWER."""
    parts: list[bytes] = []
    size = 0
    while True:
        await trio.lowlevel.wait_readable(fd)
        try:
            part = os.read(fd, _CHUNK)
        except BlockingIOError:
            continue
        if not part:
            return b"".join(parts)
        size += len(part)
        if size > MAX_ANSWER:  # wall
            raise _refusal(f"answered with more than {MAX_ANSWER >> 20} MiB")
        parts.append(part)


def decode_answer(untrusted_answer: bytes, contents: Sequence[bytes]) -> list[ParsedFile | Malformed]:
    """Return what the child says of each file. Raises Refused for anything but an answer to the question."""
    try:
        answers = _decode_answer(untrusted_answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _refusal(f"gave an answer that cannot be decoded: {shown(str(error))}") from error
    if len(answers) != len(contents):  # wall
        raise _refusal(f"answered for {len(answers)} files of {len(contents)}")
    return [_checked(answer, content) for answer, content in zip(answers, contents, strict=True)]


def _checked(untrusted_answer: _Values | _Malformed, content: bytes) -> ParsedFile | Malformed:
    last_line = content.count(b"\n") + 1
    if isinstance(untrusted_answer, _Malformed):
        line = _line(untrusted_answer.line, last_line)
        return Malformed(line, shown(untrusted_answer.text)[:500])
    if len(untrusted_answer.entries) > MAX_KEYS:
        raise Refused(f"a configuration file has more than {MAX_KEYS} keys; no session needs that many")
    parsed = ParsedFile({}, {})
    for entry in untrusted_answer.entries:
        if not 1 <= len(entry.path) <= _MAX_DEPTH or type(entry.value) is not _KINDS[entry.kind]:  # wall
            raise _refusal("gave an answer that contradicts itself")
        value = _value(entry)
        _insert(parsed.values, entry.path, value)
        line = _line(entry.line, last_line)
        if line is not None:
            for end in range(1, len(entry.path) + 1):
                parsed.lines.setdefault(".".join(entry.path[:end]), line)
    return parsed


def _line(untrusted_line: int, last_line: int) -> int | None:
    if not 0 <= untrusted_line <= last_line:  # wall
        raise _refusal("named a line that the file does not have")
    return untrusted_line or None


def _value(entry: _Entry) -> Value:
    if entry.kind == "other":
        return Other(shown(str(entry.value))[:100])
    return {} if entry.value is None else entry.value


def _insert(table: dict[str, Value], path: tuple[str, ...], value: Value) -> None:
    for part in path[:-1]:
        below = table.setdefault(part, {})
        if not isinstance(below, dict):
            raise _refusal("named one key twice")
        table = below
    if path[-1] in table:  # wall
        raise _refusal("named one key twice")
    table[path[-1]] = value


def _refusal(what: str) -> Refused:
    return Refused(
        f"no configuration file can be read: the program that decodes them {what}; no session is started; "
        "run it again, and if that does not help install ral again"
    )
