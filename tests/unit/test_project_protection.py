"""What of a project is protected, on real repositories; and what of git's data outside becomes writable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from ral_broker.config.settings import Settings
from ral_broker.envelope.facts import canonical_name
from ral_broker.envelope.git_config import GitConfig, parse_git_config
from ral_broker.envelope.plan import Identity
from ral_broker.envelope.project import look_at_project
from ral_broker.envelope.protection import (
    GitDirectory,
    Outside,
    ProjectLook,
    Protection,
    project_protection,
)
from ral_broker.errors import Refused
from support.git import git, repository, with_submodule, worktree

NAMES = Settings().project_protected_paths
HOME = b"/home/u"


async def look(project: Path, *also: Path) -> ProjectLook:
    fd = os.open(project, os.O_PATH | os.O_DIRECTORY)
    before = sorted(os.listdir("/proc/self/fd"))
    try:
        return await look_at_project(
            fd, canonical_name(fd), home=HOME, also_writable=[os.fsencode(path) for path in also]
        )
    finally:
        assert sorted(os.listdir("/proc/self/fd")) == before
        os.close(fd)


async def protection(project: Path, *also: Path, names: tuple[str, ...] = ()) -> Protection:
    return project_protection(await look(project, *also), names=names, protect=True, homes=(HOME,))


def paths(rules: Protection) -> set[str]:
    return {os.fsdecode(rule.path) for rule in rules.protected}


REPOSITORY = {"config", "config.worktree", "hooks", "info/attributes", "commondir"}
WORKTREE = {"commondir", "gitdir", "config.worktree"}


def parts(directory: Path, names: set[str] = REPOSITORY) -> set[str]:
    return {f"{directory}/{name}" for name in names}


async def test_a_directory_without_git_has_the_names_of_the_list_only(tmp_path: Path) -> None:
    rules = await protection(tmp_path, names=("a", "./b//c", ".envrc"))
    assert paths(rules) == {f"{tmp_path}/a", f"{tmp_path}/b/c", f"{tmp_path}/.envrc"}
    assert {rule.why for rule in rules.protected} == {"project_protected_paths"}
    assert (rules.writable, rules.blocked, rules.notices) == ((), (), ())


@pytest.mark.parametrize("name", ["", "/", "/etc/x", "../x", "a/../../x", "a/..", ".", "x\0y"])
def test_a_name_of_the_list_that_leads_out_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="project_protected_paths"):
        project_protection(ProjectLook(b"/p"), names=(name,), protect=True)


async def test_a_repository(tmp_path: Path) -> None:
    rules = await protection(repository(tmp_path))
    assert paths(rules) == parts(tmp_path / ".git")
    assert {rule.why for rule in rules.protected} == {"protect_project"}
    assert rules.notices == ()
    assert rules.writable == ()


async def test_a_bare_repository(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "--bare")
    rules = await protection(tmp_path)
    assert paths(rules) == parts(tmp_path)


async def test_the_shape_of_a_bare_repository_beside_git_is_told(tmp_path: Path) -> None:
    repository(tmp_path)
    for name in ("HEAD", "objects", "refs"):
        (tmp_path / name).mkdir()
    rules = await protection(tmp_path)
    assert paths(rules) == parts(tmp_path / ".git") | parts(tmp_path)
    assert "has the shape of a bare repository" in rules.notices[0]


async def test_what_is_lacking_or_planted_is_told(tmp_path: Path) -> None:
    repository(tmp_path, "--template=")
    (tmp_path / ".git" / "commondir").write_text("../evil\n")
    rules = await protection(tmp_path)
    assert f"mkdir {tmp_path}/.git/hooks" in rules.notices[0]
    assert "commondir makes git obey" in rules.notices[1]


async def test_git_as_a_symbolic_link(tmp_path: Path) -> None:
    project, data = tmp_path / "p", tmp_path / "data"
    repository(project)
    (project / ".git").rename(data)
    (project / ".git").symlink_to("../data")
    rules = await protection(project)
    assert paths(rules) == parts(data)
    assert rules.writable == (), "a link proves nothing"
    assert "is a symbolic link" in rules.notices[0]
    assert f"{data}, which is not shown" in rules.notices[1]
    data.rename(project / "data")
    (project / ".git").unlink()
    (project / ".git").symlink_to("data")
    rules = await protection(project)
    assert paths(rules) == parts(project / "data")
    assert len(rules.notices) == 1


async def test_a_worktree_outside_of_its_repository(tmp_path: Path) -> None:
    main = repository(tmp_path / "main")
    tree = worktree(main, tmp_path / "tree")
    worktree(main, tmp_path / "other")
    rules = await protection(tree)
    common = main / ".git"
    assert paths(rules) == {
        f"{tree}/.git", *parts(common), *parts(common / "worktrees" / "tree", WORKTREE),
        f"{common}/worktrees/other",
    }  # fmt: skip
    assert [os.fsdecode(rule.path) for rule in rules.writable] == [str(common)]
    assert "denied_writable_paths" in rules.writable[0].why
    status = common.stat()
    assert rules.identities == ((os.fsencode(common), Identity(status.st_dev, status.st_ino)),)
    assert (rules.notices, rules.blocked) == ((), ())


async def test_worktrees_that_the_session_may_write_stay_usable(tmp_path: Path) -> None:
    main = repository(tmp_path / "main")
    inner = worktree(main, main / "trees" / "inner")
    outer = worktree(main, tmp_path / "outer")
    admin = main / ".git" / "worktrees"
    common = parts(main / ".git")
    of_inner = {f"{inner}/.git", *parts(admin / "inner", WORKTREE)}
    assert paths(await protection(main)) == common | of_inner | {f"{admin}/outer"}
    of_outer = {f"{outer}/.git", *parts(admin / "outer", WORKTREE)}
    assert paths(await protection(main, outer)) == common | of_inner | of_outer


async def test_a_worktree_that_went_with_a_private_tmp_stays_removable(tmp_path: Path) -> None:
    main = repository(tmp_path / "main")
    tree = worktree(main, tmp_path / "gone")
    admin = main / ".git" / "worktrees" / "gone"
    (admin / "gitdir").write_text("/tmp/ral-t-never-made/.git\n")
    assert paths(await protection(main)) == parts(main / ".git")
    (admin / "gitdir").write_text("/home/ral-t-never-made/.git\n")
    assert str(admin) in paths(await protection(main))
    assert tree.exists()


async def test_worktrees_inside_a_bare_repository_see_nothing_of_each_other(tmp_path: Path) -> None:
    source = repository(tmp_path / "source")
    git(tmp_path, "clone", "-q", "--bare", str(source), "bare")
    bare = tmp_path / "bare"
    tree = worktree(bare, bare / "group" / "tree")
    worktree(bare, bare / "group" / "secret")
    worktree(bare, bare / "next")
    (bare / "notes").write_text("mine")
    git(tree, "pack-refs", "--all")
    rules = await protection(tree)
    assert [os.fsdecode(rule.path) for rule in rules.writable] == [str(bare)]
    assert {os.fsdecode(r.path) for r in rules.blocked} == {
        f"{bare}/{name}" for name in ("group/secret", "next", "notes")
    }
    assert parts(bare) <= paths(rules)


async def test_a_dotgit_file_that_leads_into_the_project(tmp_path: Path) -> None:
    source = repository(tmp_path / "source")
    project = tmp_path / "p"
    git(tmp_path, "clone", "-q", "--bare", str(source), str(project / ".bare"))
    (project / ".git").write_text("gitdir: ./.bare\n")
    tree = worktree(project, project / "tree")
    rules = await protection(project)
    admin = project / ".bare" / "worktrees" / "tree"
    assert paths(rules) == {
        f"{project}/.git", f"{tree}/.git", *parts(project / ".bare"), *parts(admin, WORKTREE),
    }  # fmt: skip
    assert (rules.writable, rules.notices) == ((), ())


async def test_submodules_of_the_project(tmp_path: Path) -> None:
    main = with_submodule(tmp_path / "main", "libs/sub")
    rules = await protection(main)
    assert paths(rules) == {
        *parts(main / ".git"), *parts(main / ".git/modules/libs/sub"), f"{main}/libs/sub/.git",
    }  # fmt: skip
    # One from before git kept them in one place.
    (main / "libs/sub/.git").unlink()
    (main / ".git/modules/libs/sub").rename(main / "libs/sub/.git")
    git(tmp_path, "config", "-f", f"{main}/libs/sub/.git/config", "core.worktree", "..")
    rules = await protection(main)
    assert paths(rules) == parts(main / ".git") | parts(main / "libs/sub/.git")


async def test_a_submodule_as_the_project(tmp_path: Path) -> None:
    main = with_submodule(tmp_path / "main", "libs/sub")
    rules = await protection(main / "libs/sub")
    data = main / ".git/modules/libs/sub"
    assert [os.fsdecode(rule.path) for rule in rules.writable] == [str(data)]
    assert paths(rules) == {f"{main}/libs/sub/.git", *parts(data)}
    assert rules.notices == ()


async def test_a_separate_git_directory_is_not_writable_but_protected_and_the_setting_is_named(
    tmp_path: Path,
) -> None:
    project = repository(tmp_path / "p", f"--separate-git-dir={tmp_path}/data")
    rules = await protection(project)
    assert rules.writable == ()
    assert paths(rules) == {f"{project}/.git", *parts(tmp_path / "data")}
    assert str(tmp_path / "data") in rules.notices[0]
    assert "extra_writable_paths" in rules.notices[0]


async def test_what_the_configuration_leads_to(tmp_path: Path) -> None:
    repository(tmp_path)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "gitconfig").write_text('[includeIf "onbranch:x"]\n\tpath = ../more\n')
    (tmp_path / "more").write_text(
        "[core]\nhookspath = tools/githooks ; c\n[include]\npath=shared/gitconfig"
    )
    (tmp_path / "tools").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tools" / "linked").symlink_to("../elsewhere")
    git(tmp_path, "config", "include.path", "../shared/gitconfig")
    git(tmp_path, "config", "--add", "core.hooksPath", "tools/linked")
    git(tmp_path, "config", "--add", "core.hooksPath", "~/hooks")
    rules = await protection(tmp_path)
    assert paths(rules) == parts(tmp_path / ".git") | {
        f"{tmp_path}/shared/gitconfig", f"{tmp_path}/more", f"{tmp_path}/tools/githooks",
        f"{tmp_path}/elsewhere", "/home/u/hooks",
    }  # fmt: skip


@pytest.mark.parametrize("value", [".", "..", "/", ".git", ".git/.."])
async def test_a_hooks_path_that_holds_the_project_does_not_close_it(tmp_path: Path, value: str) -> None:
    repository(tmp_path)
    git(tmp_path, "config", "core.hooksPath", value)
    rules = await protection(tmp_path)
    assert paths(rules) == parts(tmp_path / ".git")
    assert "core.hooksPath" in rules.notices[0]


async def test_relative_hooks_are_protected_in_each_worktree(tmp_path: Path) -> None:
    main = repository(tmp_path / "main")
    git(main, "config", "core.hooksPath", ".githooks")
    worktree(main, main / "inner")
    assert {f"{main}/.githooks", f"{main}/inner/.githooks"} <= paths(await protection(main))
    tree = worktree(main, tmp_path / "tree")
    assert f"{tree}/.githooks" in paths(await protection(tree))


async def test_one_setting_lifts_it_all(tmp_path: Path) -> None:
    tree = worktree(repository(tmp_path / "main"), tmp_path / "tree")
    seen = await look(tree)
    lifted = project_protection(seen, names=NAMES, protect=False, homes=(HOME,))
    assert lifted.protected == ()
    assert [os.fsdecode(rule.path) for rule in lifted.writable] == [f"{tmp_path}/main/.git"]


OUTSIDE = Outside(b"/srv/u/repo/.git", Identity(1, 2))


@pytest.mark.parametrize(
    ("path", "doubt"),
    [
        (b"/home/u", "home directory or above"),
        (b"/home", "home directory or above"),
        (b"/", "home directory or above"),
        (b"/home/u/.ssh", "closed to programs"),
        (b"/home/u/.ssh/x/.git", "closed to programs"),
        (b"/var", "other programs"),
        (b"/tmp", "other programs"),
        (b"/home/u/.sshx", None),
        (b"/home/u/repo/.git", None),
    ],
)
def test_some_places_are_never_made_writable_by_what_a_project_says(path: bytes, doubt: str | None) -> None:
    seen = ProjectLook(b"/p", "pointer", (GitDirectory(path),), Outside(path, Identity(1, 2)))
    rules = project_protection(seen, names=(), protect=True, closed=[b"/home/u/.ssh"], homes=(HOME,))
    assert (rules.writable == ()) == (doubt is not None)
    if doubt is not None:
        assert doubt in rules.notices[0]
        assert rules.identities == ()


def test_the_git_file_of_the_project_is_protected_but_a_link_is_not_followed_as_a_whole() -> None:
    for kind, there in (("pointer", True), ("other", True), ("link", False), ("directory", False)):
        rules = project_protection(ProjectLook(b"/p", kind), names=(), protect=True)  # type: ignore[arg-type]
        assert (b"/p/.git" in {rule.path for rule in rules.protected}) == there


def test_a_configuration_as_git_reads_it() -> None:
    content = (
        b'\xef\xbb\xbf# [core] hooksPath = no\r\n[core] hooksPath = "a b;#\\"" ; comment\r\n'
        b"[CORE]\n\tHOOKSPATH = one\\\n two # x\n hooksPathX = no\n hooksPath\n"
        b'[ include ]\npath = "  x "\n[includeIf "gitdir:~/a]\\"/"]\tpath=y\n'
        b'[core "sub"]\n worktree = ../..\n[submodule "s"]\n path = p/q\n url = u\n[user]path=no\n'
    )
    assert parse_git_config(content) == GitConfig(
        hooks=(b'a b;#"', b"one two"), includes=(b"  x ", b"y"), worktree=b"../..", paths=(b"p/q",)
    )
    assert parse_git_config(b"\0\xff[core\nhooksPath=x\n]") == GitConfig()


async def test_a_look_that_is_given_up_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads for slow file systems are taken: the deadline passes before the look has begun."""
    repository(tmp_path)
    monkeypatch.setattr("ral_broker.envelope.project.LOOK_SECONDS", 0.2)
    monkeypatch.setattr("ral_broker.envelope.git_tree._QUICK_STEPS", 0)
    monkeypatch.setattr("ral_broker.envelope.project.slow_opens", busy := trio.CapacityLimiter(1))
    busy.acquire_on_behalf_of_nowait("somebody")
    with pytest.raises(Refused, match="did not answer within"):
        await look(tmp_path)
    busy.release_on_behalf_of("somebody")
    assert paths(await protection(tmp_path)) == parts(tmp_path / ".git"), "the control"
