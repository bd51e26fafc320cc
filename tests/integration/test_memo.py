"""What is remembered of a plan never outlives what it was made from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.broker import Ral
from support.installed import home_dir

pytestmark = pytest.mark.usefixtures("broker")


def inside(ral: Ral, script: str, config: Path | None = None) -> str:
    env = {"RAL_CONF": str(config)} if config else None
    done = ral("run", "-q", "--", "sh", "-c", script, env=env)
    assert done.status == 0, done
    return done.stdout.decode()


def test_a_configuration_changed_within_one_tick_of_the_clock(
    ral: Ral, project: Path, tmp_path: Path
) -> None:
    config = tmp_path / "ral.toml"
    (project / "a").write_text("A")
    (project / "b").write_text("B")
    for name, shown in (("a", "B"), ("b", "A"), ("a", "B")):
        config.write_text(f'blocked_files = ["{name}"]\n')
        os.utime(config, (1, 1))
        assert inside(ral, "cat a b", config) == shown


def test_a_file_that_appears_between_two_launches_is_masked_in_the_second(
    ral: Ral, project: Path, tmp_path: Path
) -> None:
    config = tmp_path / "ral.toml"
    config.write_text('blocked_files = [".env"]\n')
    assert inside(ral, "ls -A", config) == ""
    (project / ".env").write_text("S")
    assert inside(ral, "cat .env; ls -A", config) == ".env\n"
    (project / ".env").unlink()
    (project / ".env").mkdir()
    (project / ".env/key").write_text("S")
    assert inside(ral, "ls -A .env", config) == ""


def test_a_link_that_leads_elsewhere_is_followed_anew(ral: Ral, project: Path, tmp_path: Path) -> None:
    config = tmp_path / "ral.toml"
    config.write_text('blocked_files = ["link"]\n')
    for name in ("one", "two"):
        (project / name).write_text(name)
    for target, shown in (("one", "two"), ("two", "one")):
        (project / "link").unlink(missing_ok=True)
        (project / "link").symlink_to(target)
        assert inside(ral, "cat one two", config) == shown


def test_hooks_that_appear_are_protected_in_the_next_session(ral: Ral, project: Path) -> None:
    script = "mkdir -p .git/hooks; echo x >.git/hooks/pre-commit 2>/dev/null && echo written || echo refused"
    assert inside(ral, script) == "written\n"
    (project / ".git/hooks/pre-commit").unlink()
    assert inside(ral, script) == "refused\n"


def test_each_session_has_its_own_marker(ral: Ral) -> None:
    seen = {inside(ral, 'readlink /run/ral-session; test "$(readlink /run/ral-session)" = "$RAL_SESSION"')
            for _ in range(3)}  # fmt: skip
    assert len(seen) == 3


def test_a_file_of_the_home_that_appears_is_shown_by_the_next_session(ral: Ral) -> None:
    name = home_dir() / ".condarc"
    if name.exists():
        pytest.fail(f"{name} exists: this test would replace it")
    assert inside(ral, "ls ~/.condarc 2>/dev/null || true") == ""
    name.write_text("x: 1\n")
    try:
        assert inside(ral, "cat ~/.condarc") == "x: 1\n"
    finally:
        name.unlink()
