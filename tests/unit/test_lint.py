"""The rules that a machine can check, as tests: what CI refuses fails here first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.installed import ROOT

ROOMS = ("client", "broker", "helpers", "protocol")


def assert_passes(*command: str) -> None:
    """Run ``command`` in the tree and show what it says if it fails. It must not write there."""
    tool = Path(sys.executable).parent
    environment = {
        "PATH": f"{tool}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": ":".join(str(ROOT / room) for room in ROOMS),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"


def test_ruff_finds_nothing() -> None:
    assert_passes(sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", ".")


def test_the_code_is_formatted() -> None:
    assert_passes(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".")


@pytest.mark.slow
def test_the_types_are_right(tmp_path: Path) -> None:
    assert_passes(sys.executable, "-m", "mypy", f"--cache-dir={tmp_path}")


def test_layers_of_the_broker_hold() -> None:
    lint_imports = str(Path(sys.executable).with_name("lint-imports"))
    assert_passes(lint_imports, "--no-cache", "--no-logo")


@pytest.mark.parametrize("script", [script.name for script in (ROOT / "tools").glob("*.sh")])
def test_shell_scripts_parse_in_dash(script: str) -> None:
    assert_passes("dash", "-n", f"tools/{script}")
    assert os.access(ROOT / "tools" / script, os.X_OK)


@pytest.mark.needs("systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in (ROOT / "systemd").iterdir():
        text = unit.read_text().replace("ExecStart=ral ", "ExecStart=/bin/true ")
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
