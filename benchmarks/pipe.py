"""A gigabyte through ``ral run -- cat`` against ``cat``: no byte of a pipe passes through ral.

Usage: python benchmarks/pipe.py [ROUNDS].
"""

from __future__ import annotations

import sys

from measured import Setting
from pairs import command, rounds, table


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with Setting() as setting:
        script = "head -c 1073741824 /dev/zero | {} | tail -c 1"
        ral = f"{setting.ral} run -q -- cat"
        candidates = {
            "cat": command("/bin/sh", "-c", script.format("cat"), env=setting.env, cwd=setting.project),
            "ral run -- cat": command(
                "/bin/sh", "-c", script.format(ral), env=setting.env, cwd=setting.project
            ),
        }
        table(rounds(candidates, count), "cat")


if __name__ == "__main__":
    main()
