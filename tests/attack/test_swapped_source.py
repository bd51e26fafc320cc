"""Between the plan and the spawn somebody exchanges what a name reaches: the object, or a refusal."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ral_broker.envelope.opened import open_plan
from ral_broker.envelope.plan import Bind, Identity, Plan
from ral_broker.errors import Refused
from support.broker import Completed, Ral
from support.hostile import run_group
from support.installed import python_path, ral_path, session_environment

pytestmark = [pytest.mark.attack, pytest.mark.needs("bubblewrap")]

RUNS = 50

FLIP = """
import ctypes, os, sys
number = {"x86_64": 316, "aarch64": 276}[os.uname().machine]
exchange = ctypes.CDLL(None).syscall
a, b = (ctypes.c_char_p(os.fsencode(p)) for p in sys.argv[1:3])
print("up", flush=True)
while True:
    if exchange(number, -100, a, -100, b, 2) != 0: sys.exit("renameat2")
"""


def exchange(a: Path, b: Path) -> None:
    number = {"x86_64": 316, "aarch64": 276}[os.uname().machine]
    result = ctypes.CDLL(None).syscall(
        number, -100, ctypes.c_char_p(os.fsencode(a)), -100, ctypes.c_char_p(os.fsencode(b)), 2
    )
    assert result == 0


@contextlib.contextmanager
def flipping(a: Path, b: Path) -> Iterator[None]:
    """Exchange two names as fast as it goes."""
    with subprocess.Popen(
        ["/usr/bin/python3", "-I", "-c", FLIP, str(a), str(b)], stdout=subprocess.PIPE
    ) as flipper:
        assert flipper.stdout is not None
        assert flipper.stdout.readline() == b"up\n"
        try:
            yield
        finally:
            still = flipper.poll() is None
            flipper.kill()
    assert still, "nothing was exchanged"


def in_directory(fd: int) -> Callable[[], None]:
    return lambda: os.fchdir(fd)


def run_in(ral: Ral, fd: int, *command: str) -> Completed:
    """``ral run`` with this very directory as the working directory, whatever its name is now."""
    done = subprocess.run(
        [str(ral_path()), "run", "-q", *command], env=ral.environment, stdin=subprocess.DEVNULL,
        capture_output=True, preexec_fn=in_directory(fd), timeout=30, check=False,
    )  # fmt: skip
    return Completed(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def pair(project: Path) -> Iterator[tuple[Path, Path, int]]:
    """Two directories, ``mine`` and ``other``, a file in each says which it is; a handle of mine."""
    for name in ("mine", "other"):
        (project / name / "deep").mkdir(parents=True)
        (project / name / "which").write_text(name)
        (project / name / "deep" / "which").write_text(name)
    fd = os.open(project / "mine", os.O_PATH)
    yield project / "mine", project / "other", fd
    os.close(fd)


REASONS = (
    b"now reaches", b"symbolic link that ral will not follow", b"no longer there", b"was replaced while",
    b"changed it while", b"cannot be read", b"is not there", b"No such file", b"Not a directory",
    b"changes all the time",
)  # fmt: skip


def outcomes(runs: list[Completed]) -> tuple[int, int]:
    """(runs that showed the object, runs that were refused); anything else is the fault this is about."""
    for done in runs:
        if done.status == 0:
            assert done.stdout == b"mine", done
        else:
            assert done.status == 78, done
            assert done.stdout == b"", done
            assert any(reason in done.stderr for reason in REASONS), done
    return sum(d.status == 0 for d in runs), sum(d.status != 0 for d in runs)


@pytest.mark.slow
@pytest.mark.usefixtures("broker")
@pytest.mark.parametrize("what", ["the project", "its parent", "a link in its place"])
def test_the_project_is_the_object_that_the_caller_stands_in_or_nothing(
    ral: Ral, pair: tuple[Path, Path, int], project: Path, what: str
) -> None:
    mine, other, fd = pair
    inner = os.open(mine / "deep", os.O_PATH)
    place = {"the project": fd, "its parent": inner, "a link in its place": fd}[what]
    swap: tuple[Path, Path] = (mine, other)
    if what == "a link in its place":
        (project / "link").symlink_to(other)
        swap = (mine, project / "link")
    try:
        with flipping(*swap):
            seen = {(mine / "which").read_text() for _ in range(2000)}
            runs = [run_in(ral, place, "cat", "which") for _ in range(RUNS)]
    finally:
        os.close(inner)
    assert seen == {"mine", "other"}, "the control: by name both are seen"
    shown, refused = outcomes(runs)
    assert shown + refused == RUNS
    assert run_in(ral, fd, "cat", "which").stdout == b"mine"


@pytest.mark.slow
@pytest.mark.usefixtures("broker")
def test_the_working_directory_is_the_object_that_the_caller_stands_in_or_nothing(
    ral: Ral, pair: tuple[Path, Path, int], project: Path
) -> None:
    mine, other, fd = pair
    with flipping(mine, other):
        runs = [run_in(ral, fd, "--project", str(project), "cat", "which") for _ in range(RUNS)]
    shown, refused = outcomes(runs)
    assert shown + refused == RUNS


def test_plain_bwrap_shows_the_other_one(pair: tuple[Path, Path, int]) -> None:
    """The control: mounted by name, what was checked a moment ago is not what is shown."""
    mine, other, _ = pair
    seen: set[bytes] = set()
    with flipping(mine, other):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if (mine / "which").read_text() != "mine":
                continue
            command = ["bwrap", "--ro-bind", "/", "/", "--bind", str(mine), "/mnt", "cat", "/mnt/which"]
            seen.add(subprocess.run(command, capture_output=True, check=False).stdout)
            if b"other" in seen:
                break
    assert b"other" in seen


def bind(source: Path, identity: Identity | None, *, required: bool = True) -> Plan:
    operation = Bind(
        dest=b"/x", source=os.fsencode(source), writable=True, required=required, layer="project", why="t",
        identity=identity,
    )  # fmt: skip
    return Plan(operations=(operation,), cwd=b"/")


def identity_of(path: Path) -> Identity:
    status = path.stat()
    return Identity(status.st_dev, status.st_ino)


async def test_a_symbolic_link_on_the_way_is_refused_in_fixed_words(pair: tuple[Path, Path, int]) -> None:
    mine, other, _ = pair
    planned = bind(mine / "deep", identity_of(mine / "deep"))
    shutil.rmtree(mine)
    mine.symlink_to(other)
    words = (
        f"{mine}/deep now goes through a symbolic link that ral will not follow; reload the grant or "
        "restart ral if you made that change"
    )
    with pytest.raises(Refused) as refusal:
        await open_plan(planned, {}, -1)
    assert refusal.value.message == words
    mine.unlink()


@pytest.mark.parametrize("required", [True, False])
async def test_another_object_at_the_name_is_refused_and_named(
    pair: tuple[Path, Path, int], required: bool
) -> None:
    mine, other, _ = pair
    planned = bind(mine, identity_of(mine), required=required)
    opened = await open_plan(planned, {}, -1)
    opened.close()
    exchange(mine, other)
    with pytest.raises(Refused, match=r"now reaches .*, not what the grant rendered"):
        await open_plan(planned, {}, -1)


async def test_nothing_stays_open_of_a_plan_that_is_refused(pair: tuple[Path, Path, int]) -> None:
    mine, other, _ = pair
    wrong = bind(other, identity_of(mine))
    plan = Plan(operations=bind(mine, identity_of(mine)).operations + wrong.operations, cwd=b"/")
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(Refused):
        await open_plan(plan, {}, -1)
    assert sorted(os.listdir("/proc/self/fd")) == before


# A broker whose bwrap is not the host's, in a mount namespace of its own.
# Says what the client got after each step.
OWN_BWRAP = """
import json, os, subprocess, sys
env, python, ral, project, steps = json.loads(sys.argv[1])
serve = [python, "-I", "-m", "ral_broker", "run"]
broker = subprocess.Popen(serve, env=env, cwd="/", stderr=subprocess.PIPE)
while b"serves" not in broker.stderr.readline(): assert broker.poll() is None
said = []
for step in steps:
    subprocess.run(["sh", "-ec", step], check=True)
    run = [ral, "run", "-q", "--", "echo", "ran"]
    done = subprocess.run(run, env=env, cwd=project, stdin=subprocess.DEVNULL, capture_output=True)
    said.append([done.returncode, done.stdout.decode(), done.stderr.decode()])
broker.terminate(); broker.communicate()
print(json.dumps(said))
"""


def with_own_bwrap(
    runtime: Path, project: Path, prepare: str, steps: list[str]
) -> list[tuple[int, str, str]]:
    """What ``ral run`` gives after each of ``steps``, the broker having been started after ``prepare``."""
    mount = "mount -t tmpfs tmpfs /usr/local/bin; B=/usr/local/bin/bwrap"
    description = [
        session_environment(runtime),
        str(python_path()),
        str(ral_path()),
        str(project),
        ["B=/usr/local/bin/bwrap; " + s for s in steps],
    ]
    own = f"exec unshare --user --map-user={os.getuid() or 1} --map-group={os.getgid() or 1}"
    enter = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-ec",
        f'{mount}\n{prepare}\n{own} "$@"',
        "sh",
    ]
    done = run_group([*enter, "/usr/bin/python3", "-I", "-c", OWN_BWRAP, json.dumps(description)])
    assert done.returncode == 0, done
    return [(status, out, err) for status, out, err in json.loads(done.stdout)]


def test_a_bwrap_that_is_unlinked_or_replaced_after_the_start_is_still_the_one_that_runs(
    runtime: Path, project: Path
) -> None:
    steps = ["true", "cp /usr/bin/false $B.new; mv $B.new $B", "rm $B", "mkdir $B; cp /usr/bin/false $B/x"]
    said = with_own_bwrap(runtime, project, "cp /usr/bin/bwrap $B", steps)
    assert said == [(0, "ran\n", "")] * 4


def test_a_broker_that_starts_later_runs_what_is_there_then(runtime: Path, project: Path) -> None:
    """The control: the trap of the test above catches whoever looks bwrap up again."""
    ((status, out, err),) = with_own_bwrap(runtime, project, "cp /usr/bin/false $B", ["true"])
    assert (status, out) == (78, "")
    assert "/usr/local/bin/bwrap says: ended with status 1 without a word" in err


@pytest.mark.needs("gcc")
def test_a_bwrap_that_mounts_by_name_only_is_refused_with_its_path(
    runtime: Path, project: Path, tmp_path: Path
) -> None:
    source = """
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <unistd.h>
    int main(int argc, char **argv) {
        char buffer[65536];
        ssize_t size = pread(atoi(argv[2]), buffer, sizeof buffer, 0);
        for (char *at = buffer; at < buffer + size; at += strlen(at) + 1)
            if (!strcmp(at, "--ro-bind-fd") || !strcmp(at, "--bind-fd")) {
                fprintf(stderr, "bwrap: Unknown option %s\\n", at); return 1;
            }
        execv("/usr/bin/bwrap", argv);
        return 99;
    }
    """
    (tmp_path / "old.c").write_text(source)
    subprocess.run(["gcc", "-o", tmp_path / "old", tmp_path / "old.c"], check=True)
    ((status, out, err),) = with_own_bwrap(runtime, project, f"cp {tmp_path}/old $B", ["true"])
    assert (status, out) == (78, "")
    assert "/usr/local/bin/bwrap does not mount what is handed to it by descriptor" in err
    assert "0.8.0-2+deb12u1" in err
