"""Loading a configuration where /etc is a copy that a test may change. Root only; the host's stays."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping

from support.installed import python_path

_PREPARE = (
    "set -e; mount --make-rprivate /; mkdir -p $1/etc; cp -a /etc/. $1/etc/; mount --bind $1/etc /etc\n"
    'mkdir -p /etc/ral\n{}\nshift; exec "$@"'
)
_LOAD = """
import json, os, sys, trio
from ral_broker.config.load import Loader
environment, overrides, home, project = json.loads(sys.argv[1])
arguments = [e.encode() for e in environment], overrides, os.fsencode(project), None, b"true"
effective, problems = trio.run(Loader(os.fsencode(home)).check, *arguments)
values = files = None
if effective is not None:
    values = {name: getattr(effective.settings, name) for name in effective.settings.__struct_fields__}
    files = effective.files
print(json.dumps([values, [[p.severity, p.message] for p in problems], files]))
"""


class Loaded:
    """What a load came to: ``values`` by setting, None after an error; messages; files."""

    def __init__(self, answer: tuple[dict[str, object] | None, list[list[str]], list[str] | None]) -> None:
        self.values, problems, self.files = answer
        self.errors = [message for severity, message in problems if severity == "error"]
        self.warnings = [message for severity, message in problems if severity == "warning"]


def load(
    prepare: str,
    *,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, str] | None = None,
    home: str = "/root",
    project: str = "/srv/p",
) -> Loaded:
    """Load in a mount namespace whose /etc the shell commands of ``prepare`` have changed."""
    entries = [f"{name}={value}" for name, value in (environment or {}).items()]
    argument = json.dumps([entries, overrides or {}, home, project])
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        python = [str(python_path()), "-I", "-c", _LOAD, argument]
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", _PREPARE.format(prepare), "sh", scratch, *python],
            capture_output=True, timeout=60, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return Loaded(json.loads(done.stdout))
