"""The child that reads TOML: values, the line of every key, and words for what is no TOML."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ral_helpers import toml_reader

DOCUMENT = b'''# comment = "x"

a = 1
"b.c" = ["x = 1", # [no]
  "y",
]
'd' . e = """
f = 2
\\""" """
g = \'\'\'
[no]\'\'\'\'\'
h = { i = 1, j = { k = "}" } }
[t.u] # [v]
w = true
[t."x]"]
y = 1979-05-27

[[z]]
a = 1
[[z]]
a = 2
[empty]
'''
LINES = {
    ("a",): 3, ("b.c",): 4, ("d", "e"): 7, ("g",): 10, ("h", "i"): 12, ("h", "j", "k"): 12,
    ("t", "u", "w"): 14, ("t", "x]", "y"): 16, ("z",): 18, ("empty",): 22,
}  # fmt: skip


def entries(content: bytes) -> dict[tuple[str, ...], tuple[int, str, object]]:
    word, answer = toml_reader.read_document(content)
    assert word == "values"
    assert isinstance(answer, list)
    return {tuple(path): (line, kind, value) for path, line, kind, value in answer}


def test_every_value_has_the_line_of_its_key() -> None:
    assert {path: line for path, (line, _, _) in entries(DOCUMENT).items()} == LINES


def test_lines_are_those_of_an_editor_whatever_ends_them() -> None:
    assert {p: line for p, (line, _, _) in entries(DOCUMENT.replace(b"\n", b"\r\n")).items()} == LINES


def test_kinds() -> None:
    found = {
        path[0]: (kind, value)
        for path, (_, kind, value) in entries(
            b"a=true\nb=1\nc='s'\nd=['s']\ne=[]\nf=1.5\ng=inf\nh=12:00:00\ni=[1]\nj=[['s']]\nk=9007199254740993\nl={}\n"
            b"m=0xffffffffffffffffffffff\n"
        ).items()
    }
    assert found["a"] == ("boolean", True)
    assert found["b"] == ("integer", 1)
    assert found["c"] == ("string", "s")
    assert found["d"] == ("array", ["s"])
    assert found["e"] == ("array", [])
    assert found["l"] == ("table", None)
    assert {found[name][0] for name in "fghijkm"} == {"other"}
    assert found["h"][1] == "a date or time"


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"a = 1\nb =\n", 2, "Invalid value"),
        (b"a = 1\na = 2\n", 2, "overwrite"),
        (b"a = 1\n\n[x", 3, ""),
        (b"ok = 1\n\xff\n", 2, "not UTF-8"),
        (b"a = " + b"[" * 100_000, 0, "nested too deeply"),
        (b".".join([b"a"] * 50) + b" = 1", 0, "nested too deeply"),
        (b"a = " + b"9" * 5000, 0, "integer"),
        (b"a = 'x", 1, ""),
        (b"a = 1\rb = 2", 1, ""),
        (b"\0", 1, ""),
    ],
)
def test_what_is_no_toml_is_told_with_its_line(content: bytes, line: int, words: str) -> None:
    word, found, text = toml_reader.read_document(content)
    assert (word, found) == ("malformed", line)
    assert isinstance(text, str)
    assert text
    assert words in text


BARE = st.text(alphabet="abcXYZ019_-", min_size=1, max_size=6)
KEYS = st.one_of(BARE, st.text(max_size=6).map(lambda text: f"'{text}'" if is_literal(text) else '"q]#="'))
VALUES = st.sampled_from(
    [
        "1",
        "true",
        '"x"',
        "'#'",
        '"""\n[x]\n"""',
        "'''\na=1\n'''",
        '["a",\n# c ]\n"b"\n]',
        "{ }",
        '"\\""',
        '"""""a"""""',
        "''",
        '""',
    ],
)


def is_literal(text: str) -> bool:
    return text.isprintable() and "'" not in text


@given(st.lists(st.tuples(KEYS, VALUES, st.sampled_from(["", " # x = [", "\n\n", "\n# ]"])), max_size=8))
def test_lines_of_any_document(parts: list[tuple[str, str, str]]) -> None:
    text, expected = "", {}
    for key, value, after in parts:
        (name,) = tomllib.loads(f"{key} = 1")
        if name in expected:
            continue
        expected[name] = text.count("\n") + 1
        text += f"{key} = {value}{after}\n"
    assert {path[0]: line for path, (line, _, _) in entries(text.encode()).items()} == expected
