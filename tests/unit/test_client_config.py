"""``ral config`` and ``ral explain``: what is asked, what is printed, and the file that ``init`` writes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ral_broker.config.files import select
from ral_broker.config.settings import SETTINGS, Settings
from ral_client import config
from ral_client.call import Failure
from ral_client.explain import absolute
from ral_protocol import exits, wire
from support.installed import ROOT
from support.peer import Incoming, Peer, client_command

TEMPLATE = ROOT / "client/ral_client" / config.TEMPLATE
USER_FILE = "/home/u/.config/ral/ral.toml"
FILES: dict[str, object] = {
    "t": "config_files",
    "files": [b"/etc/ral/ral.toml", USER_FILE.encode()],
    "profile": "shell",
}
DONE: dict[str, object] = {"t": "done"}
ANSWERS: list[dict[str, object]] = [
    FILES,
    {
        "t": "problem", "severity": "warning", "file": USER_FILE, "line": 3, "key": "private_tmp",
        "text": "removed \x1b[31m",
    },
    {"t": "setting", "name": "private_tmp", "is_list": False, "state": "built", "default": False},
    {"t": "origin", "value": b"true", "layer": "/etc/ral/ral.toml", "line": 1},
    {"t": "setting", "name": "home_readonly", "is_list": True, "state": "built", "default": False},
    {"t": "origin", "value": b'".bashrc"', "layer": "built-in"},
    {"t": "origin", "value": b'"caf\xe9"', "layer": USER_FILE, "line": 9},
    {"t": "setting", "name": "blocked_files", "is_list": True, "state": "built", "default": True},
    {"t": "setting", "name": "sandbox_nproc_limit", "is_list": False, "state": "built", "default": False},
    {"t": "setting", "name": "mount_guard", "is_list": False, "state": "refused", "unknown": 1},
    {"t": "origin", "value": b'"off"', "layer": "built-in", "line": None},
    DONE,
]  # fmt: skip


class Asked:
    """A broker that gives fixed answers, and what it was asked."""

    def __init__(self, *answers: dict[str, object]) -> None:
        self.answers = answers
        self.payload: object = None
        self.directories: list[str] = []

    def __call__(self, incoming: Incoming, request: dict[str, object], fds: list[int]) -> None:
        if fds:
            self.payload = wire.unpack(os.pread(fds[0], 6 << 20, 0))
            self.directories = [os.readlink(f"/proc/self/fd/{fd}") for fd in fds[1:]]
        for fd in fds:
            os.close(fd)
        # A client that does not understand an answer does not wait for the rest.
        with contextlib.suppress(BrokenPipeError):
            for answer in self.answers:
                incoming.answer(answer)


def client(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        client_command(*arguments),
        capture_output=True, env=environment, timeout=20, stdin=subprocess.DEVNULL, cwd=cwd,
    )  # fmt: skip


def ask(
    runtime: Path, asked: Asked, *arguments: str, cwd: Path | None = None, **environment: str
) -> tuple[subprocess.CompletedProcess[bytes], dict[str, object]]:
    """Run the client against ``asked``: how it ended, and its request."""
    peer = Peer(runtime, asked)
    try:
        ended = client(*arguments, cwd=cwd, RAL_RUNTIME_DIR=str(runtime), **environment)
    finally:
        peer.close()
    (request,) = peer.requests
    return ended, request


def test_the_request_is_the_whole_environment_and_the_project(runtime: Path, project: Path) -> None:
    below = project / "below"
    below.mkdir()
    asked = Asked(FILES, DONE)
    arguments = ("config", "check", "--project", "below", "--profile=shell")
    variables = {"HOME_ACCESS": "read", "SECRET": "x", "MOUNT_GUARD": "", "RAL_CONF": "a/b"}
    ended, request = ask(runtime, asked, *arguments, cwd=project, **variables)
    assert ended.returncode == 0, ended
    assert request == {
        "t": "config", "project": os.fsencode(below), "profile": "shell", "check": True,
        "overrides": {"HOME_ACCESS": "read"},
    }  # fmt: skip
    assert asked.directories == [str(below)]
    assert isinstance(asked.payload, list)
    argv, environment = asked.payload
    assert argv == []
    # Only the client knows the directory that a relative name counts from.
    assert f"RAL_CONF={project}/a/b".encode() in environment
    assert {b"SECRET=x", b"HOME_ACCESS=read", b"MOUNT_GUARD="} <= set(environment)


@pytest.mark.parametrize("verb", [("config", "show"), ("config", "check"), ("explain", "x")])
def test_a_project_that_is_none_is_a_failure_and_nothing_is_asked(
    project: Path, verb: tuple[str, ...]
) -> None:
    ended = client(*verb, "--project", "nowhere", cwd=project, RAL_RUNTIME_DIR="/nonexistent")
    assert (ended.returncode, ended.stdout) == (exits.FAILED, b"")
    assert ended.stderr == b"ral: project nowhere refused: No such file or directory\n"


def test_show_is_a_table_and_warnings_go_to_standard_error(runtime: Path, project: Path) -> None:
    ended, _ = ask(runtime, Asked(*ANSWERS), "config", "show", cwd=project)
    assert ended.returncode == 0
    assert ended.stderr.decode() == (
        "ral: warning: /home/u/.config/ral/ral.toml:3: private_tmp: removed \\x1b[31m\n"
    )
    assert ended.stdout.decode() == (
        "SETTING              VALUE      LAYER\n"
        "private_tmp          true       /etc/ral/ral.toml:1\n"
        'home_readonly        ".bashrc"  built-in\n'
        '                     "caf\\xe9"  /home/u/.config/ral/ral.toml:9\n'
        "blocked_files        []         built-in\n"
        "sandbox_nproc_limit  -          -\n"
        'mount_guard          "off"      built-in\n'
    )


def test_show_as_a_document(runtime: Path, project: Path) -> None:
    ended, _ = ask(runtime, Asked(*ANSWERS), "config", "show", "--json", cwd=project)
    assert (ended.returncode, ended.stderr) == (0, b"")
    document = json.loads(ended.stdout)
    assert document["project"] == str(project)
    assert document["files"] == ["/etc/ral/ral.toml", USER_FILE]
    assert document["profile"] == "shell"
    assert document["problems"] == [
        {
            "severity": "warning", "file": USER_FILE, "line": 3, "key": "private_tmp",
            "text": "removed \x1b[31m",
        }
    ]  # fmt: skip
    settings = {setting["name"]: setting for setting in document["settings"]}
    assert settings["private_tmp"] == {
        "name": "private_tmp", "value": True, "layer": "/etc/ral/ral.toml", "state": "built",
        "default": False,
        "entries": [{"value": True, "layer": "/etc/ral/ral.toml", "line": 1}],
    }  # fmt: skip
    assert settings["home_readonly"]["value"] == [".bashrc", "caf\\xe9"]
    assert settings["home_readonly"]["layer"] is None
    assert settings["home_readonly"]["entries"][1] == {
        "value": "caf\\xe9", "value_b64": "Y2Fm6Q==", "layer": USER_FILE, "line": 9,
    }  # fmt: skip
    assert settings["blocked_files"]["value"] == settings["blocked_files"]["entries"] == []
    assert settings["sandbox_nproc_limit"]["value"] is None
    assert settings["mount_guard"]["state"] == "refused"


@pytest.mark.parametrize(
    ("problems", "status", "says"),
    [
        ([], 0, "ok: /etc/ral/ral.toml\nok: /home/u/.config/ral/ral.toml\n"),
        (
            [("warning", USER_FILE, 2, "devices", "is no glob")],
            0,
            (
                "warning: /home/u/.config/ral/ral.toml:2: devices: is no glob\nok: /etc/ral/ral.toml\n"
                "ok: /home/u/.config/ral/ral.toml\n"
            ),
        ),
        (
            [("error", "/c\n", None, None, "no TOML"), ("warning", None, None, None, "\u202eodd")],
            1,
            "error: /c\\n: no TOML\nwarning: \\u202eodd\n",
        ),
    ],
)
def test_check_names_file_line_and_key_and_fails_for_errors_only(
    runtime: Path, problems: list[tuple[object, ...]], status: int, says: str
) -> None:
    keys = ("severity", "file", "line", "key", "text")
    lines: list[dict[str, object]] = [
        {"t": "problem"} | dict(zip(keys, one, strict=True)) for one in problems
    ]
    ended, request = ask(runtime, Asked(FILES, *lines, DONE), "config", "check")
    assert (ended.returncode, ended.stdout.decode(), ended.stderr) == (status, says, b"")
    assert request["check"] is True
    ended, _ = ask(runtime_again(runtime), Asked(FILES, *lines, DONE), "config", "check", "--json")
    assert ended.returncode == status
    document = json.loads(ended.stdout)
    assert "settings" not in document
    assert [problem["text"] for problem in document["problems"]] == [one[4] for one in problems]


def runtime_again(runtime: Path) -> Path:
    """The same directory, free for another listener."""
    (runtime / "control.sock").unlink()
    return runtime


def test_check_without_a_file_says_what_holds(runtime: Path) -> None:
    ended, _ = ask(runtime, Asked(FILES | {"files": []}, DONE), "config", "check")
    assert ended.returncode == 0
    assert b"the defaults hold" in ended.stdout


def test_a_refusal_is_a_failure(runtime: Path) -> None:
    refused: dict[str, object] = {"t": "refused", "kind": "refused", "message": "no\x1b", "status": 78}
    for verb in (("config", "show"), ("config", "check"), ("explain", "/x")):
        ended, _ = ask(runtime, Asked(refused), *verb)
        assert (ended.returncode, ended.stdout, ended.stderr) == (exits.FAILED, b"", b"ral: no\\x1b\n")
        runtime_again(runtime)


@pytest.mark.parametrize(
    "answer",
    [
        {"t": "origin", "value": b"1", "layer": "x"},
        {"t": "frobnicated"},
        {"t": "setting", "name": 1, "is_list": False, "state": "built", "default": False},
        {"t": "config_files", "files": ["text"], "profile": None},
    ],
)
def test_an_answer_that_is_not_understood_is_no_success(runtime: Path, answer: dict[str, object]) -> None:
    ended, _ = ask(runtime, Asked(answer, DONE), "config", "show")
    assert ended.returncode in (exits.FAILED, exits.UNAVAILABLE)
    assert ended.stdout == b""
    assert ended.stderr.startswith(b"ral: ")


def uncommented() -> str:
    """The template with every setting set, without the prose and the examples of tables."""
    settings = TEMPLATE.read_text(encoding="utf-8").partition("## Tables")[0]
    return "".join(
        line.removeprefix("# ")
        for line in settings.partition("\n\n")[2].splitlines(keepends=True)
        if line.startswith("# ")
    )


def test_the_template_sets_nothing_and_has_every_setting_with_its_default() -> None:
    text = TEMPLATE.read_text(encoding="utf-8")
    assert tomllib.loads(text) == {}
    values = tomllib.loads(uncommented())
    defaults = {name: getattr(Settings(), name) for name in SETTINGS}
    assert set(values) == set(defaults)
    for name, default in defaults.items():
        if default is not None:
            assert values[name] == (list(default) if isinstance(default, tuple) else default), name
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"^##   \[replace\]$", text, re.MULTILINE)


def test_the_template_is_made_of_the_settings() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "tools/config_template.py"], capture_output=True, check=True, timeout=20
    )
    assert made.stdout == TEMPLATE.read_bytes(), (
        "run tools/config_template.py > client/ral_client/ral.toml.in"
    )


def test_the_template_explains_every_setting_and_says_what_cannot_be_changed() -> None:
    blocks = re.findall(r"\n\n((?:## .*\n)+)# (\w+) =", TEMPLATE.read_text(encoding="utf-8"))
    explained = {name: " ".join(line[3:] for line in said.splitlines()) for said, name in blocks}
    assert set(explained) == set(SETTINGS)
    for name, said in explained.items():
        assert said.casefold().startswith(SETTINGS[name].doc.casefold()), name
        assert (SETTINGS[name].state == "refused") == ("Cannot be changed in this version" in said), name


def test_init_writes_a_file_that_is_the_users_alone(tmp_path: Path) -> None:
    ended = client("config", "init", XDG_CONFIG_HOME=str(tmp_path / "a/b"))
    file = tmp_path / "a/b/ral/ral.toml"
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert str(file).encode() in ended.stdout
    assert file.read_bytes() == TEMPLATE.read_bytes()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for directory in (tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/ral"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("there", ["file", "link to nothing", "directory"])
def test_init_leaves_what_is_there_alone(tmp_path: Path, there: str) -> None:
    file = tmp_path / "ral/ral.toml"
    file.parent.mkdir()
    if there == "file":
        file.write_text("private_tmp = false\n")
    elif there == "directory":
        file.mkdir()
    else:
        file.symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.rglob("*"))
    ended = client("config", "init", XDG_CONFIG_HOME=str(tmp_path))
    assert (ended.returncode, ended.stdout) == (exits.FAILED, b"")
    assert f"{file} is there already and is left as it is".encode() in ended.stderr
    assert sorted(tmp_path.rglob("*")) == before
    assert there != "file" or file.read_text() == "private_tmp = false\n"


@pytest.mark.parametrize(
    ("environment", "written"),
    [
        ({"RAL_CONF": "mine.toml", "SANDBOX_CONF": "other.toml"}, "mine.toml"),
        ({"SANDBOX_CONF": "sub/other.toml", "RAL_CONF": ""}, "sub/other.toml"),
    ],
)
def test_init_writes_the_file_that_is_named(
    tmp_path: Path, environment: dict[str, str], written: str
) -> None:
    ended = client("config", "init", cwd=tmp_path, XDG_CONFIG_HOME="/nonexistent", **environment)
    assert ended.returncode == 0, ended
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / written]


def looked_for(monkeypatch: pytest.MonkeyPatch, home: str, *entries: str) -> str:
    """Where the client looks for the user's file, with this environment."""
    environment = [os.fsencode(entry) for entry in entries]
    monkeypatch.setattr(config, "caller_environment", lambda: environment)
    monkeypatch.setattr("posix.environ", dict(entry.split(b"=") for entry in environment))
    monkeypatch.setattr(config, "home", lambda: os.fsencode(home))
    return os.fsdecode(config.user_file())


@pytest.mark.parametrize(
    "entries",
    [
        (),
        ("HOME=/elsewhere", "XDG_CONFIG_HOME=relative"),
        ("XDG_CONFIG_HOME=/x/y/",),
        ("XDG_CONFIG_HOME=", "RAL_CONF=", "SANDBOX_CONF=/a/b"),
        ("SANDBOX_CONF=/a/b", "RAL_CONF=/c\udce9"),
    ],
)
def test_the_client_looks_for_the_file_where_the_broker_does(
    monkeypatch: pytest.MonkeyPatch, entries: tuple[str, ...]
) -> None:
    selected = select("/home/u", map(os.fsencode, entries)).user_file
    assert looked_for(monkeypatch, "/home/u", *entries) == selected


def test_without_a_home_directory_there_is_no_place_for_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failure) as raised:
        looked_for(monkeypatch, "")
    assert "no home directory" in raised.value.message
    assert raised.value.status == exits.FAILED


def test_init_is_refused_inside_a_session(tmp_path: Path) -> None:
    ended = client("config", "init", XDG_CONFIG_HOME=str(tmp_path), RAL_SESSION="0a1b2c3d")
    assert (ended.returncode, ended.stdout) == (exits.FAILED, b"")
    assert b"inside session 0a1b2c3d" in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["no space", "a file in the way"])
def test_init_that_fails_leaves_no_part_of_a_file(tmp_path: Path, fault: str) -> None:
    if fault == "a file in the way":
        (tmp_path / "ral").touch()

    def little_space() -> None:
        if fault == "no space":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    # The directory exists, so that only the file itself is missing.
    ended = subprocess.run(
        client_command("config", "init"), env={"XDG_CONFIG_HOME": str(tmp_path)}, capture_output=True,
        preexec_fn=little_space, timeout=20,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (exits.FAILED, b""), ended
    assert ended.stderr.startswith(b"ral: ")
    assert ended.stderr.count(b"\n") == 1
    assert not list(tmp_path.rglob("ral.toml"))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (b"a/./b//c/", b"/work/a/b/c"),
        (b"/a//b/.", b"/a/b"),
        (b"..", b"/"),
        (b"/nowhere/x/../y", b"/nowhere/y"),
        (b"../../../etc/x", b"/etc/x"),
        (b"/", b"/"),
        (b".", b"/work"),
        (b"caf\xe9", b"/work/caf\xe9"),
    ],
)
def test_a_path_becomes_absolute(path: bytes, name: bytes) -> None:
    assert absolute(path, b"/work") == name


def test_two_dots_leave_the_directory_that_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real/below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real/below")
    found = absolute(b"link/../x", os.fsencode(tmp_path))
    assert found == os.fsencode(tmp_path.resolve() / "real/x")
    # The link itself is what is asked about, though.
    assert absolute(b"link", os.fsencode(tmp_path)) == os.fsencode(tmp_path / "link")


EXPLAINED: dict[str, object] = {
    "t": "explained", "path": b"/home/u/caf\xe9", "state": "masked", "dest": b"/home/u/caf\xe9",
    "source": None, "mode": "ro", "layer": "mask", "why": "blocked_files", "setting": "blocked_files",
    "origin": "conf.d/a.toml:4", "text": "It is hidden.\nTake it out of blocked_files\x1b.",
}  # fmt: skip


def test_explain_asks_about_a_session_that_were_started_now(runtime: Path, project: Path) -> None:
    asked = Asked(EXPLAINED)
    ended, request = ask(runtime, asked, "explain", "x/y", cwd=project, PRIVATE_TMP="false")
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout == b"It is hidden.\nTake it out of blocked_files\\x1b.\n"
    assert request == {
        "t": "explain", "path": os.fsencode(project / "x/y"), "project": os.fsencode(project),
        "profile": None, "overrides": {"PRIVATE_TMP": "false"},
    }  # fmt: skip
    assert asked.directories == [str(project)]


def test_explain_asks_about_a_running_session(runtime: Path, project: Path) -> None:
    ended, request = ask(runtime, Asked(EXPLAINED), "explain", "--json", "0a1b", "..", cwd=project)
    assert request == {"t": "explain", "session": "0a1b", "path": os.fsencode(project.parent)}
    assert json.loads(ended.stdout) == {
        "path": "/home/u/caf\\xe9", "path_b64": "L2hvbWUvdS9jYWbp", "dest": "/home/u/caf\\xe9",
        "dest_b64": "L2hvbWUvdS9jYWbp", "source": None, "state": "masked", "mode": "ro", "layer": "mask",
        "why": "blocked_files", "setting": "blocked_files", "origin": "conf.d/a.toml:4",
        "text": EXPLAINED["text"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("config",), "show, check or init is missing"),
        (("config", "edit"), "edit is not show, check or init"),
        (("config", "init", "x"), "one argument too many"),
        (("config", "show", "--frob"), "--frob is not an option"),
        (("explain",), "a path is missing"),
        (("explain", ""), "a path is missing"),
        (("explain", "0a", "b", "c"), "one argument too many: c"),
        (("explain", "--project", "/p", "0a", "b"), "leave out its id, or the option"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], says: str) -> None:
    ended = client(*arguments, RAL_RUNTIME_DIR="/nonexistent")
    assert (ended.returncode, ended.stdout) == (exits.USAGE, b"")
    assert says in ended.stderr.decode()


def test_what_cannot_begin_an_id_is_no_session() -> None:
    ended = client("explain", "/a", "/b", RAL_RUNTIME_DIR="/nonexistent")
    assert ended.returncode == exits.FAILED
    assert b"no session is named '/a'" in ended.stderr
