"""Where the installation under test is: the programs of the environment of pytest, or of RAL_TEST_BIN."""

from __future__ import annotations

import os
import pwd
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The tree that the tests came from; sources are read there, nothing is imported from there."""


def bin_dir() -> Path:
    """Directory of the installed ``ral`` and of the interpreter it was installed for."""
    return Path(os.environ.get("RAL_TEST_BIN") or sysconfig.get_path("scripts"))


def ral_path() -> Path:
    """The installed launcher."""
    return bin_dir() / "ral"


def python_path() -> Path:
    """The interpreter that has the packages installed."""
    return bin_dir() / "python"


def home_dir() -> Path:
    """The home directory that passwd names, which is what the broker goes by; HOME may say anything."""
    return Path(pwd.getpwuid(os.getuid()).pw_dir)


def session_environment(runtime: Path) -> dict[str, str]:
    """A login session's environment with the runtime directory ``runtime`` and nothing of the test run."""
    entry = pwd.getpwuid(os.getuid())
    return {
        "HOME": entry.pw_dir,
        "LANG": "C.UTF-8",
        "LOGNAME": entry.pw_name,
        "PATH": f"{bin_dir()}:/usr/local/bin:/usr/bin:/bin",
        "RAL_RUNTIME_DIR": str(runtime),
        "SHELL": "/bin/sh",
        "TERM": "xterm",
        "USER": entry.pw_name,
    }
