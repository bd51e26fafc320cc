"""Opening what a sandbox shows: every errno has its fate, and what never answers stops nobody."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ral_broker.envelope.facts import look, observe
from ral_broker.envelope.opened import identity_of, open_plan, open_refusal
from ral_broker.envelope.plan import (
    MAX_COPY,
    Bind,
    Copy,
    Device,
    Identity,
    Layer,
    Operation,
    Plan,
    Symlink,
    Tmpfs,
)
from ral_broker.errors import HostLacks, Refused


def bind(
    source: Path, *, required: bool = False, layer: Layer = "project", identity: Identity | None = None
) -> Bind:
    path = os.fsencode(source)
    return Bind(
        dest=path, source=path, writable=False, layer=layer, why="test", required=required, identity=identity
    )


def plan(*operations: Operation) -> Plan:
    return Plan(operations=operations, cwd=b"/")


@pytest.mark.parametrize("kind", ["last", "middle", "dangling", "loop", "magic"])
async def test_a_symbolic_link_anywhere_is_refused_with_the_fixed_message(tmp_path: Path, kind: str) -> None:
    (tmp_path / "real" / "below").mkdir(parents=True)
    (tmp_path / "last").symlink_to("real")
    (tmp_path / "middle").symlink_to("real")
    (tmp_path / "dangling").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    path = {"middle": tmp_path / "middle" / "below", "magic": Path("/proc/self/cwd")}.get(
        kind, tmp_path / kind
    )
    with pytest.raises(Refused) as refused:
        await open_plan(plan(bind(path)), {}, -1)
    assert str(refused.value) == (
        f"{path} now goes through a symbolic link that ral will not follow; "
        "reload the grant or restart ral if you made that change"
    )


async def test_what_is_absent_is_dropped_unless_it_is_required(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    absent = [bind(tmp_path / "absent"), bind(tmp_path / "file" / "below")]
    opened = await open_plan(plan(*absent, Tmpfs(dest=b"/tmp", layer="scratch", why="test")), {}, -1)
    assert [type(o) for o in opened.operations] == [Tmpfs]
    assert opened.handles == []
    with pytest.raises(Refused, match="no longer there"):
        await open_plan(plan(bind(tmp_path / "absent", required=True)), {}, -1)


async def test_what_may_not_be_reached_drops_a_system_default_and_refuses_the_rest(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "below").mkdir(parents=True)
    closed.chmod(0)
    try:
        opened = await open_plan(plan(bind(closed / "below", layer="system")), {}, -1)
        assert opened.operations == []
        with pytest.raises(Refused, match="below: Permission denied"):
            await open_plan(plan(bind(closed / "below")), {}, -1)
        assert look(os.fsencode(closed / "below")).kind == "unreadable"
    finally:
        closed.chmod(0o700)


async def test_another_object_at_the_name_is_refused_and_nothing_stays_open(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    status = first.stat()
    identity = Identity(status.st_dev, status.st_ino)
    opened = await open_plan(plan(bind(first, identity=identity)), {}, -1)
    assert identity_of(opened.handles[0]) == identity
    opened.close()
    first.rename(tmp_path / "moved")
    second.rename(first)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Refused, match=r"now reaches .*, not what the grant rendered"):
        await open_plan(plan(bind(tmp_path), bind(first, identity=identity)), {}, -1)
    assert os.listdir("/proc/self/fd") == before


async def test_a_copy_is_of_a_file_that_is_not_large(tmp_path: Path) -> None:
    def copy(source: Path) -> Plan:
        return plan(Copy(dest=b"/x", source=os.fsencode(source), mode=0o600, layer="home", why="test"))

    file = tmp_path / "file"
    file.touch()
    os.truncate(file, MAX_COPY)
    opened = await open_plan(copy(file), {}, -1)
    assert os.fstat(opened.handles[0]).st_size == MAX_COPY
    opened.close()
    os.truncate(file, MAX_COPY + 1)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Refused, match=f"has {MAX_COPY + 1} bytes"):
        await open_plan(copy(file), {}, -1)
    with pytest.raises(Refused, match="not what the grant rendered"):
        await open_plan(copy(tmp_path), {}, -1)
    assert os.listdir("/proc/self/fd") == before


async def test_a_device_is_the_one_that_was_seen(tmp_path: Path) -> None:
    def device(source: Path, number: int) -> Plan:
        path = os.fsencode(source)
        return plan(Device(dest=path, source=path, device=number, layer="kernel", why="devices"))

    null = Path(os.devnull)
    number = os.stat(null).st_rdev
    (await open_plan(device(null, number), {}, -1)).close()
    before = os.listdir("/proc/self/fd")
    (tmp_path / "file").touch()
    for source, wanted in ((null, number + 1), (tmp_path / "file", number), (tmp_path / "file", 0)):
        with pytest.raises(Refused, match="not what the grant rendered"):
            await open_plan(device(source, wanted), {}, -1)
    assert os.listdir("/proc/self/fd") == before


async def test_each_lent_operation_has_one_handle_in_order(tmp_path: Path) -> None:
    names = [tmp_path / name for name in ("a", "b", "c")]
    for name in names:
        name.mkdir()
    link = Symlink(dest=b"/x", target=b"y", layer="system", why="test")
    opened = await open_plan(plan(bind(names[0]), link, bind(names[1]), bind(names[2])), {}, -1)
    assert [identity_of(fd).inode for fd in opened.handles] == [name.stat().st_ino for name in names]
    assert all(not os.get_inheritable(fd) for fd in opened.handles)
    opened.close()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ETIMEDOUT, "did not answer"),
        (errno.EMFILE, "ulimit -Hn"),
        (errno.EIO, "Input/output error"),
        (errno.ESTALE, "Stale file handle"),
    ],
)
def test_other_errors_name_the_path_and_the_cause(number: int, words: str) -> None:
    refusal = open_refusal(b"/data/x\n", OSError(number, os.strerror(number)))
    assert words in str(refusal)
    assert "/data/x\\n" in str(refusal)


def test_a_kernel_without_openat2_is_a_fault_of_the_host() -> None:
    refusal = open_refusal(b"/x", OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)))
    assert isinstance(refusal, HostLacks)
    assert "Linux 5" in str(refusal)


async def test_facts_tell_links_apart_and_name_their_ends(tmp_path: Path) -> None:
    base = os.fsencode(tmp_path)
    (tmp_path / "d").mkdir()
    (tmp_path / "f").touch()
    (tmp_path / "to-d").symlink_to("d")
    (tmp_path / "gone").symlink_to("nothing")
    kinds = {
        b"/d": "directory", b"/f": "file", b"/to-d": "link", b"/gone": "link", b"/absent": "absent",
        b"/to-d/../d": "directory",
    }  # fmt: skip
    facts = await observe(base + name for name in kinds)
    assert {name: facts[base + name].kind for name in kinds} == kinds
    assert facts[base + b"/to-d"].resolved == base + b"/d"
    assert facts[base + b"/to-d"].reaches == "directory"
    assert facts[base + b"/gone"].resolved == base + b"/nothing"
    assert facts[base + b"/gone"].reaches == "absent"
    assert facts[base + b"/to-d/../d"].resolved == base + b"/d"


SILENT = """
import ctypes, os, sys, time, trio
from ral_broker.envelope.facts import observe
from ral_broker.envelope.opened import open_real

where = sys.argv[1].encode()
fuse = os.open("/dev/fuse", os.O_RDWR)
data = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % fuse
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"silent", where, b"fuse", 0, data) != 0:
    sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")

async def main():
    ticks = 0
    async def tick():
        nonlocal ticks
        while True:
            await trio.sleep(0.05)
            ticks += 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        started = time.monotonic()
        try:
            await open_real(where + b"/x")
            print("opened")
        except OSError as error:
            print(error.errno, round(time.monotonic() - started))
        facts = await observe([where + b"/y"])
        print(facts[where + b"/y"].kind)
        print(ticks > 50)
        nursery.cancel_scope.cancel()
    sys.stdout.flush()
    os._exit(0)

trio.run(main)
"""


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.needs("/dev/fuse")
def test_a_file_system_that_never_answers_costs_a_deadline_and_stops_nobody(tmp_path: Path) -> None:
    """A real FUSE mount, in namespaces of its own, whose server never reads a request."""
    started = time.monotonic()
    done = subprocess.run(
        ["unshare", "-Urm", sys.executable, "-c", SILENT, str(tmp_path)], capture_output=True, check=False,
        timeout=60, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout.split() == [str(errno.ETIMEDOUT).encode(), b"5", b"unreadable", b"True"], done
    assert time.monotonic() - started < 30
