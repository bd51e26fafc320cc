"""What a file may say, and what the message is where it may not: file, line, key, and what to do."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ral_broker.config.document import OVERRIDES, read_document, toml_text
from ral_broker.config.entries import EntryError, normal_entry
from ral_broker.config.settings import SETTINGS, Settings
from ral_broker.config.values import Other, ParsedFile
from ral_client.run import OVERRIDES as SENT
from support.layers import HOME, layer

FILE = "/home/u/.config/ral/ral.toml"


def problem(text: str) -> str:
    """The one thing that is wrong with a user's file."""
    document = layer("user", text)
    assert len(document.problems) == 1, document.problems
    assert document.problems[0].severity == "error"
    return document.problems[0].message


def test_every_setting_has_a_description_and_every_description_a_setting() -> None:
    assert tuple(SETTINGS) == Settings.__struct_fields__
    for name, setting in SETTINGS.items():
        assert setting.doc, name
        assert bool(setting.note) == (setting.state == "refused"), name
        assert bool(setting.order) == (setting.merge == "ordered"), name


def test_the_client_sends_exactly_the_overrides_that_are_known() -> None:
    assert set(SENT) == set(OVERRIDES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'extra_writeable_paths = ["/x"]',
            "extra_writeable_paths: no setting has this name; the nearest is extra_writable_paths",
        ),
        ('\nHOME_ACCESS = "read"', ":2: HOME_ACCESS: no setting has this name; the nearest is home_access"),
        ("zzzzzz = 1", "ral.toml(5) lists them all"),
        ('private_tmp = "yes"', 'private_tmp: is "yes"; true or false is expected'),
        ("private_tmp = 1", "private_tmp: is 1; true or false is expected"),
        ("sandbox_nproc_limit = true", "is true; a whole number is expected"),
        ("sandbox_nproc_limit = 0", "is out of range; the smallest is 1"),
        ("sandbox_nproc_limit = 99999999999", "is out of range"),
        ('readonly_mounts = "/usr"', 'is "/usr"; an array of strings is expected'),
        ("[readonly_mounts]\nx = 1", "is a table; an array of strings is expected"),
        ('home_access = ["read"]', "is an array; one of"),
        ('home_access = "reed"', 'did you mean "read"?'),
        ('network_filter_mode = "offline"', '"open", "filtered", "proxied", "isolated"'),
        ('sandbox_backend = "firejail"', 'one of "auto", "bwrap"'),
        ("allow_root_session = true", "only the administrator's /etc/ral/ral.toml may set this"),
        ('[match]\nproject = ["/x"]', "belongs into a file in conf.d"),
        ("replace = 1", "is a table of lists"),
        ("[replace]\nprivate_tmp = true", "replace.private_tmp: is no list"),
        (
            '[replace]\nblocked_fils = ["/x"]',
            ":2: replace.blocked_fils: no setting has this name; the nearest is blocked_files",
        ),
        ('blocked_files = [""]', '"" is empty'),
        ('blocked_files = ["a\\u0000b"]', "control character"),
        ('blocked_files = ["/a\\nb"]', '"/a\\u000ab" holds a control character'),
        ('blocked_files = ["/a/../b"]', 'goes up with ".."'),
        ('blocked_files = ["."]', "is the project itself"),
        ('readonly_mounts = ["usr"]', "is no absolute path"),
        ('home_writable = ["../x"]', 'goes up with ".."'),
        ('home_writable = ["."]', "is the home directory itself"),
        ('home_writable = ["~"]', "is the home directory itself"),
        ('home_writable = ["/etc"]', "is not below the home directory"),
        ('extra_writable_paths = ["~other/x"]', "another user's home"),
        ('devices = ["/etc/passwd"]', "is nothing below /dev"),
        ('devices = ["/dev/../etc"]', 'goes up with ".."'),
        ('devices = ["/dev/"]', "is nothing below /dev"),
        ('blocked_env_vars = ["A=B"]', "is no name of an environment variable"),
        ('allowed_env_vars = ["A B"]', "is no name of an environment variable"),
        ('sandbox_env = ["A=\\u0000"]', "control character"),
        ('mount_guard = "kill"', '"kill" is refused: this version has no mount guard'),
        ('network_blocklist = ["x.example"]', "this version filters no network"),
        ('sandbox_modules = ["gcc"]', "environment modules are not loaded"),
        ('slurm_scope = "user"', "commands of the host cannot be called"),
        ("reload_attach = true", "cannot be changed"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_an_error_that_says_what_to_do(text: str, words: str) -> None:
    message = problem(text)
    assert words in message
    assert message.startswith(f"{FILE}:")


def test_all_that_is_wrong_is_found_not_the_first_alone() -> None:
    document = layer("user", 'a_typo = 1\nprivate_tmp = 3\nhome_access = "x"\nblocked_files = ["$(x)"]\n')
    assert [problem.line for problem in document.problems] == [1, 2, 3, 4]
    assert document.values == {}


LISTS = (
    "allowed_project_parents", "readonly_mounts", "home_readonly", "home_writable", "home_seeded_files",
    "blocked_files", "extra_blocked_paths", "extra_writable_paths", "denied_writable_paths",
    "project_protected_paths",
)  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize(
    "value",
    [
        "$(touch /home/u/pwn)",
        "/x/$(id)",
        "`id`",
        "$USER/x",
        "/x/${USER}",
        "$HOMER/x",
        "${HOME}x",
        "/a/$HOME",
    ],
)
def test_what_a_shell_would_expand_is_refused_naming_the_list(name: str, value: str) -> None:
    message = problem(f'{name} = ["{value}"]')
    assert f"{name}: " in message
    assert "a shell would expand" in message


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("written", ["~/d", "$HOME/d", "${HOME}/d", "~//./d/", "/home/u/d//"])
def test_the_home_directory_at_the_start_is_known(name: str, written: str) -> None:
    document = layer("user", f'{name} = ["{written}"]')
    assert document.problems == ()
    assert document.values[name] == ("d" if SETTINGS[name].entries == "below home" else "/home/u/d",)


def test_an_element_twice_counts_once_and_adding_to_a_replacement_is_one_list() -> None:
    document = layer("user", 'blocked_files = ["/a", "/a/", "/b"]\n[replace]\nblocked_files = ["/c", "/a"]')
    assert document.values["blocked_files"] == ("/c", "/a", "/b")
    assert document.replaced == {"blocked_files"}


def test_a_value_that_is_refused_unless_default_may_say_the_default() -> None:
    document = layer("user", 'mount_guard = "off"\nnetwork_blocklist = []\nmount_guard_interval = 300\n')
    assert document.problems == ()


def test_a_list_has_a_limit() -> None:
    values = tuple(f"/x/{number}" for number in range(10_001))
    document = read_document("user", FILE, FILE, ParsedFile({"blocked_files": values}, {}), HOME)
    assert "has 10001 elements" in document.problems[0].message
    document = read_document("user", FILE, FILE, ParsedFile({"blocked_files": values[1:]}, {}), HOME)
    assert document.problems == ()


def test_what_is_no_value_of_a_setting_is_told_in_words() -> None:
    document = read_document(
        "user", FILE, FILE, ParsedFile({"private_tmp": Other("a float")}, {"private_tmp": 4}), HOME
    )
    assert document.problems[0].message == f"{FILE}:4: private_tmp: is a float; true or false is expected"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("match = 1", "is a table"),
        ("[match]", "has to be an array"),
        ("[match]\nproject = []", "has to be an array"),
        ('[match]\nproject = "/x"', "has to be an array"),
        ('[match]\nproject = ["x"]', "is no absolute path"),
        ('[match]\nproject = ["$(x)"]', "is no absolute path|a shell would expand"),
        ('[match]\nproject = ["/x"]\nhost = ["y"]', "nothing else than project"),
    ],
)
def test_a_match_that_means_nothing_is_an_error(text: str, words: str) -> None:
    document = layer("conf.d", text)
    assert len(document.problems) == 1
    assert any(part in document.problems[0].message for part in words.split("|"))


PATHS = st.text(alphabet=string.ascii_letters + "./~$`{(\x00é", max_size=30)


@given(PATHS)
def test_a_normal_form_is_normal_and_goes_nowhere_else(text: str) -> None:
    for kind in ("absolute", "below project", "below home"):
        try:
            normal = normal_entry(kind, text, HOME)
        except EntryError:
            continue
        parts = normal.removeprefix("/").split("/")
        assert normal == "/" or (".." not in parts and "." not in parts and "" not in parts)
        assert normal.startswith("/") == (kind == "absolute") or kind == "below project"
        assert "`" not in normal
        assert "\0" not in normal
        assert normal_entry(kind, normal, HOME) == normal or normal.startswith("~")


@given(st.text())
def test_toml_text_is_one_printable_line_that_means_the_same(text: str) -> None:
    import tomllib

    shown = toml_text(text)
    assert shown.isprintable()
    assert tomllib.loads(f"x = {shown}") == {"x": text}
