"""Why a path is what it is inside, for each state, and which setting would change it."""

from __future__ import annotations

import pytest

from ral_broker.envelope import masks
from ral_broker.envelope.explain import Explanation, State, explain
from ral_broker.envelope.facts import ABSENT, PathFact
from ral_broker.envelope.plan import Bind, Copy, Identity, Mask, Tmpfs
from ral_broker.envelope.policy import HomeAccess, Rule, Text
from ral_broker.envelope.session_plan import plan_session
from support.policies import HOME, PROJECT, blocked, directory, link, policy, regular, usual


def rule(path: bytes, why: str) -> tuple[Rule, ...]:
    return (Rule(path, why),)


def said(path: bytes, facts: dict[bytes, PathFact] | None = None, **changes: object) -> Explanation:
    """What is said of a path of a host with ``facts``, in a session with these changes."""
    wanted, found = policy(**changes), usual() | (facts or {})
    plan = plan_session(wanted, found)
    answer = explain(plan, found, path, masks.rules(wanted))
    assert answer.path == path
    assert path.decode() in answer.sentence
    return answer


def short(answer: Explanation) -> tuple[State, str | None]:
    return answer.state, answer.setting


ENV = PROJECT + b"/.env"
SSH = HOME + b"/.ssh"
GH = HOME + b"/.config/gh"
BASHRC = HOME + b"/.bashrc"
WIDE = b"/srv/wide"


def test_what_the_project_grants_is_writable_and_no_setting_takes_it_back() -> None:
    answer = said(PROJECT + b"/src", {PROJECT + b"/src": directory(PROJECT + b"/src")})
    assert short(answer) == ("writable", None)
    assert answer.sentence == f"{PROJECT.decode()}/src is writable (project)"
    assert said(PROJECT + b"/new").sentence.endswith(
        "does not exist in the host and may be made there (project)"
    )


def test_what_a_list_makes_writable_names_that_list() -> None:
    answer = said(WIDE, {WIDE: directory(WIDE)}, writable=rule(WIDE, "extra_writable_paths"))
    assert short(answer) == ("writable", "extra_writable_paths")
    assert "take it out of extra_writable_paths" in answer.sentence


def test_a_directory_that_is_bound_to_hold_something_protected_is_writable_for_its_own_reason() -> None:
    deep = WIDE + b"/a/key"
    facts = {WIDE: directory(WIDE), WIDE + b"/a": directory(WIDE + b"/a"), deep: regular(deep)}
    answer = said(WIDE + b"/a", facts, writable=rule(WIDE, "extra_writable_paths"), blocked=blocked(deep))
    assert short(answer) == ("writable", "extra_writable_paths")


def test_a_word_is_set_otherwise() -> None:
    facts = {HOME: directory(HOME), HOME + b"/x": regular(HOME + b"/x")}
    answer = said(HOME + b"/x", facts, home_access="write")
    assert short(answer) == ("writable", "home_access")
    assert "set home_access otherwise" in answer.sentence


@pytest.mark.parametrize(
    ("path", "setting"),
    [(b"/usr/bin/env", "extra_writable_paths"), (HOME + b"/notes", "home_writable")],
)
def test_what_is_read_only_says_what_would_make_it_writable(path: bytes, setting: str) -> None:
    facts = {path: regular(path), HOME: directory(HOME)}
    answer = said(path, facts, home_access="read")
    assert short(answer) == ("read-only", setting)
    assert f"list it in {setting} to write to it" in answer.sentence
    gone = said(path, {HOME: directory(HOME)}, home_access="read")
    assert short(gone) == ("absent", setting)
    assert "does not exist in the host and cannot be made" in gone.sentence


def test_what_runs_at_the_next_login_has_a_setting_and_what_the_broker_runs_has_none() -> None:
    facts = {HOME: directory(HOME), BASHRC: regular(BASHRC)}
    answer = said(BASHRC, facts, home_access="write")
    assert short(answer) == ("read-only", "home_writable")
    assert 'home_writable = [".bashrc"]' in answer.sentence
    listed = said(BASHRC, facts, home_access="write", home_writable=rule(BASHRC, "home_writable"))
    assert listed.state == "writable"
    venv = PROJECT + b"/.venv"
    answer = said(venv, {venv: directory(venv)}, installation=(venv,))
    assert (*short(answer), answer.why) == ("read-only", None, "ral's own installation")
    answer = said(b"/usr/bin/bwrap", pins=(("bwrap", b"/usr/bin/bwrap"),))
    assert short(answer) == ("read-only", None)


def test_a_protected_path_is_for_its_own_setting_to_change() -> None:
    hooks = PROJECT + b"/.git/hooks"
    answer = said(hooks, {hooks: directory(hooks)}, protected=rule(hooks, "protect_project"))
    assert short(answer) == ("read-only", "protect_project")
    assert "that is for protect_project to change" in answer.sentence


def test_a_mask_says_whose_it_is() -> None:
    answer = said(ENV, {ENV: regular(ENV)}, blocked=blocked(ENV))
    assert isinstance(answer.by, Mask)
    assert short(answer) == ("masked", "blocked_files")
    assert "looks empty and cannot be written; take it out of blocked_files" in answer.sentence
    # What lies below a masked directory is gone with it.
    below = said(ENV + b"/x", {ENV: directory(ENV)}, blocked=blocked(ENV))
    assert short(below) == ("masked", "blocked_files")


@pytest.mark.parametrize("mode", ["read", "write"])
def test_some_credentials_can_be_shown_and_some_never(mode: HomeAccess) -> None:
    facts = {HOME: directory(HOME), SSH: directory(SSH), GH: directory(GH)}
    assert short(said(SSH, facts, home_access=mode)) == ("masked", None)
    answer = said(GH, facts, home_access=mode)
    assert short(answer) == ("masked", "home_readonly")
    assert 'home_readonly = [".config/gh"] would show it read-only' in answer.sentence
    listed = said(GH, facts, home_access="read", home_readonly=rule(GH, "home_readonly"))
    assert listed.state == "read-only"


def test_what_would_be_masked_if_it_were_shown_does_not_advise_to_show_it() -> None:
    """In an empty home there is nothing to mask; home_readonly = [".ssh"] would not show it either."""
    facts = {SSH + b"/id": regular(SSH + b"/id"), SSH: directory(SSH), GH: directory(GH)}
    answer = said(SSH + b"/id", facts)
    assert short(answer) == ("absent", None)
    assert "exists in the host and is hidden (credentials)" in answer.sentence
    assert short(said(GH, facts)) == ("absent", "home_readonly")
    assert short(said(ENV, {ENV: ABSENT}, blocked=blocked(ENV))) == ("writable", None)


@pytest.mark.parametrize(
    ("path", "setting"),
    [
        (HOME + b"/notes", "home_readonly"), (b"/srv/x", "readonly_mounts"), (b"/sys/fs", "devices"),
    ],
)  # fmt: skip
def test_what_is_not_shown_says_which_setting_would(path: bytes, setting: str) -> None:
    answer = said(path, {path: regular(path)})
    assert short(answer) == ("absent", setting)
    assert "exists in the host and is not shown" in answer.sentence


def test_what_is_nowhere_is_said_to_be_nowhere() -> None:
    answer = said(b"/nowhere")
    assert (*short(answer), answer.by, answer.why) == ("absent", None, None, "")
    assert "no setting names it" in answer.sentence


def test_file_systems_of_the_sessions_own_forget_what_is_written() -> None:
    answer = said(HOME)
    assert isinstance(answer.by, Tmpfs)
    assert short(answer) == ("own", "home_access")
    assert "what is written there is gone at the end" in answer.sentence
    assert "nothing can be made there" in said(HOME, home_access="restricted").sentence
    assert short(said(b"/tmp/x")) == ("own", "private_tmp")
    assert short(said(b"/proc/self")) == ("own", None)
    assert short(said(b"/dev/null")) == ("own", "devices")
    # Above the project: made, for something is shown below it.
    assert short(said(HOME + b"/work", {HOME + b"/work": directory(HOME + b"/work")}))[0] == "own"
    made = said(b"/srv", {b"/srv": directory(b"/srv"), WIDE: directory(WIDE)}, readonly=rule(WIDE, "r"))
    assert short(made) == ("own", None)
    assert "nothing can be made in it" in made.sentence


def test_what_is_made_for_the_session_names_its_setting() -> None:
    seed = HOME + b"/.gitconfig"
    answer = said(seed, {seed: regular(seed)}, home_seeded=rule(seed, "home_seeded_files"))
    assert isinstance(answer.by, Copy)
    assert short(answer) == ("own", "home_seeded_files")
    text = Text(b"/etc/passwd", b"x", "filter_passwd")
    answer = said(text.path, {text.path: regular(text.path)}, texts=(text,))
    assert short(answer) == ("read-only", "filter_passwd")
    kvm = b"/dev/kvm"
    device = PathFact("file", None, kvm, "file", Identity(1, 5), False, 7)
    assert short(said(kvm, {kvm: device}, devices=(kvm,))) == ("writable", "devices")


def test_a_link_is_explained_by_what_it_leads_to() -> None:
    facts = {
        b"/usr/bin/env": regular(b"/usr/bin/env"),
        b"/bin/env": PathFact("file", None, b"/usr/bin/env", "file"),
        PROJECT + b"/l": link(b"/srv/x", b"/srv/x", "file"),
        b"/srv/x": regular(b"/srv/x"),
    }
    answer = said(b"/bin/env", facts)
    assert short(answer) == ("read-only", "extra_writable_paths")
    assert answer.sentence.startswith("/bin/env leads to /usr/bin/env; /usr/bin/env is read-only")
    assert isinstance(answer.by, Bind)
    assert answer.by.dest == b"/usr"
    answer = said(PROJECT + b"/l", facts)
    assert short(answer) == ("absent", "readonly_mounts")
    assert "leads to /srv/x" in answer.sentence


def test_links_that_go_round_end() -> None:
    a, b = PROJECT + b"/a", PROJECT + b"/b"
    answer = said(a, {a: link(b"b", b, "file"), b: link(b"a", a, "file")})
    assert answer.state == "writable"
    assert answer.sentence.count("leads to") <= 8
