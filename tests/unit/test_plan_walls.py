"""What no configuration, no project and no link of a program's making gets past the plan builder."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ral_broker.config.policy import Found, Place, session_policy
from ral_broker.config.settings import Settings
from ral_broker.config.sockets import Socket
from ral_broker.envelope.facts import SILENT, PathFact, look
from ral_broker.envelope.places import ALWAYS_HIDDEN, CONFIGURATION, HOME_PROTECTED, ROOT_MASKED, SOCKETS
from ral_broker.envelope.plan import (
    Bind,
    Copy,
    Device,
    Directory,
    Identity,
    Mask,
    Plan,
    ReadOnly,
    Symlink,
    Tmpfs,
    is_under,
)
from ral_broker.envelope.policy import Rule, SessionPolicy
from ral_broker.envelope.session_plan import SessionPlan, plan_session, session_plan
from ral_broker.errors import Refused
from ral_broker.sessions.preparation import _socket_doubt
from support.policies import HOME, PROJECT, blocked, directory, index, link, policy, regular, usual

Facts = dict[bytes, PathFact]


def rule(path: bytes, why: str = "test") -> tuple[Rule, ...]:
    return (Rule(path, why),)


def there(*paths: bytes) -> Facts:
    """Directories."""
    return {path: directory(path) for path in paths}


def binds(plan: Plan, place: bytes, *, writable: bool | None = None) -> list[bytes]:
    """What is shown of the host at or below ``place``."""
    return [
        o.dest
        for o in plan.operations
        if isinstance(o, Bind) and is_under(o.dest, place) and writable in (None, o.writable)
    ]


def masked(plan: Plan) -> list[bytes]:
    return [o.dest for o in plan.operations if isinstance(o, Mask)]


def planned(facts: Facts, **changes: object) -> SessionPlan:
    return session_plan(policy(**changes), usual() | facts)


# Projects and rules.


@pytest.mark.parametrize("setting", ["denied_writable", "protected"])
@pytest.mark.parametrize("place", [PROJECT, HOME + b"/work"])
def test_a_project_in_what_stays_read_only_is_refused(setting: str, place: bytes) -> None:
    for facts in (there(place), {b"/l": link(place, place)}):
        named = rule(next(iter(facts)), "denied_writable_paths")
        with pytest.raises(Refused, match="denied_writable_paths"):
            planned(facts, **{setting: named})
    beside = HOME + b"/work/other"
    assert binds(planned(there(beside), **{setting: rule(beside)}).plan, PROJECT, writable=True)


def test_nothing_in_what_is_hidden_is_shown() -> None:
    config = HOME + b"/.ssh/config"
    facts = there(HOME + b"/.ssh") | {config: regular(config)}
    for setting in ("home_readonly", "home_writable", "readonly", "writable"):
        made = planned(facts, **{setting: rule(config, setting)})
        assert binds(made.plan, config) == []
        assert any(setting in notice and "hidden (credentials)" in notice for notice in made.notices)
    made = planned(facts, home_seeded=rule(config, "home_seeded_files"))
    assert not [o for o in made.plan.operations if isinstance(o, Copy)]
    assert "hidden (credentials)" in made.notices[0]


@pytest.mark.parametrize("path", [b"/run", b"/run/user", b"/run/user/1000"])
def test_the_directories_of_sockets_are_shown_to_nobody(path: bytes) -> None:
    for setting in ("readonly", "writable"):
        made = planned(there(path), **{setting: rule(path)})
        assert binds(made.plan, path) == []
        assert "sockets of other programs" in made.notices[0]
    below = path + b"/app"
    assert binds(planned(there(path, below), readonly=rule(below)).plan, path) == [below]


def test_the_kernels_own_file_systems_are_not_for_settings_to_show() -> None:
    names = (b"/proc/sys", b"/dev/dri", b"/sys/fs/cgroup")
    assert [binds(planned(there(n), writable=rule(n)).plan, n) for n in names] == [[]] * 3
    assert [binds(planned(there(n), readonly=rule(n)).plan, n) for n in names] == [[], [], [names[2]]]


def test_a_link_that_a_program_could_have_made_shows_nothing_elsewhere() -> None:
    name, kept = PROJECT + b"/build", PROJECT + b"/real"
    for setting in ("readonly", "writable"):
        made = planned({name: link(b"/srv/x", b"/srv/x")}, **{setting: rule(name)})
        assert binds(made.plan, b"/srv") == []
        assert "a program inside could have made" in made.notices[0]
    assert not planned({name: link(b"real", kept)}, writable=rule(name)).notices


@pytest.mark.parametrize("path", [HOME, b"/home", b"/"])
def test_no_setting_makes_the_home_writable(path: bytes) -> None:
    for mode in ("tmpwrite", "restricted", "read"):
        made = planned(there(HOME, path), writable=rule(path, "extra_writable_paths"), home_access=mode)
        assert binds(made.plan, b"/", writable=True) == [PROJECT]
        assert any("is $HOME or an ancestor" in notice for notice in made.notices)


def test_what_is_denied_is_not_writable_even_if_it_does_not_answer() -> None:
    denied, below = b"/srv/x", b"/srv/x/y"
    for fact in (directory(denied), SILENT):
        facts = {denied: fact, below: directory(below)}
        made = planned(facts, denied_writable=rule(denied), writable=rule(below))
        assert binds(made.plan, b"/srv", writable=True) == []
        assert "stays read-only" in made.notices[0]


# What is made, and where.


def test_no_link_is_made_in_what_the_host_shows() -> None:
    facts = there(b"/srv", b"/data") | {b"/srv/l": link(b"/data", b"/data")}
    made = plan_session(policy(readonly=(*rule(b"/srv"), *rule(b"/srv/l"))), usual() | facts)
    assert [o.dest for o in made.operations if isinstance(o, Symlink) and o.layer == "system"] == []
    alone = plan_session(policy(readonly=rule(b"/srv/l")), usual() | facts)
    assert index(alone, Symlink, b"/srv/l") < len(alone.operations)


def test_nothing_is_made_in_a_home_that_is_the_hosts() -> None:
    seed, new = HOME + b"/.gitconfig", HOME + b"/.cache"
    made: dict[str, list[bytes]] = {}
    for mode in ("tmpwrite", "read", "write"):
        plan = planned(
            there(HOME) | {seed: regular(seed)}, home_access=mode, home_seeded=rule(seed),
            home_writable=rule(new),
        ).plan  # fmt: skip
        made[mode] = [o.dest for o in plan.operations if isinstance(o, Copy | Directory)]
    assert made == {"tmpwrite": [new, seed], "read": [], "write": []}


def test_no_scratch_directory_is_made_below_what_the_host_shows() -> None:
    made = planned(there(b"/", b"/tmp", HOME), readonly=rule(b"/"))
    own = [o.dest for o in made.plan.operations if isinstance(o, Tmpfs)]
    assert own == [b"/tmp", HOME]
    assert any("/var/tmp" in n and "is not made" in n for n in made.notices)


def test_what_holds_something_protected_cannot_be_renamed() -> None:
    deep = PROJECT + b"/a/b/.env"
    plan = planned({deep: regular(deep)}, blocked=blocked(deep)).plan
    assert binds(plan, PROJECT, writable=True) == [PROJECT, PROJECT + b"/a", PROJECT + b"/a/b"]
    assert masked(plan) == [deep]


def test_an_empty_home_that_is_restricted_is_closed_after_everything_in_it() -> None:
    plan = planned({}, home_access="restricted").plan
    at = index(plan, ReadOnly, HOME)
    assert at > max(i for i, o in enumerate(plan.operations) if is_under(o.dest, HOME) and i != at)


# Masks.


def test_no_setting_shows_what_is_always_hidden() -> None:
    paths = [HOME + b"/" + name for name in ALWAYS_HIDDEN]
    listed = tuple(Rule(path, "home_readonly") for path in paths)
    for mode in ("read", "write"):
        plan = planned(there(HOME, *paths), home_access=mode, home_readonly=listed).plan
        assert masked(plan) == paths


def test_credentials_that_a_profile_names_are_masked() -> None:
    keys = b"/etc/keys"
    assert masked(planned(there(keys), credentials=rule(keys)).plan) == [keys]


def test_sockets_in_a_shared_tmp_are_masked_unless_named() -> None:
    path = b"/tmp/.X11-unix"
    facts = there(b"/tmp", path)
    plan = planned(facts, private_tmp=False).plan
    assert [(o.dest, o.why) for o in plan.operations if isinstance(o, Mask)] == [(path, SOCKETS)]
    assert masked(planned(facts, private_tmp=False, readonly=rule(path)).plan) == []


def test_what_is_to_be_hidden_and_does_not_answer_refuses_where_it_would_be_shown() -> None:
    path = PROJECT + b"/mnt/key"
    with pytest.raises(Refused, match="cannot be looked at"):
        planned({path: SILENT}, blocked=blocked(path))
    planned({b"/srv/key": SILENT}, blocked=blocked(b"/srv/key"))


def test_a_mask_names_the_object_that_was_found() -> None:
    secret, closed = PROJECT + b"/.env", PROJECT + b"/closed"
    facts = {
        secret: PathFact("file", None, secret, "file", Identity(3, 4)),
        closed + b"/key": PathFact("unreadable", reaches="unreadable", closed=closed),
    }
    plan = planned(facts, blocked=blocked(secret, closed + b"/key")).plan
    found = {o.dest: o.identity for o in plan.operations if isinstance(o, Mask)}
    assert found == {secret: Identity(3, 4), closed: None}


def test_shared_memory_of_the_host_is_masked_like_everything_else() -> None:
    path = b"/dev/shm/key"
    plan = planned(there(b"/dev/shm") | {path: regular(path)}, private_ipc=False, blocked=blocked(path)).plan
    assert index(plan, Mask, path) > index(plan, Bind, b"/dev/shm")


def test_root_does_not_read_what_the_kernel_tells_root() -> None:
    root = policy(uid=0, home=b"/root", home_path=b"/root")
    plan = plan_session(root, usual() | {path: regular(path) for path in ROOT_MASKED})
    assert masked(plan) == list(ROOT_MASKED)


def test_only_a_device_below_dev_is_shown_as_one() -> None:
    facts = {
        b"/dev/kvm": PathFact("file", None, b"/dev/kvm", "file", Identity(1, 5), False, 7),
        b"/dev/plain": regular(b"/dev/plain"),
        b"/dev/away": PathFact("link", b"/srv/node", b"/srv/node", "file", Identity(1, 6), False, 8),
    }
    made = planned(facts, devices=tuple(facts))
    assert [o.dest for o in made.plan.operations if isinstance(o, Device)] == [b"/dev/kvm"]
    assert len(made.notices) == 2


# What runs or decides outside later.


def test_what_runs_at_the_next_login_is_not_written() -> None:
    paths = [HOME + b"/" + name for name in HOME_PROTECTED]
    plan = planned(there(HOME, *paths), home_access="write").plan
    assert sorted(binds(plan, HOME, writable=False)) == sorted(paths)
    listed = planned(there(HOME, *paths), home_access="write", home_writable=rule(paths[0])).plan
    assert paths[0] not in binds(listed, HOME, writable=False)


@pytest.mark.parametrize("setting", ["protected", "denied_writable"])
def test_what_is_protected_is_read_only_above_and_below_every_grant(setting: str) -> None:
    hooks, deep = PROJECT + b"/.git/hooks", PROJECT + b"/.git/hooks/deep"
    plan = planned(there(hooks, deep), **{setting: rule(hooks)}, writable=rule(deep)).plan
    assert binds(plan, hooks, writable=True) == []
    assert hooks in binds(plan, hooks, writable=False)


def test_a_seeded_file_of_a_home_that_is_writable_is_not_written() -> None:
    seed = HOME + b"/.gitconfig"
    facts = there(HOME) | {seed: regular(seed)}
    plan = planned(facts, home_access="write", home_seeded=rule(seed)).plan
    assert binds(plan, seed, writable=False) == [seed]


def test_the_configuration_of_the_next_session_cannot_be_made_inside() -> None:
    path = HOME + b"/.config/ral"
    changes = {"home_access": "write", "protected": rule(path, CONFIGURATION)}
    with pytest.raises(Refused, match=r"mkdir -p /home/u/\.config/ral"):
        planned(there(HOME), **changes)
    assert path in binds(planned(there(HOME, path), **changes).plan, HOME, writable=False)
    planned({}, protected=rule(path, CONFIGURATION))


def test_what_is_protected_and_does_not_answer_refuses_where_it_would_be_writable() -> None:
    path = PROJECT + b"/mnt/hooks"
    for setting in ("protected", "denied_writable"):
        with pytest.raises(Refused, match="cannot be looked at"):
            planned({path: SILENT}, **{setting: rule(path)})
        planned({b"/srv/hooks": SILENT}, **{setting: rule(b"/srv/hooks")})


# From settings to a policy.


def from_settings(settings: Settings, configuration: tuple[bytes, ...] = ()) -> SessionPolicy:
    place = Place(
        uid=1000, home=HOME, home_path=HOME, project=PROJECT, cwd=PROJECT, session="0123abcd", hidden=(),
        installation=(), pins=(), fresh_proc=True,
    )  # fmt: skip
    return session_policy(settings, place, Found(), configuration, share_network=True)


def test_the_configuration_that_was_read_is_protected() -> None:
    assert from_settings(Settings(), (b"/c/ral",)).protected == rule(b"/c/ral", CONFIGURATION)


def test_denied_paths_reach_the_builder() -> None:
    found = from_settings(Settings(denied_writable_paths=("/srv/x", "~/y"))).denied_writable
    assert found == tuple(Rule(p, "denied_writable_paths") for p in (b"/srv/x", HOME + b"/y"))


def test_only_the_socket_that_was_seen_is_passed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    name = os.fsencode(path)
    asked = Socket(name, (), "sockets = $S")
    assert _socket_doubt(asked, {name: look(name)}) == f"sockets = $S: there is no {path}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        seen = look(name)
        assert _socket_doubt(asked, {name: seen}) is None
        path.rename(tmp_path / "kept")
    for make in (path.touch, path.mkdir):
        make()
        for fact in (look(name), seen):
            with pytest.raises(Refused, match="is no socket"):
                _socket_doubt(asked, {name: fact})
        path.unlink() if path.is_file() else path.rmdir()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        with pytest.raises(Refused, match="is no socket"):
            _socket_doubt(asked, {name: seen})
