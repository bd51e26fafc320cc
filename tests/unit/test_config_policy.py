"""From settings to a policy: what the administrator pins reaches the builder as more than a setting."""

from __future__ import annotations

import pytest

from ral_broker import admin
from ral_broker.config.effective import Effective, Origin
from ral_broker.config.policy import Place, expand, pinned_readonly
from ral_broker.config.settings import Settings

PLACE = Place(
    uid=1000, home=b"/home/u", home_path=b"/var/home/u", project=b"/var/home/u/p", cwd=b"/var/home/u/p",
    session="", hidden=(), installation=(), pins=(), fresh_proc=True,
)  # fmt: skip


def effective(readonly: dict[str, str], writable: dict[str, str] | None = None) -> Effective:
    settings = Settings(home_readonly=tuple(readonly), home_writable=tuple(writable or {}))
    origins = {
        "home_readonly": tuple(Origin(f'"{name}"', layer) for name, layer in readonly.items()),
        "home_writable": tuple(Origin(f'"{name}"', layer) for name, layer in (writable or {}).items()),
    }
    return Effective(settings=settings, origins=origins)


def test_what_the_administrator_shows_read_only_is_never_made_writable() -> None:
    found = pinned_readonly(effective({".ssh": admin.PATH, ".vimrc": "built-in", ".x": "conf.d/a"}), PLACE)
    assert [rule.path for rule in found] == [b"/var/home/u/.ssh"]


@pytest.mark.parametrize("writable", [".config", ".config/git", ".config/git/x"])
def test_what_the_administrator_makes_writable_there_stays_so(writable: str) -> None:
    theirs = effective({".config/git": admin.PATH}, {writable: admin.PATH})
    assert list(pinned_readonly(theirs, PLACE)) == []
    users = effective({".config/git": admin.PATH}, {writable: "/home/u/.config/ral/ral.toml"})
    assert [rule.path for rule in pinned_readonly(users, PLACE)] == [b"/var/home/u/.config/git"]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("~", b"/h"), ("~/a", b"/h/a"), ("/a//b/./c", b"/a/b/c"), ("a", b"/p/a"), ("//a", b"/a"),
        ("caf\udce9", b"/p/caf\xe9"),
    ],
)  # fmt: skip
def test_a_path_is_absolute_and_normal(text: str, path: bytes) -> None:
    assert expand(text, home=b"/h", base=b"/p") == path
