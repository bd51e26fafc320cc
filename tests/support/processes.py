"""What the processes of a test leave behind. The test run is a child subreaper: every orphan of a broker, a
sandbox or a holder becomes its child, so that none can hide behind pid 1."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

STOP_SECONDS = 5.0
"""Anything that takes longer than this to start or to stop has failed."""


class Process(NamedTuple):
    """One line of a process list."""

    pid: int
    parent: int
    state: str
    command: str


def become_subreaper() -> None:
    """Adopt orphaned descendants (prctl(2)). OSError where the kernel refuses."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
    prctl.restype = ctypes.c_int
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "prctl")


def _read(pid: str) -> Process | None:
    try:
        stat = Path("/proc", pid, "stat").read_bytes()
        command = Path("/proc", pid, "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    name = stat[stat.index(b"(") + 1 : stat.rindex(b")")]
    fields = stat[stat.rindex(b")") + 2 :].split()
    shown = command.replace(b"\0", b" ").strip() or b"[" + name + b"]"
    return Process(int(pid), int(fields[1]), fields[0].decode(), shown.decode(errors="backslashreplace"))


def descendants(pid: int | None = None) -> list[Process]:
    """Every living descendant of ``pid`` (of this process without one). Zombies are not alive: of them only
    a status is left that nobody has read."""
    found = [p for p in (_read(name) for name in os.listdir("/proc") if name.isdigit()) if p is not None]
    family = {os.getpid() if pid is None else pid}
    # Parents may have larger numbers than their children, so until nothing is added.
    while added := {p.pid for p in found if p.parent in family} - family:
        family |= added
    family.discard(os.getpid() if pid is None else pid)
    return [p for p in found if p.pid in family and p.state not in {"Z", "X"}]


def wait_without(known: set[int], seconds: float = STOP_SECONDS) -> list[Process]:
    """Wait until no descendant but those in ``known`` lives; return those that still do at the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        left = [p for p in descendants() if p.pid not in known]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def end(processes: list[Process]) -> None:
    """Kill what a test left, so that the next one starts clean."""
    for process in processes:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    ended = {p.pid for p in processes}
    wait_without({p.pid for p in descendants() if p.pid not in ended})


def reap(known: set[int]) -> None:
    """Collect adopted orphans that have ended. Somebody else waits for children in ``known``."""
    for name in os.listdir("/proc"):
        process = _read(name) if name.isdigit() else None
        if process is None or process.parent != os.getpid() or process.state != "Z" or process.pid in known:
            continue
        try:
            os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:
            continue
