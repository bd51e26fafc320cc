"""``ral explain`` with a real broker: what it says of a path is what a session then shows."""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ral_protocol import exits, wire
from support.broker import Ral
from support.installed import home_dir

pytestmark = pytest.mark.usefixtures("broker")

HELLO = {"t": "hello", "proto": exits.PROTOCOL, "version": exits.VERSION}
PROBE = """
for path; do
    if [ -L "$path" ] || [ -e "$path" ]; then
        if [ -w "$path" ]; then echo w; elif [ -s "$path" ]; then echo r; else echo e; fi
    else
        echo -
    fi
done
"""


@pytest.fixture
def config(ral: Ral, tmp_path: Path) -> Path:
    """The user's file, which does not exist yet."""
    (tmp_path / "ral").mkdir()
    ral.environment["XDG_CONFIG_HOME"] = str(tmp_path)
    return tmp_path / "ral/ral.toml"


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    made = tmp_path / "wide"
    made.mkdir()
    return made


@pytest.fixture
def dotfile() -> Iterator[Path]:
    """A file in the home directory that no setting names."""
    file = home_dir() / f".ral-test-{os.getpid()}"
    file.write_text("content")
    yield file
    file.unlink()


def explained(ral: Ral, *arguments: str | bytes, cwd: Path | None = None) -> dict[str, object]:
    done = ral("explain", "--json", *arguments, cwd=cwd)
    assert (done.status, done.stderr) == (0, b""), done
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def said(ral: Ral, *arguments: str | bytes) -> str:
    done = ral("explain", *arguments)
    assert (done.status, done.stderr) == (0, b""), done
    return done.stdout.decode()


def test_the_answer_is_what_a_session_shows(
    ral: Ral, config: Path, wide: Path, project: Path, dotfile: Path
) -> None:
    (project / ".git").mkdir()
    for name in ("hooks", "objects", "refs"):
        (project / ".git" / name).mkdir()
        (project / ".git" / name / "sample").write_text("sample")
    (project / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (project / ".git/config").write_text("[core]\n")
    (project / ".env").write_text("secret")
    (project / "link").symlink_to("/usr/bin/env")
    (wide / "file").write_text("content")
    config.write_text(f'extra_writable_paths = ["{wide}"]\nblocked_files = [".env"]\n')
    paths = {
        project: "writable",
        project / ".env": "masked",
        project / ".git/config": "read-only",
        project / ".git/hooks/sample": "read-only",
        project / "link": "read-only",
        wide / "file": "writable",
        Path("/usr/bin/env"): "read-only",
        Path("/etc/passwd"): "read-only",
        dotfile: "absent",
        home_dir(): "own",
        Path("/tmp"): "own",
        Path("/dev/null"): "own",
        Path("/nowhere"): "absent",
        config: "absent",
    }
    seen = {
        "writable": {"w"}, "read-only": {"r", "e"}, "masked": {"e"}, "absent": {"-"},
        "own": {"w", "r", "e"},
    }  # fmt: skip
    done = ral("run", "-q", "--", "sh", "-c", PROBE, "sh", *map(str, paths))
    assert done.status == 0, done
    for (path, state), letter in zip(paths.items(), done.stdout.decode().split(), strict=True):
        found = explained(ral, str(path))
        assert (found["path"], found["state"]) == (str(path), state), found
        assert letter in seen[state], (path, letter)


def test_what_grants_writing_is_named_with_its_file_and_line(ral: Ral, config: Path, wide: Path) -> None:
    config.write_text(f'\nextra_writable_paths = ["{wide}"]\n')
    found = explained(ral, str(wide / "new"))
    assert (found["state"], found["setting"]) == ("writable", "extra_writable_paths")
    assert found["origin"] == f"{config}:2"
    assert (found["dest"], found["mode"], found["source"]) == (str(wide), "rw", str(wide))
    assert f'The entry "{wide}" of extra_writable_paths is from {config}:2.' in said(ral, str(wide / "new"))


def test_following_the_advice_makes_it_so(ral: Ral, config: Path, wide: Path, dotfile: Path) -> None:
    """The lines that are to be written are taken out of the answer."""
    for path, before, after in ((wide, "absent", "read-only"), (dotfile, "absent", "read-only")):
        text = said(ral, str(path))
        assert explained(ral, str(path))["state"] == before
        line, _, file = text.split("To change that: ")[1].removesuffix(".\n").rpartition(" in ")
        assert file == str(config)
        with config.open("a") as user:
            user.write(line + "\n")
        assert explained(ral, str(path))["state"] == after
    home_writable = said(ral, str(dotfile)).split("To change that: ")[1].split(" in ")[0]
    assert home_writable == f'home_writable = ["{dotfile.name}"]'


def test_a_hook_that_cannot_be_made_names_the_setting_that_lifts_it(
    ral: Ral, config: Path, project: Path
) -> None:
    (project / ".git/hooks").mkdir(parents=True)
    for name in ("objects", "refs"):
        (project / ".git" / name).mkdir()
    (project / ".git/HEAD").write_text("ref: refs/heads/main\n")
    text = said(ral, ".git/hooks/pre-commit")
    assert text.startswith(
        f"{project}/.git/hooks/pre-commit does not exist in the host and cannot be made: "
    )
    assert "project_protected_paths" in text
    assert f"To change that: protect_project = false in {config}." in text
    touch = ("run", "-q", "--", "touch", ".git/hooks/pre-commit")
    assert ral(*touch).status == 1
    config.write_text("protect_project = false\n")
    assert explained(ral, ".git/hooks/pre-commit")["state"] == "writable"
    assert ral(*touch).status == 0
    assert explained(ral, ".git/hooks/pre-commit")["why"] == "project"


def test_what_is_hidden_is_not_said_to_be_shown_by_a_setting(
    ral: Ral, config: Path, dotfile: Path, runtime: Path
) -> None:
    config.write_text(f'blocked_files = ["{dotfile}"]\n')
    found = explained(ral, str(dotfile))
    assert (found["state"], found["setting"]) == ("absent", "blocked_files")
    assert found["origin"] == f"{config}:1"
    assert explained(ral, str(runtime / "control.sock"))["setting"] is None


def test_a_path_counts_from_the_callers_directory(ral: Ral, project: Path) -> None:
    below = project / "below"
    below.mkdir()
    assert explained(ral, "x", cwd=below)["path"] == f"{below}/x"
    # The working directory is the project, and what is beside it is not shown.
    assert explained(ral, "../x", cwd=below)["path"] == f"{project}/x"
    assert explained(ral, "../x", cwd=below)["state"] == "own"
    assert explained(ral, "--project", "..", "../x", cwd=below)["state"] == "writable"


def test_a_name_that_is_no_utf8_is_answered_for(ral: Ral, project: Path) -> None:
    found = explained(ral, b"caf\xe9\x1b")
    assert found["path"] == f"{project}/caf\\xe9\x1b"
    assert found["path_b64"]
    assert "\x1b" not in said(ral, b"caf\xe9\x1b")


def test_a_running_session_is_explained_by_what_it_was_started_with(
    ral: Ral, config: Path, wide: Path
) -> None:
    config.write_text(f'extra_writable_paths = ["{wide}"]\n')
    session = ral("run", "-q", "-d", "--", "sleep", "60").stdout.decode().strip()
    config.unlink()
    assert explained(ral, str(wide))["state"] == "absent"
    found = explained(ral, session[:4], str(wide))
    assert (found["state"], found["setting"], found["origin"]) == (
        "writable",
        "extra_writable_paths",
        None,
    )
    assert str(wide) in said(ral, session, str(wide))
    done = ral("explain", "ffffffff", "/usr")
    assert (done.status, done.stdout) == (exits.FAILED, b"")
    assert b"there is no session ffffffff" in done.stderr
    assert ral("kill", session).status == 0
    done = ral("explain", session, "/usr")
    assert done.status == exits.FAILED
    assert b"ended with status" in done.stderr


def test_a_place_where_no_session_would_start_says_so(ral: Ral) -> None:
    done = ral("explain", "/usr", cwd=home_dir())
    assert (done.status, done.stdout) == (exits.FAILED, b"")
    assert b"is your home directory" in done.stderr


def ask(runtime: Path, fields: dict[str, object], fds: list[int]) -> dict[str, object]:
    """Send one request as no client does: the first answer. Closes ``fds``."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(20)
        peer.connect(str(runtime / "control.sock"))
        peer.sendall(wire.frame(wire.pack(HELLO)))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        peer.sendmsg([wire.frame(wire.pack(fields), len(fds))], rights)
        for fd in fds:
            os.close(fd)
        data = b""
        while len(data) < 4 or len(data) < 4 + wire.parse_header(data[:4])[0]:
            part = peer.recv(65536)
            assert part, "no answer"
            data += part
    answer = wire.unpack(data[4 : 4 + wire.parse_header(data[:4])[0]])
    assert isinstance(answer, dict)
    return answer


def payload(argv: list[bytes], flags: int = os.MFD_ALLOW_SEALING) -> int:
    fd = os.memfd_create("payload", flags | os.MFD_CLOEXEC)
    os.write(fd, wire.pack([argv, [b"PATH=/usr/bin"]]))
    return fd


@pytest.mark.parametrize("kind", ["config", "explain"])
def test_a_request_that_contradicts_itself_is_refused(runtime: Path, project: Path, kind: str) -> None:
    named = os.fsencode(project)
    right: dict[str, object] = {"t": kind, "project": named}
    if kind == "explain":
        right["path"] = b"/usr"

    def directory(path: str = str(project)) -> int:
        return os.open(path, os.O_PATH)

    assert ask(runtime, right, [payload([]), directory()])["t"] != "refused"
    for changed, fds, says in (
        ({}, [], "fewer descriptors"),
        ({}, [payload([])], "fewer descriptors"),
        ({}, [payload([]), directory(), directory()], "more descriptors"),
        ({}, [payload([b"true"]), directory()], "takes no command"),
        ({}, [payload([], 0), directory()], "that can be sealed"),
        ({}, [payload([]), directory("/usr")], "now reaches /usr"),
        ({}, [payload([]), directory("/etc/passwd")], "no directory"),
        ({"project": named + b"/"}, [payload([]), directory()], "now reaches"),
        ({"project": b"relative"}, [payload([]), directory()], "absolute path"),
        ({"surplus": 1}, [payload([]), directory()], "cannot be decoded"),
    ):
        answer = ask(runtime, right | changed, fds)
        assert answer["t"] == "refused", answer
        assert says in str(answer["message"]), answer


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"path": b"usr", "session": "00"}, "absolute and normal"),
        ({"path": b"/usr/../etc", "session": "00"}, "absolute and normal"),
        ({"path": b"/usr//bin", "session": "00"}, "absolute and normal"),
        ({"path": b"/a\0b", "session": "00"}, "absolute and normal"),
        ({"path": b"", "session": "00"}, "absolute and normal"),
        ({"path": b"/usr"}, "either a project or a session"),
        ({"path": b"/usr", "session": "00", "project": b"/"}, "either a project or a session"),
        ({"path": b"/usr", "session": "../x"}, "a session is named by its id"),
    ],
)
def test_a_crooked_question_is_refused(runtime: Path, fields: dict[str, object], says: str) -> None:
    answer = ask(runtime, {"t": "explain"} | fields, [])
    assert answer["t"] == "refused", answer
    assert says in str(answer["message"])


def test_a_session_is_explained_without_descriptors(runtime: Path) -> None:
    answer = ask(runtime, {"t": "explain", "path": b"/usr", "session": "00"}, [payload([])])
    assert (answer["t"], answer["kind"]) == ("refused", "request")
