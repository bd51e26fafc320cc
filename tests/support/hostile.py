"""A hostile program as a Python script: run inside a session, and outside as the positive control."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from support.broker import Ral

PYTHON = ("/usr/bin/python3", "-I", "-S", "-c")

PRELUDE = """
import ctypes, errno, fcntl, json, os, signal, socket, struct, sys, termios, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *arguments):
    "The result of a system call, or the name of its error."
    ctypes.set_errno(0)
    result = libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in (number, *arguments)))
    return result if result >= 0 else errno.errorcode[ctypes.get_errno()]
def tried(action, *arguments):
    "What a function returns, or the name of its error."
    try: return action(*arguments)
    except OSError as error: return errno.errorcode[error.errno]
def tell(**found): print(json.dumps(found), flush=True)
"""

Found = dict[str, object]


def decode(stdout: bytes) -> Found:
    """Everything that the script told."""
    found: Found = {}
    for line in stdout.splitlines():
        if line.startswith(b"{"):
            found |= json.loads(line)
    return found


def inside(ral: Ral, script: str, *arguments: str, env: dict[str, str] | None = None) -> Found:
    """What ``script`` tells when it runs in a session. It has to end with 0."""
    done = ral("run", "-q", "--", *PYTHON, PRELUDE + script, *arguments, env=env, seconds=60)
    assert done.status == 0, done
    return decode(done.stdout)


def outside(script: str, *arguments: str, prefix: tuple[str, ...] = (), cwd: Path | None = None) -> Found:
    """What ``script`` tells when it runs in the host, started through ``prefix``."""
    done = subprocess.run(
        [*prefix, *PYTHON, PRELUDE + script, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": os.environ.get("HOME", "/")},
        check=False,
    )
    assert done.returncode == 0, done
    return decode(done.stdout)


def run_group(
    command: list[str], *, seconds: float = 60, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run ``command`` as a process group of its own; whatever of the group is left at its end is killed."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            stdout, stderr = process.communicate(timeout=seconds)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
