"""``ral config`` with a real broker: what holds, where it comes from, what is wrong."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import pytest

import ral_client
import ral_protocol
from ral_broker.config.settings import SETTINGS, Settings
from ral_protocol import exits
from support.broker import Completed, Ral
from support.installed import ROOT, bin_dir, home_dir

pytestmark = pytest.mark.usefixtures("broker")

TEMPLATE = ROOT / "client/ral_client/ral.toml.in"


@pytest.fixture
def directory(ral: Ral, tmp_path: Path) -> Path:
    """The directory of a user's configuration, which this test's client looks into."""
    made = tmp_path / "ral"
    (made / "conf.d").mkdir(parents=True)
    ral.environment["XDG_CONFIG_HOME"] = str(tmp_path)
    return made


def write(directory: Path, text: str, name: str = "ral.toml") -> Path:
    file = directory / name
    file.write_text(text, encoding="utf-8")
    return file


def shown(ral: Ral, *arguments: str, env: dict[str, str] | None = None) -> dict[str, dict[str, object]]:
    """The settings of ``config show --json`` by name."""
    done = ral("config", "show", "--json", *arguments, env=env)
    assert done.status == 0, done
    return {setting["name"]: setting for setting in json.loads(done.stdout)["settings"]}


def checked(ral: Ral, *arguments: str, status: int = 0, env: dict[str, str] | None = None) -> list[str]:
    """The lines of ``config check``."""
    done = ral("config", "check", *arguments, env=env)
    assert (done.status, done.stderr) == (status, b""), done
    return done.stdout.decode().splitlines()


def test_without_files_the_defaults_hold(ral: Ral, directory: Path) -> None:
    settings = shown(ral)
    assert list(settings) == list(SETTINGS)
    for name, setting in settings.items():
        default = getattr(Settings(), name)
        assert setting["value"] == (list(default) if isinstance(default, tuple) else default), name
        assert setting["default"] is True
        assert setting["state"] == SETTINGS[name].state
        assert setting["layer"] == (None if isinstance(default, tuple) or default is None else "built-in")
    assert checked(ral) == [
        "ok: there is no configuration file; the defaults hold (ral config init writes one)"
    ]
    assert list(directory.rglob("*")) == [directory / "conf.d"]


def test_every_value_has_its_layer_and_line(ral: Ral, directory: Path, project: Path) -> None:
    file = write(directory, '# one\nprivate_tmp = false\nextra_blocked_paths = ["/srv/a"]\n')
    match = f'[match]\nproject = ["{project}"]\n'
    write(directory, 'extra_blocked_paths = ["/srv/b", "/srv/a"]\n' + match, "conf.d/20-this.toml")
    write(directory, f'[replace]\nhome_readonly = ["caf\\u00e9"]\n{match}', "conf.d/30-odd.toml")
    write(directory, '[match]\nproject = ["/nowhere"]\n[replace]\nhome_readonly = []\n', "conf.d/40-no.toml")
    write(directory, "nonsense", "conf.d/ignored.conf")
    settings = shown(ral, env={"HOME_ACCESS": "read", "NETWORK_FILTER_MODE": ""})
    assert settings["private_tmp"]["entries"] == [{"value": False, "layer": str(file), "line": 2}]
    assert settings["extra_blocked_paths"]["entries"] == [
        {"value": "/srv/a", "layer": str(file), "line": 3},
        {"value": "/srv/b", "layer": "conf.d/20-this.toml", "line": 1},
    ]
    assert settings["home_readonly"]["entries"] == [
        {"value": "café", "layer": "conf.d/30-odd.toml", "line": 2}
    ]
    assert settings["home_access"]["layer"] == "environment HOME_ACCESS"
    assert (settings["home_access"]["value"], settings["home_access"]["default"]) == ("read", False)
    assert settings["network_filter_mode"]["layer"] == "built-in"

    done = ral("config", "show")
    lines = [re.split(" {2,}", line.strip()) for line in done.stdout.decode().splitlines()]
    assert lines[0] == ["SETTING", "VALUE", "LAYER"]
    assert ["private_tmp", "false", f"{file}:2"] in lines
    assert ["home_readonly", '"café"', "conf.d/30-odd.toml:2"] in lines
    at = lines.index(["extra_blocked_paths", '"/srv/a"', f"{file}:3"])
    assert lines[at + 1] == ['"/srv/b"', "conf.d/20-this.toml:1"]


def test_a_project_that_is_named_has_its_own_settings(ral: Ral, directory: Path, tmp_path: Path) -> None:
    other = home_dir() / "."
    match = f'home_access = "restricted"\n[match]\nproject = ["{tmp_path}/*"]\n'
    write(directory, match, "conf.d/a.toml")
    named = tmp_path / "named"
    named.mkdir()
    assert shown(ral, "--project", str(named))["home_access"]["value"] == "restricted"
    assert shown(ral)["home_access"]["value"] == "tmpwrite"
    # Settings can be asked for where no session would start.
    assert shown(ral, "--project", str(other))["home_access"]["value"] == "tmpwrite"
    (warning,) = (line for line in checked(ral, "--project", str(other)) if "warning" in line)
    assert "no session would start here" in warning


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "\n\nhome_readonyl = []\n",
            ":3: home_readonyl: no setting has this name; the nearest is home_readonly",
        ),
        ("private_tmp = 3\n", ":1: private_tmp: is 3; true or false is expected"),
        ('home_access = "wirte"\n', ":1: home_access: "),
        ("private_tmp = \n", ":1: "),
        ('blocked_files = ["$(id)"]\n', ":1: blocked_files: "),
        ("mount_guard_interval = 5\n", ":1: mount_guard_interval: 5 is refused: "),
        ("allow_root_session = true\n", ":1: allow_root_session: only the administrator's"),
        ('[match]\nproject = ["/x"]\n', "match: belongs into a file in conf.d"),
    ],
)
def test_an_error_names_file_line_and_key_and_nothing_starts(
    ral: Ral, directory: Path, project: Path, text: str, says: str
) -> None:
    file = write(directory, text)
    before = {path: path.lstat().st_mtime_ns for path in (*project.rglob("*"), *directory.rglob("*"))}
    (line,) = checked(ral, status=1)
    assert line.startswith(f"error: {file}:")
    assert says in line
    for arguments, status in (
        (("config", "show"), exits.FAILED),
        (("explain", "/usr"), exits.FAILED),
        (("run", "--", "true"), exits.REFUSED),
    ):
        done = ral(*arguments)
        assert (done.status, done.stdout) == (status, b""), arguments
        assert done.stderr.decode().startswith(f"ral: {file}:"), done
        assert says in done.stderr.decode()
    document = json.loads(ral("config", "check", "--json").stdout)
    (problem,) = document["problems"]
    assert (problem["severity"], problem["file"]) == ("error", str(file))
    assert before == {
        path: path.lstat().st_mtime_ns for path in (*project.rglob("*"), *directory.rglob("*"))
    }


def test_all_errors_are_listed_and_warnings_are_no_failure(ral: Ral, directory: Path) -> None:
    file = write(directory, 'extra_writable_paths = ["~"]\n')
    lines = checked(ral)
    assert [line for line in lines if line.startswith("warning: ")] == [lines[0]]
    assert lines[0].startswith(f"warning: {file}:1: extra_writable_paths: User config: ")
    assert "is $HOME or an ancestor" in lines[0]
    assert lines[1:] == [f"ok: {file}"]
    shown_too = ral("config", "show")
    assert shown_too.status == 0
    assert b"is $HOME or an ancestor" in shown_too.stderr

    write(directory, 'extra_writable_paths = ["~"]\nx = 1\ny = 2\n')
    write(directory, "z = [", "conf.d/z.toml")
    lines = checked(ral, status=1)
    assert len([line for line in lines if line.startswith("error: ")]) == 3
    assert not [line for line in lines if line.startswith("ok")]
    assert b"(2 more: run ral config check)" in ral("config", "show").stderr


def test_a_named_file_is_read_and_has_to_be_there(ral: Ral, directory: Path, project: Path) -> None:
    (project / "mine.toml").write_text("private_ipc = false\n")
    settings = shown(ral, env={"RAL_CONF": "mine.toml"})
    assert settings["private_ipc"]["layer"] == str(project / "mine.toml")
    assert shown(ral, env={"SANDBOX_CONF": "mine.toml"})["private_ipc"]["value"] is False
    (line,) = checked(ral, status=1, env={"RAL_CONF": "nowhere.toml"})
    assert str(project / "nowhere.toml") in line
    done = ral("run", "--", "true", env={"RAL_CONF": "nowhere.toml"})
    assert (done.status, done.stdout) == (exits.REFUSED, b"")
    assert str(project / "nowhere.toml") in done.stderr.decode()


def test_a_run_does_what_its_file_says(ral: Ral, directory: Path, project: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "settings.toml"
    elsewhere.write_text('sandbox_env = ["SAID=hello"]\n')
    script = 'printf %s "$SAID"'
    assert ral("run", "-q", "--", "sh", "-c", script).stdout == b""
    named = {"RAL_CONF": os.path.relpath(elsewhere, project)}
    assert ral("run", "-q", "--", "sh", "-c", script, env=named).stdout == b"hello"


def test_a_profile_is_chosen_by_name_and_a_wrong_name_is_refused(ral: Ral, directory: Path) -> None:
    document = json.loads(ral("config", "show", "--json", "--profile", "shell").stdout)
    assert document["profile"] == "shell"
    assert json.loads(ral("config", "show", "--json").stdout)["profile"] is None
    for arguments, status in (
        (("config", "show", "--profile", "nosuch"), exits.FAILED),
        (("run", "--profile", "nosuch", "--", "true"), exits.REFUSED),
    ):
        done = ral(*arguments)
        assert done.status == status, done
        assert b"there is no profile nosuch; there are: " in done.stderr
        assert b"shell" in done.stderr
    (line,) = checked(ral, "--profile", "nosuch", status=1)
    assert line.startswith("error: there is no profile nosuch")
    assert ral("run", "-q", "--profile", "shell", "--", "true").status == 0


def test_an_override_that_is_nonsense_is_an_error(ral: Ral, directory: Path) -> None:
    (line,) = checked(ral, status=1, env={"HOME_ACCESS": "nonsense"})
    assert "HOME_ACCESS" in line
    done = ral("run", "--", "true", env={"HOME_ACCESS": "nonsense"})
    assert (done.status, done.stdout) == (exits.REFUSED, b"")


def test_the_template_loads_cleanly_also_with_everything_set(ral: Ral, directory: Path) -> None:
    done = ral("config", "init")
    file = directory / "ral.toml"
    assert done.status == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert checked(ral) == [f"ok: {file}"]
    again = ral("config", "init")
    assert (again.status, again.stdout) == (exits.FAILED, b"")
    assert b"is there already" in again.stderr

    text = TEMPLATE.read_text(encoding="utf-8").partition("\n\n")[2].partition("## Tables")[0]
    lines = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
    only_admin = {name for name, setting in SETTINGS.items() if setting.admin_only}
    kept = [line for line in lines if line.partition(" =")[0] not in only_admin]
    write(directory, "\n".join(kept) + "\n")
    assert checked(ral) == [f"ok: {file}"]
    settings = shown(ral)
    assert {name for name, setting in settings.items() if not setting["default"]} == {"sandbox_nproc_limit"}
    scalars = {name: one["layer"] for name, one in settings.items() if one["layer"] is not None}
    assert {name for name, layer in scalars.items() if layer == str(file)} == set(scalars) - only_admin


def test_a_list_of_thousands_is_shown_whole(ral: Ral, directory: Path) -> None:
    paths = [f"/srv/{number:04}/{'x' * 200}" for number in range(6000)]
    assert sum(map(len, paths)) > 1 << 20
    half = len(paths) // 2
    for name, part in (("ral.toml", paths[:half]), ("conf.d/b.toml", paths[half:])):
        write(directory, f"readonly_mounts = {json.dumps(part)}\n", name)
    done = ral("config", "show", "--json", seconds=60)
    assert done.status == 0, done.stderr
    (setting,) = (one for one in json.loads(done.stdout)["settings"] if one["name"] == "readonly_mounts")
    assert setting["value"][-len(paths) :] == paths


def test_inside_a_session_there_is_no_configuration_to_ask_for(ral: Ral, directory: Path) -> None:
    # The client itself, wherever it is installed.
    packages = {Path(os.path.realpath(package.__path__[0])).parent for package in (ral_client, ral_protocol)}
    places = sorted({str(bin_dir().parent), *map(str, packages)})
    write(directory, f"readonly_mounts = {json.dumps(places)}\n")

    def inside(*arguments: str) -> Completed:
        return ral(
            "run", "-q", "--", "ral", *arguments, env={"RAL_RUNTIME_DIR": ral.environment["RAL_RUNTIME_DIR"]}
        )

    for arguments in (("config", "show"), ("config", "check"), ("explain", "/usr")):
        done = inside(*arguments)
        assert (done.status, done.stdout) == (exits.REFUSED, b""), done
        assert b"inside session" in done.stderr
    done = ral("run", "-q", "--", "env", f"RAL_CONF={directory}/mine.toml", "ral", "config", "init")
    assert (done.status, done.stdout) == (exits.FAILED, b"")
    assert b"inside session" in done.stderr
    assert not (directory / "mine.toml").exists()
