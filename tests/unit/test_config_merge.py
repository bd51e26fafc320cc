"""How layers combine: what each class of settings adds, keeps and gives back, and who is told."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ral_broker.config.document import EXPECTED
from ral_broker.config.effective import Origin, restart_digests
from ral_broker.config.merge import merge
from ral_broker.config.settings import SETTINGS, Settings
from ral_broker.config.where import Where, applies
from support.layers import HOME, PROJECT, errors, layer, merged, override, profile, warnings

ADMIN_FILE = "/etc/ral/ral.toml"
USER_FILE = "/home/u/.config/ral/ral.toml"


def names(merge: str) -> list[str]:
    return [
        name for name, setting in SETTINGS.items() if setting.merge == merge and setting.state == "built"
    ]


def entry(name: str, number: int) -> str:
    """An element that a list can have."""
    match SETTINGS[name].entries:
        case "absolute" | "below project":
            return f"/e/{name}/{number}"
        case "device":
            return f"/dev/e{number}"
        case "variable" | "pattern":
            return f"E{number}"
        case _:
            return f"e{number}"


ENFORCED = names("enforced")
ADDITIVE = names("additive")
HARD = names("hard")
ORDERED = names("ordered")


def test_the_classes_are_those_of_the_contract() -> None:
    assert set(ENFORCED) == {
        "blocked_files", "extra_blocked_paths", "blocked_env_vars", "blocked_env_patterns",
        "hide_from_sandbox", "devices_blacklist", "project_protected_paths",
    }  # fmt: skip
    assert set(HARD) == {"private_tmp", "private_ipc", "filter_passwd", "protect_project"}
    assert set(ORDERED) == {"network_filter_mode", "network_filter_fallback"}
    assert {name for name, s in SETTINGS.items() if s.state == "refused" and s.merge == "enforced"} == {
        "network_blocklist", "network_blocklist_except",
    }  # fmt: skip


def test_without_any_layer_the_defaults_hold() -> None:
    result = merged()
    assert result.settings == Settings()
    assert result.problems == ()
    assert set(result.origins) == set(SETTINGS)
    assert result.origins["private_tmp"] == (Origin("true", "built-in"),)
    assert result.origins["sandbox_nproc_limit"] == ()


@pytest.mark.parametrize("name", [*ENFORCED, *ADDITIVE])
def test_a_list_adds_in_the_order_of_the_layers(name: str) -> None:
    a, b, c, d = (entry(name, number) for number in range(4))
    result = merged(
        layer("admin", f'{name} = ["{a}", "{b}"]'),
        layer("user", f'{name} = ["{c}", "{a}"]'),
        layer("conf.d", f'{name} = ["{d}"]'),
    )
    value = getattr(result.settings, name)
    assert value == (*getattr(Settings(), name), a, b, c, d)
    assert warnings(result) == []
    assert [origin.layer for origin in result.origins[name][-4:]] == [
        ADMIN_FILE, ADMIN_FILE, USER_FILE, "conf.d/10.toml",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ENFORCED)
@pytest.mark.parametrize(
    ("kind", "label"), [("user", "user config"), ("conf.d", "project config")], ids=["user", "conf.d"]
)
def test_what_the_administrator_enforces_comes_back_with_a_warning(name: str, kind: str, label: str) -> None:
    a, b = entry(name, 1), entry(name, 2)
    assert kind in ("user", "conf.d")
    weaker = layer("user" if kind == "user" else "conf.d", f"[replace]\n{name} = []\n")
    result = merged(layer("admin", f'{name} = ["{a}", "{b}"]'), weaker)
    assert getattr(result.settings, name) == (a, b)
    assert len(warnings(result)) == 2
    for warning, restored in zip(warnings(result), (a, b), strict=True):
        assert "removed admin-enforced" in warning
        assert f"'{restored}'" in warning
        assert label in warning.lower()
        assert ":2: " in warning


@pytest.mark.parametrize("name", ADDITIVE)
def test_what_the_administrator_adds_stays_without_a_warning(name: str) -> None:
    a, b = entry(name, 1), entry(name, 2)
    result = merged(layer("admin", f'{name} = ["{a}"]'), layer("user", f'[replace]\n{name} = ["{b}"]'))
    assert getattr(result.settings, name) == (a, b)
    assert warnings(result) == []


@pytest.mark.parametrize("name", [*ENFORCED, *ADDITIVE])
def test_without_an_administrators_file_a_list_can_be_replaced(name: str) -> None:
    a = entry(name, 1)
    result = merged(layer("user", f'[replace]\n{name} = ["{a}"]'))
    assert getattr(result.settings, name) == (a,)
    assert result.problems == ()


def test_an_administrators_file_that_does_not_name_a_setting_does_not_pin_it() -> None:
    result = merged(
        layer("admin", "allow_root_session = false"),
        layer("user", "private_tmp = false\n[replace]\ndevices_blacklist = []\n"),
    )
    assert not result.settings.private_tmp
    assert result.settings.devices_blacklist == ()
    assert not result.settings.allow_root_session
    assert result.problems == ()


@pytest.mark.parametrize("name", HARD)
def test_an_administrators_true_stays(name: str) -> None:
    variable = SETTINGS[name].override
    layers = [layer("admin", f"{name} = true"), layer("user", f"{name} = false")]
    layers += [layer("conf.d", f"{name} = false")]
    layers += [override(variable, "false")] if variable else []
    result = merged(*layers)
    assert getattr(result.settings, name) is True
    assert result.origins[name] == (Origin("true", ADMIN_FILE, 1),)
    labels = ["User config", "Project config", "Launch override (env/CLI)"][: len(layers) - 1]
    assert len(warnings(result)) == len(labels)
    for warning, label in zip(warnings(result), labels, strict=True):
        assert f"{label}: " in warning


@pytest.mark.parametrize("name", HARD)
def test_an_administrators_false_may_become_true_and_false_again(name: str) -> None:
    stricter = merged(layer("admin", f"{name} = false"), layer("user", f"{name} = true"))
    assert getattr(stricter.settings, name) is True
    back = merged(
        layer("admin", f"{name} = false"),
        layer("user", f"{name} = true"),
        layer("conf.d", f"{name} = false"),
    )
    assert getattr(back.settings, name) is False
    assert back.problems == ()


def test_an_ordered_word_may_be_stricter_and_never_weaker() -> None:
    for name in ORDERED:
        order, variable = SETTINGS[name].order, SETTINGS[name].override
        assert variable is not None
        for pin in order:
            for wanted in order:
                for weaker_layer in (layer("user", f'{name} = "{wanted}"'), override(variable, wanted)):
                    result = merged(layer("admin", f'{name} = "{pin}"'), weaker_layer)
                    allowed = order.index(wanted) >= order.index(pin)
                    assert getattr(result.settings, name) == (wanted if allowed else pin)
                    assert bool(warnings(result)) == (not allowed)
        assert getattr(merged(layer("user", f'{name} = "{order[0]}"')).settings, name) == order[0]


def test_an_override_beats_files_and_an_administrators_default() -> None:
    result = merged(
        layer("admin", 'home_access = "restricted"\nsandbox_nproc_limit = 100'),
        layer("user", 'home_access = "read"'),
        override("HOME_ACCESS", "Write"),
        override("SANDBOX_NPROC_LIMIT", "70"),
        override("LANDLOCK_HARD_REQUIREMENT", "no"),
    )
    assert (result.settings.home_access, result.settings.sandbox_nproc_limit) == ("write", 70)
    assert not result.settings.landlock_hard_requirement
    assert result.origins["home_access"] == (Origin('"write"', "environment HOME_ACCESS"),)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HOME_ACCESS", "everything"),
        ("NETWORK_FILTER_MODE", "closed"),
        ("PRIVATE_TMP", "maybe"),
        ("SANDBOX_NPROC_LIMIT", "0"),
        ("SANDBOX_NPROC_LIMIT", "-3"),
        ("SANDBOX_NPROC_LIMIT", "9" * 40),
        ("SANDBOX_NPROC_LIMIT", "\u0663"),
        ("SANDBOX_BACKEND", "firejail"),
        ("MOUNT_GUARD", "kill"),
        ("SLURM_SCOPE", "user"),
        ("NETWORK_MAIL_BLOCK", "on"),
        ("MOUNT_GUARD_INTERVAL", "5"),
        ("EXTRA_WRITABLE_PATHS", "/"),
    ],
)
def test_an_override_that_cannot_be_held_refuses_and_is_named(variable: str, value: str) -> None:
    result = merged(override(variable, value))
    assert len(errors(result)) == 1
    assert variable in errors(result)[0]
    assert result.settings == Settings()


def test_an_override_that_says_what_holds_anyway_is_taken() -> None:
    result = merged(override("MOUNT_GUARD", "off"), override("SLURM_SCOPE", "project"))
    assert result.problems == ()


# Parents of projects.


def test_parents_narrow_and_what_lies_elsewhere_is_left_out() -> None:
    result = merged(
        layer("admin", 'allowed_project_parents = ["/data"]'),
        layer("user", 'allowed_project_parents = ["/data/a", "/tmp/foo"]'),
        project="/data/a/p",
    )
    assert result.settings.allowed_project_parents == ("/data/a",)
    (warning,) = warnings(result)
    assert "'/tmp/foo' is not under any admin-allowed parent" in warning
    assert "resolves" not in warning
    assert errors(result) == []


def test_parents_are_compared_with_every_link_followed() -> None:
    result = merged(
        layer("admin", 'allowed_project_parents = ["/data"]'),
        layer("user", 'allowed_project_parents = ["/data/out", "/in", "/data"]'),
        links={"/data/out": "/tmp", "/in": "/data/a"},
        project="/data/a/p",
    )
    assert result.settings.allowed_project_parents == ("/in", "/data")
    (warning,) = warnings(result)
    assert "(it resolves to '/tmp')" in warning


def test_parents_of_several_layers_of_the_users_add_up() -> None:
    text = 'allowed_project_parents = ["{}"]'
    result = merged(layer("user", text.format("/a")), layer("conf.d", text.format("/b")), project="/b/p")
    assert result.settings.allowed_project_parents == ("/a", "/b")
    assert result.problems == ()


def test_no_parent_left_is_a_refusal() -> None:
    result = merged(
        layer("admin", 'allowed_project_parents = ["/data"]'),
        layer("user", 'allowed_project_parents = ["/tmp"]'),
        project="/data/p",
    )
    assert "allows no directory at all" in errors(result)[0]
    assert errors(merged(layer("admin", "allowed_project_parents = []")))


def test_parents_are_told_apart_by_component() -> None:
    foo = layer("admin", 'allowed_project_parents = ["/foo"]')
    assert errors(merged(foo, project="/foobar"))
    assert not errors(merged(foo, project="/foo"))
    assert not errors(merged(foo, project="/foo/bar"))
    assert not errors(merged(layer("admin", 'allowed_project_parents = ["/"]'), project="/anything"))


def test_a_project_under_none_of_the_parents_refuses_and_names_them() -> None:
    (error,) = errors(merged(layer("user", 'allowed_project_parents = ["~/src"]')))
    assert PROJECT in error
    assert "'/home/u/src'" in error
    assert error.startswith(f"{USER_FILE}:1: allowed_project_parents: ")


# What cannot be made writable.


@pytest.mark.parametrize(
    "spelled", [".ssh/", "./.ssh", ".ssh//", ".ssh/authorized_keys", "~/.ssh", "$HOME/.ssh/x"]
)
def test_a_home_entry_that_overlaps_the_administrators_read_only_ones_is_left_out(spelled: str) -> None:
    result = merged(
        layer("admin", 'home_readonly = [".ssh"]'), layer("user", f'home_writable = ["{spelled}"]')
    )
    assert result.settings.home_writable == ()
    (warning,) = warnings(result)
    assert "overlaps admin home_readonly entry '.ssh'" in warning


@pytest.mark.parametrize(
    ("setting", "value", "links"),
    [
        ("home_writable", ".config", {}),
        ("home_writable", "link", {"/home/u/link": "/home/u/.config/git"}),
        ("home_writable", "link", {"/home/u/link": "/home/u/.config"}),
        ("home_writable", "real", {"/home/u/.config": "/home/u/real"}),
        ("extra_writable_paths", "/home/u/k", {"/home/u/k": "/home/u/.config/git"}),
        ("extra_writable_paths", "/home/u/.config/git/hooks", {}),
        ("extra_writable_paths", "/elsewhere", {"/home/u/.config": "/elsewhere"}),
        ("extra_writable_paths", "/var/u/.config/git", {"/home/u": "/var/u"}),
    ],
)
def test_above_and_through_links_counts_as_overlap(setting: str, value: str, links: dict[str, str]) -> None:
    result = merged(
        layer("admin", 'home_readonly = [".config/git"]'),
        layer("user", f'{setting} = ["{value}"]'),
        links=links,
    )
    assert getattr(result.settings, setting) == ()
    assert "overlaps admin home_readonly entry '.config/git'" in warnings(result)[0]


def test_the_administrators_own_writable_entries_are_exempt() -> None:
    result = merged(
        layer("admin", 'home_readonly = [".config"]\nhome_writable = [".config/tool"]'),
        layer("user", 'home_writable = [".config/tool", ".config/other"]'),
    )
    assert result.settings.home_writable == (".config/tool",)
    assert len(warnings(result)) == 1


def test_read_only_entries_of_the_users_own_or_built_in_do_not_forbid() -> None:
    result = merged(layer("user", 'home_readonly = [".ssh"]\nhome_writable = [".local/bin/x", ".ssh/x"]'))
    assert result.settings.home_writable == (".local/bin/x", ".ssh/x")


@pytest.mark.parametrize(
    ("denied", "entry", "links"),
    [
        ("/srv/x", "/srv/x/y", {}),
        ("/srv/x", "/srv/x", {}),
        ("/srv/x", "/srv/l/y", {"/srv/l": "/srv/x"}),
        ("/srv/l", "/srv/x/y", {"/srv/l": "/srv/x"}),
        ("/srv/l", "/srv/m", {"/srv/l": "/srv/x", "/srv/m": "/srv/x/y"}),
        ("~/keep", "~/keep/y", {}),
    ],
)
def test_nothing_denied_becomes_writable_in_any_spelling(
    denied: str, entry: str, links: dict[str, str]
) -> None:
    user = layer("user", f'extra_writable_paths = ["{entry}", "/srv/xy"]\n')
    result = merged(layer("admin", f'denied_writable_paths = ["{denied}"]'), user, links=links)
    assert result.settings.extra_writable_paths == ("/srv/xy",)
    assert "denied_writable_paths" in warnings(result)[0]
    assert errors(result) == []
    assert "/srv/xy" in merged(user, links=links).settings.extra_writable_paths


def test_denied_holds_for_the_home_for_profiles_and_for_the_administrator() -> None:
    denied = 'denied_writable_paths = ["~/.cache/secret", "/srv/x"]\n'
    result = merged(
        profile(home_writable=(".cache/secret/a", ".cache/uv"), extra_writable_paths=("/srv/x/p",)),
        layer("admin", denied + 'extra_writable_paths = ["/srv/x/a"]'),
    )
    assert result.settings.home_writable == (".cache/uv",)
    assert result.settings.extra_writable_paths == ()
    assert len(warnings(result)) == 3


def test_a_denied_project_is_refused() -> None:
    for links in ({}, {"/denied": PROJECT}):
        path = "/denied" if links else "/home/u/work"
        (error,) = errors(merged(layer("admin", f'denied_writable_paths = ["{path}"]'), links=links))
        assert "nothing may write" in error
        assert PROJECT in error


def test_the_administrators_denials_are_the_administrators_alone() -> None:
    admin = layer("admin", 'denied_writable_paths = ["/srv/x"]')
    emptied = merged(admin, layer("user", "[replace]\ndenied_writable_paths = []"))
    assert emptied.settings.denied_writable_paths == ("/srv/x",)
    added = merged(admin, layer("user", 'denied_writable_paths = ["/srv/y"]'))
    assert added.settings.denied_writable_paths == ("/srv/x",)
    assert "'/srv/y' is left out" in warnings(added)[0]
    alone = merged(layer("user", 'denied_writable_paths = ["/srv/y"]'))
    assert alone.settings.denied_writable_paths == ("/srv/y",)


@pytest.mark.parametrize(
    ("entry", "links"),
    [
        (HOME, {}),
        ("/", {}),
        ("/home", {}),
        ("~", {}),
        ("/l", {"/l": HOME}),
        ("/l", {"/l": "/"}),
        ("/var/home/u", {"/home": "/var/home"}),
        ("/var", {"/home": "/var/home"}),
    ],
)
def test_the_home_and_what_lies_above_it_is_never_writable_as_a_whole(
    entry: str, links: dict[str, str]
) -> None:
    for kind in ("admin", "user"):
        result = merged(
            layer("admin" if kind == "admin" else "user", f'extra_writable_paths = ["{entry}"]'), links=links
        )
        assert result.settings.extra_writable_paths == ()
        assert "is $HOME or an ancestor" in warnings(result)[0]


def test_a_link_in_the_home_to_the_home_is_not_writable_either() -> None:
    result = merged(layer("user", 'home_writable = ["me"]'), links={"/home/u/me": HOME})
    assert result.settings.home_writable == ()


def test_what_does_not_answer_is_left_out_and_named() -> None:
    document = layer("user", 'extra_writable_paths = ["/dead", "/alive"]')
    where = Where(HOME, PROJECT, {HOME: HOME, PROJECT: PROJECT, "/alive": "/alive"})
    result = merge([document], where)
    assert result.settings.extra_writable_paths == ("/alive",)
    assert "'/dead' did not answer" in warnings(result)[0]


# Smaller rules.


def test_relative_paths_are_put_below_the_project() -> None:
    result = merged(
        layer("user", 'blocked_files = [".env", "~/x"]\nextra_blocked_paths = ["a//b/"]\n'
        'extra_writable_paths = ["./out"]\nproject_protected_paths = ["Makefile", "/abs"]')
    )  # fmt: skip
    settings = result.settings
    assert settings.blocked_files == (PROJECT + "/.env", "/home/u/x")
    assert settings.extra_blocked_paths == (PROJECT + "/a/b",)
    assert settings.extra_writable_paths == (PROJECT + "/out",)
    assert settings.project_protected_paths[-2:] == ("Makefile", "/abs")


def test_a_relative_entry_of_the_administrators_is_enforced_in_each_project() -> None:
    result = merged(
        layer("admin", 'blocked_files = [".env"]'), layer("user", "[replace]\nblocked_files = []")
    )
    assert result.settings.blocked_files == (PROJECT + "/.env",)
    assert "removed admin-enforced blocked_files entry" in warnings(result)[0]


def test_path_cannot_be_hidden() -> None:
    result = merged(layer("user", 'hide_from_sandbox = ["PATH", "X"]'))
    assert result.settings.hide_from_sandbox == ("X",)
    assert "PATH cannot be hidden" in warnings(result)[0]


def test_writable_and_seeded_win_over_read_only() -> None:
    result = merged(
        layer(
            "user",
            'home_readonly = ["a", "b", "c"]\nhome_writable = ["a", ".local/bin"]\n'
            'home_seeded_files = ["b"]',
        )
    )
    assert set(result.settings.home_readonly) >= {"c", ".bashrc"}
    assert not {"a", "b", ".local/bin"} & set(result.settings.home_readonly)
    assert [bool(re.search(r"(writable|seeded) wins", warning)) for warning in warnings(result)] == [
        True,
        True,
    ]


def test_bind_dev_pts_does_nothing_and_says_so() -> None:
    assert "no effect" in warnings(merged(layer("user", "bind_dev_pts = true")))[0]
    assert not warnings(merged(layer("user", "bind_dev_pts = false")))


def test_a_profile_is_the_weakest_layer() -> None:
    result = merged(
        profile(home_writable=(".tool",), allowed_env_vars=("TOOL_KEY",), blocked_files=("~/.tool/key",)),
        layer("admin", 'home_readonly = [".tool"]\n[replace]\nblocked_files = []'),
    )
    assert result.settings.home_writable == ()
    assert result.settings.blocked_files == ()
    assert "overlaps admin home_readonly" in warnings(result)[0]
    assert result.origins["allowed_env_vars"][-1] == Origin('"TOOL_KEY"', "profile tool")


# Projects of conf.d files.


@pytest.mark.parametrize(
    ("pattern", "project", "expected"),
    [
        ("~/work/*", "/home/u/work/p", True),
        ("~/work/*", "/home/u/work/p/deeper", True),
        ("~/work/*", "/home/u/work", False),
        ("~/work/*", "/home/u/other/p", False),
        ("~/work", "/home/u/work/p", True),
        ("~/work", "/home/u/workshop", False),
        ("~/w*/p?", "/home/u/work/p1", True),
        ("~/w*/p?", "/home/u/work/x/p1", False),
        ("~/**/p1", "/home/u/a/b/p1", True),
        ("~/**/p1", "/home/u/p1", True),
        ("~/**/p1", "/home/u/a/b", False),
        ("/**", "/anything", True),
        ("/*", "/anything/below", True),
        ("/srv/[ab]", "/srv/b", True),
        ("/srv/[ab]", "/srv/c", False),
        ("/link/*", "/real/p", True),
        ("/link/*", "/link/p", True),
    ],
)
def test_patterns_of_projects(pattern: str, project: str, expected: bool) -> None:
    document = layer("conf.d", f'[match]\nproject = ["/never", "{pattern}"]')
    canonical = {"/link": "/real"}
    assert applies(document, Where(HOME, project, canonical)) == expected


def test_a_file_for_other_projects_contributes_nothing() -> None:
    text = 'private_tmp = false\nextra_writable_paths = ["/x"]\n[match]\nproject = ["{}"]'
    ours, other = layer("conf.d", text.format("~/work/*")), layer("conf.d", text.format("~/other"))
    assert merged(other).settings == Settings()
    assert merged(ours).settings != Settings()


def test_a_file_for_other_projects_is_checked_all_the_same() -> None:
    assert errors(merged(layer("conf.d", 'typo = 1\n[match]\nproject = ["/other"]')))


# Laws.

_LISTS = st.sampled_from([*ENFORCED, *ADDITIVE])


@st.composite
def files(draw: st.DrawFn) -> str:
    """A file of a user's that tries this and that."""
    lines: list[str] = []
    replaced: list[str] = []
    for name in draw(st.lists(_LISTS, max_size=4, unique=True)):
        entries = [entry(name, number) for number in draw(st.lists(st.integers(0, 4), max_size=4))]
        (replaced if draw(st.booleans()) else lines).append(f"{name} = {entries!r}")
    lines += [f"{name} = {draw(st.sampled_from(['true', 'false']))}" for name in HARD if draw(st.booleans())]
    lines += [
        f'{name} = "{draw(st.sampled_from(SETTINGS[name].order))}"'
        for name in ORDERED
        if draw(st.booleans())
    ]
    return "\n".join([*lines, "[replace]", *replaced])


@given(files(), files(), files())
def test_no_combination_of_layers_weakens_a_pin(admin: str, user: str, conf_d: str) -> None:
    pins = merged(layer("admin", admin))
    result = merged(layer("admin", admin), layer("user", user), layer("conf.d", conf_d))
    document = layer("admin", admin)
    for name, value in document.values.items():
        effective, pinned = getattr(result.settings, name), getattr(pins.settings, name)
        match SETTINGS[name].merge:
            case "enforced":
                assert set(document_entries(name, value)) <= set(effective)
            case "hard":
                assert effective or not pinned
            case "ordered":
                order = SETTINGS[name].order
                assert order.index(effective) >= order.index(pinned)


def document_entries(name: str, value: object) -> tuple[str, ...]:
    assert isinstance(value, tuple)
    return (
        value if SETTINGS[name].entries != "below project" else tuple(v for v in value if v.startswith("/"))
    )


@given(files(), files())
def test_a_layer_twice_is_that_layer_once(admin: str, user: str) -> None:
    layers = layer("admin", admin), layer("user", user)
    once, twice = merged(*layers), merged(*layers, layer("conf.d", user))
    assert {n: set(v) if isinstance(v, tuple) else v for n, v in values(once.settings).items()} == {
        n: set(v) if isinstance(v, tuple) else v for n, v in values(twice.settings).items()
    }
    assert merged(*layers) == once


@given(files(), files(), files())
def test_lists_hold_nothing_twice_and_every_element_has_its_origin(
    admin: str, user: str, conf_d: str
) -> None:
    result = merged(layer("admin", admin), layer("user", user), layer("conf.d", conf_d))
    for name in SETTINGS:
        if EXPECTED[name].type is tuple:
            value = getattr(result.settings, name)
            assert len(set(value)) == len(value)
            assert len(result.origins[name]) == len(value)
            assert all(
                origin.value.strip('"') in element
                for origin, element in zip(result.origins[name], value, strict=True)
            )


@given(files(), files())
def test_the_order_of_the_stronger_layers_additions_is_kept(admin: str, user: str) -> None:
    document = layer("user", user)
    result = merged(layer("admin", admin), document)
    for name, value in document.values.items():
        if isinstance(value, tuple):
            effective = getattr(result.settings, name)
            admins = layer("admin", admin).values.get(name, ())
            assert isinstance(admins, tuple)
            own = [
                e for e in value if e in effective and e not in admins and e not in getattr(Settings(), name)
            ]
            assert [e for e in effective if e in own] == own


def values(settings: Settings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in SETTINGS}


# For reload.


def test_a_digest_changes_with_its_setting_alone_and_says_nothing() -> None:
    changed = merged(layer("user", 'sandbox_env = ["KEY=hunter2"]\nextra_writable_paths = ["/x"]')).settings
    before, after = restart_digests(Settings(), b"salt"), restart_digests(changed, b"salt")
    assert {name for name in before if before[name] != after[name]} == {"sandbox_env"}
    assert after != restart_digests(changed, b"other")
    assert "hunter2" not in repr(after)
    assert not before.keys() & {"extra_writable_paths", "home_writable", "blocked_files", "sandbox_quiet"}
    assert before.keys() >= {
        "devices",
        "private_tmp",
        "network_filter_mode",
        "home_access",
        "enabled_agents",
    }
