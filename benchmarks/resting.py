"""What a broker costs while nothing happens, with many sessions, and after many launches.

Run it as root, who alone may read the memory of a holder (no other process may look into one).
Usage: python benchmarks/resting.py [SESSIONS [LAUNCHES [SECONDS]]]. Goals: no system call while idle; broker
and helpers under 60 MiB with 200 sessions; descriptors and children back to the start value after 1,000
launches.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from measured import Setting
from resident import Resident


def pss(pid: int) -> int:
    """KiB of proportional set size (proc_pid_smaps(5), smaps_rollup)."""
    found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def holders(pid: int) -> list[int]:
    return [
        child
        for child in children(pid)
        if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"ral-holder")
    ]


def show(label: str, pid: int) -> None:
    held = holders(pid)
    broker, helpers = pss(pid), sum(map(pss, held))
    print(
        f"{label}: broker {broker} KiB, {len(held)} holders {helpers} KiB, together "
        f"{(broker + helpers) / 1024:.1f} MiB; "
        f"{len(os.listdir(f'/proc/{pid}/fd'))} descriptors, {len(children(pid))} children"
    )


def main() -> None:
    numbers = [int(text) for text in sys.argv[1:]] + [200, 1000, 60][len(sys.argv) - 1 :]
    sessions, launches, seconds = numbers
    with Setting() as setting:
        pid = setting.pid()
        time.sleep(1)
        show("at start", pid)
        started = [
            subprocess.run(
                [setting.ral, "run", "-q", "-d", "--", "sleep", "100000"], env=setting.env,
                cwd=setting.project,
                capture_output=True, check=True,
            ).stdout.decode().strip()
            for _ in range(sessions)
        ]  # fmt: skip
        show(f"with {sessions} detached sessions", pid)
        time.sleep(1)
        traced = subprocess.run(
            ["timeout", str(seconds), "strace", "-f", "-p", str(pid)],
            capture_output=True,
            check=False,
            text=True,
        )
        calls = [
            line
            for line in traced.stderr.splitlines()
            if "(" in line and not any(word in line for word in ("resuming", "unfinished", "epoll_wait"))
        ]  # fmt: skip
        print(f"system calls of the broker in {seconds} idle seconds: {len(calls)}")
        for line in calls[:10]:
            print("  ", line)
        for session in started:
            subprocess.run([setting.ral, "kill", session], env=setting.env, check=True)
        time.sleep(1)
        show("after their end", pid)
        resident = Resident(setting.runtime, setting.project)
        for _ in range(launches):
            resident.run([b"/usr/bin/true"])
        time.sleep(1)
        show(f"after {launches} launches", pid)


if __name__ == "__main__":
    main()
