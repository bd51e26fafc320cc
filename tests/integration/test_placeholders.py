"""Empty files for blocked paths that do not exist: made by handle, removed only if they are still ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ral_broker.errors import Refused
from ral_broker.sessions.placeholders import make_placeholders, remove_placeholders


def tree(top: Path) -> list[tuple[str, int, int]]:
    return sorted(
        (str(path.relative_to(top)), path.lstat().st_mode, path.lstat().st_size) for path in top.rglob("*")
    )


def test_a_file_and_the_directories_above_it_are_made_and_removed(tmp_path: Path) -> None:
    before = tree(tmp_path)
    made, notices = make_placeholders([bytes(tmp_path / "a/b/secret"), bytes(tmp_path / "token")])
    assert (tmp_path / "a/b/secret").stat().st_size == 0
    assert [p.path for p in made] == [bytes(tmp_path / name) for name in ("a", "a/b", "a/b/secret", "token")]
    assert len(notices) == 4
    assert remove_placeholders(made) == []
    assert tree(tmp_path) == before


def test_what_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("S")
    made, _ = make_placeholders([bytes(tmp_path / "secret")])
    assert made == []
    assert (tmp_path / "secret").read_text() == "S"


def test_every_path_that_cannot_be_made_is_named_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    (tmp_path / "file").touch()
    before = tree(tmp_path)
    paths = [bytes(tmp_path / name) for name in ("fine/x", "closed/y", "file/z")]
    with pytest.raises(Refused) as refused:
        make_placeholders(paths)
    assert "closed/y" in refused.value.message
    assert "file/z" in refused.value.message
    assert tree(tmp_path) == before


def test_a_placeholder_that_was_filled_or_replaced_stays(tmp_path: Path) -> None:
    made, _ = make_placeholders([bytes(tmp_path / name) for name in ("filled", "replaced", "gone", "d/e")])
    (tmp_path / "filled").write_text("S")
    os.rename(tmp_path / "replaced", tmp_path / "elsewhere")
    (tmp_path / "replaced").touch()
    (tmp_path / "gone").unlink()
    (tmp_path / "d/other").touch()
    notices = remove_placeholders(made)
    assert any("filled" in text and "no longer empty" in text for text in notices)
    assert any("replaced" in text and "has been replaced" in text for text in notices)
    assert any("/d:" in text for text in notices)
    assert (tmp_path / "filled").read_text() == "S"
    assert (tmp_path / "replaced").exists()
    assert not (tmp_path / "d/e").exists()


def test_a_link_to_nothing_gets_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    made, _ = make_placeholders([bytes(tmp_path / "link")])
    assert [p.path for p in made] == [bytes(tmp_path / "target")]
    assert (tmp_path / "link").is_symlink()
