"""Compile the native programs of ral with gcc. Imports nothing but the standard library.

By hand: ``python3 helpers/build_native.py OUTDIR [PROGRAM…]``. The wheel's build hook calls
``compile_programs``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HELPERS = ("trampoline", "holder", "zygote")
"""Belong into the package ral_helpers."""
LAUNCHER = "launcher"
"""Is installed as the command ``ral``."""
PROGRAMS = (*HELPERS, LAUNCHER)
MACHINES = ("x86_64", "aarch64")
SOURCES = Path(__file__).resolve().parent / "native"
FLAGS = (
    "-std=gnu11", "-Os", "-Wall", "-Wextra", "-Werror",
    # Without a libc: the programs run where no library is to be trusted, and start faster.
    "-nostdlib", "-ffreestanding", "-fno-stack-protector", "-fno-builtin",
    # Position independent, so that addresses are random; without a loader nobody would apply relocations, so
    # nothing may need one: no tables of pointers, not even the compiler's own.
    "-static-pie", "-fpie", "-fvisibility=hidden", "-fno-jump-tables", "-fno-tree-switch-conversion",
    # Some of what they read is written by hostile programs: an index out of its array ends the process.
    "-fsanitize=bounds", "-fsanitize-undefined-trap-on-error",
    # The loops of memcpy and memset must not become calls of themselves.
    "-fno-tree-loop-distribute-patterns",
    "-fno-asynchronous-unwind-tables", "-ffunction-sections",
    "-Wl,--gc-sections", "-Wl,--build-id=none", "-Wl,-z,noexecstack", "-Wl,-z,relro", "-Wl,-z,now",
    "-Wl,-z,text", "-Wl,--no-dynamic-linker", "-s",
)  # fmt: skip


class BuildError(Exception):
    """The native programs cannot be built; the message says what is missing and what to do."""


def compile_programs(out_dir: Path, programs: Sequence[str] = HELPERS, cc: str | None = None) -> list[Path]:
    """Compile ``programs`` into ``out_dir`` (made if missing) and return their paths.

    ``cc`` is the compiler, gcc under any name and with further options, also one for another machine; by
    default ``$CC``, else ``gcc``. A program gets its name only when it is complete. Raises BuildError.
    """
    compiler = cc or os.environ.get("CC") or "gcc"
    words = shlex.split(compiler)
    if shutil.which(words[0]) is None:
        raise BuildError(
            f"the C compiler {words[0]} is missing; install it (Debian: apt install gcc libc6-dev)"
        )
    machine = _run([*words, "-dumpmachine"]).partition("-")[0]
    if machine not in MACHINES:
        raise BuildError(
            f"{compiler} compiles for {machine}; ral's native programs exist for {', '.join(MACHINES)}"
        )
    out_dir.mkdir(parents=True, exist_ok=True)
    built: list[Path] = []
    for program in programs:
        target = out_dir / program
        partial = out_dir / f".{program}.{os.getpid()}"
        try:
            _run([*words, *FLAGS, "-o", str(partial), str(SOURCES / f"{program}.c")])
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        built.append(target)
    return built


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout.strip()


def main() -> int:
    """Compile into the directory named first what is named after it, else the helpers; print the paths."""
    out_dir, *programs = sys.argv[1:] or [""]
    if not out_dir or not set(programs) <= set(PROGRAMS):
        print(f"usage: build_native.py OUTDIR [{'|'.join(PROGRAMS)}]…", file=sys.stderr)
        return 2
    try:
        for path in compile_programs(Path(out_dir), programs or HELPERS):
            print(path)
    except BuildError as error:
        print(f"build_native: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
