"""Two hundred mounts: descriptors run out where the limit is low, and then a sentence says so."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from pathlib import Path

import pytest

from support.installed import python_path, session_environment

pytestmark = [pytest.mark.attack, pytest.mark.needs("bubblewrap")]

COUNT = 200

# A launch by the broker's own parts, of a plan that no front end makes.
LAUNCH = """
import collections, json, os, resource, sys, trio
from ral_broker.envelope.opened import identity_of
from ral_broker.envelope.plan import Bind, Dev, Identity, Plan, Proc, Symlink, Tmpfs
from ral_broker.equipment import Equipment
from ral_broker.errors import RalError
from ral_broker.runtime import find_runtime_dir
from ral_broker.sessions.caller import Habits
from ral_broker.sessions.launch import Launcher, Stages
from ral_broker.sessions.prepared import Prepared
from ral_broker.spawn import raise_descriptor_limit
from ral_protocol.control import Payload, Run

base, count, soft, hard = json.loads(sys.argv[1])
def bind(source, writable=False):
    status = os.stat(source)
    return Bind(dest=source, source=source, writable=writable, required=True, layer="system", why="test",
                identity=Identity(status.st_dev, status.st_ino))
names = [os.fsencode(base) + b"/%03d" % n for n in range(count)]
operations = [bind(p) for p in (b"/usr", b"/etc")]
operations += [Symlink(dest=p, target=os.readlink(p), layer="system", why="test")
               for p in (b"/bin", b"/lib", b"/lib64") if os.path.islink(p)]
operations += [Tmpfs(dest=b"/tmp", layer="scratch", why="test")]
operations += [bind(name, writable=True) for name in names]
last = ((Proc, b"/proc"), (Dev, b"/dev"))
operations += [kind(dest=dest, layer="kernel", why="test") for kind, dest in last]
script = b"cat " + os.fsencode(base) + b"/*/number; ls /proc/self/fd | wc -l; ulimit -n"

def held(without):
    "What is open, stdio of the launch aside (which the launch closes)."
    paths = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd") if int(n) not in without]
    return collections.Counter(os.readlink(path) for path in paths if os.path.lexists(path))

async def main():
    equipment = Equipment()
    await equipment.probe()
    runtime = find_runtime_dir(os.environb)
    launcher = Launcher(runtime, equipment, ())
    read, write = os.pipe2(os.O_CLOEXEC)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    root = os.stat(names[0])
    prepared = Prepared("0123abcd", Plan(operations=tuple(operations), cwd=names[0]),
                        Payload([b"sh", b"-c", script], []), (b"PATH=/usr/bin:/bin",), 0,
                        Identity(root.st_dev, root.st_ino))
    limits = ((resource.RLIMIT_NOFILE, 64, 64),)
    habits = Habits(umask=0o22, nice=0, limits=limits, affinity=frozenset({0, 1}), groups=frozenset(),
                    cgroup=b"")
    request = Run(project=b"/", cwd=b"/", terminals=(False, False, False))
    stdio = [null, os.dup(write), write]
    before = held(set(stdio))
    try:
        launched = await launcher.launch(prepared, request, habits, None, stdio, Stages())
    except RalError as error:
        print(json.dumps({"refused": error.message, "left": list((held(set()) - before).elements())}))
        return
    with launched:
        out = b""
        while part := await trio.to_thread.run_sync(os.read, read, 65536): out += part
        await launched.session.wait()
        print(json.dumps({"out": out.decode(), "status": launched.session.exit}))
    launched.session.close()

resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
raise_descriptor_limit()
trio.run(main)
"""


def launch(runtime: Path, base: Path, soft: int, hard: int) -> dict[str, object]:
    for number in range(COUNT):
        (base / f"{number:03}").mkdir()
        (base / f"{number:03}" / "number").write_text(f"{number}\n")
    done = subprocess.run(
        [str(python_path()), "-I", "-c", LAUNCH, json.dumps([str(base), COUNT, soft, hard])],
        env=session_environment(runtime), capture_output=True, timeout=60, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@pytest.mark.needs("fresh /proc")
def test_a_soft_limit_of_256_is_no_obstacle(runtime: Path, project: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    answer = launch(runtime, project, 256, hard if hard != resource.RLIM_INFINITY else 4096)
    assert answer["status"] == 0, answer
    out = answer["out"]
    assert isinstance(out, str)
    lines = out.splitlines()
    assert lines[:COUNT] == [str(number) for number in range(COUNT)]
    assert lines[COUNT:] == ["4", "64"]
    assert (
        os.listdir(runtime / "sessions") == ["0123abcd.json", "0123abcd.status"]
        or not (runtime / "sessions" / "0123abcd.sock").exists()
    )


@pytest.mark.parametrize("hard", [128, 256, 300, 400])
def test_a_hard_limit_that_is_too_low_is_named(runtime: Path, project: Path, hard: int) -> None:
    answer = launch(runtime, project, hard, hard)
    refused = answer["refused"]
    assert isinstance(refused, str)
    assert str(hard) in refused, refused
    assert "ulimit -Hn" in refused
    assert answer["left"] == []
    assert os.listdir(runtime / "sessions") == []
