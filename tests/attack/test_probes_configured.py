"""The probes again, with one rule of the user's: ``.env`` in the project is denied."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support.broker import Broker, Completed, Ral
from support.git import git, repository

pytestmark = [pytest.mark.attack, pytest.mark.usefixtures("broker")]


@pytest.fixture
def denied(ral: Ral, tmp_path: Path) -> Ral:
    config = tmp_path / "ral.toml"
    config.write_text('blocked_files = [".env"]\n')
    ral.environment["RAL_CONF"] = str(config)
    return ral


def shell(ral: Ral, script: str, *arguments: str) -> Completed:
    return ral("run", "-q", "--", "sh", "-c", script, "sh", *arguments)


def tree(top: Path) -> list[tuple[str, int, bytes]]:
    """Names, modes and contents of everything below a directory."""
    found = []
    for path in sorted(top.rglob("*")):
        content = os.fsencode(os.readlink(path)) if path.is_symlink() else b""
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
        found.append((str(path.relative_to(top)), path.lstat().st_mode, content))
    return found


PLANT = """
mv .git g2 2>/dev/null; mkdir -p .git/hooks 2>/dev/null
printf '#!/bin/sh\\necho planted >../planted\\n' >.git/hooks/pre-commit 2>/dev/null
chmod +x .git/hooks/pre-commit 2>/dev/null; true
"""


def commit_in_host(project: Path) -> bool:
    """Commit outside, as the user would, and tell whether a planted hook ran."""
    (project / "more").write_text("m")
    author = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    for command in (["add", "more"], [*author, "commit", "-qm", "more"]):
        subprocess.run(["git", *command], cwd=project, check=False, capture_output=True)
    planted = project.parent / "planted"
    ran = planted.exists()
    planted.unlink(missing_ok=True)
    return ran


def test_p2_no_hook_is_planted_by_moving_the_repository_away(denied: Ral, project: Path) -> None:
    inner = project / "repository"
    repository(inner)
    done = denied("run", "-q", "--project", str(inner), "--", "sh", "-c", PLANT, cwd=inner)
    assert done.status == 0, done
    assert not commit_in_host(inner)
    assert git(inner, "log", "-1", "--format=%s").strip() == "more"


def test_p2_the_control_without_a_sandbox_the_hook_runs(project: Path) -> None:
    inner = project / "repository"
    repository(inner)
    subprocess.run(["sh", "-c", PLANT], cwd=inner, check=True)
    # What is left is no repository: git makes one of it, and keeps the hook.
    subprocess.run(["git", "init", "-q"], cwd=inner, check=True)
    assert commit_in_host(inner)


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "everything is killed"])
def test_p4_a_denied_path_that_does_not_exist_leaves_nothing(
    denied: Ral, broker: Broker, project: Path, killed: bool
) -> None:
    (project / "sub").mkdir()
    (project / "sub/file").write_text("f")
    before = tree(project)
    if not killed:
        assert shell(denied, "ls -A; cat .env 2>/dev/null; true").stdout == b"sub\n"
    else:
        client = denied.start("run", "-q", "--", "sleep", "600")
        deadline = time.monotonic() + 10
        while not denied.live():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        client.send_signal(signal.SIGKILL)
        broker.crash()
        client.wait(10)
        broker.start()
    assert tree(project) == before


def test_p7_secrets_in_the_environment_stay_outside(denied: Ral) -> None:
    denied.environment |= {"AWS_SECRET_ACCESS_KEY": "S", "MY_TOKEN": "S", "ANTHROPIC_API_KEY": "K"}
    out = shell(denied, "env").stdout
    assert b"=S\n" not in out
    assert b"ANTHROPIC_API_KEY=K\n" in out


def test_p11_a_denied_path_that_is_a_dangling_link(denied: Ral, project: Path) -> None:
    (project / ".env").symlink_to("target")
    before = tree(project)
    assert shell(denied, "true").status == 0
    assert tree(project) == before
    (project / "target").write_text("S")
    assert (
        shell(denied, "cat .env target; echo x 2>/dev/null >target || echo refused").stdout == b"refused\n"
    )


def test_p12_hooks_are_a_link_to_a_directory(denied: Ral, project: Path) -> None:
    repository(project)
    (project / "hooks").mkdir()
    if (project / ".git/hooks").exists():
        (project / ".git/hooks").rename(project / "old-hooks")
    (project / ".git/hooks").symlink_to("../hooks")
    script = 'for d in .git/hooks hooks; do echo x 2>/dev/null >"$d/pre-commit" && echo "$d"; done; true'
    assert shell(denied, script).stdout == b""
    assert os.listdir(project / "hooks") == []


def test_what_is_denied_has_one_empty_name_and_no_other(denied: Ral, project: Path) -> None:
    (project / ".env").write_text("S")
    (project / "link").symlink_to(".env")
    (project / "up").symlink_to(".")
    script = """
cat .env link up/.env up/up/.env /proc/self/cwd/.env 2>/dev/null
ln .env hard 2>/dev/null && cat hard; mv .env other 2>/dev/null && cat other
cp .env copy && cat copy; rm -f copy .env 2>/dev/null; mv ../"$(basename "$PWD")" ../q 2>/dev/null; true
"""
    done = shell(denied, script)
    assert done.stdout == b"", done
    assert (project / ".env").read_text() == "S"


def test_read_only_calls_of_git_never_break_and_writing_ones_are_explained(
    denied: Ral, project: Path
) -> None:
    repository(project)
    works = "git status && git log --oneline -1 && git config --get core.bare && git branch && git diff"
    assert shell(denied, works).status == 0
    done = shell(denied, "git remote add origin https://example.org/x; git config user.name y")
    assert done.status != 0
    assert git(project, "remote") == ""
    told = denied("explain", ".git/config")
    assert told.status == 0, told
    assert b"read-only" in told.stdout
    assert b"protect_project" in told.stdout


def test_user_namespaces_inside_are_one_option(ral: Ral, tmp_path: Path) -> None:
    assert shell(ral, "unshare --user true 2>/dev/null || echo refused").stdout == b"refused\n"
    config = tmp_path / "ral.toml"
    config.write_text("nested_userns = true\n")
    ral.environment["RAL_CONF"] = str(config)
    assert shell(ral, "unshare --user true && echo made").stdout == b"made\n"


def test_a_nested_namespace_uncovers_nothing(ral: Ral, project: Path, tmp_path: Path) -> None:
    (project / ".env").write_text("S")
    (project / ".envrc").write_text("E")
    config = tmp_path / "ral.toml"
    config.write_text('nested_userns = true\nblocked_files = [".env"]\n')
    ral.environment["RAL_CONF"] = str(config)
    script = """
exec 2>/dev/null
mount -t tmpfs tmpfs /tmp && echo mounted
umount .env; umount -l .env; cat .env; mount --bind . /mnt && cat /mnt/.env
mount --rbind . /tmp && cat /tmp/.env; umount -R -l /tmp; cat /tmp/.env
mount -o remount,bind,rw .envrc; mount -o remount,rw /; echo x >.envrc; umount -l .envrc; echo x >.envrc
true
"""
    done = shell(ral, 'unshare --user --map-root-user --mount sh -c "$1"', script)
    assert done.stdout == b"mounted\n", done
    assert (project / ".envrc").read_text() == "E"


def test_a_saved_file_that_is_protected_says_what_is_wrong(denied: Ral, project: Path) -> None:
    """As editors and ``git config -f`` save: a new file beside it, renamed over it."""
    (project / ".envrc").write_text("export A=1\n")
    done = shell(denied, "echo new >tmp; mv tmp .envrc; echo x >>.envrc")
    assert done.status != 0
    assert b"Read-only" in done.stderr or b"busy" in done.stderr
    assert (project / ".envrc").read_text() == "export A=1\n"
    assert b"project_protected_paths" in denied("explain", ".envrc").stdout
