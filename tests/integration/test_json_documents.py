"""Every ``--json`` document has exactly the keys, types and words that docs/json.md tells."""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from ral_protocol.exits import VERSION
from support.broker import Broker, Ral
from support.installed import ROOT

NOT_UTF8 = b"caf\xe9"
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


class Key(NamedTuple):
    """One row of a table: the type in words, whether it is only there where needed, the words it may be."""

    kind: str
    needed: bool
    words: frozenset[str]


TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "boolean": bool,
    "object": dict,
    "list of strings": list,
    "list of objects": list,
}


def told(heading: str, table: int = 0) -> dict[str, Key]:
    """The ``table``-th table of a section of docs/json.md."""
    text = (ROOT / "docs/json.md").read_text(encoding="utf-8")
    section = re.search(rf"^## `{re.escape(heading)}`$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section, f"docs/json.md has no section for {heading}"
    tables = re.findall(r"^\| key \| type \| what \|\n\|[-|]+\n((?:\|.*\n?)+)", section[1], re.MULTILINE)
    found = {}
    for line in tables[table].splitlines():
        key, kind, what = (cell.strip() for cell in line.strip().strip("|").split("|", 2))
        words = frozenset(re.findall(r"`([^`]+)`", what))
        found[key.strip("`")] = Key(kind, what == "where needed", words)
    return found


def check(document: object, keys: dict[str, Key], *closed: str) -> dict[str, object]:
    """Compare one object with its table. Values of the ``closed`` keys must be among the words told."""
    assert isinstance(document, dict)
    assert {key for key, told_key in keys.items() if not told_key.needed} <= set(document) <= set(keys)
    for key, value in document.items():
        kinds = keys[key].kind.split(" or ")
        if value is None:
            assert "null" in kinds, f"{key} is null"
            continue
        fitting = [kind for kind in kinds if kind != "null" and type(value) is TYPES[kind]]
        assert fitting, f"{key} is {value!r}, told is {keys[key].kind}"
        if fitting == ["list of strings"]:
            assert all(type(item) is str for item in value), key
    for key in closed:
        assert document[key] in keys[key].words, f"{key} is {document[key]!r}"
    return document


def printed(ral: Ral, *arguments: str | bytes, status: int = 0, cwd: Path | None = None) -> object:
    """The one document that a command prints."""
    done = ral(*arguments, cwd=cwd)
    assert done.status == status, done
    document: object = json.loads(done.stdout.decode("utf-8"))
    assert done.stdout.endswith(b"\n")
    return document


def objects(document: object) -> list[object]:
    assert isinstance(document, list)
    return document


@pytest.mark.usefixtures("broker")
def test_sessions(ral: Ral, project: Path) -> None:
    keys = told("ral sessions --json")
    assert printed(ral, "sessions", "--json") == []
    odd = project / os.fsdecode(NOT_UTF8)
    odd.mkdir()
    plain = ral("run", "-q", "-d", "--", "sleep", "60").stdout.decode().strip()
    strange = ral("run", "-q", "-d", "--", "sh", "-c", "sleep 60", NOT_UTF8, cwd=odd)
    assert strange.status == 0, strange

    first, second = (
        check(one, keys, "kind", "state", "guard") for one in objects(printed(ral, "sessions", "--json"))
    )
    assert (first["id"], first["state"], first["version"]) == (plain, "detached", VERSION)
    assert (first["project"], first["command"]) == (str(project), ["sleep", "60"])
    assert (first["exit"], first["ended"], first["lost"]) == (None, None, False)
    assert TIME.fullmatch(str(first["started"]))
    assert not {"project_b64", "command_b64"} & set(first)

    assert second["project"] == f"{project}/caf\\xe9"
    assert base64.b64decode(str(second["project_b64"])) == os.fsencode(odd)
    encoded = second["command_b64"]
    assert isinstance(encoded, list)
    assert [base64.b64decode(item) for item in encoded] == [b"sh", b"-c", b"sleep 60", NOT_UTF8]

    assert ral("kill", plain).status == 0
    ended = [check(one, keys, "state") for one in objects(printed(ral, "sessions", "--all", "--json"))]
    assert [one["state"] for one in ended] == ["detached", "ended"]
    assert (ended[1]["id"], ended[1]["exit"], ended[1]["lost"]) == (plain, 143, False)
    assert TIME.fullmatch(str(ended[1]["ended"]))


@pytest.mark.usefixtures("broker")
def test_a_detached_start(ral: Ral) -> None:
    document = check(
        printed(ral, "run", "-q", "-d", "--json", "--", "sleep", "60"), told("ral run -d --json")
    )
    assert ral.live() == [document["id"]]


@pytest.mark.usefixtures("broker")
def test_a_plan(ral: Ral, project: Path) -> None:
    odd = project / os.fsdecode(NOT_UTF8)
    odd.mkdir()
    heading = "ral run --dry-run --json"
    document = check(printed(ral, "run", "--dry-run", "--json", "--", "true", cwd=odd), told(heading))
    plan = document["plan"]
    assert isinstance(plan, list)
    operations = [check(one, told(heading, 1), "op", "mode", "layer") for one in plan]
    (own,) = (one for one in operations if one["layer"] == "project")
    assert own["mode"] == "rw"
    assert (
        base64.b64decode(str(own["dest_b64"]))
        == base64.b64decode(str(own["source_b64"]))
        == os.fsencode(odd)
    )
    assert {one["op"] for one in operations} >= {"bind", "tmpfs", "symlink", "dev", "readonly"}
    encoded = document["options_b64"]
    assert isinstance(encoded, list)
    assert os.fsencode(odd) in [base64.b64decode(item) for item in encoded]
    assert ral.live() == []


@pytest.mark.usefixtures("broker")
def test_what_hides_comes_after_all_that_is_shown(ral: Ral) -> None:
    heading = "ral run --dry-run --json"
    document = check(printed(ral, "run", "--dry-run", "--json", "--", "true"), told(heading))
    plan = document["plan"]
    assert isinstance(plan, list)
    later = ("mask", "kernel", "final")
    assert set(later) <= told(heading, 1)["layer"].words
    places = [later.index(one["layer"]) + 1 if one["layer"] in later else 0 for one in plan]
    assert places == sorted(places)
    shown = [one["dest"] for one, place in zip(plan, places, strict=True) if place == 0]
    for at, dest in enumerate(shown):
        assert not any(earlier.startswith(f"{dest}/") for earlier in shown[:at]), dest


def test_doctor(ral: Ral) -> None:
    done = ral("doctor", "--json")
    assert done.status in (0, 1)
    findings = [check(one, told("ral doctor --json"), "state") for one in json.loads(done.stdout)]
    names = [one["name"] for one in findings]
    assert {"kernel", "bwrap", "landlock"} <= set(names)
    assert len(set(names)) == len(names)
    assert (done.status == 1) == any(one["state"] == "problem" for one in findings)


def test_the_state_of_a_broker(broker: Broker, ral: Ral) -> None:
    keys = told("ral broker status --json")
    before = check(printed(ral, "broker", "status", "--json"), keys)
    assert (before["running"], before["pid"], before["version"]) == (True, broker.pid, VERSION)
    assert (before["sessions"], before["last_launch_us"]) == (0, {})
    assert before["runtime_dir"] == str(broker.runtime)
    assert ral("run", "-q", "--", "true").status == 0
    after = check(printed(ral, "broker", "status", "--json"), keys)["last_launch_us"]
    assert isinstance(after, dict)
    stages = [word for word in keys_in_order("last_launch_us") if word in after]
    assert list(after) == stages == ["request", "plan", "open", "spawn", "bwrap", "go"]
    assert all(type(value) is int and value >= 0 for value in after.values())


def keys_in_order(key: str) -> list[str]:
    """The words of a row of docs/json.md, in order."""
    text = (ROOT / "docs/json.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{key}` \|.*$", text, re.MULTILINE)
    return re.findall(r"`([^`]+)`", row)


def test_no_broker(ral: Ral) -> None:
    assert printed(ral, "broker", "status", "--json", status=1) == {"running": False}


@pytest.mark.usefixtures("broker")
def test_a_configuration(ral: Ral, project: Path, tmp_path: Path) -> None:
    odd = project / os.fsdecode(NOT_UTF8)
    odd.mkdir()
    (tmp_path / "ral").mkdir()
    (tmp_path / "ral/ral.toml").write_text('extra_blocked_paths = ["below"]\nbind_dev_pts = true\n')
    ral.environment["XDG_CONFIG_HOME"] = str(tmp_path)
    heading = "ral config show --json"
    document = check(printed(ral, "config", "show", "--json", cwd=odd), told(heading))
    assert base64.b64decode(str(document["project_b64"])) == os.fsencode(odd)
    settings = {
        one["name"]: one
        for one in (check(one, told(heading, 1), "state") for one in objects(document["settings"]))
    }
    assert settings["private_tmp"]["value"] is True
    assert settings["sandbox_nproc_limit"]["value"] is None
    for setting in settings.values():
        entries = [check(one, told(heading, 2)) for one in objects(setting["entries"])]
        value = setting["value"]
        if isinstance(value, list):
            assert [one["value"] for one in entries] == value
            assert setting["layer"] is None
        elif value is None:
            assert entries == []
        else:
            assert [(one["value"], one["layer"]) for one in entries] == [(value, setting["layer"])]
    # The project's own name is in it, and that is no UTF-8.
    (entry,) = objects(settings["extra_blocked_paths"]["entries"])
    assert isinstance(entry, dict)
    assert base64.b64decode(str(entry["value_b64"])) == os.fsencode(odd / "below")
    assert entry["line"] == 1
    assert document["problems"] != []

    heading = "ral config check --json"
    document = check(printed(ral, "config", "check", "--json"), told(heading))
    problems = [check(one, told(heading, 1), "severity") for one in objects(document["problems"])]
    assert ("warning", 2, "bind_dev_pts") in [(one["severity"], one["line"], one["key"]) for one in problems]
    (tmp_path / "ral/ral.toml").write_text("nonsense")
    document = check(printed(ral, "config", "check", "--json", status=1), told(heading))
    (problem,) = (check(one, told(heading, 1), "severity") for one in objects(document["problems"]))
    assert problem["severity"] == "error"


@pytest.mark.usefixtures("broker")
def test_an_explanation(ral: Ral, project: Path) -> None:
    keys = told("ral explain --json")
    operation = told("ral run --dry-run --json", 1)
    for path in ("/usr", "/nowhere", str(project), "/dev/null", "/proc"):
        document = check(printed(ral, "explain", "--json", path), keys, "state")
        for key in ("mode", "layer"):
            assert document[key] is None or document[key] in operation[key].words
    odd = check(printed(ral, "explain", "--json", NOT_UTF8), keys)
    assert base64.b64decode(str(odd["path_b64"])) == os.fsencode(project) + b"/" + NOT_UTF8
