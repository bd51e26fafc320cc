"""Real repositories: nothing of the account's own configuration of git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ENVIRONMENT = {
    "GIT_AUTHOR_EMAIL": "t@example.org",
    "GIT_AUTHOR_NAME": "t",
    "GIT_COMMITTER_EMAIL": "t@example.org",
    "GIT_COMMITTER_NAME": "t",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "HOME": "/nonexistent",
    "LC_ALL": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
}


def git(where: Path, *arguments: str, status: int = 0) -> str:
    """Run git in ``where``; it has to end with ``status``. Returns what it printed."""
    command = ["git", "-c", "protocol.file.allow=always", "-c", "init.defaultBranch=main", *arguments]
    done = subprocess.run(
        command,
        cwd=where,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, (command, done)
    return os.fsdecode(done.stdout)


def repository(where: Path, *init: str) -> Path:
    """A repository with one commit."""
    where.mkdir(parents=True, exist_ok=True)
    git(where, "init", "-q", *init)
    (where / "file").write_text("one\n")
    git(where, "add", "file")
    git(where, "commit", "-qm", "one")
    return where


def worktree(main: Path, where: Path) -> Path:
    """A worktree of ``main`` on a branch of its own."""
    git(main, "worktree", "add", "-q", str(where))
    return where


def with_submodule(where: Path, name: str = "sub") -> Path:
    """A repository with a submodule ``name``."""
    other = repository(where.with_name(where.name + "-other"))
    main = repository(where)
    git(main, "submodule", "add", "-q", str(other), name)
    git(main, "commit", "-qm", "submodule")
    return main
