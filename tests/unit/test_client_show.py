"""Answers as text and as documents."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ral_client import show
from ral_protocol import exits
from support.peer import Incoming, Peer, client_command
from support.terminal import Terminal

LINE: dict[str, object] = {
    "t": "session",
    "id": "0123abcd",
    "kind": "session",
    "project": b"/home/u/p\xff",
    "command": [b"sh", b"-c", b"echo a b"],
    "pid": 12,
    "bwrap_pid": 11,
    "started": "2026-11-30T10:00:00Z",
    "state": "live",
    "guard": "off",
    "version": "0.1.0",
}
ENDED = LINE | {
    "id": "fedc0000",
    "project": b"/p",
    "state": "ended",
    "exit": 7,
    "ended": "2026-11-30T11:00:00Z",
    "command": [b"\x1b[31m", b"it's"],
    "unknown_to_this_client": [1],
}


def answering(*answers: dict[str, object]) -> Callable[[Incoming, dict[str, object], list[int]], None]:
    def handle(incoming: Incoming, request: dict[str, object], fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        for answer in answers:
            incoming.answer(answer)
        if answers[-1]["t"] == "done":
            incoming.sock.close()

    return handle


def ask(
    runtime: Path, answers: list[dict[str, object]], *arguments: str
) -> tuple[int, bytes, bytes, list[dict[str, object]]]:
    peer = Peer(runtime, answering(*answers))
    try:
        ended = subprocess.run(
            client_command(*arguments),
            capture_output=True,
            env={"RAL_RUNTIME_DIR": str(runtime)},
            timeout=20,
            stdin=subprocess.DEVNULL,
        )
    finally:
        peer.close()
    return ended.returncode, ended.stdout, ended.stderr, peer.requests


def test_sessions_as_a_document(runtime: Path) -> None:
    status, stdout, stderr, requests = ask(
        runtime, [LINE, ENDED, {"t": "done"}], "sessions", "--all", "--json"
    )
    assert (status, stderr) == (0, b"")
    assert requests == [{"t": "sessions", "ended": True}]
    live, ended = json.loads(stdout)
    assert live == {
        "id": "0123abcd",
        "kind": "session",
        "project": "/home/u/p\\xff",
        "project_b64": base64.b64encode(b"/home/u/p\xff").decode(),
        "command": ["sh", "-c", "echo a b"],
        "pid": 12,
        "bwrap_pid": 11,
        "started": "2026-11-30T10:00:00Z",
        "state": "live",
        "guard": "off",
        "version": "0.1.0",
        "exit": None,
        "lost": False,
        "ended": None,
    }
    assert ended["command"] == ["\x1b[31m", "it's"]
    assert "project_b64" not in ended
    assert (ended["exit"], ended["ended"]) == (7, "2026-11-30T11:00:00Z")


def test_sessions_as_a_table_without_colours_in_a_pipe(runtime: Path) -> None:
    status, stdout, _, _ = ask(runtime, [LINE, ENDED, {"t": "done"}], "sessions", "--all")
    assert status == 0
    assert b"\x1b" not in stdout
    head, live, ended = stdout.decode().splitlines()
    assert head.split()[:3] == ["ID", "KIND", "STATE"]
    assert live.index("session") == ended.index("session") == head.index("KIND")
    assert "sh -c 'echo a b'" in live
    assert "ended (7)" in ended
    assert "'\\x1b[31m' 'it'\\''s'" in ended


def test_no_session_is_an_empty_list_and_a_sentence(runtime: Path) -> None:
    assert ask(runtime, [{"t": "done"}], "sessions", "--json")[:3] == (0, b"[]\n", b"")
    (runtime / "control.sock").unlink()
    assert ask(runtime, [{"t": "done"}], "sessions")[:2] == (0, b"")


@pytest.mark.parametrize(
    ("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours_only_on_a_terminal_and_never_with_no_color(
    runtime: Path, variables: dict[str, str], coloured: bool
) -> None:
    peer = Peer(runtime, answering(LINE, {"t": "done"}))
    try:
        environment = {
            "PATH": os.environ["PATH"],
            "RAL_RUNTIME_DIR": str(runtime),
            "TERM": "xterm",
        } | variables
        with Terminal(client_command("sessions"), cwd=runtime, env=environment) as terminal:
            assert terminal.wait() == 0
            assert (b"\x1b[32mlive\x1b[m" in terminal.output) is coloured
    finally:
        peer.close()


def test_a_refusal_of_other_commands_is_1(runtime: Path) -> None:
    refused: dict[str, object] = {
        "t": "refused",
        "kind": "refused",
        "message": "no session 0a",
        "status": 78,
    }
    assert ask(runtime, [refused], "kill", "0a")[:3] == (exits.FAILED, b"", b"ral: no session 0a\n")


def test_kill_sends_the_number(runtime: Path) -> None:
    status, _, _, requests = ask(runtime, [{"t": "done"}], "kill", "0a", "--signal", "hup")
    assert (status, requests) == (0, [{"t": "kill", "session": "0a", "signal": 1}])
    (runtime / "control.sock").unlink()
    assert ask(runtime, [{"t": "done"}], "kill", "0a")[3] == [{"t": "kill", "session": "0a", "signal": None}]


def test_a_plan_as_a_document_and_as_a_table(runtime: Path) -> None:
    answers: list[dict[str, object]] = [
        {"t": "argv", "argv": [b"bwrap", b"--args"], "options": [b"--tmpfs", b"/tmp"]},
        {
            "t": "plan",
            "op": "bind",
            "dest": b"/\xfe",
            "source": b"/usr",
            "mode": "ro",
            "layer": "defaults",
            "why": "readonly_mounts",
        },
        {
            "t": "plan",
            "op": "tmpfs",
            "dest": b"/tmp",
            "source": None,
            "mode": "rw",
            "layer": "defaults",
            "why": "private_tmp",
        },
        {"t": "done"},
    ]
    status, stdout, stderr, requests = ask(
        runtime, answers, "run", "--dry-run", "--json", "--profile", "p", "ls"
    )
    assert (status, stderr) == (0, b"")
    assert (requests[0]["dry_run"], requests[0]["profile"]) == (True, "p")
    assert json.loads(stdout) == {
        "argv": ["bwrap", "--args"],
        "options": ["--tmpfs", "/tmp"],
        "plan": [
            {
                "op": "bind",
                "dest": "/\\xfe",
                "dest_b64": "L/4=",
                "source": "/usr",
                "mode": "ro",
                "layer": "defaults",
                "why": "readonly_mounts",
            },
            {
                "op": "tmpfs",
                "dest": "/tmp",
                "source": None,
                "mode": "rw",
                "layer": "defaults",
                "why": "private_tmp",
            },
        ],
    }
    (runtime / "control.sock").unlink()
    text = ask(runtime, answers, "run", "--dry-run", "ls")[1].decode()
    assert text.startswith("argv     bwrap --args\noptions  --tmpfs /tmp\n")
    assert "bind" in text
    assert "private_tmp" in text


def test_the_state_of_the_broker(runtime: Path) -> None:
    answer: dict[str, object] = {
        "t": "broker",
        "version": "0.1.0",
        "pid": 5,
        "started": "2026-11-30T10:00:00Z",
        "sessions": 2,
        "activated": True,
        "runtime_dir": b"/run/user/1/ral",
        "stages": [["plan", 5]],
    }
    status, stdout, _, _ = ask(runtime, [answer], "broker", "status", "--json")
    assert (status, json.loads(stdout)) == (
        0,
        {
            "running": True,
            "version": "0.1.0",
            "pid": 5,
            "started": "2026-11-30T10:00:00Z",
            "sessions": 2,
            "activated": True,
            "last_launch_us": {"plan": 5},
            "runtime_dir": "/run/user/1/ral",
        },
    )
    (runtime / "control.sock").unlink()
    assert b"by systemd's socket unit" in ask(runtime, [answer], "broker", "status")[1]


def test_stop_waits_until_the_broker_has_closed_the_connection(runtime: Path) -> None:
    status, stdout, stderr, requests = ask(runtime, [{"t": "done"}], "broker", "stop")
    assert (status, stdout, stderr) == (0, b"", b"")
    assert requests == [{"t": "stop"}]


def test_words_are_quoted_for_a_shell() -> None:
    words = [b"a b", b"", b"it's", b"$HOME", b"plain-1.0=x", b"*"]
    echoed = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {show.paste(words)}"], capture_output=True, check=True
    )
    assert echoed.stdout == b"".join(word + b"\n" for word in words)
