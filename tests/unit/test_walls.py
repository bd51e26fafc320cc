"""Every check that is marked as a wall has a test that falls without it; tools/walls.py tries them."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import ral_broker
from support.installed import ROOT


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("walls", ROOT / "tools" / "walls.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load()
PACKAGE = Path(ral_broker.__path__[0])


def test_every_marked_line_is_known_and_every_known_line_is_marked() -> None:
    known = [(wall.file, wall.line) for wall in TOOL.WALLS]
    assert sorted(known) == sorted(TOOL.marked(PACKAGE))
    assert len(known) == len(set(known)) > 40


@pytest.mark.parametrize("wall", TOOL.WALLS, ids=lambda wall: f"{wall.file}: {wall.line[:40]}")
def test_a_wall_can_be_taken_down_and_its_tests_exist(wall: object) -> None:
    assert isinstance(wall, TOOL.Wall)
    source = (PACKAGE / wall.file).read_text()
    without = TOOL.taken_down(source, wall)
    assert without != source
    ast.parse(without)
    assert wall.tests
    for test in wall.tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text()
        if name:
            assert re.search(rf"def {re.escape(name.partition('[')[0])}\(", text), test
        assert wall.root == ("pytest.mark.root" in text and _is_roots(text, name.partition("[")[0])), test


def _is_roots(text: str, name: str) -> bool:
    """Whether the test, or its whole file, is marked root."""
    before = text.partition(f"def {name}(")[0] if name else ""
    head = text.partition("\ndef ")[0]
    decorators = re.split(r"\n\n\n", before)[-1]
    return (
        "pytest.mark.root" in decorators or re.search(r"pytestmark = .*pytest\.mark\.root", head) is not None
    )


def test_a_line_that_is_gone_is_noticed() -> None:
    wall = TOOL.WALLS[0]
    with pytest.raises(ValueError, match="0 times"):
        TOOL.taken_down("nothing\n", wall)
