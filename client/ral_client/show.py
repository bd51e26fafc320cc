"""Answers as text for people and as JSON documents. Imported inside the verbs that print."""

import json
import posix
from binascii import b2a_base64

from ral_client.answer import Answer
from ral_client.call import Connection, ask, escape, put, reach, refusal, say
from ral_protocol import exits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

COLOURS = {"live": "\x1b[32m", "reloading": "\x1b[33m", "detached": "\x1b[36m", "ended": "\x1b[2m"}
PLAIN = "\x1b[m"


def show_json(document: object) -> None:
    """Print one document."""
    put(1, (json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "backslashreplace"))


def add_bytes(document: "dict[str, object]", key: str, untrusted: "bytes | list[bytes] | None") -> None:
    """Store bytes as text. Where one is not UTF-8 it appears escaped, and ``key_b64`` has the same in
    base64."""
    items = untrusted if isinstance(untrusted, list) else [] if untrusted is None else [untrusted]
    texts = [item.decode("utf-8", "backslashreplace") for item in items]
    encoded = [b2a_base64(item, newline=False).decode() for item in items]
    exact = all(text.encode() == item for text, item in zip(texts, items, strict=True))
    if untrusted is None:
        document[key] = None
    elif isinstance(untrusted, list):
        document[key] = texts
        if not exact:
            document[f"{key}_b64"] = encoded
    else:
        document[key] = texts[0]
        if not exact:
            document[f"{key}_b64"] = encoded[0]


def table(rows: "list[list[str]]", colours: "dict[str, str] | None" = None) -> str:
    """Aligned columns, two blanks between them; a cell that ``colours`` names gets its colour."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[-1] = cells[-1].rstrip()
        for at, cell in enumerate(row):
            if colours and cell in colours:
                cells[at] = colours[cell] + cell + PLAIN + cells[at][len(cell) :]
        lines.append("  ".join(cells) + "\n")
    return "".join(lines)


def coloured() -> bool:
    """Whether standard output is a terminal that may get colours (https://no-color.org)."""
    return not posix.environ.get(b"NO_COLOR") and posix.isatty(1) and posix.environ.get(b"TERM") != b"dumb"


def paste(argv: "list[bytes]") -> str:
    """A command line that a shell reads back."""
    words = []
    for argument in argv:
        word = escape(argument)
        plain = word and all(c.isalnum() or c in "%+,-./:=@_" for c in word)
        words.append(word if plain else "'" + word.replace("'", "'\\''") + "'")
    return " ".join(words)


def stream(connection: Connection, answer: Answer) -> "Iterator[Answer]":
    """The answers from ``answer`` to before ``done``. Raises Failure for a refusal."""
    while answer.kind != "done":
        if answer.kind == "refused":
            raise refusal(answer, exits.FAILED)
        yield answer
        answer = connection.receive()


def show_id(identity: str, *, as_json: bool) -> None:
    """The id of a session that was started detached."""
    if as_json:
        show_json({"id": identity})
    else:
        put(1, f"{identity}\n".encode())


def show_plan(connection: Connection, answer: Answer, *, as_json: bool) -> int:
    """What `--dry-run` would have started. ``answer`` is the first of the stream."""
    document: dict[str, object] = {}
    plan = []
    rows = [["OP", "DEST", "SOURCE", "MODE", "LAYER", "WHY"]]
    head = ""
    for line in stream(connection, answer):
        if line.kind == "argv":
            add_bytes(document, "argv", line.datas("argv"))
            add_bytes(document, "options", line.datas("options"))
            head = f"argv     {paste(line.datas('argv'))}\noptions  {paste(line.datas('options'))}\n\n"
        elif line.kind == "plan":
            source = line.data("source") if line.has("source") else None
            operation: dict[str, object] = {"op": line.text("op")}
            add_bytes(operation, "dest", line.data("dest"))
            add_bytes(operation, "source", source)
            operation.update((key, line.text(key)) for key in ("mode", "layer", "why"))
            plan.append(operation)
            rows.append([
                escape(line.text("op")), escape(line.data("dest")), escape(source or b"-"),
                *(escape(line.text(key)) for key in ("mode", "layer", "why")),
            ])  # fmt: skip
        elif line.kind == "notice":
            say(line.text("text"))
    if as_json:
        show_json({**document, "plan": plan})
    else:
        put(1, (head + table(rows)).encode())
    return exits.OK


def sessions(options: "dict[str, str]") -> int:
    """``ral sessions``."""
    connection, answer = ask({"t": "sessions", "ended": "all" in options})
    lines = list(stream(connection, answer))
    if "json" in options:
        show_json([session_document(line) for line in lines])
        return exits.OK
    rows = [["ID", "KIND", "STATE", "PID", "STARTED", "GUARD", "PROJECT", "COMMAND"]]
    for line in lines:
        state = line.text("state")
        rows.append([
            escape(line.text("id")), escape(line.text("kind")), escape(state) + _ending(line),
            str(line.number("pid")), escape(line.text("started")), escape(line.text("guard")),
            escape(line.data("project")), paste(line.datas("command")),
        ])  # fmt: skip
    if len(rows) == 1:
        say(
            "there is no session" if "all" in options else "there is no live session; --all shows ended ones"
        )
        return exits.OK
    put(1, table(rows, COLOURS if coloured() else None).encode())
    return exits.OK


def _ending(line: Answer) -> str:
    if line.flag("lost"):
        return " (lost)"
    if line.has("exit"):
        return f" ({line.number('exit')})"
    return ""


def session_document(line: Answer) -> "dict[str, object]":
    """One object of `ral sessions --json`."""
    document: dict[str, object] = {"id": line.text("id"), "kind": line.text("kind")}
    add_bytes(document, "project", line.data("project"))
    add_bytes(document, "command", line.datas("command"))
    document.update({
        "pid": line.number("pid"), "bwrap_pid": line.number("bwrap_pid"), "started": line.text("started"),
        "state": line.text("state"), "guard": line.text("guard"), "version": line.text("version"),
        "exit": line.number("exit") if line.has("exit") else None, "lost": line.flag("lost"),
        "ended": line.text("ended") if line.has("ended") else None,
    })  # fmt: skip
    return document


def broker_status(options: "dict[str, str]") -> int:
    """``ral broker status``: 0 if one runs, 1 if not. Starts none."""
    connection = reach(start=False)
    if connection is None:
        if "json" in options:
            show_json({"running": False})
        else:
            put(1, b"no broker is running; `ral run` starts one\n")
        return exits.FAILED
    connection.close()
    _, answer = ask({"t": "status"})
    if answer.kind != "broker":
        raise refusal(answer, exits.FAILED)
    stages = answer.pairs("stages")
    document: dict[str, object] = {
        "running": True, "version": answer.text("version"), "pid": answer.number("pid"),
        "started": answer.text("started"), "sessions": answer.number("sessions"),
        "activated": answer.flag("activated"), "last_launch_us": dict(stages),
    }  # fmt: skip
    add_bytes(document, "runtime_dir", answer.data("runtime_dir"))
    if "json" in options:
        show_json(document)
        return exits.OK
    by = "systemd's socket unit" if answer.flag("activated") else "a client"
    rows = [
        ["version", escape(answer.text("version"))],
        ["pid", str(answer.number("pid"))],
        ["started", f"{escape(answer.text('started'))} by {by}"],
        ["sessions", str(answer.number("sessions"))],
        ["runtime directory", escape(answer.data("runtime_dir"))],
    ]
    if stages:
        rows.append(
            ["last launch", ", ".join(f"{escape(name)} {micro / 1000:.1f} ms" for name, micro in stages)]
        )
    put(1, table(rows).encode())
    return exits.OK


def broker_stop() -> int:
    """``ral broker stop``: sessions go on. 0 also if none runs."""
    connection = reach(start=False)
    if connection is None:
        say("no broker is running")
        return exits.OK
    connection.close()
    connection, answer = ask({"t": "stop"})
    for _ in stream(connection, answer):
        pass
    connection.sock.settimeout(10)
    while connection.fill():
        pass
    return exits.OK


def kill(session: str, number: "int | None") -> int:
    """``ral kill``."""
    connection, answer = ask({"t": "kill", "session": session, "signal": number})
    for _ in stream(connection, answer):
        pass
    return exits.OK
