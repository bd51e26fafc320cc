"""``ral explain``: why a path is visible, writable, masked or absent in a session."""

import posix

from ral_client.answer import Answer
from ral_client.call import ask, escape, put, refusal
from ral_client.config import request_of
from ral_client.run import encode_argument
from ral_client.show import add_bytes, show_json
from ral_protocol import exits

BYTES = ("path", "dest", "source")
TEXTS = ("mode", "layer", "why", "setting", "origin")


def absolute(path: bytes, directory: bytes) -> bytes:
    """The absolute name of ``path`` as seen from ``directory``, links kept: what is at the name is asked,
    not what it leads to. ``..`` leaves the directory that a link leads to, as the kernel does."""
    at = b"" if path.startswith(b"/") else directory.rstrip(b"/")
    for part in path.split(b"/"):
        if part == b"..":
            at = _physical(at).rpartition(b"/")[0]
        elif part not in (b"", b"."):
            at += b"/" + part
    return at or b"/"


def _physical(path: bytes) -> bytes:
    try:
        fd = posix.open(path or b"/", posix.O_PATH | posix.O_CLOEXEC)
    except OSError:
        return path
    physical = posix.readlink(b"/proc/self/fd/%d" % fd)
    posix.close(fd)
    return physical


def document_of(line: Answer) -> "dict[str, object]":
    """The document of `ral explain --json`."""
    document: dict[str, object] = {}
    for key in BYTES:
        add_bytes(document, key, line.data(key) if line.has(key) else None)
    document["state"] = line.text("state")
    document.update((key, line.text(key) if line.has(key) else None) for key in TEXTS)
    document["text"] = line.text("text")
    return document


def explain(options: "dict[str, str]", path: str, session: "str | None") -> int:
    """Print what a session shows at ``path``: the running one ``session`` (the beginning of its id), or one
    that were started now."""
    wanted = absolute(encode_argument(path), posix.getcwdb())
    if session is None:
        request, fds, _ = request_of("explain", options)
    else:
        request, fds = {"t": "explain", "session": session}, ()
    _, answer = ask(request | {"path": wanted}, fds)
    if answer.kind != "explained":
        raise refusal(answer, exits.FAILED)
    if "json" in options:
        show_json(document_of(answer))
    else:
        for sentence in answer.text("text").split("\n"):
            put(1, f"{escape(sentence)}\n".encode())
    return exits.OK
