"""The zygote, through the broker's end of it: masks in real sandboxes, its life, and its ends."""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from ral_broker import zygote as broker_end
from ral_broker.envelope.opened import identity_of
from ral_broker.envelope.plan import Identity, Mask
from ral_broker.errors import HostLacks, Refused
from ral_broker.pins import Pin, take_helper
from ral_broker.sessions.many import attach_masks
from ral_broker.zygote import FIND, IDENTITY, KIND, MaskAt, Outcome, Zygote, decode, encode
from support.changes import Driven, Waiting, item, listed
from support.native import SECONDS

pytestmark = pytest.mark.needs("bubblewrap")

DONE = Outcome(0, 0)


@pytest.fixture
def null_fd() -> Iterator[int]:
    fd = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    yield fd
    os.close(fd)


@pytest.fixture
async def zygote(null_fd: int) -> AsyncIterator[Zygote]:
    """One that is supervised, as in the broker."""
    pin = take_helper("zygote")
    made = Zygote(pin, null_fd)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.supervise)
        yield made
        nursery.cancel_scope.cancel()
    assert made.pid is None
    os.close(pin.fd)


def secrets(directory: Path, count: int) -> list[MaskAt]:
    """Make files and directories in turn that hold something to hide."""
    made: list[MaskAt] = []
    for number in range(count):
        path = directory / f"{number:05}"
        if number % 2:
            path.mkdir()
            (path / "secret").write_text("SECRET\n")
        else:
            path.write_text("SECRET\n")
        made.append(MaskAt(os.fsencode(path), path.is_dir()))
    return made


async def test_files_and_directories_are_hidden_before_the_program_starts(
    zygote: Zygote, project: Path
) -> None:
    masks = secrets(project, 40)
    script = f"cd {project}; cat * */* 2>/dev/null; stat -c '%a %s %F' *; cat /proc/self/mountinfo"
    with Waiting(project, script) as waiting:
        assert await zygote.change(waiting.namespace, masks) == [DONE] * 40
        said = waiting.run().decode()
    assert "SECRET" not in said
    assert said.count("444 0 regular empty file\n") == said.count("555 40 directory\n") == 20
    mounts = [line for line in said.splitlines() if " ral-mask " in line]
    assert len(mounts) == 40
    for line in mounts:
        # Propagation would be named between the attributes and the dash: there is none.
        assert re.fullmatch(
            rf"\d+ \d+ \S+ /(file|directory) {project}/\d+ ro,nosuid,nodev,relatime - tmpfs ral-mask \S+",
            line,
        )
    with Waiting(project, script) as waiting:
        assert waiting.run().count(b"SECRET") == 40, "the control: without masks all of it is read"


async def test_every_change_has_an_outcome_of_its_own(zygote: Zygote, project: Path) -> None:
    for name in ("here", "other", "last"):
        (project / name).write_text("SECRET")
    (project / "directory").mkdir()
    (project / "link").symlink_to("here")
    (project / "through").symlink_to("directory")
    (project / "directory" / "below").touch()
    fd = os.open(project / "here", os.O_PATH | os.O_CLOEXEC)
    here = identity_of(fd)
    os.close(fd)
    asked = {
        "here": (False, here, DONE),
        "absent": (False, None, Outcome(FIND, errno.ENOENT)),
        "here/below": (False, None, Outcome(FIND, errno.ENOTDIR)),
        "link": (False, None, Outcome(FIND, errno.ELOOP)),
        "through/below": (False, None, Outcome(FIND, errno.ELOOP)),
        "other": (False, here, Outcome(IDENTITY, errno.ESTALE)),
        "directory": (False, None, Outcome(KIND, errno.EISDIR)),
        "directory/below": (True, None, Outcome(KIND, errno.ENOTDIR)),
        "last": (False, None, DONE),
    }
    changes = [
        MaskAt(os.fsencode(project / name), directory, identity)
        for name, (directory, identity, _) in asked.items()
    ]
    with Waiting(project, f"cd {project}; cat here other last") as waiting:
        outcomes = await zygote.change(waiting.namespace, changes)
        assert dict(zip(asked, outcomes, strict=True)) == {
            name: want for name, (_, _, want) in asked.items()
        }
        assert waiting.run() == b"SECRET", "of three files one is left"


@pytest.mark.slow
async def test_more_masks_than_one_order_takes(zygote: Zygote, project: Path) -> None:
    masks = secrets(project, broker_end.MAX_ITEMS + 4)
    with Waiting(project, f"cat {project}/*0 {project}/*1/*; echo end") as waiting:
        assert await zygote.change(waiting.namespace, masks) == [DONE] * len(masks)
        said = waiting.run()
    assert b"SECRET" not in said
    assert said.endswith(b"end\n")


async def test_many_orders_at_once_in_many_sandboxes(zygote: Zygote, project: Path) -> None:
    sandboxes = []
    try:
        for number in range(6):
            place = project / f"{number}"
            place.mkdir()
            sandboxes.append((place, Waiting(place, f"cat {place}/* {place}/*/*; echo end")))
        async with trio.open_nursery() as nursery:
            for place, waiting in sandboxes:
                for mask in secrets(place, 8):
                    nursery.start_soon(zygote.change, waiting.namespace, [mask])
        for _, waiting in sandboxes:
            said = waiting.run()
            assert b"SECRET" not in said
            assert said.endswith(b"end\n")
    finally:
        for _, waiting in sandboxes:
            waiting.__exit__(None, None, None)


async def test_a_launch_is_refused_unless_every_mask_holds(zygote: Zygote, project: Path) -> None:
    masks = [
        Mask(dest=mask.path, directory=mask.directory, layer="mask", why="denied")
        for mask in secrets(project, 3)
    ]
    with Waiting(project, f"cat {project}/*; echo end") as waiting:
        await attach_masks(zygote, waiting.sandbox.lease, waiting.init_pid, masks)
        assert b"SECRET" not in waiting.run()
    (project / "00002").unlink()
    gone = pytest.raises(Refused, match="00002 cannot be hidden: it is no longer there; nothing was started")
    with Waiting(project, "true") as waiting, gone:
        await attach_masks(zygote, waiting.sandbox.lease, waiting.init_pid, masks)
    with Waiting(project, "true") as waiting:
        os.kill(waiting.init_pid, signal.SIGKILL)
        assert waiting.sandbox.ended(SECONDS)
        with pytest.raises(HostLacks, match="the sandbox ended while it was prepared"):
            await attach_masks(zygote, waiting.sandbox.lease, waiting.init_pid, masks)


async def test_a_launch_is_refused_if_another_object_is_there_than_was_planned(
    zygote: Zygote, project: Path
) -> None:
    secret = project / "secret"
    secret.write_text("SECRET")
    status = secret.stat()
    identity = Identity(status.st_dev, status.st_ino)
    masks = [Mask(dest=os.fsencode(secret), directory=False, identity=identity, layer="mask", why="denied")]
    with Waiting(project, f"cat {secret}; echo end") as waiting:
        await attach_masks(zygote, waiting.sandbox.lease, waiting.init_pid, masks)
        assert waiting.run() == b"end\n"
    secret.rename(project / "moved")
    secret.write_text("other")
    other = pytest.raises(Refused, match="secret cannot be hidden: it is another object than before")
    with Waiting(project, "true") as waiting, other:
        await attach_masks(zygote, waiting.sandbox.lease, waiting.init_pid, masks)


async def test_without_masks_no_helper_is_started(zygote: Zygote, project: Path) -> None:
    with Waiting(project, "true") as waiting:
        await attach_masks(zygote, waiting.sandbox.lease, waiting.init_pid, [])
    assert zygote.pid is None


def proc(pid: int | None, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def is_there(pid: int) -> bool:
    """Also as a zombie."""
    return Path(f"/proc/{pid}").exists()


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


async def kill(pid: int | None) -> None:
    """Kill a process and let everybody take note of it."""
    assert pid is not None
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    with trio.fail_after(SECONDS):
        await trio.lowlevel.wait_readable(pidfd)
    await trio.testing.wait_all_tasks_blocked()
    os.close(pidfd)


async def test_it_holds_its_socket_and_nothing_of_a_session(zygote: Zygote, project: Path) -> None:
    masks = secrets(project, 4)
    with Waiting(project, "true") as waiting:
        await zygote.change(waiting.namespace, masks[:2])
        first = zygote.pid
        await zygote.change(waiting.namespace, masks[2:])
        assert zygote.pid == first is not None
        held = {int(fd): os.readlink(f"/proc/{first}/fd/{fd}") for fd in os.listdir(f"/proc/{first}/fd")}
        assert {fd: target.partition(":")[0] for fd, target in held.items()} == {
            0: "/dev/null", 1: "/dev/null", 2: "/dev/null", 3: "socket",
        }  # fmt: skip
        assert os.readlink(f"/proc/{first}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
        assert os.readlink(f"/proc/{first}/ns/user") == os.readlink("/proc/self/ns/user")
        words = dict(re.findall(r"^(\w+):\s*(.*)$", proc(first, "status"), re.MULTILINE))
        assert {int(words[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
        assert words["NoNewPrivs"] == "1"
        assert proc(first, "environ") == ""
        assert wait_until(lambda: proc(first, f"task/{first}/children") == ""), "neither child nor zombie"


async def test_one_that_died_is_started_anew(zygote: Zygote, project: Path) -> None:
    [first, second] = secrets(project, 2)
    with Waiting(project, "true") as waiting:
        assert await zygote.change(waiting.namespace, [first]) == [DONE]
        pid = zygote.pid
        assert pid is not None
        await kill(pid)
        assert zygote.pid is None
        assert not is_there(pid), "the supervisor has reaped it"
        assert await zygote.change(waiting.namespace, [second]) == [DONE]
        assert zygote.pid not in (None, pid)


async def test_an_order_that_was_with_it_fails_in_words(zygote: Zygote, project: Path) -> None:
    masks = secrets(project, 3)
    with Waiting(project, "true") as waiting:
        await zygote.change(waiting.namespace, masks[:1])
        assert zygote.pid is not None
        os.kill(zygote.pid, signal.SIGSTOP)
        async with trio.open_nursery() as nursery:

            async def pending() -> None:
                with pytest.raises(HostLacks, match="ended before it was done; run the command again"):
                    await zygote.change(waiting.namespace, masks[1:2])

            nursery.start_soon(pending)
            await trio.testing.wait_all_tasks_blocked(0.05)
            await kill(zygote.pid)
        assert await zygote.change(waiting.namespace, masks[2:]) == [DONE]


async def test_one_that_dies_again_and_again_is_not_started_for_ever(zygote: Zygote, project: Path) -> None:
    [mask] = secrets(project, 1)
    with Waiting(project, "true") as waiting:
        for _ in range(broker_end.MAX_STARTS):
            await zygote.change(waiting.namespace, [mask])
            await kill(zygote.pid)
        with pytest.raises(HostLacks, match="ended 5 times within 60 seconds"):
            await zygote.change(waiting.namespace, [mask])


async def test_one_that_takes_no_orders_is_ended_at_the_deadline(zygote: Zygote, project: Path) -> None:
    masks = secrets(project, 2)
    with Waiting(project, "true") as waiting:
        await zygote.change(waiting.namespace, masks[:1])
        stopped = zygote.pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(HostLacks, match=r"could not be changed within 0\.2 seconds"):
            await zygote.change(waiting.namespace, masks[1:], seconds=0.2)
        assert not is_there(stopped)
        assert await zygote.change(waiting.namespace, masks[1:]) == [DONE]


SLEEPER = """\
#!/usr/bin/python3 -IS
import array, os, socket, struct, subprocess
orders = socket.socket(fileno=3)
_, ancillary, _, _ = orders.recvmsg(64, 256)
answer = socket.socket(fileno=struct.unpack("3i", ancillary[0][2])[0])
child = subprocess.Popen(["/bin/sleep", "1000"])
with open(PLACE, "w") as file: file.write(str(child.pid))
rights = array.array("i", [os.pidfd_open(child.pid)])
answer.sendmsg([struct.pack("<IIiI", 1, 0, 0, 0)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
child.wait()
orders.recv(1)
"""
"""A zygote whose child does nothing."""


@pytest.mark.slow
async def test_a_child_that_hangs_is_killed_at_the_deadline(
    null_fd: int, project: Path, tmp_path: Path
) -> None:
    program = tmp_path / "zygote"
    program.write_text(SLEEPER.replace("PLACE", repr(str(tmp_path / "pid"))))
    program.chmod(0o755)
    # A script is opened once more by its interpreter, so this one descriptor is inherited.
    fd = os.open(program, os.O_RDONLY)
    os.set_inheritable(fd, True)
    status = os.fstat(fd)
    hanging = Zygote(Pin(fd, status.st_dev, status.st_ino, os.fsencode(program)), null_fd)
    [mask] = secrets(project, 1)
    late = pytest.raises(HostLacks, match="could not be changed within 1 seconds")
    with Waiting(project, "true") as waiting, late:
        await hanging.change(waiting.namespace, [mask], seconds=1)
    child = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not is_there(child))
    hanging.close()
    os.close(fd)


def test_the_kernel_ends_a_child_whose_time_is_over(project: Path) -> None:
    items = [item(mask.path + b"\0", 2 if mask.directory else 1) for mask in secrets(project, 1000)]
    with Driven() as driven, Waiting(project, "true") as waiting:
        assert driven.order(waiting.namespace, listed(*items), milliseconds=1) is None
        answer = driven.order(waiting.namespace, listed(items[0]))
        assert answer is not None
        assert answer.results == [(0, 0)]


def test_it_ends_with_whoever_started_it(project: Path) -> None:
    """However that one ended."""
    script = """
        import os, sys, trio
        from ral_broker.pins import take_helper
        from ral_broker.zygote import MaskAt, Zygote
        async def main():
            zygote = Zygote(take_helper("zygote"), os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC))
            await zygote.change(int(sys.argv[1]), [MaskAt(os.fsencode(sys.argv[2]), False)])
            print(zygote.pid, flush=True)
            await trio.sleep_forever()
        trio.run(main)
    """
    [mask] = secrets(project, 1)
    with Waiting(project, "true") as waiting:
        broker = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-c",
                textwrap.dedent(script),
                str(waiting.namespace),
                os.fsdecode(mask.path),
            ],
            stdout=subprocess.PIPE,
            pass_fds=[waiting.namespace],
        )
        assert broker.stdout is not None
        pidfd = os.pidfd_open(int(broker.stdout.readline()))
        assert not select.select([pidfd], [], [], 0.05)[0]
        broker.kill()
        assert select.select([pidfd], [], [], SECONDS)[0], "it outlives its broker"
        os.close(pidfd)
        broker.stdout.close()
        broker.wait()


PATHS = st.binary(min_size=1, max_size=40).map(lambda name: b"/" + name.replace(b"\0", b"x"))
IDENTITIES = st.none() | st.builds(Identity, st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1))


@given(st.lists(st.builds(MaskAt, PATHS, st.booleans(), IDENTITIES), min_size=1, max_size=5))
def test_a_list_is_what_the_protocol_says(changes: list[MaskAt]) -> None:
    items = []
    for change in changes:
        device, inode = (change.identity.device, change.identity.inode) if change.identity else (0, 0)
        operation, flags = 2 if change.directory else 1, int(change.identity is not None)
        items.append(item(change.path + b"\0", operation, flags=flags, device=device, inode=inode))
    assert encode(changes) == listed(*items)


@given(st.binary(max_size=80), st.integers(0, 5))
def test_an_answer_that_is_none_is_an_error(untrusted: bytes, count: int) -> None:
    try:
        outcomes = decode(untrusted, count)
    except HostLacks:
        return
    assert len(outcomes) == count
    assert untrusted == b"\2" + bytes(11) + count.to_bytes(4, "little") + b"".join(
        o.stage.to_bytes(4, "little") + o.error.to_bytes(4, "little") for o in outcomes
    )


def test_an_answer_that_leaves_changes_out_is_none() -> None:
    for count in (0, 1, 3):
        with pytest.raises(HostLacks, match="an answer that is none"):
            decode(b"\2" + bytes(11) + count.to_bytes(4, "little") + bytes(8 * count), 2)
    assert decode(b"\2" + bytes(11) + b"\2\0\0\0" + bytes(16), 2) == [DONE, DONE]


@pytest.mark.parametrize(
    "results", [b"", b"\0" * 7, b"\0" * 9, b"\1" + b"\0" * 7, b"\0" * 4 + b"\1\0\0\0", b"\x63\0\0\0\1\0\0\0"]
)
def test_an_outcome_is_either_done_or_has_a_reason(results: bytes) -> None:
    head = b"\2" + bytes(11) + b"\1\0\0\0"
    assert decode(head + bytes(8), 1) == [DONE]
    with pytest.raises(HostLacks, match="an answer that is none"):
        decode(head + results, 1)
