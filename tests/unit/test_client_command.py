"""The command line: what is accepted, what is refused, and with which status."""

from __future__ import annotations

import os
import subprocess

import pytest

from ral_client import main
from ral_client.call import Failure, escape
from ral_protocol import exits
from support.peer import client_command


def client(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    environment = {"PATH": os.environ["PATH"], "RAL_RUNTIME_DIR": "/nonexistent/ral"}
    return subprocess.run(client_command(*arguments), capture_output=True, env=environment, timeout=20)


@pytest.mark.parametrize(
    ("arguments", "options", "operands"),
    [
        (["grep", "-r", "x"], {}, ["grep", "-r", "x"]),
        (["-q", "--", "-x", "--", "y"], {"quiet": ""}, ["-x", "--", "y"]),
        (["-qd", "sh"], {"quiet": "", "detach": ""}, ["sh"]),
        (
            ["--project", "/p", "--profile=none", "sh", "--project"],
            {"project": "/p", "profile": "none"},
            ["sh", "--project"],
        ),
        (["--dry-run", "--json", "-"], {"dry-run": "", "json": ""}, ["-"]),
        (["--as-user=me", "a b", "", "\n"], {"as-user": "me"}, ["a b", "", "\n"]),
    ],
)
def test_options_of_run_end_at_the_command(
    arguments: list[str], options: dict[str, str], operands: list[str]
) -> None:
    assert main.parse("run", arguments) == (options, operands)


def test_options_of_other_commands_may_follow_the_operand() -> None:
    assert main.parse("kill", ["0a", "--signal", "HUP"]) == ({"signal": "HUP"}, ["0a"])
    assert main.parse("attach", ["0a", "--read-only"]) == ({"read-only": ""}, ["0a"])
    assert main.parse("attach", ["--", "--read-only"]) == ({}, ["--read-only"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["frobnicate"], "frobnicate: unknown command"),
        (["exec", "--grant", "x", "--", "make"], "exec: unknown command"),
        (["broker run"], "unknown command"),
        (["--frobnicate"], "--frobnicate is not an option"),
        (["run"], "no command"),
        (["run", "--"], "no command"),
        (["run", "--frob", "sh"], "--frob is not an option"),
        (["run", "-x", "sh"], "-x is not an option"),
        (["run", "--project"], "--project needs a value"),
        (["run", "--project=", "sh"], "is empty"),
        (["run", "--dry-run=yes", "sh"], "takes no value"),
        (["run", "--json", "sh"], "--json needs --dry-run or --detach"),
        (["sessions", "x"], "one argument too many"),
        (["attach"], "the id of a session is missing"),
        (["logs", "a", "b"], "one argument too many"),
        (["kill", "a", "--signal", "NOSUCH"], "NOSUCH is not a signal"),
        (["kill", "a", "--signal", "_DFL"], "is not a signal"),
        (["kill", "a", "--signal", "0"], "is not a signal"),
        (["kill", "a", "--signal", "99"], "is not a signal"),
        (["broker"], "run, status or stop is missing"),
        (["broker", "restart"], "restart is not run, status or stop"),
    ],
)
def test_wrong_usage_is_2_and_a_sentence(arguments: list[str], says: str) -> None:
    ended = client(*arguments)
    assert ended.returncode == exits.USAGE, ended
    assert ended.stdout == b""
    assert ended.stderr.startswith(b"ral: ")
    assert says in ended.stderr.decode()
    assert ended.stderr.count(b"\n") == 1


@pytest.mark.parametrize("argument", ["\x1b[31mred", "a\u202eb", "tab\tnewline\n"])
def test_what_was_typed_is_shown_with_control_characters_escaped(argument: str) -> None:
    ended = client(argument)
    assert ended.returncode == exits.USAGE
    assert ended.stderr.decode().isprintable() or ended.stderr.decode()[:-1].isprintable()
    assert argument not in ended.stderr.decode()


def test_escape_shows_bytes_that_are_not_utf8() -> None:
    assert escape(b"a\xffb\x1b") == "a\\xffb\\x1b"
    assert escape("grün") == "grün"


@pytest.mark.parametrize("command", ["", *sorted({name.partition(" ")[0] for name in main.OPTIONS})])
def test_every_command_has_a_help_text_that_names_its_options(command: str) -> None:
    ended = client(*[word for word in (command, "--help") if word])
    assert ended.returncode == 0
    assert ended.stderr == b""
    text = ended.stdout.decode()
    assert text.startswith(f"usage: ral {command or 'COMMAND'}")
    for name, (flags, valued) in main.OPTIONS.items():
        if name.partition(" ")[0] == command:
            for option in set((flags + " " + valued).split()) - {"help"}:
                assert f"--{option}" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_without_a_command_the_help_goes_to_stderr() -> None:
    ended = client()
    assert (ended.returncode, ended.stdout) == (exits.USAGE, b"")
    assert ended.stderr.startswith(b"usage: ral COMMAND")


def test_version() -> None:
    assert client("--version").stdout == f"ral {exits.VERSION}\n".encode()


@pytest.mark.parametrize(
    ("name", "number"),
    [("TERM", 15), ("SIGTERM", 15), ("term", 15), ("9", 9), ("SIGUSR1", 10), ("CONT", 18)],
)
def test_signals_have_names_and_numbers(name: str, number: int) -> None:
    assert main.signal_number(name) == number


@pytest.mark.parametrize("prefix", ["", "0123456789", "ABC", "../x", "a/b", "\udc80"])
def test_what_cannot_begin_an_id_is_no_session(prefix: str) -> None:
    with pytest.raises(Failure) as raised:
        main.session_id(prefix)
    assert raised.value.status == exits.FAILED


@pytest.mark.parametrize("mask", ["", "zz", "run"])
def test_start_without_a_mask_is_wrong_usage(mask: str) -> None:
    command = client_command()
    command[-1] = mask
    ended = subprocess.run([*command, "sessions"], capture_output=True, timeout=20)
    assert ended.returncode == exits.USAGE
    assert b"mask of ignored signals" in ended.stderr
