"""Completion scripts: they offer what the client takes, in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ral_client import completion, main, usage
from ral_protocol import exits
from support.peer import client_command
from support.terminal import Terminal

SESSIONS = b"ID        KIND     STATE\\n0a1b2c3d  session  live\\n5e6f7a8b  session  detached\\n"

# Without a terminal there is no completion to set options of, so compopt is left out.
HARNESS = """
compopt() { :; }
. "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_ral
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A directory with the script of every shell, as the client prints it, and a ral with two sessions."""
    for shell in completion.SHELLS:
        done = subprocess.run(client_command("completion", shell), capture_output=True, timeout=20)
        assert (done.returncode, done.stderr) == (0, b"")
        (tmp_path / shell).write_bytes(done.stdout)
    (tmp_path / "bin").mkdir()
    ral = tmp_path / "bin/ral"
    ral.write_text(
        '#!/bin/sh\ncase "$*" in\n"broker status") ;;\n'
        f"sessions) printf '{SESSIONS.decode()}' ;;\n*) echo ral was asked: $* ;;\nesac\n"
    )
    ral.chmod(0o755)
    return tmp_path


def environment(scripts: Path) -> dict[str, str]:
    return {"PATH": f"{scripts}/bin:/usr/bin:/bin", "HOME": str(scripts), "TERM": "dumb", "LANG": "C.UTF-8"}


def offered(scripts: Path, *words: str) -> set[str]:
    """What bash offers for the last of ``words``."""
    done = subprocess.run(
        ["bash", "--norc", "-c", HARNESS, "bash", scripts / "bash", *words],
        capture_output=True, text=True, cwd=scripts, env=environment(scripts), timeout=20,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split("\n")) - {""}


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_shell_finds_no_fault_in_its_script(scripts: Path, shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"needs {shell}")
    done = subprocess.run([program, "-n", scripts / shell], capture_output=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_option_of_every_command_is_in_every_script(scripts: Path, shell: str) -> None:
    text = (scripts / shell).read_text()
    for verb, (flags, valued) in main.OPTIONS.items():
        if verb not in main.CHOICES:
            for name in (flags + " " + valued).split():
                assert f"-l {name}" in text if shell == "fish" else f"--{name}" in text, (verb, name)
    for name in usage.COMMANDS:
        assert name in text


def test_what_takes_a_value_or_an_operand_is_known() -> None:
    assert {name for _, valued in main.OPTIONS.values() for name in valued.split()} == set(completion.VALUES)
    assert set(completion.OPERANDS) <= set(main.OPTIONS)
    for words in main.CHOICES.values():
        assert words
    for verb in main.CHOICES:
        below = {name.partition(" ")[2] for name in main.OPTIONS if name.startswith(f"{verb} ")}
        assert below in (set(), set(main.CHOICES[verb]))


def test_options_are_described_as_in_the_help_text() -> None:
    described = {name: what for name, what, _ in completion.options_of("run")}
    assert described["quiet"] == "no notices about the session"
    assert all(what for verb in main.OPTIONS for _, what, _ in completion.options_of(verb))


def test_commands_are_offered(scripts: Path) -> None:
    assert offered(scripts, "ral", "") == {*usage.COMMANDS, "--help", "--version"}
    assert offered(scripts, "ral", "co") == {"config", "completion"}


@pytest.mark.parametrize("verb", sorted(set(main.OPTIONS) - set(main.CHOICES)))
def test_exactly_the_options_of_a_command_are_offered(scripts: Path, verb: str) -> None:
    names = {name for part in main.OPTIONS[verb] for name in part.split()}
    assert offered(scripts, "ral", *verb.split(), "--") == {f"--{name}" for name in names}


@pytest.mark.parametrize("command", sorted(main.CHOICES))
def test_the_words_that_have_to_follow_are_offered(scripts: Path, command: str) -> None:
    assert offered(scripts, "ral", command, "") == {*main.CHOICES[command], "--help"}


@pytest.mark.parametrize("verb", ["attach", "logs", "kill"])
def test_sessions_are_offered(scripts: Path, verb: str) -> None:
    assert offered(scripts, "ral", verb, "") == {"0a1b2c3d", "5e6f7a8b"}
    assert offered(scripts, "ral", verb, "5") == {"5e6f7a8b"}
    assert offered(scripts, "ral", verb, "5e6f7a8b", "") == set()


def test_no_broker_is_started_by_a_key(scripts: Path) -> None:
    (scripts / "bin/ral").write_text(
        '#!/bin/sh\n[ "$*" = "broker status" ] || touch started\nexit 1\n', encoding="utf-8"
    )
    assert offered(scripts, "ral", "attach", "") == set()
    assert not (scripts / "started").exists()


def test_values_of_options_are_offered(scripts: Path) -> None:
    (scripts / "a directory").mkdir()
    for words in (("--project", "a"), ("--project", "=", "a"), ("-q", "--project", "a")):
        assert offered(scripts, "ral", "run", *words) == {"a directory"}
    assert "root" in offered(scripts, "ral", "run", "--as-user", "ro")
    assert offered(scripts, "ral", "kill", "--signal", "US") == {"USR1", "USR2"}
    assert offered(scripts, "ral", "run", "--profile", "") == set()


def test_the_command_of_run_and_its_arguments_are_those_of_the_command(scripts: Path) -> None:
    (scripts / "a file").touch()
    assert "env" in offered(scripts, "ral", "run", "-q", "en")
    assert "env" in offered(scripts, "ral", "run", "--", "en")
    for before in ((), ("--",), ("--project", "=", ".", "--")):
        assert offered(scripts, "ral", "run", *before, "cat", "a f") == {"a file"}
        assert offered(scripts, "ral", "run", *before, "cat", "--") == set()


def test_a_path_or_a_session_is_offered_to_explain(scripts: Path) -> None:
    (scripts / "0a-file").touch()
    assert offered(scripts, "ral", "explain", "0a") == {"0a-file", "0a1b2c3d"}
    assert offered(scripts, "ral", "explain", "0a1b2c3d", "0a") == {"0a-file"}


@pytest.mark.parametrize(
    ("shell", "prepare"),
    [
        (("bash", "--norc", "-i"), b". ./bash"),
        (("zsh", "-f", "-i"), b"autoload -U compinit; compinit -u -D; . ./zsh"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_person_completes(scripts: Path, shell: tuple[str, ...], prepare: bytes) -> None:
    if shutil.which(shell[0]) is None:
        pytest.skip(f"needs {shell[0]}")
    with Terminal(shell, cwd=scripts, env=environment(scripts)) as terminal:
        terminal.send(prepare + b"; echo rea''dy\r")
        terminal.expect(rb"ready\r\n")
        for typed, asked in (
            (b"ral conf\tsh\t--js\t", b"config show --json"),
            (b"ral kill --sig\tUSR2 5\t", b"kill --signal(=| )USR2 5e6f7a8b"),
            (b"ral run -q env ./ba\t", b"run -q env ./bash"),
        ):
            terminal.send(typed + b"\r")
            terminal.expect(b"ral was asked: " + asked + rb"\r\n")
        terminal.send(b"exit\r")
        assert terminal.wait() == 0


def test_fish_completes(scripts: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("needs fish")

    def completed(line: str) -> set[str]:
        done = subprocess.run(
            ["fish", "--no-config", "-c", 'source fish; complete -C "$argv[1]"', line],
            capture_output=True, text=True, cwd=scripts, env=environment(scripts), timeout=20,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return {found.split("\t")[0] for found in done.stdout.splitlines()}

    assert completed("ral ") == set(usage.COMMANDS)
    assert completed("ral config ") == set(main.CHOICES["config"])
    assert completed("ral config show --") == {"--json", "--help", "--project", "--profile"}
    assert completed("ral attach ") == {"0a1b2c3d", "5e6f7a8b"}
    assert {"--detach", "--project"} <= completed("ral run --")
    assert "env" in completed("ral run -q en")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("completion",), "bash, zsh or fish is missing"),
        (("completion", "tcsh"), "tcsh is not bash, zsh or fish"),
        (("completion", "bash", "zsh"), "one argument too many: zsh"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], says: str) -> None:
    done = subprocess.run(client_command(*arguments), capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (exits.USAGE, "")
    assert says in done.stderr
