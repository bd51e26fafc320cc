"""A project's .git may have been written by an earlier, hostile session: it makes nothing writable, and
nothing hang."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from ral_broker.envelope.facts import canonical_name
from ral_broker.envelope.git_look import MAX_DIRECTORIES
from ral_broker.envelope.git_tree import TooManyError, Tree, UncachedError
from ral_broker.envelope.plan import Identity
from ral_broker.envelope.project import look_at_project
from ral_broker.envelope.protection import ProjectLook, Protection, project_protection
from ral_broker.errors import Refused
from support.git import git, repository, with_submodule, worktree

pytestmark = pytest.mark.attack


async def look(project: Path) -> ProjectLook:
    fd = os.open(project, os.O_PATH | os.O_DIRECTORY)
    before = len(os.listdir("/proc/self/fd"))
    try:
        return await look_at_project(fd, canonical_name(fd), home=b"/home/u")
    finally:
        assert len(os.listdir("/proc/self/fd")) == before
        os.close(fd)


async def protection(project: Path) -> Protection:
    return project_protection(await look(project), names=(), protect=True, homes=(b"/home/u",))


def writable(rules: Protection) -> list[str]:
    return [os.fsdecode(rule.path) for rule in rules.writable]


class Scene:
    """A project, and beside it a victim that no session may write: a repository of the user's."""

    def __init__(self, directory: Path) -> None:
        self.victim = repository(directory / "victim")
        self.data = self.victim / ".git"
        self.project = directory / "project"
        self.project.mkdir()

    def point(self, where: Path | str) -> None:
        (self.project / ".git").write_text(f"gitdir: {where}\n")

    def admin(self, where: Path, common: Path | str, back: Path | str | None = None) -> Path:
        """What a repository keeps of a worktree, made by hand."""
        where.mkdir(parents=True)
        (where / "HEAD").write_text("ref: refs/heads/main\n")
        (where / "commondir").write_text(f"{common}\n")
        (where / "gitdir").write_text(f"{back or self.project / '.git'}\n")
        return where


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_the_control_a_true_worktree_gets_its_repository(scene: Scene, tmp_path: Path) -> None:
    tree = worktree(scene.victim, tmp_path / "tree")
    assert writable(await protection(tree)) == [str(scene.data)]


async def test_the_control_a_true_submodule_gets_its_repository(tmp_path: Path) -> None:
    main = with_submodule(tmp_path / "main")
    assert writable(await protection(main / "sub")) == [str(main / ".git/modules/sub")]


def plain(scene: Scene) -> None:
    scene.point(scene.data)


def relative(scene: Scene) -> None:
    scene.point("../victim/.git")


def no_repository(scene: Scene) -> None:
    keys = scene.project.parent / "keys"
    keys.mkdir()
    scene.point(keys)


def admin_in_the_project(scene: Scene) -> None:
    """The project itself says what it should prove."""
    scene.point(scene.admin(scene.project / "worktrees" / "x", scene.data))


def admin_in_the_project_beside_what_it_wants(scene: Scene) -> None:
    """As above; what it wants is two directories up, as with git."""
    for name in ("HEAD", "objects", "refs"):
        (scene.project.parent / name).mkdir()
    scene.project.rename(scene.project.with_name("worktrees"))
    scene.project = scene.project.with_name("worktrees")
    scene.point(scene.admin(scene.project / "x", "../.."))


def common_elsewhere(scene: Scene) -> None:
    """What another session could write says that a third place is the repository."""
    scene.point(scene.admin(scene.project.parent / "other" / "worktrees" / "x", scene.data))


def a_worktree_of_no_repository(scene: Scene) -> None:
    """As git has it, but what it belongs to is a directory like any other."""
    scene.point(scene.admin(scene.project.parent / "other" / "worktrees" / "x", "../.."))


def common_through_a_link(scene: Scene) -> None:
    other = scene.project.parent / "other"
    scene.point(scene.admin(other / "worktrees" / "x", "link"))
    (other / "worktrees" / "x" / "link").symlink_to(scene.data)


def worktrees_is_a_link(scene: Scene) -> None:
    """``x`` is reached through the victim's directory but lies elsewhere."""
    scene.admin(scene.project.parent / "other" / "x", scene.data)
    (scene.data / "worktrees").symlink_to(scene.project.parent / "other")
    scene.point(scene.data / "worktrees" / "x")


def a_worktree_of_somebody_else(scene: Scene) -> None:
    """A true one, but of another directory."""
    worktree(scene.victim, scene.project.parent / "tree")
    scene.point(scene.data / "worktrees" / "tree")


def a_hard_link_of_a_worktrees_file(scene: Scene) -> None:
    """The very .git file of a true worktree, under a second name."""
    tree = worktree(scene.victim, scene.project.parent / "tree")
    os.link(tree / ".git", scene.project / ".git")


def back_through_a_link(scene: Scene) -> None:
    """A worktree that was in the project: its name now leads to the project itself."""
    tree = worktree(scene.victim, scene.project / "tree")
    shutil.rmtree(tree)
    tree.symlink_to(".")
    scene.point(scene.data / "worktrees" / "tree")


def commondir_goes_round(scene: Scene) -> None:
    where = scene.admin(scene.project.parent / "other" / "worktrees" / "x", ".")
    scene.point(where)


def commondir_is_a_fifo(scene: Scene) -> None:
    where = scene.admin(scene.project.parent / "other" / "worktrees" / "x", ".")
    (where / "commondir").unlink()
    os.mkfifo(where / "commondir")
    scene.point(where)


def not_a_submodule_there(scene: Scene) -> None:
    """core.worktree agrees, but the repository is no submodule's: any directory could be made to look so."""
    git(scene.victim, "config", "core.worktree", str(scene.project))
    scene.point(scene.data)


def a_submodule_of_nothing(scene: Scene) -> None:
    """It lies in a directory modules, but not in that of a repository."""
    moved = scene.project.parent / "modules" / "x"
    moved.parent.mkdir()
    scene.data.rename(moved)
    git(scene.project, "config", "-f", str(moved / "config"), "core.worktree", str(scene.project))
    scene.point(moved)


def a_submodule_elsewhere(scene: Scene) -> None:
    main = with_submodule(scene.project.parent / "main")
    scene.point(main / ".git/modules/sub")


def itself(scene: Scene) -> None:
    scene.point(".git")


def the_project(scene: Scene) -> None:
    scene.point(".")


def magic(scene: Scene) -> None:
    scene.point("/proc/self/root")


def root(scene: Scene) -> None:
    scene.point("/")


LIES: list[Callable[[Scene], None]] = [
    plain, relative, no_repository, admin_in_the_project, admin_in_the_project_beside_what_it_wants,
    common_elsewhere, a_worktree_of_no_repository,
    common_through_a_link, worktrees_is_a_link, a_worktree_of_somebody_else,
    a_hard_link_of_a_worktrees_file, back_through_a_link, commondir_goes_round, commondir_is_a_fifo,
    not_a_submodule_there, a_submodule_of_nothing, a_submodule_elsewhere, itself, the_project, magic, root,
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
async def test_a_git_file_that_lies_makes_nothing_writable(
    scene: Scene, lie: Callable[[Scene], None]
) -> None:
    lie(scene)
    rules = await protection(scene.project)
    assert rules.writable == ()
    assert rules.blocked == ()
    seen = await look(scene.project)
    if seen.outside is not None:
        assert "which is not made writable" in rules.notices[-1]
        assert "extra_writable_paths" in rules.notices[-1]


async def test_a_directory_dressed_as_a_repository_is_hidden_but_for_gits_own(
    scene: Scene, tmp_path: Path
) -> None:
    """Two sessions together: the one in ``other`` makes it look like a repository of which the project is a
    worktree. What is protected in ``other`` must not be writable from the project."""
    other = repository(tmp_path / "other")
    for name in ("objects", "refs", "hooks", "info"):
        (other / name).mkdir()
    (other / "HEAD").write_text("ref: refs/heads/main\n")
    (other / ".envrc").write_text("mine")
    scene.point(scene.admin(other / "worktrees" / "x", "../.."))
    rules = await protection(scene.project)
    assert writable(rules) == [str(other)]
    assert {os.fsdecode(rule.path) for rule in rules.blocked} == {
        f"{other}/{name}" for name in (".git", ".envrc", "file")
    }
    assert os.fsencode(other / "hooks") in {rule.path for rule in rules.protected}


async def test_what_is_too_much_is_not_believed(scene: Scene, tmp_path: Path) -> None:
    tree = worktree(scene.victim, tmp_path / "tree")
    for number in range(300):
        (scene.data / f"x{number}").touch()
    rules = await protection(tree)
    assert writable(rules) == []
    assert "too much that is not git's" in rules.notices[-1]


@pytest.mark.root
async def test_a_repository_of_another_user_is_not_made_writable(scene: Scene, tmp_path: Path) -> None:
    tree = worktree(scene.victim, tmp_path / "tree")
    assert writable(await protection(tree)) == [str(scene.data)]
    os.chown(scene.data, 65534, 65534)
    rules = await protection(tree)
    assert writable(rules) == []
    assert "it is not yours" in rules.notices[-1]


CONTENTS = {
    "empty": b"",
    "no gitdir": b"hello\n",
    "only a word": b"gitdir: ",
    "nul": b"gitdir: /a\0b\n",
    "newline": b"gitdir: /a\n/b\n",
    "not utf-8": b"gitdir: \xff\xfe\n",
    "long name": b"gitdir: " + b"x" * 3000 + b"\n",
    "huge": b"gitdir: /" + b"x/" * (1 << 20),
    "loop": b"gitdir: loop/loop\n",
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
async def test_a_git_file_with_any_content_is_looked_at(scene: Scene, content: bytes) -> None:
    (scene.project / ".git").write_bytes(content)
    (scene.project / "loop").symlink_to("loop")
    rules = await protection(scene.project)
    assert rules.writable == ()
    assert [rule.path for rule in rules.protected] == [os.fsencode(scene.project / ".git")]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def looping(path: Path) -> None:
    path.symlink_to(path.name)


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("make", [fifo, endless, looping, large, Path.mkdir], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "name",
    [
        ".git", ".gitmodules", ".git/config", ".git/config.worktree", ".git/commondir", ".git/hooks",
        ".git/HEAD", ".git/modules", ".git/modules/sub", ".git/modules/sub/config", ".git/worktrees",
        ".git/worktrees/tree", ".git/worktrees/tree/gitdir", "included", "sub/.git",
    ],
)  # fmt: skip
async def test_a_thing_of_another_kind_in_its_place_stops_nothing(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    main = with_submodule(tmp_path / "main")
    worktree(main, main / "tree")
    git(main, "config", "include.path", "../included")
    (main / "included").touch()
    path = main / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)
    began = time.monotonic()
    with trio.fail_after(5):
        rules = await protection(main)
    assert time.monotonic() - began < 2
    assert rules.writable == ()
    inside = os.fsencode(main)
    assert all(rule.path.startswith(inside + b"/") for rule in rules.protected)


async def test_nothing_is_taken_from_what_is_no_file(tmp_path: Path) -> None:
    """A FIFO would wake whoever writes to it."""
    main = repository(tmp_path / "main")
    path = main / ".git" / "config"
    path.unlink()
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(fd, b"[core]\nhooksPath = taken\n")
        rules = await protection(main)
        assert os.fsencode(main / "taken") not in {rule.path for rule in rules.protected}
        assert os.read(fd, 100) == b"[core]\nhooksPath = taken\n"
    finally:
        os.close(fd)


def test_much_work_is_not_done_where_it_would_stop_the_broker(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_PATH)
    try:
        for tree, done in ((Tree(None), 2000), (Tree(time.monotonic() + 30), 5000)):
            number = 0
            with contextlib.suppress(UncachedError):
                while number < 5000 and tree.exists(fd, b"."):
                    number += 1
            assert number == done
        with pytest.raises(TimeoutError):
            Tree(time.monotonic() - 1).exists(fd, b".")
    finally:
        os.close(fd)


def test_a_directory_is_listed_up_to_a_limit(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    fd = os.open(tmp_path, os.O_PATH)
    try:
        tree = Tree(time.monotonic() + 10)
        assert tree.names(fd, 3) == [b"a", b"b", b"c"]
        assert tree.names(fd, 3, directories=True) == []
        for directories in (False, True):
            with pytest.raises(TooManyError):
                tree.names(fd, 2, directories=directories)
    finally:
        os.close(fd)


@pytest.mark.slow
async def test_a_hundred_thousand_worktrees_are_closed_as_a_whole(tmp_path: Path) -> None:
    main = repository(tmp_path / "main")
    directory = main / ".git" / "worktrees"
    directory.mkdir()
    for number in range(100_000):
        os.mkdir(f"{directory}/{number}")
    began = time.monotonic()
    rules = await protection(main)
    assert time.monotonic() - began < 1
    assert os.fsencode(directory) in {rule.path for rule in rules.protected}
    assert len(rules.protected) < 10
    assert "all of it is read-only inside" in rules.notices[-1]


@pytest.mark.parametrize("number", [MAX_DIRECTORIES, MAX_DIRECTORIES + 1])
async def test_as_many_as_are_looked_at_are_protected_one_by_one(tmp_path: Path, number: int) -> None:
    main = repository(tmp_path / "main")
    directory = main / ".git" / "worktrees"
    for count in range(number):
        (directory / f"{count}").mkdir(parents=True)
        (directory / f"{count}" / "gitdir").write_text(f"{main}/{count}/.git\n")
    paths = {rule.path for rule in (await protection(main)).protected}
    whole = os.fsencode(directory) in paths
    assert whole == (number > MAX_DIRECTORIES)
    assert (len(paths) == 5 + 3 * MAX_DIRECTORIES) == (not whole)


async def test_modules_within_modules_end(tmp_path: Path) -> None:
    main = repository(tmp_path / "main")
    deep = main / ".git" / "modules"
    for _ in range(100):
        deep /= "a"
    deep.mkdir(parents=True)
    rules = await protection(main)
    assert os.fsencode(main / ".git" / "modules") in {rule.path for rule in rules.protected}


async def test_configurations_that_include_each_other_end(tmp_path: Path) -> None:
    main = repository(tmp_path / "main")
    files = "".join(f"[include]\n path = ../f{n}\n" for n in range(200))
    for number in range(200):
        (main / f"f{number}").write_text(files.replace("../", ""))
    (main / ".git" / "config").write_text(files)
    rules = await protection(main)
    assert len(rules.protected) == 5 + 32
    assert "includes too many files" in rules.notices[0]


async def test_a_look_that_takes_too_long_is_given_up_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = repository(tmp_path / "main")
    modules = main / ".git" / "modules"
    for number in range(250):
        git_directory = modules / f"{number}"
        for name in ("HEAD", "objects", "refs"):
            (git_directory / name).mkdir(parents=True)
    assert len((await protection(main)).protected) == 5 * 251, "the control: in time it is all found"
    monkeypatch.setattr("ral_broker.envelope.project.LOOK_SECONDS", 0.001)
    with pytest.raises(Refused, match="did not answer within"):
        await look(main)


FLIP = """
import ctypes, os, sys
number = {"x86_64": 316, "aarch64": 276}[os.uname().machine]
exchange = ctypes.CDLL(None).syscall
a, b = (ctypes.c_char_p(os.fsencode(p)) for p in sys.argv[1:3])
print("up", flush=True)
while True:
    if exchange(number, -100, a, -100, b, 2) != 0: sys.exit("renameat2")
"""


@contextlib.contextmanager
def flipping(a: Path, b: Path) -> Iterator[None]:
    """Exchange two names as fast as it goes."""
    command = ["/usr/bin/python3", "-I", "-c", FLIP, str(a), str(b)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as flipper:
        assert flipper.stdout is not None
        assert flipper.stdout.readline() == b"up\n"
        try:
            yield
        finally:
            still = flipper.poll() is None
            flipper.kill()
    assert still, "nothing was exchanged"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["file", "link", "fifo", "directory"])
async def test_a_git_file_that_changes_all_the_time_gives_what_is_true_or_nothing(
    scene: Scene, tmp_path: Path, what: str
) -> None:
    tree = worktree(scene.victim, tmp_path / "tree")
    decoy = tree / "decoy"
    match what:
        case "file":
            decoy.write_text(
                f"gitdir: {scene.admin(tree / 'worktrees' / 'x', scene.victim, tree / '.git')}\n"
            )
        case "link":
            decoy.symlink_to(scene.victim)
        case "fifo":
            os.mkfifo(decoy)
        case _:
            repository(tmp_path / "third")
            (tmp_path / "third" / ".git").rename(decoy)
    status = scene.data.stat()
    true = ((os.fsencode(scene.data), Identity(status.st_dev, status.st_ino)),)
    seen: set[str] = set()
    with flipping(tree / ".git", decoy):
        for _ in range(300):
            rules = await protection(tree)
            assert rules.identities in ((), true)
            assert writable(rules) in ([], [str(scene.data)])
            seen.add((await look(tree)).git)
    # The control: both were met.
    assert len(seen) == 2 or what == "file"


@pytest.mark.slow
async def test_a_worktree_whose_parent_changes_is_the_object_that_was_opened(tmp_path: Path) -> None:
    """The name of a proven directory is exchanged later: its identity is handed on, so that the launch sees
    it."""
    main = repository(tmp_path / "main")
    tree = worktree(main, tmp_path / "tree")
    rules = await protection(tree)
    [(path, identity)] = rules.identities
    main.rename(tmp_path / "away")
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / ".git").symlink_to("/etc")
    status = os.stat(path)
    assert Identity(status.st_dev, status.st_ino) != identity
    status = (tmp_path / "away" / ".git").stat()
    assert Identity(status.st_dev, status.st_ino) == identity
