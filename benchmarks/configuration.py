"""What a configuration costs: to load with the child that reads it, again unchanged, and to plan with.

Usage: python benchmarks/configuration.py [ROUNDS]. Goals: linear in the number of paths; 100 paths under
60 ms, the child included; without any file no child at all.
"""

from __future__ import annotations

import os
import pwd
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from ral_broker.config.effective import Effective
from ral_broker.config.load import Loader
from ral_broker.config.policy import Found, Place, session_policy
from ral_broker.envelope.facts import observe
from ral_broker.envelope.session_plan import paths_of_interest, plan_session

SIZES = (10, 100, 1000)


class Bench:
    """A home with a configuration, and a loader that has read nothing yet."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.home = os.fsencode(pwd.getpwuid(os.getuid()).pw_dir)
        self.home_path = os.path.realpath(self.home)
        self.project = os.fsencode(scratch / "project")
        self.config = scratch / "config/ral"
        self.environment = [b"XDG_CONFIG_HOME=" + os.fsencode(scratch / "config")]
        (scratch / "project").mkdir()
        (scratch / "paths").mkdir()
        for number in range(max(SIZES)):
            (scratch / "paths" / str(number)).mkdir()

    def write(self, paths: int) -> None:
        """A file that makes half of the paths writable and blocks the other half."""
        self.config.mkdir(parents=True, exist_ok=True, mode=0o755)
        names = [str(self.scratch / "paths" / str(number)) for number in range(paths)]
        text = "".join(f'  "{name}",\n' for name in names[::2])
        blocked = "".join(f'  "{name}",\n' for name in names[1::2])
        file = self.config / "ral.toml"
        file.write_text(f"extra_writable_paths = [\n{text}]\nextra_blocked_paths = [\n{blocked}]\n")
        file.chmod(0o644)

    async def load(self, loader: Loader) -> Effective:
        return await loader.load(self.environment, {}, self.project, "none", b"true")

    async def plan(self, effective: Effective) -> int:
        """The look at the host and the plan; number of operations."""
        place = Place(
            uid=os.getuid(), home=self.home, home_path=self.home_path, project=self.project,
            cwd=self.project, session="00000000", hidden=(), installation=(), pins=(), fresh_proc=True,
        )  # fmt: skip
        policy = session_policy(effective.settings, place, Found(), (), share_network=True)
        facts = await observe(paths_of_interest(policy))
        return len(plan_session(policy, facts).operations)


async def median(rounds: int, work: Callable[[], Awaitable[object]]) -> float:
    """Milliseconds."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        await work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1000


async def bare_interpreter() -> None:
    """What every child costs before it does anything."""
    await trio.to_thread.run_sync(
        lambda: subprocess.run([sys.executable, "-I", "-S", "-c", "import tomllib, json"], check=True)
    )


async def measure(bench: Bench, rounds: int) -> None:
    empty = Loader(bench.home)
    print(f"an interpreter that imports tomllib:  {await median(rounds, bare_interpreter):8.2f} ms")
    nothing = await median(rounds * 5, lambda: bench.load(empty))
    print(f"load without any file:                {nothing:8.2f} ms")
    print(f"{'paths':>6}{'load, changed':>16}{'unchanged':>12}{'plan':>10}{'together':>12}   operations")
    for size in SIZES:
        bench.write(size)
        loader = Loader(bench.home)
        effective = await bench.load(loader)
        fresh = await median(rounds, lambda: bench.load(Loader(bench.home)))
        again = await median(rounds, lambda known=loader: bench.load(known))
        operations = await bench.plan(effective)
        plan = await median(rounds, lambda it=effective: bench.plan(it))
        columns = f"{size:6}{fresh:13.2f} ms{again:9.2f} ms{plan:7.2f} ms"
        print(f"{columns}{fresh + plan:9.2f} ms   {operations}")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    scratch = Path(tempfile.mkdtemp(prefix="ral-bench-", dir=pwd.getpwuid(os.getuid()).pw_dir))
    try:
        trio.run(measure, Bench(scratch), rounds)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
