"""Launches that hide many files, against a plain bwrap with the same mounts: with the zygote, and with
everything left to bwrap.

Usage: python benchmarks/masks.py [ROUNDS]. bwrap's own work grows with the square of the number of mounts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import trio
from measured import usage
from pairs import table

from ral_broker.envelope.plan import (
    Bind,
    Dev,
    Identity,
    Mask,
    Operation,
    Plan,
    Proc,
    ReadOnly,
    Symlink,
    Tmpfs,
)
from ral_broker.equipment import Equipment
from ral_broker.runtime import find_runtime_dir
from ral_broker.sessions import many
from ral_broker.sessions.caller import Habits
from ral_broker.sessions.launch import Launcher, Prepared, Stages
from ral_broker.spawn import raise_descriptor_limit
from ral_protocol.control import Payload, Run

COUNTS = (0, 8, 20, 64, 200, 2000)
_THRESHOLD = many.MASKS_BY_BWRAP


def bind(path: bytes, *, writable: bool = False) -> Bind:
    return Bind(dest=path, source=path, writable=writable, required=True, layer="system", why="benchmark")


def plan_of(project: bytes, count: int) -> Plan:
    """A small plan with ``count`` masks of files in a project."""
    operations: list[Operation] = [bind(b"/usr"), bind(b"/etc")]
    operations += [
        Symlink(dest=path, target=os.readlink(path), layer="system", why="benchmark")
        for path in (b"/bin", b"/sbin", b"/lib", b"/lib64")
        if os.path.islink(path)
    ]
    operations += [Tmpfs(dest=b"/tmp", layer="scratch", why="benchmark"), bind(project, writable=True)]
    for number in range(count):
        name = b"%s/%04d" % (project, number)
        operations.append(Mask(dest=name, directory=False, layer="mask", why="denied"))
    operations += [
        Proc(dest=b"/proc", layer="kernel", why="always"),
        Dev(dest=b"/dev", layer="kernel", why="always"),
        ReadOnly(dest=b"/", layer="final", why="always"),
    ]
    return Plan(operations=tuple(operations), cwd=project)


def plain(plan: Plan, empty: str) -> list[str]:
    """A plain bwrap with the same mounts and namespaces, by name."""
    options: list[str] = ["bwrap", "--unshare-user", "--unshare-pid", "--unshare-uts", "--unshare-ipc"]
    options += ["--unshare-cgroup-try", "--disable-userns", "--as-pid-1", "--cap-drop", "ALL"]
    for operation in plan.operations:
        dest = os.fsdecode(operation.dest)
        match operation:
            case Bind(writable=writable):
                options += ["--bind" if writable else "--ro-bind", dest, dest]
            case Mask():
                options += ["--ro-bind", empty, dest]
            case Symlink(target=target):
                options += ["--symlink", os.fsdecode(target), dest]
            case Tmpfs():
                options += ["--tmpfs", dest]
            case Proc() | Dev():
                options += [f"--{type(operation).__name__.lower()}", dest]
            case ReadOnly():
                options += ["--remount-ro", dest]
    return [*options, "--chdir", os.fsdecode(plan.cwd), "--", "/usr/bin/true"]


run_plain = partial(subprocess.run, check=True)


class Bench:
    """One launcher with the broker's own parts, without the wire."""

    def __init__(self, equipment: Equipment, project: bytes) -> None:
        self._runtime = find_runtime_dir(os.environb)
        self._launcher = Launcher(self._runtime, equipment, ())
        status = os.stat(project)
        self._identity = Identity(status.st_dev, status.st_ino)
        self._number = 0

    async def launch(self, plan: Plan, threshold: int) -> None:
        """Launch true and wait for its end."""
        many.MASKS_BY_BWRAP = threshold
        self._number += 1
        prepared = Prepared(
            f"{self._number:08x}", plan, Payload([b"/usr/bin/true"], []), (b"PATH=/usr/bin:/bin",), 0,
            self._identity,
        )  # fmt: skip
        habits = Habits(
            umask=0o22, nice=0, limits=(), affinity=frozenset({0}), groups=frozenset(), cgroup=b""
        )
        request = Run(project=b"/", cwd=b"/", terminals=(False, False, False))
        stdio = [os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC) for _ in range(3)]
        launched = await self._launcher.launch(prepared, request, habits, None, stdio, Stages())
        with launched:
            await launched.session.wait()
            if launched.session.exit != 0:
                raise SystemExit(f"the program ended with {launched.session.exit}")
        launched.session.close()
        for name in os.listdir(self._runtime.sessions_fd):
            os.unlink(name, dir_fd=self._runtime.sessions_fd)


async def measure(scratch: Path, rounds: int) -> None:
    """Print a table for each number of masks."""
    project = scratch / "project"
    project.mkdir()
    (scratch / "empty").touch()
    for number in range(max(COUNTS)):
        (project / f"{number:04}").write_text("secret\n")
    equipment = Equipment()
    await equipment.probe()
    bench = Bench(equipment, os.fsencode(project))
    for count in COUNTS:
        plan = plan_of(os.fsencode(project), count)
        argv = plain(plan, str(scratch / "empty"))
        times: dict[str, list[float]] = {"plain bwrap": [], "left to bwrap": [], "with the zygote": []}
        for number in range(max(3, min(rounds, 4000 // (count + 1))) + 1):
            for name, values in times.items():
                started = time.perf_counter()
                if name == "plain bwrap":
                    run_plain(argv)
                else:
                    await bench.launch(plan, 1 << 30 if name == "left to bwrap" else 0)
                if number:
                    values.append((time.perf_counter() - started) * 1000)
        print(f"{count} masks ({'with the zygote' if count > _THRESHOLD else 'left to bwrap'} in ral):")
        table(times, "plain bwrap")


def main() -> None:
    if len(sys.argv) > 2 or not all(word.isdigit() for word in sys.argv[1:]):
        sys.exit(usage())
    raise_descriptor_limit()
    scratch = Path(tempfile.mkdtemp(prefix="ral-masks-", dir=Path.home()))
    os.environ["RAL_RUNTIME_DIR"] = str(scratch / "runtime")
    (scratch / "runtime").mkdir(mode=0o700)
    try:
        trio.run(measure, scratch, int(sys.argv[1]) if len(sys.argv) > 1 else 40)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
