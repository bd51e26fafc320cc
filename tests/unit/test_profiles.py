"""Profiles: what is shipped, what a file may hold, which one a launch gets."""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ral_broker
from ral_broker.config import profile_file
from ral_broker.config.parse import Other, ParsedFile, Value
from ral_broker.config.profile import BUILT_IN, Profile
from ral_broker.config.profile_file import decode
from ral_broker.config.profiles import ADMIN_DIRECTORY, built_in, find_profile, login_warning
from ral_broker.config.settings import Settings
from ral_broker.config.sockets import Socket, named_sockets
from ral_broker.envelope.environment import DEFAULT, environment_policy
from ral_broker.errors import Refused
from support.installed import ROOT

USER_DIRECTORY = "/home/u/.config/ral/profiles"
SHIPPED = Path(ral_broker.__file__).parent / "profiles"


def parsed(text: str) -> ParsedFile:
    values: dict[str, Value] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in tomllib.loads(text).items()
    }
    lines = {
        line.split("=")[0].strip(): number for number, line in enumerate(text.splitlines(), 1) if "=" in line
    }
    return ParsedFile(values, lines)


async def parse(content: bytes, label: str) -> ParsedFile:
    del label
    return parsed(content.decode())


class Tree:
    """Files by path, in the place of the host's."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files
        self.read_as: list[tuple[str, bool]] = []

    async def names(self, directory: str) -> tuple[str, ...]:
        return tuple(path.rpartition("/")[2] for path in self.files if path.rpartition("/")[0] == directory)

    async def read(self, path: str, *, trusted: bool) -> bytes | None:
        self.read_as.append((path, trusted))
        return self.files[path].encode() if path in self.files else None


def tree(*, admin: Mapping[str, str] | None = None, user: Mapping[str, str] | None = None) -> Tree:
    return Tree(
        {f"{ADMIN_DIRECTORY}/{name}.toml": text for name, text in (admin or {}).items()}
        | {f"{USER_DIRECTORY}/{name}.toml": text for name, text in (user or {}).items()}
    )


async def find(
    files: Tree | None = None,
    *,
    name: str | None = None,
    command: bytes = b"true",
    enabled: tuple[str, ...] = ("*",),
) -> Profile | None:
    return await find_profile(
        files or tree(), parse, USER_DIRECTORY, name=name, command=command, enabled=enabled
    )


async def found(files: Tree | None = None, *, name: str | None = None, command: bytes = b"true") -> Profile:
    profile = await find(files, name=name, command=command)
    assert profile is not None
    return profile


# What is shipped.


def test_every_file_that_is_shipped_is_a_profile() -> None:
    assert set(built_in()) == {path.stem for path in SHIPPED.iterdir()}
    assert {"shell", "codex", "claude", "npm", "cargo", "pip", "go"} <= set(built_in())


@pytest.mark.parametrize("name", sorted(built_in()))
def test_what_is_shipped_asks_for_nothing_outside_of_the_home_directory(name: str) -> None:
    lists = built_in()[name].lists
    assert not {"extra_writable_paths", "devices", "sockets", "extends"} & lists.keys()
    assert all(path.startswith("~/") for path in lists.get("blocked_files", ()))


@pytest.mark.parametrize("name", sorted(built_in()))
def test_what_is_shipped_reads_no_credentials_of_others(name: str) -> None:
    lists = built_in()[name].lists
    shown = [path for key in profile_file._RELATIVE for path in lists.get(key, ())]
    assert not [
        path for path in shown if re.match(r"\.(ssh|aws|gnupg|netrc|kube|docker|git-credentials)", path)
    ]


def test_caches_are_written_only_by_those_who_ask_for_it() -> None:
    assert all(not built_in()[name].lists.get("commands") for name in ("npm", "cargo", "pip", "go"))


@pytest.mark.parametrize("name", ["codex", "claude"])
def test_an_agent_writes_nothing_that_runs_outside(name: str) -> None:
    """Each settings file is a copy, or read-only wherever its directory is writable."""
    lists = built_in()[name].lists
    writable = lists["home_writable"]
    dangerous = {
        "codex": (".codex/config.toml", ".codex/hooks.json", ".codex/rules", ".codex/packages"),
        "claude": (".claude/settings.json", ".claude/hooks", ".claude/skills", ".claude.json"),
    }[name]
    for path in dangerous:
        assert path in lists["protected_files"]
        assert path not in writable
    assert all(path not in writable for path in (".", ".config", ".local", ".claude"))


# What a file may hold.


def test_a_file_is_decoded() -> None:
    text = """
    extends = "codex"
    commands = ["aider", "aider"]
    home_writable = [".aider"]
    login_hint = "run aider --login"
    """
    file = decode(parsed(text), "aider", "/x/aider.toml")
    assert file.lists == {"extends": ("codex",), "commands": ("aider",), "home_writable": (".aider",)}
    assert (file.name, file.source, file.login_hint) == ("aider", "/x/aider.toml", "run aider --login")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\nhome_writeable = []",
         "/x/p.toml:2: home_writeable: a profile has no such key; did you mean home_writable?"),
        ("home_access = 'write'", "/x/p.toml:1: home_access: a profile has no such key"),
        ("enabled_agents = ['x']", "/x/p.toml:1: enabled_agents: a profile has no such key"),
        ("home_writable = '.x'", "/x/p.toml:1: home_writable: a string where a list of strings is wanted"),
        ("home_writable = true", "a boolean where a list of strings is wanted"),
        ("home_writable = 1", "a number where a list of strings is wanted"),
        ("home_writable = {a = 'b'}", "a table where a list of strings is wanted"),
        ("login_hint = ['x']", "/x/p.toml:1: login_hint: a list where a string is wanted"),
        ("home_writable = ['']", "is empty"),
        ("home_writable = ['/etc']", "is no path below the home directory"),
        ("home_writable = ['~/x']", "is no path below the home directory"),
        ("home_readonly = ['a/../../b']", "is no path below the home directory"),
        ("home_writable = ['.']", "is the whole home directory"),
        ("home_writable = ['./']", "is the whole home directory"),
        ("protected_files = ['/etc/passwd']", "is no path below the home directory"),
        ('home_writable = ["a\\nb"]', "holds a control character"),
        ("extends = ['../x']", "is no name of a profile"),
        ("extends = '../x'", "is no name of a profile"),
        ("commands = ['/bin/sh']", "is a path"),
        ("credential_variables = ['A-B']", "is no name of a variable"),
        ("sockets = ['run/x']", "is no socket"),
        ("sockets = ['$A-B']", "is no socket"),
    ],
)  # fmt: skip
def test_what_a_file_may_not_hold_is_refused_with_file_line_and_key(text: str, said: str) -> None:
    with pytest.raises(Refused) as refused:
        decode(parsed(text), "p", "/x/p.toml")
    assert refused.value.message.startswith("/x/p.toml:")
    assert said in refused.value.message


def test_a_value_that_no_key_takes_is_named() -> None:
    with pytest.raises(Refused, match=r"^/x/p\.toml:1: commands: a date where a list of strings is wanted"):
        decode(ParsedFile({"commands": Other("a date")}, {"commands": 1}), "p", "/x/p.toml")


_VALUES = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=8) | st.builds(Other, st.just("a float")),
    lambda inner: st.lists(st.text(max_size=8), max_size=4).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from((*profile_file.SETTING_KEYS, *profile_file.OWN_KEYS, "nonsense"))
        | st.text(max_size=4),
        _VALUES,
        max_size=5,
    )
)
def test_any_file_is_a_profile_or_is_refused(values: dict[str, Value]) -> None:
    refused, file = None, None
    try:
        file = decode(ParsedFile(values, {}), "p", "/x/p.toml")
    except Refused as error:
        refused = error
    if file is None:
        assert refused is not None
        assert refused.message.startswith("/x/p.toml: ")
        assert refused.message.isprintable()
        return
    assert file.lists.keys() | {"login_hint"} >= values.keys()
    for key in profile_file._RELATIVE:
        assert not [
            path for path in file.lists.get(key, ()) if path.startswith("/") or ".." in path.split("/")
        ]


# Which one a launch gets.


async def test_the_name_of_the_command_chooses() -> None:
    assert (await found(command=b"zsh")).name == "shell"
    assert (await found(command=b"codex")).title == "codex"
    assert await find(command=b"true") is None


@pytest.mark.parametrize(
    "command", [b"./codex", b"/home/u/project/codex", b"bin/codex", b"", b"\xff", b"codex "]
)
async def test_a_path_chooses_nothing(command: bytes) -> None:
    assert await find(command=command) is None


async def test_a_profile_that_is_not_enabled_is_chosen_by_name_only() -> None:
    assert await find(command=b"codex", enabled=("claude",)) is None
    assert await find(command=b"codex", enabled=()) is None
    chosen = await find(command=b"codex", enabled=("codex",))
    assert chosen is not None
    assert await find(name="codex", enabled=()) == chosen


async def test_a_name_goes_before_the_command_and_none_is_a_name() -> None:
    assert (await found(name="npm", command=b"codex")).name == "npm"
    assert await find(name="none", command=b"codex") is None


@pytest.mark.parametrize("name", ["codez", "../codex", "", "a/b", "x" * 65, "\x1b[2J"])
async def test_a_name_that_is_none_is_refused_with_those_that_are(name: str) -> None:
    files = tree(user={"mine": ""})
    with pytest.raises(Refused) as refused:
        await find(files, name=name)
    assert "there are: cargo, claude, codex, go, mine, npm, pip, shell, none" in refused.value.message
    assert refused.value.message.isprintable()
    assert files.read_as in (
        [],
        [(f"{ADMIN_DIRECTORY}/{name}.toml", True), (f"{USER_DIRECTORY}/{name}.toml", False)],
    )


async def test_the_administrators_goes_before_the_users_and_that_before_the_shipped_one() -> None:
    one, two = "home_writable = ['.a']\ncommands = ['codex']", "home_writable = ['.u']\ncommands = ['codex']"
    files = tree(admin={"codex": one}, user={"codex": two})
    for profile in (await found(files, name="codex"), await found(files, command=b"codex")):
        assert profile.values == {"home_writable": (".a",)}
        assert profile.source == f"{ADMIN_DIRECTORY}/codex.toml"
        assert profile.files == (profile.source,)
        assert profile.title == f"codex ({ADMIN_DIRECTORY}/codex.toml)"
    assert (await found(tree(user={"codex": two}), command=b"codex")).values == {"home_writable": (".u",)}


async def test_one_that_takes_the_place_of_a_shipped_one_decides_about_its_commands_too() -> None:
    assert await find(tree(user={"codex": "home_writable = ['.u']"}), command=b"codex") is None


async def test_the_administrators_files_are_read_as_such() -> None:
    files = tree(admin={"a": "commands = ['x']"}, user={"b": "commands = ['y']"})
    await find(files, command=b"y")
    assert files.read_as == [(f"{ADMIN_DIRECTORY}/a.toml", True), (f"{USER_DIRECTORY}/b.toml", False)]


async def test_its_own_name_extends_what_it_takes_the_place_of() -> None:
    files = tree(user={"codex": "extends = 'codex'\nhome_writable = ['.more']\nlogin_hint = 'hint'"})
    profile = await found(files, command=b"codex")
    shipped = built_in()["codex"]
    assert profile.values["home_writable"] == (*shipped.lists["home_writable"], ".more")
    assert profile.protected_files == shipped.lists["protected_files"]
    assert profile.commands == ("codex",)
    assert profile.login_hint == "hint"
    assert profile.source == f"{USER_DIRECTORY}/codex.toml"


async def test_another_name_extends_without_the_commands() -> None:
    files = tree(user={"mine": "extends = ['codex', 'npm', 'codex']"})
    profile = await found(files, name="mine")
    assert profile.commands == ()
    assert {".codex", ".npm/_cacache"} <= set(profile.values["home_writable"])
    assert (await found(files, command=b"codex")).name == "codex"


async def test_a_users_profile_may_extend_the_administrators_but_not_the_other_way_round() -> None:
    files = tree(
        admin={"site": "home_readonly = ['.site']", "wide": "extends = 'mine'"},
        user={"mine": "extends = 'site'", "codex": "home_writable = ['.u']"},
    )
    assert (await found(files, name="mine")).values == {"home_readonly": (".site",)}
    with pytest.raises(Refused, match=r"wide\.toml: extends: there is no profile mine"):
        await find(files, name="wide")
    own = tree(admin={"codex": "extends = 'codex'"}, user={"codex": "home_writable = ['.u']"})
    assert (await found(own, name="codex")).values["home_writable"] == (".codex",)


async def test_profiles_that_extend_each_other_are_refused() -> None:
    files = tree(user={"a": "extends = 'b'", "b": "extends = 'a'"})
    with pytest.raises(Refused, match="extends itself"):
        await find(files, name="a")
    with pytest.raises(Refused, match=r"c\.toml: extends: there is no profile c"):
        await find(tree(user={"c": "extends = 'c'"}), name="c")


async def test_a_long_chain_is_refused() -> None:
    files = tree(user={f"p{number}": f"extends = 'p{number + 1}'" for number in range(40)})
    with pytest.raises(Refused, match="more than 16 profiles"):
        await find(files, name="p0")
    wide = tree(
        user={"all": f"extends = {[f'q{number}' for number in range(40)]}"}
        | {f"q{number}": "" for number in range(40)}
    )
    with pytest.raises(Refused, match="more than 16 profiles"):
        await find(wide, name="all")


async def test_two_of_one_place_with_one_command_are_refused() -> None:
    files = tree(user={"one": "commands = ['tool']", "two": "commands = ['tool']"})
    with pytest.raises(Refused, match="both have the command tool; choose one with --profile"):
        await find(files, command=b"tool")
    assert (await found(files, name="two", command=b"tool")).name == "two"
    assert (await found(tree(user={"bash2": "commands = ['bash']"}), command=b"bash")).name == "bash2"


async def test_a_broken_file_starts_nothing() -> None:
    with pytest.raises(Refused, match="no such key"):
        await find(tree(user={"broken": "x = 1"}), command=b"true")


async def test_files_that_are_no_profiles_are_not_read() -> None:
    files = Tree(
        {f"{USER_DIRECTORY}/{name}": "x = 1" for name in ("a.toml~", ".hidden.toml", "b.toml.bak", "c")}
    )
    assert await find(files, command=b"true") is None
    assert files.read_as == []


# The schema for editors.


@functools.cache
def schema() -> dict[str, dict[str, dict[str, object]]]:
    text = (ROOT / "docs/ral-profile.schema.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, dict[str, object]]] = json.loads(text)
    return found


def test_the_schema_has_the_keys_of_the_code() -> None:
    assert set(schema()["properties"]) == {*profile_file.SETTING_KEYS, *profile_file.OWN_KEYS}
    assert not schema()["additionalProperties"]
    assert all(about["description"] for about in schema()["properties"].values())


def fits(key: str, value: object) -> bool:
    """Whether the schema takes a value: the few words of JSON Schema that it uses."""
    about = schema()["properties"].get(key)
    if about is None:
        return False
    kinds = about["type"] if isinstance(about["type"], list) else [about["type"]]
    if isinstance(value, str):
        return "string" in kinds and re.search(str(about.get("pattern", "")), value) is not None
    if not isinstance(value, list) or "array" not in kinds:
        return False
    items = about["items"]
    assert isinstance(items, dict)
    assert items["type"] == "string"
    return all(isinstance(entry, str) and re.search(items["pattern"], entry) for entry in value)


@pytest.mark.parametrize("path", sorted(SHIPPED.iterdir()), ids=lambda path: path.stem)
def test_the_schema_takes_what_is_shipped(path: Path) -> None:
    for key, value in tomllib.loads(path.read_text(encoding="utf-8")).items():
        assert fits(key, value), key


@pytest.mark.parametrize("key", [*profile_file.SETTING_KEYS, *profile_file.OWN_KEYS])
@pytest.mark.parametrize(
    "entry",
    [
        "",
        "a",
        ".x/y",
        "/x",
        "~/x",
        "..",
        "../x",
        "a/../b",
        "a\nb",
        "$A",
        "$A-B",
        "A-B",
        "A=1",
        "x y",
        "-x",
        ".",
    ],
)
def test_the_schema_refuses_what_the_code_refuses(key: str, entry: str) -> None:
    value: object = entry if key == "login_hint" else [entry]
    untrusted: Value = entry if key == "login_hint" else (entry,)
    try:
        decode(ParsedFile({key: untrusted}, {}), "p", "/x")
    except Refused:
        assert not fits(key, value)
    else:
        assert fits(key, value)


# The document.


@functools.cache
def document() -> str:
    return (ROOT / "docs/profiles.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table that begins with this row, without it."""
    _, _, rest = document().partition(heading + "\n")
    table = rest.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_document_has_what_is_shipped_and_what_chooses_it() -> None:
    told = {row[0].strip("`"): set(re.findall(r"`([^`]+)`", row[1])) for row in rows(
        "| profile | chosen by | keeps in the host | shows |"
    )}  # fmt: skip
    assert told == {
        name: set(file.lists.get("commands", (f"--profile {name}",))) for name, file in built_in().items()
    }


def test_the_document_has_every_key() -> None:
    keys = [key for row in rows("| key | meaning |") for key in re.findall(r"`([^`]+)`", row[0])]
    assert sorted(keys) == sorted((*profile_file.SETTING_KEYS, *profile_file.OWN_KEYS))


def test_the_example_of_the_document_is_a_profile() -> None:
    [example] = re.findall(r"```toml\n(.*?)```", document(), re.DOTALL)
    assert decode(parsed(example), "aider", "/x/aider.toml").lists["commands"] == ("aider",)


# Credentials that do not get in.

AGENT = Profile(name="agent", credential_variables=("A_KEY", "B_TOKEN"), login_hint="log in")


@pytest.mark.parametrize(
    ("variables", "marker_exists", "suppressed", "told"),
    [
        ({b"B_TOKEN"}, False, (), True),
        ({b"B_TOKEN", b"TERM"}, False, ("other",), True),
        (set(), False, (), False),
        ({b"B_TOKEN"}, True, (), False),
        ({b"B_TOKEN"}, False, ("agent",), False),
        ({b"B_TOKEN"}, False, ("all",), False),
        ({b"A_KEY"}, False, (), False),
        ({b"A_KEY", b"B_TOKEN"}, False, (), False),
    ],
)
def test_a_credential_that_is_set_but_blocked_is_told_once(
    variables: set[bytes], marker_exists: bool, suppressed: tuple[str, ...], told: bool
) -> None:
    warning = login_warning(AGENT, variables, DEFAULT, marker_exists=marker_exists, suppressed=suppressed)
    assert (warning is not None) is told
    if warning is not None:
        assert warning.startswith("agent: B_TOKEN is set but kept out of the sandbox")
        assert warning.endswith("add it to allowed_env_vars, or log in")


def test_a_hidden_credential_is_kept_out_too() -> None:
    policy, _ = environment_policy(Settings(hide_from_sandbox=("A_KEY",)), Settings.__struct_fields__)
    assert login_warning(AGENT, {b"A_KEY"}, policy, marker_exists=False, suppressed=()) is not None


async def test_the_agents_that_are_shipped_get_the_keys_they_name() -> None:
    for name in ("codex", "claude"):
        profile = await found(name=name)
        policy = msgspec.structs.replace(
            DEFAULT, allowed=frozenset(entry.encode() for entry in profile.values["allowed_env_vars"])
        )
        for variable in profile.values["allowed_env_vars"]:
            assert variable in profile.credential_variables
            assert not login_warning(
                profile, {variable.encode()}, policy, marker_exists=False, suppressed=()
            )


# Sockets.


@pytest.mark.parametrize(
    ("entry", "variables", "path", "let_in"),
    [
        ("/run/docker.sock", {}, b"/run/docker.sock", ()),
        ("//run/./docker.sock", {}, b"/run/docker.sock", ()),
        ("$SSH_AUTH_SOCK", {"SSH_AUTH_SOCK": "/tmp/ssh-x/agent"}, b"/tmp/ssh-x/agent", ("SSH_AUTH_SOCK",)),
        ("$DOCKER_HOST", {"DOCKER_HOST": "unix:///run/docker.sock"}, b"/run/docker.sock", ("DOCKER_HOST",)),
        ("$DBUS_SESSION_BUS_ADDRESS", {"DBUS_SESSION_BUS_ADDRESS": "unix:path=/run/user/1/bus,guid=0;tcp:"},
         b"/run/user/1/bus", ("DBUS_SESSION_BUS_ADDRESS",)),
        ("$DISPLAY", {"DISPLAY": ":1.0"}, b"/tmp/.X11-unix/X1", ("DISPLAY",)),
        ("$PULSE_SERVER", {"PULSE_SERVER": "unix:/run/user/1/pulse/native"}, b"/run/user/1/pulse/native",
         ("PULSE_SERVER",)),
        ("$WAYLAND_DISPLAY", {"WAYLAND_DISPLAY": "wayland-0", "XDG_RUNTIME_DIR": "/run/user/1"},
         b"/run/user/1/wayland-0", ("WAYLAND_DISPLAY", "XDG_RUNTIME_DIR")),
        ("$WAYLAND_DISPLAY", {"WAYLAND_DISPLAY": "/w"}, b"/w", ("WAYLAND_DISPLAY",)),
    ],
)  # fmt: skip
def test_an_entry_names_one_socket(
    entry: str, variables: dict[str, str], path: bytes, let_in: tuple[str, ...]
) -> None:
    environment = {name.encode(): value.encode() for name, value in variables.items()}
    named = tuple(name.encode() for name in let_in)
    assert named_sockets([entry], environment) == ((Socket(path, named, f"sockets = {entry}"),), ())


@pytest.mark.parametrize(
    ("entry", "variables"),
    [
        ("$SSH_AUTH_SOCK", {}),
        ("$SSH_AUTH_SOCK", {"SSH_AUTH_SOCK": ""}),
        ("$SSH_AUTH_SOCK", {"SSH_AUTH_SOCK": "relative"}),
        ("$DISPLAY", {"DISPLAY": "localhost:10.0"}),
        ("$DISPLAY", {"DISPLAY": ":../../x"}),
        ("$DOCKER_HOST", {"DOCKER_HOST": "tcp://10.0.0.1:2375"}),
        ("$DBUS_SESSION_BUS_ADDRESS", {"DBUS_SESSION_BUS_ADDRESS": "unix:abstract=/tmp/dbus-x"}),
        ("$WAYLAND_DISPLAY", {"WAYLAND_DISPLAY": "wayland-0"}),
        ("$WAYLAND_DISPLAY", {"WAYLAND_DISPLAY": "../x", "XDG_RUNTIME_DIR": "/run/user/1"}),
    ],
)
def test_a_variable_that_names_no_socket_is_told(entry: str, variables: dict[str, str]) -> None:
    environment = {name.encode(): value.encode() for name, value in variables.items()}
    sockets, [warning] = named_sockets([entry], environment)
    assert sockets == ()
    assert warning.startswith(f"sockets entry '{entry}' ignored: ")


def test_two_entries_for_one_socket_are_one() -> None:
    environment = {b"SSH_AUTH_SOCK": b"/a", b"OTHER": b"/a"}
    [socket], _ = named_sockets(["/a", "$SSH_AUTH_SOCK", "$OTHER"], environment)
    assert socket.variables == (b"SSH_AUTH_SOCK", b"OTHER")


def test_a_built_in_profile_says_so() -> None:
    assert Profile(name="x").source == BUILT_IN
