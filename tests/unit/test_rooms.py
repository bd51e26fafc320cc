"""Every room imports what it is allowed to, and nothing else: what nobody thought of is refused."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

import pytest

from support.installed import ROOT

DYNAMIC = {"importlib", "imp", "runpy", "pkgutil", "zipimport"}
STDLIB = frozenset(sys.stdlib_module_names) - DYNAMIC
ROOMS = {"ral_broker", "ral_client", "ral_helpers", "ral_protocol"}
BUILTIN_IMPORTERS = {"__import__", "exec", "eval", "compile"}

# Common path of the client (run, exec, sessions, reload): what these cost is the client's start.
CLIENT_EARLY = {
    "posix", "sys", "errno", "_signal", "_socket", "time", "select",
    "ral_client", "ral_protocol", "ral_protocol.wire", "ral_protocol.exits",
}  # fmt: skip
CLIENT_TERMINAL = CLIENT_EARLY | {"fcntl", "termios"}

PURE = (
    "plan", "policy", "places", "session_plan", "home_plan", "kernel_plan", "coverage", "masks", "protect",
    "checks", "explain", "options", "slots", "warrant", "environment", "git_config", "protection", "passwd",
)  # fmt: skip
"""Modules of ral_broker/envelope that turn values into values."""
PURE_ALLOWED = {
    "__future__", "collections", "enum", "fnmatch", "functools", "itertools", "re", "struct", "typing",
    "msgspec", "ral_broker", "ral_protocol",
}  # fmt: skip
PURE_SIBLINGS = {f"ral_broker.envelope.{name}" for name in PURE} | {
    "ral_broker.envelope",
    "ral_broker.envelope.facts",
    "ral_broker.errors",
    # For the printable form of a name.
    "ral_broker.log",
}


class Import(NamedTuple):
    """One import statement, or a call that amounts to one."""

    module: str
    line: int
    top: bool


def imports_of(source: str) -> Iterator[Import]:
    """Every module that ``source`` imports anywhere, names of submodules and relative ones (``.``) included.

    ``top`` is whether it runs when the module itself is imported.
    """
    tree = ast.parse(source)
    late = {
        inner
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        or (isinstance(outer, ast.If) and ast.unparse(outer.test) == "TYPE_CHECKING")
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        top = node not in late
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, node.lineno, top) for alias in names)
            case ast.ImportFrom(module=module, level=0, names=names) if module:
                yield Import(module, node.lineno, top)
                if module.split(".")[0] in ROOMS:
                    yield from (Import(f"{module}.{alias.name}", node.lineno, top) for alias in names)
            case ast.ImportFrom():
                yield Import(".", node.lineno, top)
            case ast.Call(func=ast.Name(id=name)) if name in BUILTIN_IMPORTERS:
                yield Import(f"{name}()", node.lineno, top)
            case ast.Attribute(attr="import_module" | "exec_module" | "load_module" as name):
                yield Import(f"{name}()", node.lineno, top)


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def refused(source: str, allowed: AbstractSet[str], early_only: bool = False) -> list[Import]:
    """Imports in ``source`` that are allowed neither by their full name nor by their top-level package.

    What can import a module whose name is a value is allowed by its full name only."""
    found = []
    for imported in imports_of(source):
        package = imported.module.split(".")[0]
        by_package = package in allowed and package not in DYNAMIC
        if imported.module not in allowed and not by_package and (imported.top or not early_only):
            found.append(imported)
    return found


def offences(paths: list[Path], allowed: AbstractSet[str], early_only: bool = False) -> list[str]:
    """What is refused in ``paths``, a line each."""
    return [
        f"{path.relative_to(ROOT)}:{imported.line}: {imported.module}"
        for path in paths
        for imported in refused(path.read_text(encoding="utf-8"), allowed, early_only)
    ]


def named(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


# importlib.resources finds the native helpers by a string, so that no import leads to them.
BROKER_ALLOWED = STDLIB | {
    "ral_broker", "ral_protocol", "importlib.resources",
    "trio", "msgspec", "pyroute2", "systemd", "pyseccomp",
}  # fmt: skip
HELPERS_ALLOWED = STDLIB
PROTOCOL_ALLOWED = STDLIB | {"msgspec", "ral_protocol"}
CLIENT_ALLOWED = STDLIB - {"asyncio", "threading"} | {"ral_client", "ral_protocol", "msgspec"}


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("broker/ral_broker", BROKER_ALLOWED),
        ("helpers/ral_helpers", HELPERS_ALLOWED),
        ("protocol/ral_protocol", PROTOCOL_ALLOWED),
        ("client/ral_client", CLIENT_ALLOWED),
    ],
)
def test_a_room_imports_what_it_is_allowed_to(room: str, allowed: frozenset[str]) -> None:
    paths = modules(room)
    assert paths, f"{room} holds no module"
    executing = ROOT / "client/ral_client/start.py"
    assert offences([path for path in paths if path != executing], allowed) == []


def test_one_module_executes_byte_code() -> None:
    """What starts the client does for its own modules what import does."""
    start = ROOT / "client/ral_client/start.py"
    assert offences([start], CLIENT_ALLOWED | {"exec()"}) == []
    assert [imported.module for imported in refused(start.read_text(), CLIENT_ALLOWED)] == ["exec()"]


def test_wire_and_exits_import_nothing() -> None:
    paths = [ROOT / "protocol/ral_protocol" / name for name in ("wire.py", "exits.py", "__init__.py")]
    assert offences(paths, set()) == []


def test_the_client_imports_late_what_is_not_on_the_common_path() -> None:
    """At the top of a module only what is cheap; what decodes or draws is imported where it is needed."""
    late_rooms = {"show.py", "logs.py", "doctor.py"}
    for path in modules("client/ral_client"):
        if path.name in late_rooms:
            continue
        allowed = CLIENT_TERMINAL if path.name in {"terminal.py", "attach.py"} else CLIENT_EARLY
        assert offences([path], allowed, early_only=True) == []


def test_ctypes_is_used_in_one_module_of_the_broker() -> None:
    users = [path for path in modules("broker") if refused(path.read_text(), BROKER_ALLOWED - {"ctypes"})]
    assert named(users) == ["broker/ral_broker/syscalls.py"]


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_neither_opens_nor_waits(name: str) -> None:
    path = ROOT / "broker/ral_broker/envelope" / f"{name}.py"
    source = path.read_text(encoding="utf-8")
    assert offences([path], PURE_ALLOWED) == []
    used = {
        i.module
        for i in imports_of(source)
        if (ROOT / "broker" / f"{i.module.replace('.', '/')}.py").exists()
    }
    assert used <= PURE_SIBLINGS
    tree = ast.parse(source)
    calls = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"open", "print", "input"}
    assert not any(isinstance(node, ast.Await | ast.AsyncFunctionDef) for node in ast.walk(tree))


def test_python_helpers_are_one_file_each() -> None:
    for path in modules("helpers/ral_helpers"):
        assert not [
            i for i in imports_of(path.read_text()) if i.module.split(".")[0] in ROOMS or i.module == "."
        ]


def test_no_room_is_opened_to_its_neighbour_by_a_stray_package() -> None:
    """An ``__init__.py`` beside a package would give every module a second name."""
    for room in ("broker", "client", "helpers", "protocol", "tests"):
        assert not (ROOT / room / "__init__.py").exists()


@pytest.mark.parametrize(
    ("room", "line", "allowed"),
    [
        ("client", "import trio", CLIENT_ALLOWED),
        ("client", "def f():\n    import asyncio", CLIENT_ALLOWED),
        ("client", "import ral_broker.spawn", CLIENT_ALLOWED),
        ("client", "from importlib import import_module", CLIENT_ALLOWED),
        ("client", "import sys\nsys.modules['x'].import_module('trio')", CLIENT_ALLOWED),
        ("client", "__import__('trio')", CLIENT_ALLOWED),
        ("broker", "from ral_client import call", BROKER_ALLOWED),
        ("broker", "import ral_helpers", BROKER_ALLOWED),
        ("broker", "if True:\n    import attr", BROKER_ALLOWED),
        ("broker", "from . import errors", BROKER_ALLOWED),
        ("protocol", "import trio", PROTOCOL_ALLOWED),
        ("helpers", "from ral_helpers import probe", HELPERS_ALLOWED),
        ("helpers", "import pyroute2", HELPERS_ALLOWED),
        ("helpers", "exec('import trio')", HELPERS_ALLOWED),
        ("wire", "import struct", frozenset()),
    ],
)
def test_the_wall_stops_a_planted_violation(room: str, line: str, allowed: frozenset[str]) -> None:
    """The check itself, on sources that break it."""
    assert refused(line, allowed), f"{line!r} passes in {room}"
