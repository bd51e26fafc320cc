"""``ral run -- true`` as a process against the sum of its unavoidable parts, and against other sandboxes.

The parts: a bare interpreter (python3 -I -S -c pass) and plain bwrap with the same mounts. Goal: 1.3 times
their sum.
Usage: python benchmarks/command.py [ROUNDS]. Other sandboxes are measured where they are installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

from measured import Setting
from pairs import command, plain_bwrap, rounds, table


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    with Setting() as setting:
        env, cwd = setting.env, setting.project
        python = shutil.which("python3", path="/usr/bin") or sys.executable
        candidates = {
            "python3 -I -S -c pass": command(python, "-I", "-S", "-c", "pass", env=env),
            "plain bwrap": command(*plain_bwrap(setting.ral, env, cwd, "/usr/bin/true"), env=env, cwd=cwd),
            "ral run -- true": command(setting.ral, "run", "-q", "--", "/usr/bin/true", env=env, cwd=cwd),
        }
        others = {
            "firejail": ["firejail", "--quiet", "--noprofile", "--private", "--", "/usr/bin/true"],
            "nsjail": ["nsjail", "-Mo", "-q", "--chroot", "/", "--", "/usr/bin/true"],
            "srt": ["srt", "/usr/bin/true"],
            "codex sandbox": ["codex", "sandbox", "/usr/bin/true"],
        }
        for name, argv in others.items():
            program = shutil.which(argv[0])
            if program is None:
                print(f"{name}: not installed", file=sys.stderr)
                continue
            try:
                command(program, *argv[1:], cwd=cwd)()
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"{name}: does not run here: {error}", file=sys.stderr)
                continue
            candidates[name] = command(program, *argv[1:], cwd=cwd)
        medians = table(rounds(candidates, count), "ral run -- true")
        parts = medians["python3 -I -S -c pass"] + medians["plain bwrap"]
        ratio = medians["ral run -- true"] / parts
        print(f"ral run -- true: {ratio:.2f}x the sum of bare Python and plain bwrap")


if __name__ == "__main__":
    main()
