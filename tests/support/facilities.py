"""What a host must have for a test to mean something. A skip names the facility; with
RAL_SANDBOX_MUST_WORK=1, which CI sets, it is a failure."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


def _program(name: str) -> str | None:
    return (
        None
        if shutil.which(name, path="/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
        else f"{name} is not installed"
    )


def _bubblewrap() -> str | None:
    """A sandbox of the kind ral makes: an own user namespace in which no other can be made."""
    if lacking := _program("bwrap"):
        return lacking
    tried = subprocess.run(
        ["bwrap", "--unshare-user", "--disable-userns", "--unshare-pid", "--ro-bind", "/", "/", "true"],
        capture_output=True,
        timeout=10,
        check=False,
    )
    return None if tried.returncode == 0 else f"bwrap cannot make a sandbox: {tried.stderr.decode().strip()}"


def _fresh_proc() -> str | None:
    if lacking := _bubblewrap():
        return lacking
    tried = subprocess.run(
        ["bwrap", "--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "--proc", "/proc", "true"],
        capture_output=True,
        timeout=10,
        check=False,
    )
    return (
        None
        if tried.returncode == 0
        else "this host masks /proc: a fresh one cannot be mounted in a sandbox"
    )


def _landlock(abi: int = 1) -> str | None:
    """The kernel itself is asked: securityfs, which lists the active modules, is not mounted in
    containers."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.argtypes = [ctypes.c_long] * 4
    syscall.restype = ctypes.c_long
    have = syscall(444, 0, 0, 1)  # landlock_create_ruleset, LANDLOCK_CREATE_RULESET_VERSION
    if have < 0:
        return f"the kernel runs without Landlock: {os.strerror(ctypes.get_errno())}"
    return None if have >= abi else f"Landlock ABI {abi}, this kernel has {have}"


def _kernel(major: int, minor: int) -> str | None:
    have = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    return None if have >= (major, minor) else f"Linux {major}.{minor}, this is {os.uname().release}"


FACILITIES: dict[str, Callable[[], str | None]] = {
    "/dev/fuse": lambda: None if os.access("/dev/fuse", os.R_OK | os.W_OK) else "/dev/fuse cannot be opened",
    "bubblewrap": _bubblewrap,
    "fresh /proc": _fresh_proc,
    "gcc": lambda: _program("gcc"),
    "landlock": _landlock,
    "landlock scopes": lambda: _landlock(6),
    "pidfd of a socket peer": lambda: _kernel(6, 5),
    "strace": lambda: _program("strace"),
    "systemd-analyze": lambda: _program("systemd-analyze"),
    "systemd": lambda: None if Path("/run/systemd/system").is_dir() else "systemd does not run here",
}


@functools.cache
def lacking(facility: str) -> str | None:
    """What is missing for ``facility``, None if nothing. KeyError for a name that is not in the table."""
    return FACILITIES[facility]()


def require(*facilities: str) -> None:
    """Skip the calling test, naming the first facility that this host lacks; in CI fail it."""
    for facility in facilities:
        reason = lacking(facility)
        if reason is None:
            continue
        if os.environ.get("RAL_SANDBOX_MUST_WORK") == "1":
            pytest.fail(f"needs {facility}: {reason}", pytrace=False)
        pytest.skip(f"needs {facility}: {reason}")
