"""What ``ral explain`` says of the configuration: whose an entry is, and what to write where."""

from __future__ import annotations

import pytest

from ral_broker.config.advice import Sources, advise
from ral_broker.config.document import Document, Setting
from ral_broker.config.effective import Effective
from ral_broker.config.merge import merge
from ral_broker.config.where import Where
from ral_broker.envelope.explain import Explanation, State, explain
from ral_broker.envelope.facts import PathFact
from ral_broker.envelope.plan import Bind, Layer, Mask, Operation, Plan, Tmpfs
from ral_broker.envelope.policy import Rule

ADMIN, USER = "/etc/ral/ral.toml", "/home/u/.config/ral/ral.toml"
SOURCES = Sources(ADMIN, USER, (b"/var/home/u", b"/home/u"), b"/work/p")
FILE = PathFact("file", resolved=None, reaches="file")


def effective(*documents: Document) -> Effective:
    """What the layers come to."""
    paths = ("/", "/home/u", "/work/p", "/data", "/data/deep")
    merged = merge(documents, Where("/home/u", "/work/p", {path: path for path in paths}))
    return Effective(settings=merged.settings, origins=merged.origins)


def admin(**values: Setting) -> Document:
    return Document(kind="admin", file=ADMIN, name=ADMIN, values=values, lines=dict.fromkeys(values, 3))


def user(**values: Setting) -> Document:
    return Document(kind="user", file=USER, name=USER, values=values, lines=dict.fromkeys(values, 7))


def explanation(
    path: bytes, why: str, setting: str | None, *, state: State = "read-only", layer: Layer = "system"
) -> Explanation:
    by = Bind(dest=path, source=path, writable=state == "writable", layer=layer, why=why)
    return Explanation(path, state, by, why, setting, "…")


def test_an_entry_has_a_file_and_a_line() -> None:
    found = advise(
        explanation(b"/data/deep/x", "extra_writable_paths", "extra_writable_paths", state="writable"),
        effective(user(extra_writable_paths=("/data", "/data/deep"))),
        SOURCES,
    )
    assert found.origin == f"{USER}:7"
    assert found.sentences == (f'The entry "/data/deep" of extra_writable_paths is from {USER}:7.',)


def test_what_the_administrator_lists_only_the_administrator_takes_out() -> None:
    found = advise(
        explanation(b"/work/p/.env", "blocked_files", "blocked_files", state="masked"),
        effective(admin(blocked_files=(".env",)), user(blocked_files=(".env",))),
        SOURCES,
    )
    assert found.origin == f"{ADMIN}:3"
    assert found.sentences[-1] == "Only the administrator of this host can take it out."


def test_a_default_is_taken_out_under_replace() -> None:
    found = advise(explanation(b"/usr/bin/env", "readonly_mounts", "readonly_mounts"), effective(), SOURCES)
    assert found.origin == "built-in"
    assert found.sentences == (
        'The entry "/usr" of readonly_mounts is a default.',
        f"A list under [replace] in {USER} takes the place of the defaults.",
    )


@pytest.mark.parametrize(
    ("documents", "last"),
    [
        ((), f"To change that: protect_project = false in {USER}."),
        ((user(protect_project=True),), f"To change that: protect_project = false in {USER}."),
        ((admin(protect_project=True),), "Only the administrator of this host can change it."),
    ],
)
def test_the_setting_that_lifts_the_protection_of_a_project_is_named(
    documents: tuple[Document, ...], last: str
) -> None:
    for why, path in (
        ("project_protected_paths", b"/work/p/.envrc"),
        ("protect_project", b"/data/git/hooks"),
    ):
        found = advise(explanation(path, why, why, layer="protect"), effective(*documents), SOURCES)
        assert found.sentences[-1] == last, why


@pytest.mark.parametrize(
    ("path", "setting", "documents", "says"),
    [
        (b"/srv/x", "extra_writable_paths", (), f'extra_writable_paths = ["/srv/x"] in {USER}.'),
        (
            b"/srv/x",
            "extra_writable_paths",
            (user(extra_writable_paths=("/data",)),),
            f'add "/srv/x" to extra_writable_paths in {USER}:7.',
        ),
        (b"/home/u/docs", "home_readonly", (), f'home_readonly = ["docs"] in {USER}.'),
        (b"/var/home/u/docs", "home_writable", (), f'home_writable = ["docs"] in {USER}.'),
        (b'/srv/a"b\xff', "readonly_mounts", (), 'readonly_mounts = ["/srv/a\\"b\\xff"]'),
    ],
)
def test_what_to_add_and_where(
    path: bytes, setting: str, documents: tuple[Document, ...], says: str
) -> None:
    found = advise(
        explanation(path, "home_access = tmpwrite", setting, state="absent"), effective(*documents), SOURCES
    )
    assert found.origin is None
    assert len(found.sentences) == 1
    assert says in found.sentences[0].replace("\\\\", "\\"), found


def test_nothing_is_advised_where_no_setting_helps() -> None:
    assert advise(explanation(b"/run", "a fresh /run", None), effective(), SOURCES).sentences == ()
    assert advise(
        explanation(b"/dev/null", "always", "devices", state="own"), effective(), SOURCES
    ) == advise(explanation(b"/home/u", "always", "home_readonly"), effective(), SOURCES)


def plan(*operations: Operation) -> Plan:
    return Plan(operations=operations, cwd=b"/")


HOME = Tmpfs(dest=b"/home/u", layer="home", why="home_access = tmpwrite")


def test_what_is_not_shown_and_would_be_hidden_anyway_says_so() -> None:
    rules = (Rule(b"/home/u/.ssh", "credentials"), Rule(b"/home/u/secret", "blocked_files"))
    facts = {b"/home/u/.ssh/id": FILE, b"/home/u/secret": FILE, b"/home/u/docs": FILE}
    found = explain(plan(HOME), facts, b"/home/u/.ssh/id", rules)
    # No setting shows it, so none is named.
    assert (found.state, found.setting) == ("absent", None)
    assert found.sentence == "/home/u/.ssh/id exists in the host and is hidden (credentials)"
    found = explain(plan(HOME), facts, b"/home/u/secret", rules)
    assert (found.state, found.setting) == ("absent", "blocked_files")
    found = explain(plan(HOME), facts, b"/home/u/docs", rules)
    assert (found.state, found.setting) == ("absent", "home_readonly")


def test_what_cannot_be_made_has_the_reason_of_the_directory() -> None:
    hooks = Bind(
        dest=b"/work/p/.git/hooks", source=b"/work/p/.git/hooks", writable=False, layer="protect",
        why="project_protected_paths",
    )  # fmt: skip
    found = explain(plan(hooks), {}, b"/work/p/.git/hooks/pre-commit")
    assert (found.state, found.setting) == ("absent", "project_protected_paths")
    assert "cannot be made: /work/p/.git/hooks is read-only (project_protected_paths)" in found.sentence
    advice = advise(found, effective(), SOURCES)
    assert advice.sentences[0] == 'The entry ".git/hooks" of project_protected_paths is a default.'


def test_a_word_is_set_otherwise_and_an_entry_taken_out() -> None:
    tmp = Bind(dest=b"/tmp", source=b"/tmp", writable=True, layer="scratch", why="private_tmp = false")
    assert "set private_tmp otherwise" in explain(plan(tmp), {b"/tmp": FILE}, b"/tmp").sentence
    mask = Mask(dest=b"/work/p/.env", directory=False, layer="mask", why="blocked_files")
    said = explain(plan(HOME, mask), {b"/work/p/.env": FILE}, b"/work/p/.env").sentence
    assert "take it out of blocked_files" in said
