"""Launches through a resident client against plain bwrap with the same mounts: one, eight,
sixty-four at once.

Usage: python benchmarks/launch.py [ROUNDS]. Goal: 1.3 times plain bwrap, stretch 1.15.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from measured import Setting
from pairs import command, plain_bwrap, rounds, table
from resident import Resident


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    with Setting() as setting:
        plain = plain_bwrap(setting.ral, setting.env, setting.project, "/usr/bin/true")
        resident = Resident(setting.runtime, setting.project)
        launch = partial(resident.run, [b"/usr/bin/true"])
        times = rounds({"plain bwrap": command(*plain), "resident client": launch}, count)
        table(times, "plain bwrap")
        print("stages of the last launch, microseconds:")
        for name, microseconds in setting.status()["last_launch_us"].items():
            print(f"  {name:8} {microseconds:6}")
        for at_once in (8, 64):
            with ThreadPoolExecutor(at_once) as pool:
                many = {
                    f"plain bwrap, {at_once} at once": partial(_many, pool, at_once, command(*plain)),
                    f"resident client, {at_once} at once": partial(_many, pool, at_once, launch),
                }
                table(rounds(many, max(3, count // at_once)), next(iter(many)))


def _many(pool: ThreadPoolExecutor, at_once: int, launch: object) -> None:
    if not callable(launch):
        raise TypeError(launch)
    for done in [pool.submit(launch) for _ in range(at_once)]:
        done.result()


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}: {error.stderr}")
