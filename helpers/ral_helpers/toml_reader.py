"""Reads TOML files for the broker, which believes nothing of the answer.

Started as `python -I -S FILE`, once for all files of a load that have changed.
Enters: nothing. Needs: nothing; it gives up processes, files, time and memory before the first byte.
Reads: descriptor 0, to its end: for each file its length (u32, big-endian) and its bytes.
Writes: descriptor 1: one JSON array with an answer for each file, in order, either
    ["values", [[["table", …, "key"], LINE, KIND, VALUE], …]]   or   ["malformed", LINE, TEXT]
    where LINE is 0 if it is not known; KIND is "boolean", "integer", "string", "array" (of strings), "table"
    (an empty one), or "other", whose VALUE says in words what it is. Lines count from 1.
Exits: 0. Anything else means that the answer is to be thrown away.
"""

from __future__ import annotations

import json
import posix
import re
import resource
import tomllib
from collections.abc import Iterator
from datetime import date, time

CPU_SECONDS = 4
MEMORY = 512 << 20
"""Bytes of address space; the interpreter itself takes 30 MiB."""
MAX_DEPTH = 8
"""Tables within tables: what ral reads needs three."""
MAX_INTEGER = 1 << 53
"""Beyond it, JSON readers differ."""

Path = tuple[str, ...]
Table = dict[str, object]

# What a valid document consists of. A quotation mark right after the closing three belongs to the string.
_TOKENS = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"""(?!")'
    r"|'''[\s\S]*?'''(?!')"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[\[\]{}=\n]"
    r"|[^\"'#\[\]{}=\n]+"
)
_AT = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


class Unreadable(Exception):
    """TOML that is valid and deeper than anything that ral reads."""


def confine() -> None:
    """Give up what reading needs no more (getrlimit(2)). Root is not held to the number of processes."""
    for limit, value in (
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_AS, MEMORY),
    ):
        hard = resource.getrlimit(limit)[1]
        lower = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (lower, lower))


def key_path(text: str) -> Path:
    """Return the parts of a dotted key as it is written."""
    if '"' not in text and "'" not in text:
        return tuple(part.strip() for part in text.split("."))
    parts: list[str] = []
    table: object = tomllib.loads(f"{text} = 0")
    while isinstance(table, dict):
        ((part, table),) = table.items()
        parts.append(part)
    return tuple(parts)


def key_lines(text: str) -> dict[Path, int]:
    """Return the line of each key and table header of a valid document."""
    lines: dict[Path, int] = {}
    prefix: Path = ()
    written: list[str] = []
    line = start = 1
    depth = 0
    in_value = False
    for piece in _TOKENS.findall(text + "\n"):
        if piece == "\n" and depth == 0:
            header = "".join(written).strip()
            if header and not in_value:
                brackets = 2 if header.startswith("[[") else 1
                prefix = key_path(header[brackets:-brackets])
                lines.setdefault(prefix, start)
            written, in_value = [], False
        elif in_value:
            depth += (piece in "[{") - (piece in "]}")
        elif piece == "=":
            lines.setdefault(prefix + key_path("".join(written)), start)
            in_value = True
        elif not piece.startswith("#"):
            if not written:
                start = line
            written.append(piece)
        line += piece.count("\n")
    return lines


def kind_of(value: object) -> tuple[str, object]:
    """Return kind and value as they are sent."""
    match value:
        case bool():
            return "boolean", value
        case int():
            if abs(value) > MAX_INTEGER:
                return "other", "an integer of more than 53 bits"
            return "integer", value
        case str():
            return "string", value
        case float():
            return "other", "a float"
        case date() | time():
            return "other", "a date or time"
        case list():
            if all(isinstance(element, str) for element in value):
                return "array", value
            return "other", "an array with elements that are no strings"
        case _:
            return "table", None


def leaves(table: Table, path: Path = ()) -> Iterator[tuple[Path, str, object]]:
    """Yield every value of nested tables, with its path, and every empty table."""
    if len(path) >= MAX_DEPTH:
        raise Unreadable
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield ((*path, key), *kind_of(value))


def line_of(path: Path, lines: dict[Path, int]) -> int:
    """Return the line of a key; of what is in an inline table, that of the table."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 0)


def read_document(untrusted_content: bytes) -> list[object]:
    """Return the answer for one file."""
    try:
        text = untrusted_content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = untrusted_content.count(b"\n", 0, error.start) + 1
        return ["malformed", line, "this is not UTF-8"]
    try:
        table = tomllib.loads(text)
        lines = key_lines(text)
        entries = [[path, line_of(path, lines), kind, value] for path, kind, value in leaves(table)]
    except (Unreadable, RecursionError):
        return ["malformed", 0, "this is nested too deeply"]
    except ValueError as error:  # a number too long for int() is none of TOMLDecodeError
        words = str(error)
        at = _AT.search(words)
        line = 0
        if at is not None:
            line = int(at[1]) if at[1] else text.count("\n") + 1
            words = words[: at.start()]
        return ["malformed", line, words[:500]]
    return ["values", entries]


def main() -> None:
    """Answer once."""
    confine()
    parts: list[bytes] = []
    while part := posix.read(0, 1 << 20):
        parts.append(part)
    untrusted_input = b"".join(parts)
    answers: list[object] = []
    at = 0
    while at < len(untrusted_input):
        end = at + 4 + int.from_bytes(untrusted_input[at : at + 4], "big")
        answers.append(read_document(untrusted_input[at + 4 : end]))
        at = end
    output = json.dumps(answers, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    while output:
        output = output[posix.write(1, output) :]


if __name__ == "__main__":
    main()
