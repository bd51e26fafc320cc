"""What the documentation says is what the code has: commands, options, statuses, lists, links."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from ral_broker.config.document import DEFAULTS, EXPECTED, toml_text
from ral_broker.config.settings import SETTINGS, Merge
from ral_broker.doctor import KERNEL_FLOOR
from ral_broker.envelope import environment, slots
from ral_broker.sessions import records
from ral_client import main, usage
from ral_client.become import FORGOTTEN
from ral_client.run import OVERRIDES
from ral_client.spawn import PASSED
from ral_protocol import exits
from support.installed import ROOT

DOCS = ROOT / "docs"
PAGES = sorted((DOCS / "man").iterdir())
MARKDOWN = sorted(DOCS.rglob("*.md"))
TOP = [ROOT / name for name in ("README.md", "NEWS.md", "SECURITY.md")]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def rows(name: str) -> list[list[str]]:
    """The cells of every table row of a document, headings included."""
    lines = (DOCS / name).read_text(encoding="utf-8").splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|") and not re.fullmatch(r"[|:\- ]+", line)
    ]


def words(cell: str) -> set[str]:
    """What a cell has in backticks."""
    return set(re.findall(r"`([^`]+)`", cell))


def row_of(name: str, first: str) -> list[str]:
    """The one row whose first cell is ``first``."""
    found = [row for row in rows(name) if row[0] == first]
    assert len(found) == 1, f"{name}: {len(found)} rows begin with {first!r}"
    return found[0]


def as_words(names: object) -> set[str]:
    assert isinstance(names, (frozenset, tuple))
    return {name.decode() for name in names}


def page_of(verb: str) -> Path:
    return DOCS / "man" / f"ral-{verb.partition(' ')[0]}.1"


def options_on(page: Path) -> set[str]:
    """The options that a page describes, without dashes: items of its lists that begin with a flag."""
    items = re.findall(r"^\.It (Fl .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {flag.removeprefix("-") for item in items for flag in re.findall(r"Fl (\S+)", item)}


def options_of(verb: str) -> set[str]:
    """The options that the client takes for a command and for those below it, short ones included."""
    names: set[str] = set()
    for known, (flags, valued) in main.OPTIONS.items():
        if known.partition(" ")[0] == verb:
            names |= {*flags.split(), *valued.split()}
    return names | {short for short, name in main.SHORT.items() if name in names}


VERBS = sorted({verb.partition(" ")[0] for verb in main.OPTIONS})


@pytest.mark.parametrize("verb", VERBS)
def test_a_page_describes_exactly_the_options_of_its_command(verb: str) -> None:
    assert options_on(page_of(verb)) == options_of(verb)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_text_names_exactly_the_options_of_its_command(verb: str) -> None:
    text = usage.COMMANDS[verb]
    named = set(re.findall(r"^ +(?:-\w, )?--([a-z-]+)", text, re.MULTILINE))
    named |= set(re.findall(r"\[--([a-z-]+)", text))
    assert named == {name for name in options_of(verb) if len(name) > 1} - {"help"}


def test_the_first_page_lists_every_command_in_the_order_of_the_help_text() -> None:
    listed = re.findall(r"^\.It Xr ral-(\w+) 1$", (DOCS / "man/ral.1").read_text(), re.MULTILINE)
    assert listed == re.findall(r"^  (\w+) {2,}", usage.GENERAL, re.MULTILINE)
    assert sorted(listed) == VERBS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_named_and_refers_to_pages_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    name, section = page.stem, page.suffix[1:]
    assert f".Dt {name.upper()} {section}\n" in text
    assert re.search(rf"^\.Nm {re.escape(name)}$", text, re.MULTILINE)
    for other, number in re.findall(r"^\.(?:It )?Xr (ral\S*) (\d)", text, re.MULTILINE):
        assert (DOCS / "man" / f"{other}.{number}").exists(), f"{page.name} refers to {other}({number})"
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_formatted_without_a_warning(page: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("needs groff (Debian: groff-base)")
    done = subprocess.run(
        ["groff", "-mdoc", "-Tutf8", "-ww", "-P-cbou", page], capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("EXIT STATUS" in done.stdout) == (page.suffix == ".1")


def test_every_exit_status_is_explained_with_its_name() -> None:
    constants = {
        name: value
        for name, value in vars(exits).items()
        if name.isupper() and isinstance(value, int) and name != "PROTOCOL"
    }
    assert len(constants) == 9
    table = [row for row in rows("exit-status.md") if len(row) == 3]
    for name, value in constants.items():
        explained = [row for row in table if row[1] == f"`{name}`"]
        assert explained, f"{name} is not in exit-status.md"
        assert all(re.match(rf"{value}\b", row[0]) for row in explained), name


@pytest.mark.parametrize("document", [*MARKDOWN, *TOP], ids=relative)
def test_links_lead_to_files_that_exist(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path = (document.parent / target.partition("#")[0]).resolve()
        assert path.exists(), f"{relative(document)} links to {target}"
        assert path.is_relative_to(ROOT), f"{relative(document)} links out of the tree: {target}"


@pytest.mark.parametrize("document", [*MARKDOWN, *TOP, *PAGES], ids=relative)
def test_no_document_shows_the_paths_of_one_machine(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    private = (
        r"(?<![\w~])/(?:work|root|srv|mnt)/"
        # `make install PREFIX=/opt/ral` is an example for users, /tmp/ral-UID a place in every host.
        r"|/opt/(?!ral\b(?!-))\w|/home/(?!linuxbrew/)\w|/(?:tmp|var/tmp)/(?!ral-UID)\w"
    )
    assert re.findall(private, text) == []


def default_in_words(name: str) -> str:
    value = DEFAULTS[name]
    if isinstance(value, tuple):
        return " ".join(f"`{element}`" for element in value) or "empty"
    return "none" if value is None else f"`{toml_text(value)}`"


def test_the_table_of_settings_is_complete_and_true() -> None:
    table = [row for row in rows("settings.md") if len(row) == 7]
    assert [row[0] for row in table[1:]] == [f"`{name}`" for name in SETTINGS]
    for (name, setting), row in zip(SETTINGS.items(), table[1:], strict=True):
        override = f"`{setting.override}`" if setting.override else "\u2013"
        assert row[1:6] == [setting.state, default_in_words(name), setting.merge, override, setting.reload]
        assert row[6].startswith(setting.doc[0].upper() + setting.doc[1:] + ".")
        assert set(EXPECTED[name].words) <= words(row[6])
        assert (setting.note in row[6]) == (setting.state == "refused") or not setting.note
    rules = {row[0] for row in rows("settings.md") if len(row) == 2}
    assert rules == {"rule", *get_args(Merge)}


def test_the_page_of_the_file_describes_every_setting() -> None:
    page = (DOCS / "man/ral.toml.5").read_text(encoding="utf-8")
    items = re.split(r"^\.It Ic (\w+)\n", page.partition(".Sh SETTINGS")[2], flags=re.MULTILINE)[1:]
    described = dict(zip(items[::2], items[1::2], strict=True))
    assert list(described) == list(SETTINGS)
    for name, setting in SETTINGS.items():
        text = described[name].replace("\n", " ").replace("\\&", "")
        assert setting.doc[1:].replace("`", "") in text, name
        assert (setting.override is None) or f".Ev {setting.override}" in text
        value = DEFAULTS[name]
        if isinstance(value, tuple):
            assert (", ".join(value) or "Empty by default") in text, name
        elif value is not None:
            assert f".Cm {toml_text(value).strip(chr(34))} ." in text, name
        assert setting.note in text


def test_the_overrides_of_a_launch_are_those_of_the_settings() -> None:
    assert set(OVERRIDES) == {setting.override for setting in SETTINGS.values() if setting.override}
    for name in OVERRIDES:
        assert row_of("environment.md", f"`{name}`")


@pytest.mark.parametrize(
    ("first", "column", "names"),
    [
        ("secrets, by name", 1, environment.DEFAULT.blocked_names),
        ("secrets, by pattern", 1, environment.DEFAULT.blocked_patterns),
        ("pointless inside", 1, environment.DEFAULT.pointless),
        ("settings", 1, (*environment.DEFAULT.hidden, b"RAL_*")),
    ],
)
def test_the_variables_that_are_removed_are_those_of_the_code(
    first: str, column: int, names: object
) -> None:
    assert words(row_of("environment.md", first)[column]) == as_words(names)


def test_the_variables_that_are_kept_set_and_forgotten_are_those_of_the_code() -> None:
    text = (DOCS / "environment.md").read_text(encoding="utf-8")
    kept = next(row for row in rows("environment.md") if "agent needs its own key" in row[0])
    assert words(kept[0]) == as_words(environment.DEFAULT.allowed)
    entries, _ = environment.filter_environment(
        (), home=b"/h", user=b"u", project=b"/p", session="00000000", cwd=b"/p"
    )
    table = rows("environment.md")
    begin = table.index(["set", "to"])
    named = {name for row in table[begin + 1 : begin + 6] for name in words(row[0])}
    assert named == {entry.partition(b"=")[0].decode() for entry in entries}
    removed = next(
        part for part in re.split(r"\n\n", text) if part.startswith("`ral run --as-user NAME` removes")
    )
    assert as_words(FORGOTTEN) <= words(removed)
    passed = next(
        part for part in re.split(r"\n\n", text) if part.startswith("A broker that a client starts")
    )
    assert set(PASSED) <= words(passed)


def test_the_slot_table_is_that_of_the_code() -> None:
    numbers = {row[0] for row in rows("architecture.md") if re.match(r"\d", row[0])}
    first, second = slots.SECCOMP
    assert numbers == {
        "0, 1", "2", *map(str, (slots.ARGS, slots.WARRANT, slots.REPORT, slots.RULESET, slots.TRAMPOLINE)),
        f"{first}, {second}", str(slots.STATUS), str(slots.SPARE), f"{slots.MOUNTS} and up",
    }  # fmt: skip
    assert words(row_of("architecture.md", str(slots.SPARE))[1]) == set()


def test_the_table_of_files_names_those_of_a_session() -> None:
    named = {name for row in rows("architecture.md") for name in words(row[0])}
    for suffix in (records.RECORD, records.STATUS, records.ATTACH, records.ENDED, records.LOGS[1]):
        assert f"{exits.SESSIONS_DIR}/ID{suffix}" in named
    assert records.LOGS[0] in named
    assert exits.SOCKET_NAME in named


def test_the_kernel_that_is_needed_is_that_of_doctor() -> None:
    floor = ".".join(map(str, KERNEL_FLOOR))
    assert f"The floor is Linux **{floor}**" in (DOCS / "limits.md").read_text(encoding="utf-8")


def test_decisions_are_numbered_and_one_paragraph_each() -> None:
    files = sorted((DOCS / "decisions").iterdir())
    for number, file in enumerate(files, 1):
        assert re.fullmatch(rf"{number:04}-[a-z0-9-]+\.md", file.name), file.name
        title, *paragraphs = file.read_text(encoding="utf-8").strip().split("\n\n")
        assert re.fullmatch(rf"# {number}\. \S.*", title), file.name
        assert len(paragraphs) == 1, file.name


def test_the_words_of_a_session_state_are_told() -> None:
    """The plan's operations and layers are data that users compare with; so are their names in json.md."""
    from ral_broker.envelope.plan import Layer, Operation

    assert words(row_of("json.md", "`op`")[2]) == {kind.__name__.lower() for kind in get_args(Operation)}
    assert words(next(row for row in rows("json.md") if row[0] == "`layer`")[2]) == set(get_args(Layer))
