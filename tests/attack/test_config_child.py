"""The program that reads configuration files is not believed: whatever it answers, or fails to, nothing but
the values of known shape comes back, no session starts, and nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from ral_broker.config import parse as parse_module
from ral_broker.config.parse import Malformed, ParsedFile, Reader, decode_answer, parse
from ral_broker.errors import Refused
from support.processes import descendants, wait_without

pytestmark = pytest.mark.attack

CONTENT = b"a = 1\nb = ['x']\n"
GOOD = b'[["values",[[["a"],1,"integer",1],[["b"],2,"array",["x"]]]]]'
PARSED = ParsedFile({"a": 1, "b": ("x",)}, {"a": 1, "b": 2})


class Make(Protocol):
    """Makes a reader whose child is a program of the test's."""

    def __call__(self, source: str, deadline: float = 5.0) -> Reader: ...


def children() -> set[str]:
    """Our own, those that have ended and were not collected included."""
    tasks = [Path("/proc/self/task", task, "children") for task in os.listdir("/proc/self/task")]
    return {pid for task in tasks for pid in task.read_text().split()}


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Make]:
    """A reader whose child is a program of the test's. Nothing of any child may be left."""
    known = {process.pid for process in descendants()}
    waited_for = children()
    before = sorted(os.listdir("/proc/self/fd"))

    def reader(source: str, deadline: float = 5.0) -> Reader:
        program = tmp_path / "child.py"
        program.write_text("import os, sys, time\n" + textwrap.dedent(source))
        return Reader(str(program), deadline=deadline)

    yield reader
    assert {process.pid for process in descendants()} <= known
    assert children() <= waited_for
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_an_honest_child_is_believed(child: Make) -> None:
    """The control of everything below: the same program, saying what is so."""
    assert await child(f"sys.stdin.buffer.read(); os.write(1, {GOOD!r})").read([CONTENT]) == [PARSED]
    assert await Reader().read([CONTENT]) == [PARSED]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"null",
        b"{}",
        b"[]",
        b"\x00\xff\xfe",
        b"[" * 100_000,
        GOOD[:-1],
        GOOD + b"x",
        GOOD + b"[]",
        GOOD + GOOD,
        GOOD[:-1] + b"," + GOOD[1:],
        b'[["values",[[["a"],1,"integer","1"]]]]',
        b'[["values",[[["a"],1,"integer",true]]]]',
        b'[["values",[[["a"],1,"boolean",1]]]]',
        b'[["values",[[["a"],1,"string",["x"]]]]]',
        b'[["values",[[["a"],1,"array",["x",1]]]]]',
        b'[["values",[[["a"],1,"array","x"]]]]',
        b'[["values",[[["a"],1,"table",1]]]]',
        b'[["values",[[["a"],1,"other",1]]]]',
        b'[["values",[[["a"],1,"float",1.5]]]]',
        b'[["values",[[["a"],1,"integer",1.5]]]]',
        b'[["values",[[["a"],1,"integer"]]]]',
        b'[["values",[[["a"],1,"integer",1,"more"]]]]',
        b'[["values",[[["a"],1,"integer",1]],"more"]]',
        b'[["values",[[[],1,"integer",1]]]]',
        b'[["values",[[["a","b","c","d","e","f","g","h","i"],1,"integer",1]]]]',
        b'[["values",[["a",1,"integer",1]]]]',
        b'[["values",[[[1],1,"integer",1]]]]',
        b'[["values",[[["a"],1,"integer",1],[["a"],2,"integer",1]]]]',
        b'[["values",[[["a"],1,"integer",1],[["a","b"],2,"integer",1]]]]',
        b'[["values",[[["a","b"],1,"integer",1],[["a"],2,"integer",1]]]]',
        b'[["values",[[["a"],-1,"integer",1]]]]',
        b'[["values",[[["a"],4,"integer",1]]]]',
        b'[["values",[[["a"],"1","integer",1]]]]',
        b'[["values",[[["a"],1.0,"integer",1.5]]]]',
        b'[["malformed",4,"x"]]',
        b'[["malformed",1]]',
        b'[["malformed",1,2]]',
        b'[["malformed",1,"x",3]]',
        b'[["worse",1,"x"]]',
        b'[["values",[[["\\ud800"],1,"integer",1]]]]',
        b'[["values",[[["a"],1,"string","\xff"]]]]',
    ],
)
def test_an_answer_that_is_none_is_refused(answer: bytes) -> None:
    assert decode_answer(GOOD, [CONTENT]) == [PARSED]
    with pytest.raises(Refused, match="no session is started"):
        decode_answer(answer, [CONTENT])


def test_too_many_keys_are_refused() -> None:
    entries = b",".join(b'[["k%d"],1,"integer",1]' % number for number in range(10_001))
    with pytest.raises(Refused, match="more than 10000 keys"):
        decode_answer(b'[["values",[' + entries + b"]]]", [CONTENT])


def test_words_of_the_child_are_printable_and_short() -> None:
    (answer,) = decode_answer(b'[["malformed",1,"\\u001b[31m' + b"x" * 10_000 + b'"]]', [CONTENT])
    assert isinstance(answer, Malformed)
    assert answer.text.isprintable()
    assert len(answer.text) <= 500


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (f"os.write(1, {GOOD!r}); sys.exit(3)", "ended with status 3"),
        (f"os.write(1, {GOOD!r}); os.kill(os.getpid(), 11)", "ended by signal 11"),
        ("raise SystemError", "ended with status 1"),
        (f"os.write(1, {GOOD!r}); os.write(1, b'x')", "cannot be decoded"),
    ],
)
async def test_a_child_that_fails_refuses_whatever_it_said(child: Make, source: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        await child(source).read([CONTENT])


@pytest.mark.parametrize(
    "source",
    [
        "time.sleep(60)",
        f"os.write(1, {GOOD!r}); time.sleep(60)",
        f"os.write(1, {GOOD!r}); os.close(1); time.sleep(60)",
        "while True: pass",
        "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)",
    ],
)
async def test_a_child_that_hangs_is_ended_in_time(child: Make, source: str) -> None:
    begun = time.monotonic()
    with pytest.raises(Refused, match=r"did not finish within 0\.5 seconds"):
        await child(source, 0.5).read([CONTENT])
    assert time.monotonic() - begun < 3


@pytest.mark.parametrize("detail", ["time.sleep(60)", "os.close(1); time.sleep(60)"])
async def test_what_the_child_starts_ends_with_it(child: Make, detail: str) -> None:
    known = {process.pid for process in descendants()}
    waited_for = children()
    source = f"if os.fork() == 0:\n    {detail}\nos.write(1, {GOOD!r})\n"
    with contextlib.suppress(Refused):
        assert await child(source, 0.5).read([CONTENT]) == [PARSED]
    wait_without(known)
    for pid in children() - waited_for:
        # An orphan of the child's became ours: the run of the tests adopts them.
        assert ended_by(int(pid)) == signal.SIGKILL


def ended_by(pid: int) -> int:
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


async def test_a_flood_is_cut_off(child: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse_module, "MAX_ANSWER", 1 << 20)
    with pytest.raises(Refused, match="more than 1 MiB"):
        await child("while True: os.write(1, b' ' * 65536)").read([CONTENT])


async def test_the_child_has_no_environment_and_nothing_open_but_its_pipes(
    child: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAL_TEST_SECRET", "x")
    # What the run of the tests was itself started with; the broker has nothing that is passed on.
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) > 2:
                os.set_inheritable(int(name), False)
    source = """
    import json
    seen = [sorted(os.environ), sorted(os.listdir("/proc/self/fd")), os.getsid(0) == os.getpid()]
    os.write(1, json.dumps([["malformed", 0, json.dumps(seen)]]).encode())
    """
    (answer,) = await child(source).read([CONTENT])
    assert isinstance(answer, Malformed)
    # LC_CTYPE is Python's own doing (PEP 538), 3 is the directory that is being listed.
    assert answer.text in (
        '[[], ["0", "1", "2", "3"], true]',
        '[["LC_CTYPE"], ["0", "1", "2", "3"], true]',
    )


CONFINED = """
sys.path[:0] = [{directory!r}]
import toml_reader, errno, json
def tried(action):
    try:
        action()
    except MemoryError:
        return "ENOMEM"
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
before = [tried(lambda: os.close(os.open("/etc/passwd", os.O_RDONLY)))]
toml_reader.confine()
after = [
    tried(lambda: os.open("/etc/passwd", os.O_RDONLY)),
    tried(lambda: os.pipe()),
    tried(lambda: os.fork() or os._exit(0)),
    tried(lambda: bytearray(1 << 30)),
]
os.write(1, json.dumps([["malformed", 0, " ".join(before + after)]]).encode())
"""


async def test_the_real_child_gives_up_files_processes_and_memory(child: Make) -> None:
    if os.geteuid() == 0:
        pytest.skip("root is not held to a number of processes")
    directory = os.path.dirname(Reader()._program)
    (answer,) = await child(CONFINED.format(directory=directory)).read([CONTENT])
    assert answer == Malformed(None, "done EMFILE EMFILE EAGAIN ENOMEM")


async def test_content_that_takes_for_ever_is_given_up() -> None:
    begun = time.monotonic()
    hostile = b"a = [" + b"{b = 1}," * 120_000 + b"]\n"
    with pytest.raises(Refused, match="did not finish within"):
        await Reader(deadline=0.2).read([hostile])
    assert time.monotonic() - begun < 3


async def test_one_file_in_words() -> None:
    assert await parse(CONTENT, "x.toml") == PARSED
    with pytest.raises(Refused, match=r"^x\.toml:2: Invalid value; mend the file$"):
        await parse(b"a = 1\nb = \n", "x.toml")


async def test_many_files_are_one_child_each_answered_in_its_place(child: Make) -> None:
    contents = [b"n = %d\n" % number for number in range(100)] + [b"x =", b""]
    answers = await Reader().read(contents)
    assert answers[:100] == [ParsedFile({"n": number}, {"n": 1}) for number in range(100)]
    assert isinstance(answers[100], Malformed)
    assert answers[101] == ParsedFile({}, {})


async def test_an_interpreter_that_is_not_there_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(Refused, match="cannot be started: No such file"):
        await Reader().read([CONTENT])
