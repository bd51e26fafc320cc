"""What every benchmark shares: rounds in which each candidate runs once, medians, ratios.

Machines are noisy, so candidates alternate within one run and only ratios are worth comparing between runs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping


def rounds(candidates: Mapping[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Run every candidate once a round; milliseconds of each run. The first round warms up and is thrown
    away."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(count + 1):
        for name, candidate in candidates.items():
            started = time.perf_counter()
            candidate()
            if number:
                times[name].append((time.perf_counter() - started) * 1000)
    return times


def command(*argv: str, env: Mapping[str, str] | None = None, cwd: str | None = None) -> Callable[[], None]:
    """A candidate that runs a program to its end; it has to end with 0."""

    def run() -> None:
        subprocess.run(
            argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, check=True,
        )  # fmt: skip

    return run


def table(times: Mapping[str, list[float]], against: str) -> dict[str, float]:
    """Print medians and tenths of each candidate with its ratio to ``against``; return the medians."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    width = max(map(len, times))
    for name, values in times.items():
        tenths = statistics.quantiles(values, n=10)
        ratio = medians[name] / medians[against]
        print(f"{name:{width}}  {medians[name]:7.2f} ms  [{tenths[0]:.2f} {tenths[-1]:.2f}]  {ratio:5.2f}x")
    return medians


def plain_bwrap(ral: str, env: Mapping[str, str], cwd: str, program: str) -> list[str]:
    """The argv of a plain bwrap with the same mounts and namespaces as ``ral run`` makes here, by name."""
    shown = subprocess.run(
        [ral, "run", "--dry-run", "--json", "--", program], env=env, cwd=cwd, capture_output=True, check=True
    )
    document = json.loads(shown.stdout)
    sources = {
        line["dest"]: line["source"] or line["dest"]
        for line in document["plan"]
        if line["op"] in ("bind", "pinned")
    }
    options: list[str] = []
    given = iter(document["options"])
    for option in given:
        if option in ("--ro-bind-data", "--file"):
            next(given)
            dest = next(given)
            if options[-2:-1] == ["--perms"]:
                del options[-2:]
            # A file with other content costs the same.
            options += ["--ro-bind", "/etc/passwd", dest]
        elif option in ("--bind-fd", "--ro-bind-fd"):
            next(given)
            dest = next(given)
            # What is lent and has no source is the empty file of a mask.
            options += [option.removesuffix("-fd"), sources.get(dest, "/dev/null"), dest]
        elif option in ("--json-status-fd", "--add-seccomp-fd"):
            next(given)
        else:
            options.append(option)
    return ["bwrap", *options, "--", program]
