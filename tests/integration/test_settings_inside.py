"""Settings as users write them, through the installed command: what a session really shows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.broker import Completed, Ral
from support.installed import home_dir

pytestmark = pytest.mark.usefixtures("broker")


class Configured:
    """``ral run`` with a user file of its own."""

    def __init__(self, ral: Ral, directory: Path) -> None:
        self._ral, self._file = ral, directory / "ral.toml"

    def __call__(
        self,
        config: str,
        script: str,
        *arguments: str,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> Completed:
        self._file.write_text(config)
        conf = {"RAL_CONF": str(self._file)} | (env or {})
        return self._ral("run", "--", "sh", "-c", script, "sh", *arguments, cwd=cwd, env=conf)

    def out(self, config: str, script: str, *arguments: str, cwd: Path | None = None) -> str:
        done = self(config, script, *arguments, cwd=cwd)
        assert done.status == 0, done
        return done.stdout.decode()


@pytest.fixture
def run(ral: Ral, tmp_path: Path) -> Configured:
    return Configured(ral, tmp_path)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory in the account's home, gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix=".ral-test-", dir=home_dir()))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("mode", ["tmpwrite", "restricted", "read", "write"])
def test_the_home_in_each_mode(run: Configured, scratch: Path, mode: str) -> None:
    (scratch / "file").write_text("F")
    script = (
        'cat "$1/file" 2>/dev/null; echo; echo x 2>/dev/null >~/.ral-test-new && echo wrote; '
        "ls -A ~/.ssh 2>/dev/null; true"
    )
    # A program that may write the home could make it, so that mode wants it to be there.
    configuration = home_dir() / ".config/ral"
    missing = [path for path in (configuration, configuration.parent) if not path.exists()]
    ssh, made = home_dir() / ".ssh", not (home_dir() / ".ssh").exists()
    if made:
        ssh.mkdir(mode=0o700)
    key = ssh / "ral-test-key"
    key.write_text("S")
    new = home_dir() / ".ral-test-new"
    try:
        if mode == "write" and missing:
            refused = run('home_access = "write"\n', "true")
            assert (refused.status, b"mkdir -p" in refused.stderr) == (78, True)
            configuration.mkdir(parents=True)
        lines = run.out(f'home_access = "{mode}"\n', script, str(scratch)).splitlines()
        assert (lines[0] == "F") == (mode in ("read", "write"))
        assert ("wrote" in lines) == (mode in ("tmpwrite", "write"))
        assert new.exists() == (mode == "write")
        assert "ral-test-key" not in lines
    finally:
        key.unlink()
        new.unlink(missing_ok=True)
        if made:
            ssh.rmdir()
        for path in missing:
            if path.exists():
                path.rmdir()


def test_directories_of_the_home_and_the_host_are_made_writable_by_name(
    run: Configured, scratch: Path, tmp_path: Path
) -> None:
    name = scratch.name
    assert run.out(f'home_writable = ["{name}"]\n', 'echo a >"$1/a"; cat "$1/a"', str(scratch)) == "a\n"
    assert (scratch / "a").read_text() == "a\n"
    refused = run(f'home_readonly = ["{name}"]\n', 'cat "$1/a"; echo b >"$1/a"', str(scratch))
    assert refused.stdout == b"a\n"
    assert b"Read-only file system" in refused.stderr
    extra = f'extra_writable_paths = ["{scratch}"]\ndenied_writable_paths = ["{scratch}/kept"]\n'
    (scratch / "kept").mkdir()
    done = run(extra, 'echo c >"$1/c"; echo d >"$1/kept/d"', str(scratch))
    assert (scratch / "c").read_text() == "c\n"
    assert not (scratch / "kept/d").exists()
    assert b"Read-only file system" in done.stderr


@pytest.mark.parametrize("flip", [False, True])
def test_the_more_precise_path_decides_in_every_order(run: Configured, scratch: Path, flip: bool) -> None:
    (scratch / "in/deep").mkdir(parents=True)
    settings = [
        f'readonly_mounts = ["{scratch}/in"]\n',
        f'extra_writable_paths = ["{scratch}", "{scratch}/in/deep"]\n',
    ]
    script = 'for d in . in in/deep; do echo x 2>/dev/null >"$1/$d/x" && echo "$d"; done; true'
    text = "".join(reversed(settings) if flip else settings)
    assert run.out(text, script, str(scratch)) == ".\nin/deep\n"


def test_a_seeded_file_is_a_copy(run: Configured, scratch: Path) -> None:
    target = scratch / "elsewhere"
    target.write_text("[user]\n\tname = A\n")
    link = home_dir() / ".ral-test-seed"
    link.symlink_to(target)
    try:
        script = (
            "cat ~/.ral-test-seed; test -L ~/.ral-test-seed && echo link; "
            "git config -f ~/.ral-test-seed user.name B"
        )
        out = run.out('home_seeded_files = [".ral-test-seed"]\n', script)
    finally:
        link.unlink()
    assert out == "[user]\n\tname = A\n"
    assert target.read_text() == "[user]\n\tname = A\n"


def test_blocked_paths_are_empty_under_every_name_and_leave_no_trace(run: Configured, project: Path) -> None:
    (project / "real").mkdir()
    (project / "real/.env").write_text("S")
    (project / "link").symlink_to("real")
    (project / "dangling").symlink_to("later")
    before = sorted(path.name for path in project.rglob("*"))
    config = (
        'blocked_files = ["link/.env", "dangling", "never/there"]\nextra_blocked_paths = ["real/closed"]\n'
    )
    (project / "real/closed").mkdir()
    (project / "real/closed/key").write_text("S")
    out = run.out(
        config, "cat real/.env link/.env; ls -A real/closed; echo x 2>/dev/null >real/.env || echo refused"
    )
    assert out == "refused\n"
    assert (project / "real/.env").read_text() == "S"
    assert sorted(path.name for path in project.rglob("*") if "closed" not in str(path)) == before


def test_placeholders_are_made_on_request_and_removed(run: Configured, ral: Ral, project: Path) -> None:
    config = 'blocked_files = ["new/.env"]\nmaterialize_blocked_files = true\n'
    done = run(config, "cat new/.env; echo x 2>/dev/null >new/.env || echo refused")
    assert done.stdout == b"refused\n"
    assert b"materialize_blocked_files" in done.stderr
    assert (project / "new/.env").stat().st_size == 0
    shutil.rmtree(project / "new")
    run(config + "cleanup_materialized_blocked_files = true\n", "true")
    assert ral("sessions").status == 0
    for _ in range(50):
        if not (project / "new").exists():
            break
        subprocess.run(["sleep", "0.1"], check=True)
    assert not (project / "new").exists()


def test_users_are_filtered(run: Configured) -> None:
    other = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
    strangers = [f[0] for f in other if 1000 <= int(f[2]) < 65534 and int(f[2]) != os.getuid()]
    script = "id -un; cut -d: -f1 /etc/passwd"
    names = run.out("", script).split()
    assert names[0] == names[-1] or names[0] in names[1:]
    assert not set(strangers) & set(names)
    assert set(strangers) <= set(run.out("filter_passwd = false\n", script).split())


def test_ipc_and_shared_memory_are_the_sessions_own_or_the_hosts(run: Configured) -> None:
    name = f"ral-test-{os.getpid()}"
    try:
        run.out("", 'echo x >/dev/shm/"$1"', name)
        assert not Path("/dev/shm", name).exists()
        run.out("private_ipc = false\n", 'echo x >/dev/shm/"$1"', name)
        assert Path("/dev/shm", name).exists()
    finally:
        Path("/dev/shm", name).unlink(missing_ok=True)


def test_the_limit_of_processes(run: Configured) -> None:
    assert (
        run.out("sandbox_nproc_limit = 321\n", "grep 'Max processes' /proc/self/limits").split()[2] == "321"
    )


INTERFACES = "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '"


def test_the_network_is_the_hosts_or_none(run: Configured) -> None:
    hosts = {name for name in os.listdir("/sys/class/net") if (Path("/sys/class/net") / name).is_dir()}
    assert hosts <= set(run.out("", INTERFACES).split())
    assert run.out('network_filter_mode = "isolated"\n', INTERFACES).split() == ["lo"]


def test_what_cannot_be_held_follows_the_fallback_with_a_loud_warning(run: Configured) -> None:
    wanted = 'network_filter_mode = "filtered"\nnetwork_filter_fallback = '
    shared = run(wanted + '"open"\n', INTERFACES)
    assert shared.status == 0
    assert b"SHARED" in shared.stderr
    stricter = run(wanted + '"stricter"\n', INTERFACES)
    assert stricter.stdout.split() == [b"lo"]
    assert b"isolated" in stricter.stderr
    refused = run(wanted + '"strict"\n', "true")
    assert (refused.status, refused.stdout) == (78, b"")
    assert b"cannot be held" in refused.stderr
    # The default asks for nothing that is not there, so nothing is said at each start.
    assert b"network" not in run("", "true").stderr


def test_an_override_of_the_callers_environment_counts_for_one_launch(run: Configured) -> None:
    done = run("", INTERFACES, env={"NETWORK_FILTER_MODE": "isolated"})
    assert done.stdout.split() == [b"lo"]
    refused = run("", "true", env={"HOME_ACCESS": "everything"})
    assert refused.status == 78
    assert b"HOME_ACCESS" in refused.stderr


def test_variables_that_are_set_blocked_and_hidden(run: Configured) -> None:
    config = (
        'sandbox_env = ["A=1", "PATH=/x", "_B=1", "SANDBOX_X=1", "HOME_ACCESS=write", "NOEQ", '
        '"GITHUB_PAT=x"]\n'
        'blocked_env_patterns = ["*secretish*/i"]\nhide_from_sandbox = ["HIDDEN"]\n'
    )
    given = {"MySecretIsh": "1", "SECRETISH": "2", "HIDDEN": "1", "KEPT": "1", "FOO_TOKEN": "1"}
    done = run(config, "env", env=given)
    inside = dict(line.split("=", 1) for line in done.stdout.decode().splitlines() if "=" in line)
    assert inside["A"] == "1"
    assert inside["KEPT"] == "1"
    assert inside["PATH"].startswith("/x:")
    assert not {"MySecretIsh", "SECRETISH", "HIDDEN", "FOO_TOKEN", "_B", "SANDBOX_X", "GITHUB_PAT"} & set(
        inside
    )
    assert done.stderr.count(b"ignored") == 5


def test_a_file_for_some_projects_only(ral: Ral, project: Path, tmp_path: Path) -> None:
    base = tmp_path / "config/ral"
    (base / "conf.d").mkdir(parents=True)
    os.chmod(tmp_path / "config", 0o700)
    (project / "secret").write_text("S")
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    for pattern, shown in ((str(project.parent) + "/*", b""), ("/elsewhere/**", b"S")):
        (base / "conf.d/10.toml").write_text(
            f'blocked_files = ["secret"]\n[match]\nproject = ["{pattern}"]\n'
        )
        assert ral("run", "-q", "--", "cat", "secret", env=env).stdout == shown


def test_a_mistake_starts_nothing_and_is_named(run: Configured) -> None:
    done = run('blocked_files = ["a"]\nextra_writeable_paths = []\n', "echo started")
    assert (done.status, done.stdout) == (78, b"")
    assert b"ral.toml:2: extra_writeable_paths" in done.stderr
    assert b"extra_writable_paths" in done.stderr


def test_a_project_behind_a_link_and_one_nested_in_something_writable(
    run: Configured, ral: Ral, project: Path, scratch: Path
) -> None:
    link = scratch / "link"
    link.symlink_to(project)
    done = ral("run", "-q", "--project", str(link), "--", "sh", "-c", "echo x >via-link; pwd -P", cwd=link)
    assert done.stdout.decode().strip() == str(project.resolve())
    assert (project / "via-link").exists()
    (scratch / "outer/inner/.git/hooks").mkdir(parents=True)
    out = run.out(
        f'extra_writable_paths = ["{scratch}/outer"]\n',
        "echo x >../beside; echo x 2>/dev/null >.git/hooks/pre-commit || echo refused",
        cwd=scratch / "outer/inner",
    )
    assert out == "refused\n"
    assert (scratch / "outer/beside").exists()


def test_a_home_in_the_environment_that_is_wrong_or_absent_changes_nothing(ral: Ral) -> None:
    for wrong in ("/", "/nonexistent", ""):
        done = ral("run", "-q", "--", "sh", "-c", "echo $HOME", env={"HOME": wrong})
        assert done.stdout.decode().strip() == str(home_dir()), done


def test_three_thousand_denied_paths_and_two_thousand_masks(run: Configured, project: Path) -> None:
    (project / "many").mkdir()
    for number in range(2000):
        (project / f"many/{number}").write_text("S")
    config = "blocked_files = " + json.dumps([f"many/{number}" for number in range(5000)]) + "\n"
    assert run.out(config, "cat many/* | wc -c; ls many | wc -l").split() == ["0", "2000"]
