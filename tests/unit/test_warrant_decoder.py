"""The encoder and the native decoder of the warrant, against a third description (docs/protocol.md, 2).

The decoder runs as a plain process. It is not pid 1 then, which it refuses, but only after it has read the
warrant: what it says of the warrant is seen, and no program runs.
"""

from __future__ import annotations

import os
import random
import select
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ral_broker.envelope.warrant import MAX_WARRANT, UNLIMITED, Warrant, WarrantError, encode
from ral_broker.errors import Refused
from support.native import SEALS, memfd, program, spawn, wait_status

WARRANT_STEP, FORK_STEP = 1, 6
HEADER = struct.Struct("<IIIiQIIII")


@pytest.fixture(scope="module")
def trampoline() -> Iterator[int]:
    """The program, held open."""
    fd = os.open(program("trampoline"), os.O_PATH | os.O_CLOEXEC)
    yield fd
    os.close(fd)


def accepts(trampoline: int, warrant: bytes, seals: int = SEALS) -> bool:
    """Whether the native decoder takes this warrant. A refusal is said on 100 and is exit status 126."""
    fd = memfd("warrant", warrant, seals)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        slots = {0: null, 1: null, 2: null, 99: fd, 100: theirs.fileno()}
        pid = spawn(f"/proc/self/fd/{trampoline}", ["trampoline"], slots, {})
        theirs.close()
        assert wait_status(pid) == 126
        assert select.select([ours], [], [], 0)[0]
        kind: int
        step: int
        kind, step, _, zero = struct.unpack("<IiiI", ours.recv(64))
        assert (kind, zero) == (4, 0)
        assert step in {WARRANT_STEP, FORK_STEP}
        return step == FORK_STEP
    finally:
        for number in (fd, null):
            os.close(number)
        ours.close()


def is_sound(data: bytes) -> bool:
    """The contract, read from the document."""
    if not 56 <= len(data) <= MAX_WARRANT or data[:16] != b"ral-warrant/1\0\0\0":
        return False
    size, flags, umask, nice, ignored, limits, affinity, argc, envc = HEADER.unpack_from(data, 16)
    strings = 56 + 24 * limits + affinity
    if (
        size != len(data) or flags > 63 or bool(flags & 28) != bool(flags & 2) or umask > 0o777
        or not -20 <= nice <= 19 or ignored >> 8 & 1 or ignored >> 18 & 1 or limits > 16 or affinity % 8
        or affinity > 1024 or bool(affinity) != bool(flags & 32) or not 1 <= argc <= 1 << 20
        or envc > 1 << 20 or strings > size
    ):  # fmt: skip
        return False
    last = -1
    for index in range(limits):
        resource, zero, soft, hard = struct.unpack_from("<IIQQ", data, 56 + 24 * index)
        if zero or not last < resource < 16 or soft > hard:
            return False
        last = resource
    return data.endswith(b"\0") and data[strings:].count(b"\0") == argc + envc


texts = st.binary(max_size=20).filter(lambda text: b"\0" not in text)
numbers = st.one_of(st.integers(0, 1 << 20), st.just(UNLIMITED))
limit_pairs = st.tuples(numbers, numbers).map(lambda pair: (min(pair), max(pair)))
warrants = st.builds(
    Warrant,
    argv=st.lists(texts, min_size=1, max_size=5).map(tuple),
    environment=st.lists(texts, max_size=5).map(tuple),
    umask=st.integers(0, 0o777),
    nice=st.integers(-20, 19),
    ignored=st.frozensets(st.integers(1, 64).filter(lambda number: number not in {9, 19})),
    limits=st.dictionaries(st.integers(0, 15), limit_pairs).map(
        lambda table: tuple((resource, *pair) for resource, pair in table.items())
    ),
    affinity=st.one_of(st.none(), st.frozensets(st.integers(0, 8191), min_size=1, max_size=4)),
    ruleset=st.booleans(),
    terminals=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)

PLAIN = Warrant(
    argv=(b"sh", b"-c", b"true"),
    environment=(b"A=1", b""),
    limits=((7, 1, 2), (4, 0, UNLIMITED)),
    affinity=frozenset({0, 9}),
)


@given(warrants)
@settings(max_examples=150)
def test_decoder_takes_what_the_encoder_writes(trampoline: int, warrant: Warrant) -> None:
    data = encode(warrant)
    assert is_sound(data)
    assert accepts(trampoline, data)


@given(warrants)
def test_encoding_says_what_was_asked(warrant: Warrant) -> None:
    data = encode(warrant)
    size, flags, umask, nice, ignored, limits, affinity, argc, envc = HEADER.unpack_from(data, 16)
    assert (size, umask, nice) == (len(data), warrant.umask, warrant.nice)
    assert {number + 1 for number in range(64) if ignored >> number & 1} == warrant.ignored
    assert bool(flags & 1) == warrant.ruleset
    assert tuple(bool(flags & bit) for bit in (4, 8, 16)) == warrant.terminals
    table = {tuple(struct.unpack_from("<IIQQ", data, 56 + 24 * index)) for index in range(limits)}
    assert {(resource, soft, hard) for resource, _, soft, hard in table} == set(warrant.limits)
    mask = int.from_bytes(data[56 + 24 * limits :][:affinity], "little")
    found = {number for number in range(affinity * 8) if mask >> number & 1}
    assert found == (warrant.affinity or set())
    strings = data[56 + 24 * limits + affinity :].split(b"\0")[:-1]
    assert tuple(strings[:argc]) == warrant.argv
    assert tuple(strings[argc:]) == warrant.environment
    assert len(strings) == argc + envc


@given(warrants, st.integers(0, 1 << 30), st.integers(0, 255))
@settings(max_examples=400)
def test_decoder_and_document_agree_on_damaged_warrants(
    trampoline: int, warrant: Warrant, where: int, byte: int
) -> None:
    data = bytearray(encode(warrant))
    # Mostly the header and the tables: damage to a string is often no damage.
    header = min(len(data), 56 + 24 * len(warrant.limits))
    data[where % (header if where % 4 else len(data))] = byte
    assert accepts(trampoline, bytes(data)) == is_sound(bytes(data))


@given(warrants, st.integers(-80, 80))
@settings(max_examples=150)
def test_decoder_and_document_agree_on_cut_and_extended_warrants(
    trampoline: int, warrant: Warrant, change: int
) -> None:
    data = encode(warrant)
    data = data[:change] if change < 0 else data + bytes(random.Random(change).choices(range(3), k=change))
    assert accepts(trampoline, data) == is_sound(data)
    if len(data) >= 20:
        fixed = data[:16] + struct.pack("<I", len(data)) + data[20:]
        assert accepts(trampoline, fixed) == is_sound(fixed)


@given(st.binary(max_size=300))
@example(b"")
@settings(max_examples=100)
def test_decoder_refuses_noise(trampoline: int, data: bytes) -> None:
    assert not accepts(trampoline, data)
    assert not accepts(trampoline, encode(PLAIN)[:16] + data)


def changed(offset: int, kind: str, value: int) -> bytes:
    """PLAIN with one field replaced."""
    data = bytearray(encode(PLAIN))
    struct.pack_into(kind, data, offset, value)
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"ral-warrant/2\0\0\0" + encode(PLAIN)[16:], id="another version"),
        pytest.param(encode(PLAIN)[:-1], id="one byte short"),
        pytest.param(encode(PLAIN) + b"\0", id="one byte more"),
        pytest.param(changed(16, "<I", len(encode(PLAIN)) + 1), id="wrong size"),
        pytest.param(changed(20, "<I", 32 | 64), id="unknown flag"),
        pytest.param(changed(20, "<I", 32 | 2), id="terminal for nobody"),
        pytest.param(changed(20, "<I", 32 | 4), id="descriptor without terminal"),
        pytest.param(changed(20, "<I", 0), id="affinity without flag"),
        pytest.param(changed(24, "<I", 0o1000), id="umask"),
        pytest.param(changed(28, "<i", 20), id="nice"),
        pytest.param(changed(28, "<i", -21), id="nice below"),
        pytest.param(changed(32, "<Q", 1 << 8), id="ignored KILL"),
        pytest.param(changed(32, "<Q", 1 << 18), id="ignored STOP"),
        pytest.param(changed(40, "<I", 17), id="too many limits"),
        pytest.param(changed(40, "<I", 0xFFFFFFFF), id="absurd limits"),
        pytest.param(changed(44, "<I", 15), id="odd affinity"),
        pytest.param(changed(44, "<I", 1032), id="long affinity"),
        pytest.param(changed(44, "<I", 0xFFFFFFF8), id="absurd affinity"),
        pytest.param(changed(48, "<I", 0), id="no argument"),
        pytest.param(changed(48, "<I", 4), id="one argument more"),
        pytest.param(changed(48, "<I", 0xFFFFFFFF), id="absurd arguments"),
        pytest.param(changed(52, "<I", 3), id="one entry more"),
        pytest.param(changed(52, "<I", 0xFFFFFFFF), id="absurd entries"),
        pytest.param(changed(56, "<I", 16), id="unknown resource"),
        pytest.param(changed(60, "<I", 1), id="padding"),
        pytest.param(changed(88, "<Q", 3), id="soft above hard"),
        pytest.param(changed(80, "<I", 4), id="a resource twice"),
    ],
)  # fmt: skip
def test_decoder_refuses(trampoline: int, data: bytes) -> None:
    assert accepts(trampoline, encode(PLAIN))
    assert not accepts(trampoline, data)


@pytest.mark.parametrize("missing", [1, 2, 4, 8])
def test_decoder_refuses_a_warrant_without_a_seal(trampoline: int, missing: int) -> None:
    assert not accepts(trampoline, encode(PLAIN), SEALS & ~missing)


def test_largest_warrant_is_taken_and_a_larger_one_is_refused(trampoline: int) -> None:
    overhead = len(encode(Warrant(argv=(b"",))))
    assert accepts(trampoline, encode(Warrant(argv=(b"x" * (MAX_WARRANT - overhead),))))
    with pytest.raises(WarrantError, match="pass long arguments in a file"):
        encode(Warrant(argv=(b"x" * (MAX_WARRANT - overhead + 1),)))
    data = encode(Warrant(argv=(b"x" * (MAX_WARRANT - overhead),)))
    larger = data[:16] + struct.pack("<I", MAX_WARRANT + 1) + data[20:-1] + b"x\0"
    assert not accepts(trampoline, larger)


def test_many_arguments_are_taken(trampoline: int) -> None:
    assert accepts(trampoline, encode(Warrant(argv=(b"",) * (1 << 20), environment=(b"",) * (1 << 20))))


@pytest.mark.parametrize(
    ("warrant", "said"),
    [
        (Warrant(argv=()), "without a command"),
        (Warrant(argv=(b"a\0b",)), "NUL"),
        (Warrant(argv=(b"a",), environment=(b"A=\0",)), "NUL"),
        (Warrant(argv=(b"a",), umask=0o1000), "umask"),
        (Warrant(argv=(b"a",), umask=-1), "umask"),
        (Warrant(argv=(b"a",), nice=20), "nice"),
        (Warrant(argv=(b"a",), ignored=frozenset({9})), "signal 9"),
        (Warrant(argv=(b"a",), ignored=frozenset({65})), "signal 65"),
        (Warrant(argv=(b"a",), limits=((16, 0, 0),)), "no such resource"),
        (Warrant(argv=(b"a",), limits=((1, 2, 1),)), "soft 2 and hard 1"),
        (Warrant(argv=(b"a",), limits=((1, 0, 1 << 64),)), "not a pair"),
        (Warrant(argv=(b"a",), limits=((1, 1, 1), (1, 2, 2))), "twice"),
        (Warrant(argv=(b"a",), affinity=frozenset()), "run nowhere"),
        (Warrant(argv=(b"a",), affinity=frozenset({8192})), "processor 8192"),
        (Warrant(argv=(b"a",), affinity=frozenset({-1})), "processor -1"),
        (Warrant(argv=(b"",) * ((1 << 20) + 1)), "1048577 arguments"),
    ],
)
def test_encoder_refuses_with_a_sentence(warrant: Warrant, said: str) -> None:
    with pytest.raises(WarrantError, match=said) as caught:
        encode(warrant)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, Refused)
