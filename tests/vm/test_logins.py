"""Every way a user gets a shell: which runtime directory, whose broker, and where its records are."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from support.login import SECONDS, SERVICE, User, wait_until
from support.terminal import Terminal

IN_PROJECT = "cd project && "


def test_without_the_variable_the_managers_directory_and_unit_are_found(user: User) -> None:
    """cron and su without PAM: XDG_RUNTIME_DIR is not set, and the user's manager runs all the same."""
    done = user.bare(IN_PROJECT + "ral run -q -- echo hello")
    assert done[:2] == (0, b"hello\n"), done
    said = user.broker()
    assert said["runtime_dir"] == str(user.runtime)
    assert said["activated"] is True
    assert said["pid"] == int(user.unit(SERVICE, "MainPID"))


@pytest.mark.parametrize("named", ["/run/user/0", "/nonexistent", "relative"])
def test_a_variable_that_names_no_directory_of_the_users_is_not_followed(user: User, named: str) -> None:
    Path("/run/user/0").mkdir(mode=0o700, exist_ok=True)
    done = user.bare(IN_PROJECT + "ral run -q -- echo hello", {"XDG_RUNTIME_DIR": named})
    assert done[:2] == (0, b"hello\n"), done
    assert user.broker()["runtime_dir"] == str(user.runtime)


def test_a_named_runtime_directory_gets_a_broker_of_its_own(user: User) -> None:
    named = {"RAL_RUNTIME_DIR": str(user.home / "run")}
    done = user.bare(IN_PROJECT + "ral run -q -- echo hello; ral broker status; ral broker stop", named)
    assert done.status == 0, done
    assert b"by a client" in done.stdout
    assert str(user.home / "run").encode() in done.stdout
    assert user.unit(SERVICE, "ActiveState") == "inactive"


def test_where_logind_made_no_directory_it_is_below_tmp_and_records_in_the_home(unmanaged: User) -> None:
    started = unmanaged.bare(IN_PROJECT + "ral run -d -q -- sleep 1000")
    assert started.status == 0, started
    session = started.stdout.decode().strip()
    runtime, state = Path(f"/tmp/ral-{unmanaged.uid}"), unmanaged.home / ".local/state/ral/sessions"
    for directory in (runtime, state):
        status = directory.lstat()
        assert stat.S_ISDIR(status.st_mode)
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o700, unmanaged.uid)
    assert (runtime / "control.sock").is_socket()
    assert any(name.startswith(session) for name in os.listdir(state))
    assert not (runtime / "sessions").exists()
    said = unmanaged.bare("ral broker status")
    assert b"by a client" in said.stdout
    assert str(runtime).encode() in said.stdout
    assert unmanaged.bare("ral broker stop").status == 0
    wait_until(lambda: not (runtime / "control.sock").exists(), "the socket is removed")
    again = unmanaged.bare(f"{IN_PROJECT}ral run -q -- true; ral sessions; ral kill {session}")
    assert session.encode() in again.stdout, again
    assert again.status == 0


@pytest.mark.parametrize("planted", ["another user's", "a symbolic link", "open to others"])
def test_a_planted_directory_below_tmp_is_refused(unmanaged: User, planted: str) -> None:
    runtime = Path(f"/tmp/ral-{unmanaged.uid}")
    if planted == "a symbolic link":
        runtime.symlink_to(unmanaged.home)
    else:
        runtime.mkdir()
        os.chmod(runtime, 0o755 if planted == "open to others" else 0o700)
        if planted == "open to others":
            os.chown(runtime, unmanaged.uid, unmanaged.uid)
    try:
        done = unmanaged.bare(IN_PROJECT + "ral run -q -- echo hello")
        assert (done.status, done.stdout) == (69, b""), done
        assert str(runtime).encode() in done.stderr
        assert unmanaged.processes() == []
    finally:
        runtime.unlink() if runtime.is_symlink() else shutil.rmtree(runtime)


def test_a_login_without_linger_has_a_manager_as_long_as_it_lasts(unmanaged: User) -> None:
    done = unmanaged.login("ral run -q -- echo hello; ral broker status")
    assert done.status == 0, done
    assert b"hello\n" in done.stdout
    assert b"systemd's socket unit" in done.stdout
    wait_until(lambda: not unmanaged.manager.exists(), "the manager ends with the last login", SECONDS)
    assert unmanaged.processes() == []


def _type(terminal: Terminal, line: bytes, *patterns: bytes) -> None:
    """Type a line, and wait for what it brings."""
    terminal.send(line + b"\n")
    for pattern in patterns:
        terminal.expect(pattern, SECONDS)


def test_on_a_terminal_a_session_is_used_left_and_found_again(user: User) -> None:
    detached = "read line; echo got $line; sleep 1000"
    with user.terminal() as terminal:
        _type(
            terminal, b"ral run -q -- sh -c 'tty; read line; echo got $line; exit 3'", rb"/dev/pts/\d+\r\n"
        )
        _type(terminal, b"one", rb"got one\r\n", rb"ready> ")
        _type(terminal, b"echo status $?", rb"status 3\r\n")
        _type(
            terminal,
            f"id=$(ral run -d -q -- sh -c '{detached}'); echo id=$id".encode(),
            rb"id=[0-9a-f]{8}\r\n",
        )
        _type(terminal, b"ral attach $id", rb"ral attach .id\r\n")
        _type(terminal, b"two", rb"got two\r\n")
    (session,) = user.sessions()
    with user.terminal() as terminal:
        _type(terminal, f"ral attach {session}".encode(), rb"got two\r\n")
    assert list(user.sessions()) == [session]


def test_groups_that_the_users_manager_does_not_have_are_refused_with_a_way_out(user: User) -> None:
    """The user was added to a group after the manager had started; a new login has it, the manager not."""
    assert user.ral("run", "-q", "--", "true").status == 0
    os.system(f"usermod --append --groups games {user.name}")
    try:
        refused = user.ral("run", "-q", "--", "true")
        assert refused.status == 78, refused
        assert b"groups" in refused.stderr
        assert b"RAL_RUNTIME_DIR" in refused.stderr
        own = "export RAL_RUNTIME_DIR=$(mktemp -d); ral run -q -- id -G; s=$?; ral broker stop; exit $s"
        done = user.login(own)
        assert done.status == 0, done
        assert b"65534" in done.stdout  # a group that the sandbox's user namespace does not map
    finally:
        os.system(f"gpasswd --delete {user.name} games >/dev/null")
