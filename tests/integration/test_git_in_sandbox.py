"""git works inside, and what it obeys in the host cannot be changed there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from ral_broker.config.settings import Settings
from ral_broker.envelope import facts
from ral_broker.errors import Refused
from support.git import ENVIRONMENT, git, repository, with_submodule, worktree
from support.planned import Ended, run_protected

pytestmark = [pytest.mark.needs("bubblewrap")]

NAMES = Settings().project_protected_paths

WORK = """
set -e
git status --porcelain
echo two >> file; echo new > new
git add -A
git commit -qm inside
git branch side
git checkout -q side
git tag here
git stash list
echo three >> file; git stash -q; git stash pop -q; git checkout -q -- file
git rebase -q side
git branch -q -D here-not 2>/dev/null || true
git worktree add -q "$1" >/dev/null
git -C "$1" status --porcelain
git log --oneline | wc -l
"""

PLANT = """
cd "$1" || exit 9
try() { if sh -c "$1" 2>/dev/null; then echo "DONE $1"; fi; }
try 'echo evil >> config'
try 'echo evil > config.new && mv config.new config'
try 'rm -f config'
try 'git config --file config core.fsmonitor ./evil'
try 'echo evil > hooks/pre-commit'
try 'rm -rf hooks'
try 'mv hooks hooks2'
try 'mkdir other && mv -T other hooks'
cd ..
try 'mv .git g2'
exit 0
"""


async def inside(project: Path, script: str, *arguments: str | Path, **more: object) -> Ended:
    environment = ENVIRONMENT | {"HOME": "/tmp"}
    command = ["/bin/sh", "-c", script, "sh", *map(str, arguments)]
    return await run_protected(project, *command, env=environment, names=NAMES, **more)  # type: ignore[arg-type]


def in_host(project: Path, script: str) -> None:
    subprocess.run(["/bin/sh", "-c", script], cwd=project, capture_output=True, check=True)


def everything(project: Path) -> list[Path]:
    return sorted(path.relative_to(project) for path in project.rglob("*"))


async def works(project: Path) -> None:
    """The whole day of a developer."""
    before = git(project, "rev-parse", "HEAD")
    done = await inside(project, WORK, "/tmp/tree")
    assert done.status == 0, done
    assert b"Read-only" not in done.stderr, done
    assert b"busy" not in done.stderr, done
    # What was done inside is there, and the host's git is well.
    assert git(project, "rev-parse", "HEAD~") == before
    git(project, "fsck", "--strict")
    assert git(project, "status", "--porcelain") == ""


async def holds(project: Path, *directories: Path) -> None:
    """Nothing that the host's git would obey can be changed."""
    for directory in directories:
        contents = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
        done = await inside(project, PLANT, directory)
        assert (done.status, done.stdout) == (0, b""), done
        for path, content in contents.items():
            assert path.read_bytes() == content
        assert not (directory / "hooks" / "pre-commit").exists()


async def test_a_repository(project: Path) -> None:
    repository(project)
    await works(project)
    await holds(project, project / ".git")


async def test_the_control_without_protection_hooks_and_configuration_can_be_changed(project: Path) -> None:
    repository(project)
    done = await inside(project, PLANT, project / ".git", protect=False)
    assert done.stdout.count(b"DONE") >= 8, done


async def test_a_worktree_outside_of_its_repository(project: Path) -> None:
    main, tree = repository(project / "main"), project / "tree"
    worktree(main, tree)
    await works(tree)
    await holds(tree, main / ".git")
    # The working tree of the repository is none of this session's: an empty directory of the sandbox's own
    # stands there.
    done = await inside(tree, 'cat "$1" || echo x > "$1"', main / "file")
    assert done.stdout == b"", done
    assert (main / "file").read_text() == "one\n"


async def test_the_control_without_the_common_directory_git_does_not_work_in_a_worktree(
    project: Path,
) -> None:
    main = repository(project / "main")
    tree = worktree(main, project / "tree")
    done = await inside(tree, "git status", writable=())
    assert done.status == 128
    assert b"not a git repository" in done.stderr


async def test_where_a_worktree_leads_cannot_be_changed(project: Path) -> None:
    main = repository(project / "main")
    tree = worktree(main, project / "tree")
    worktree(main, project / "other")
    script = """
    try() { if sh -c "$1" 2>/dev/null; then echo "DONE $1"; fi; }
    try 'echo "gitdir: /tmp" > .git'
    try 'rm .git'
    try 'mv .git g2'
    try 'echo /tmp > "$GIT_DIR/commondir"'
    try 'mv "$GIT_DIR" "$GIT_DIR.2"'
    try 'rm "$GIT_DIR/commondir"'
    try 'echo x > "$OTHER/HEAD"'
    try 'mv "$OTHER" "$OTHER.2"'
    """
    admin = main / ".git" / "worktrees"
    script = f"export GIT_DIR={admin}/tree OTHER={admin}/other\n{script}"
    done = await inside(tree, script)
    assert (done.status, done.stdout) == (0, b""), done


async def test_worktrees_inside_a_bare_repository(project: Path) -> None:
    source = repository(project / "source")
    git(project, "clone", "-q", "--bare", str(source), "bare")
    bare = project / "bare"
    tree = worktree(bare, bare / "tree")
    worktree(bare, bare / "next")
    (bare / "next" / ".env").write_text("secret")
    git(tree, "pack-refs", "--all")
    await works(tree)
    done = await inside(tree, 'ls -A "$1"; cat "$1/.env"; echo x > "$1/file"', bare / "next")
    assert done.stdout == b""
    assert done.status != 0
    await holds(tree, bare)


async def test_a_submodule_in_the_project_and_as_the_project(project: Path) -> None:
    main = with_submodule(project / "main", "libs/sub")
    sub, data = main / "libs/sub", main / ".git/modules/libs/sub"
    git(sub, "checkout", "-q", "-B", "main")
    await works(sub)
    await holds(sub, data)
    commit = "git add -A && git commit -qm x"
    done = await inside(main, f"cd libs/sub && echo x >x && {commit} && cd ../.. && {commit}")
    assert done.status == 0, done
    await holds(main, main / ".git", data)
    done = await inside(main, 'echo "gitdir: /tmp" > libs/sub/.git; mv libs/sub libs/s2; mv libs l2; true')
    assert (sub / ".git").read_text().startswith("gitdir: ../../.git/modules")


async def test_git_as_a_link_and_its_hooks_as_a_link(project: Path) -> None:
    """P12: the directory is read-only under both names."""
    repository(project)
    (project / ".git").rename(project / "data")
    (project / ".git").symlink_to("data")
    hooks = project / "data" / "hooks"
    for sample in hooks.iterdir():
        sample.unlink()
    hooks.rename(project / "githooks")
    hooks.symlink_to("../githooks")
    (project / "data" / "info" / "exclude").write_text("/data/\n/githooks/\n")
    await works(project)
    script = "for d in .git/hooks data/hooks githooks; do echo evil > $d/pre-commit && echo DONE; done; true"
    done = await inside(project, script)
    assert (done.status, done.stdout) == (0, b""), done
    assert done.stderr.count(b"Read-only file system") == 3
    assert any("data/hooks is a link" in notice for notice in done.notices), done
    assert any(".git is a symbolic link" in notice for notice in done.notices)
    assert list((project / "githooks").iterdir()) == []


async def test_p2_a_renamed_git_directory_plants_no_hook(project: Path) -> None:
    repository(project)
    script = """
    mv .git g2
    mkdir -p .git/hooks
    cp -rn g2/. .git
    cd .git/hooks
    printf '#!/bin/sh\\ntouch planted\\n' >pre-commit
    chmod +x pre-commit
    true
    """
    done = await inside(project, script)
    assert b"Device or resource busy" in done.stderr
    git(project, "commit", "-q", "--allow-empty", "-m", "host")
    assert everything(project)[-1] == Path("file")
    # The control: the same script in the host plants one that git runs.
    in_host(project, script)
    git(project, "commit", "-q", "--allow-empty", "-m", "host")
    assert (project / "planted").exists()


async def test_read_only_calls_work_and_a_change_of_the_configuration_fails_alone(project: Path) -> None:
    repository(project)
    done = await inside(
        project, "git config user.x y; git remote add o /x; git remote -v; git config -l; git log"
    )
    assert done.status == 0, done
    assert b"could not" in done.stderr
    assert git(project, "remote") == ""
    lifted = await inside(project, "git config user.x y && git remote add o /x", protect=False)
    assert lifted.status == 0, lifted


async def test_names_of_the_list_are_read_only_where_they_are(project: Path) -> None:
    (project / ".vscode").mkdir()
    for name in (".envrc", ".vscode/tasks.json", "real"):
        (project / name).write_text("mine")
    (project / ".mcp.json").symlink_to("real")
    names = ".envrc .vscode/tasks.json .mcp.json real"
    overwrite = f"for f in {names}; do echo x >$f && echo DONE; done"
    done = await inside(project, f"{overwrite}; mv .vscode v2 && echo DONE; echo y >.vscode/other")
    assert (done.status, done.stdout) == (0, b""), done
    assert (project / ".vscode" / "other").exists()
    assert {(project / name).read_text() for name in (".envrc", ".vscode/tasks.json", "real")} == {"mine"}


@pytest.mark.parametrize("made", ["fifo", "absent"])
async def test_what_is_no_repository_leaves_nothing_behind(project: Path, made: str) -> None:
    """P4: nothing is created in the host."""
    if made == "fifo":
        os.mkfifo(project / ".git")
    before = everything(project)
    done = await inside(project, "ls -A; rm -f .git; true")
    assert done.status == 0, done
    assert everything(project) == before


async def test_another_object_at_the_name_of_a_proven_directory_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the open another session puts a link in the place of the repository."""
    main = repository(project / "main")
    tree = worktree(main, project / "tree")
    (project / "secret").mkdir()
    observe = facts.observe

    async def exchanged(paths: Iterable[bytes]) -> dict[bytes, facts.PathFact]:
        (main / ".git").rename(project / "away")
        (main / ".git").symlink_to(project / "secret")
        return await observe(paths)

    assert (await inside(tree, "git status")).status == 0, "the control"
    monkeypatch.setattr(facts, "observe", exchanged)
    with pytest.raises(Refused, match="now reaches"):
        await inside(tree, "git status")
