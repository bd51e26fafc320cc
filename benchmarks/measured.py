"""The installation that is measured: a broker of its own, a project, and the end of both."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from types import TracebackType
from typing import Self


class Setting:
    """A context manager with a resident broker that serves nothing else."""

    def __init__(self) -> None:
        self.ral = os.path.join(os.environ.get("RAL_TEST_BIN") or sysconfig.get_path("scripts"), "ral")
        entry = pwd.getpwuid(os.getuid())
        self.scratch = tempfile.mkdtemp(prefix="ral-bench-", dir=entry.pw_dir)
        self.project = f"{self.scratch}/project"
        os.mkdir(self.project)
        # In memory, as the usual runtime directory is.
        login = f"/run/user/{os.getuid()}"
        self.runtime = tempfile.mkdtemp(
            prefix="ral-bench-", dir=login if os.path.isdir(login) else "/dev/shm"
        )
        self.env = {
            "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": entry.pw_dir, "LANG": "C.UTF-8",
            "RAL_RUNTIME_DIR": self.runtime,
        }  # fmt: skip

    def __enter__(self) -> Self:
        subprocess.run([self.ral, "run", "-q", "--", "true"], env=self.env, cwd=self.project, check=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run([self.ral, "broker", "stop"], env=self.env, check=False)
        time.sleep(0.2)
        shutil.rmtree(self.scratch, ignore_errors=True)
        shutil.rmtree(self.runtime, ignore_errors=True)

    def status(self) -> dict[str, dict[str, int]]:
        """What ``ral broker status --json`` says."""
        done = subprocess.run(
            [self.ral, "broker", "status", "--json"], env=self.env, capture_output=True, check=True
        )
        document: dict[str, dict[str, int]] = json.loads(done.stdout)
        return document

    def pid(self) -> int:
        """Process id of the broker."""
        return int(str(self.status()["pid"]))


def usage() -> str:
    """How the calling script is run."""
    return f"usage: python {sys.argv[0]} [ROUNDS]"
