"""The schema that editors read takes what the loader takes, and is printed in docs/."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import cast

import jsonschema
import pytest

from ral_broker.config.document import DEFAULTS, EXPECTED, Kind
from ral_broker.config.schema import json_schema, render
from ral_broker.config.settings import SETTINGS
from support.installed import ROOT
from support.layers import layer

PRINTED = ROOT / "docs/ral.schema.json"
EXAMPLES = sorted((ROOT / "docs/examples").rglob("*.toml"))


def is_valid(text: str) -> bool:
    checker = jsonschema.Draft202012Validator(json_schema())
    return not list(checker.iter_errors(tomllib.loads(text)))


def kind_of(example: Path) -> Kind:
    if example.parent.name == "conf.d":
        return "conf.d"
    return "admin" if example.stem == "admin" else "user"


def test_the_printed_schema_is_that_of_the_code() -> None:
    assert PRINTED.read_text(encoding="utf-8") == render()
    assert json.loads(render()) == json_schema()
    jsonschema.Draft202012Validator.check_schema(json_schema())


def test_every_setting_is_in_it() -> None:
    properties = cast("dict[str, dict[str, object]]", json_schema()["properties"])
    assert set(properties) == {*SETTINGS, "match", "replace"}
    lists = {name for name, expected in EXPECTED.items() if expected.type is tuple}
    assert set(cast("dict[str, object]", properties["replace"]["properties"])) == lists
    for name in SETTINGS:
        if SETTINGS[name].state == "built" and DEFAULTS[name] is not None:
            default = DEFAULTS[name]
            assert properties[name]["default"] == (list(default) if isinstance(default, tuple) else default)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_taken_by_schema_and_loader(example: Path) -> None:
    text = example.read_text(encoding="utf-8")
    assert is_valid(text)
    assert layer(kind_of(example), text).problems == ()
    first = text.partition("\n")[0]
    assert first.startswith("#:schema ")
    assert (example.parent / first.removeprefix("#:schema ")).resolve() == PRINTED


def test_there_are_examples() -> None:
    assert {kind_of(example) for example in EXAMPLES} == {"admin", "user", "conf.d"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_a_typo_in_any_key_of_an_example_is_refused_by_both(example: Path) -> None:
    text = example.read_text(encoding="utf-8")
    kind = kind_of(example)
    keys = [
        line.partition(" = ")[0] for line in text.splitlines() if " = " in line and not line.startswith("#")
    ]
    assert keys
    for key in keys:
        wrong = text.replace(f"\n{key} = ", f"\n{key}x = ")
        assert not is_valid(wrong), key
        assert layer(kind, wrong).problems, key


DEFAULT_TEXTS = [f"{name} = {json.dumps(DEFAULTS[name])}" for name in SETTINGS if DEFAULTS[name] is not None]


@pytest.mark.parametrize("text", DEFAULT_TEXTS, ids=lambda text: text.partition(" ")[0])
def test_every_default_may_be_written_down(text: str) -> None:
    assert is_valid(text)
    assert layer("admin", text).problems == ()


@pytest.mark.parametrize(
    "text",
    [
        "private_tmp = 1",
        'private_tmp = "true"',
        'home_access = "reed"',
        'readonly_mounts = "/usr"',
        "readonly_mounts = [1]",
        'readonly_mounts = ["usr"]',
        'blocked_files = [""]',
        'blocked_files = ["`id`"]',
        'extra_writable_paths = ["$USER"]',
        'devices = ["/etc"]',
        'blocked_env_vars = ["A=B"]',
        "sandbox_nproc_limit = 0",
        "sandbox_nproc_limit = 1.5",
        'mount_guard = "kill"',
        'network_blocklist = ["x"]',
        "reload_attach = true",
        "replace = []",
        "[replace]\nprivate_tmp = true",
        '[replace]\nblocked_files = "x"',
        "[match]",
        "[match]\nproject = []",
        '[match]\nproject = ["relative"]',
        '[match]\nproject = ["/x"]\nhost = 1',
    ],
)
def test_what_schema_refuses_the_loader_refuses(text: str) -> None:
    assert not is_valid(text)
    assert layer("conf.d", text).problems
