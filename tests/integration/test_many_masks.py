"""Launches with more masks than bwrap gets: everything is hidden when the program starts, or it does not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from support.installed import python_path, session_environment

pytestmark = pytest.mark.needs("bubblewrap", "fresh /proc")

COUNT = 200

# A launch by the broker's own parts, of a plan that no front end makes.
LAUNCH = """
import json, os, sys, trio
from ral_broker.envelope.plan import Bind, Dev, Identity, Mask, Plan, Proc, ReadOnly, Symlink, Tmpfs
from ral_broker.equipment import Equipment
from ral_broker.errors import RalError
from ral_broker.runtime import find_runtime_dir
from ral_broker.sessions.caller import Habits
from ral_broker.sessions.launch import Launcher, Stages
from ral_broker.sessions.prepared import Prepared
from ral_protocol.control import Payload, Run

base, masked, cwd = (os.fsencode(word) for word in json.loads(sys.argv[1]))
def bind(path, writable=False):
    return Bind(dest=path, source=path, writable=writable, required=True, layer="system", why="test")
operations = [bind(b"/usr"), bind(b"/etc")]
operations += [Symlink(dest=p, target=os.readlink(p), layer="system", why="test")
               for p in (b"/bin", b"/lib", b"/lib64") if os.path.islink(p)]
operations += [Tmpfs(dest=b"/tmp", layer="scratch", why="test"), bind(base, writable=True)]
paths = [base + b"/" + name for name in masked.split()]
operations += [Mask(dest=p, directory=os.path.isdir(p), layer="mask", why="denied") for p in paths]
operations += [kind(dest=dest, layer="kernel", why="test") for kind, dest in
               ((Proc, b"/proc"), (Dev, b"/dev"), (ReadOnly, b"/"))]
script = (b"cat .env */.env 2>/dev/null; cd " + base + b"; cat * */* 2>/dev/null; echo end; "
          b"wc -l </proc/self/mountinfo")

async def main():
    equipment = Equipment()
    await equipment.probe()
    runtime = find_runtime_dir(os.environb)
    launcher = Launcher(runtime, equipment, ())
    status = os.stat(cwd)
    prepared = Prepared(os.urandom(4).hex(), Plan(operations=tuple(operations), cwd=cwd),
                        Payload([b"sh", b"-c", script], []), (b"PATH=/usr/bin:/bin",), 0,
                        Identity(status.st_dev, status.st_ino))
    read, write = os.pipe2(os.O_CLOEXEC)
    stdio = [os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC), os.dup(write), write]
    habits = Habits(umask=0o22, nice=0, limits=(), affinity=frozenset({0}), groups=frozenset(), cgroup=b"")
    request = Run(project=b"/", cwd=b"/", terminals=(False, False, False))
    try:
        launched = await launcher.launch(prepared, request, habits, None, stdio, Stages())
    except RalError as error:
        print(json.dumps({"refused": error.message, "out": os.read(read, 65536).decode()}))
        return
    with launched:
        out = b""
        while part := await trio.to_thread.run_sync(os.read, read, 65536): out += part
        await launched.session.wait()
        plan = json.loads(bytes(launched.session.record.plan))
        recorded = sum(o["op"] == "mask" for o in plan["operations"])
        print(json.dumps({"out": out.decode(), "status": launched.session.exit, "recorded": recorded,
                          "helper": equipment.zygote.pid}))
    launched.session.close()

trio.run(main)
"""


def launch(runtime: Path, base: Path, masked: list[str], cwd: Path | None = None) -> dict[str, object]:
    words = json.dumps([str(base), " ".join(masked), str(cwd or base)])
    done = subprocess.run(
        [str(python_path()), "-I", "-c", LAUNCH, words],
        env=session_environment(runtime), capture_output=True, timeout=60, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@pytest.fixture
def names(project: Path) -> list[str]:
    """Files and directories that hold a secret each."""
    made: list[str] = []
    for number in range(COUNT):
        path = project / f"{number:03}"
        if number % 2:
            path.mkdir()
            (path / ".env").write_text("SECRET\n")
        else:
            path.write_text("SECRET\n")
        made.append(path.name)
    return made


def test_everything_is_hidden_when_the_program_starts(
    runtime: Path, project: Path, names: list[str]
) -> None:
    (project / "shown").write_text("SHOWN\n")
    answer = launch(runtime, project, names)
    out = answer["out"]
    assert isinstance(out, str)
    shown, end, mounts = out.split()
    assert (shown, end, answer["status"]) == ("SHOWN", "end", 0)
    assert int(mounts) > COUNT
    assert answer["recorded"] == COUNT, "the record has the whole plan"
    assert answer["helper"] is not None
    assert launch(runtime, project, names[:3])["helper"] is None, "few masks need no helper"
    control = launch(runtime, project, names[1:])["out"]
    assert isinstance(control, str)
    assert control.split()[0] == "SECRET"


def test_a_mask_that_does_not_hold_refuses_the_launch_and_leaves_nothing(
    runtime: Path, project: Path, names: list[str]
) -> None:
    (project / names[-1] / ".env").unlink()
    (project / names[-1]).rmdir()
    (project / names[-1]).symlink_to(names[1])
    answer = launch(runtime, project, names)
    assert answer["refused"] == (
        f"{project}/{names[-1]} cannot be hidden: it now goes through a symbolic link that ral will not "
        "follow; nothing was started; run the command again if something was changed there just now"
    )
    assert answer["out"] == ""
    assert os.listdir(runtime / "sessions") == []


def test_a_program_does_not_start_in_what_is_hidden(runtime: Path, project: Path, names: list[str]) -> None:
    """bwrap enters the working directory before the masks come: from there it could be read."""
    answer = launch(runtime, project, names, cwd=project / "001")
    assert "hidden inside" in str(answer["refused"])
    assert answer["out"] == ""
    control = launch(runtime, project, [n for n in names if n != "001"], cwd=project / "001")
    assert str(control["out"]).split()[0] == "SECRET"
