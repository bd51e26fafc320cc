"""The hand-written codec against msgspec, in both directions, and against garbage."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ral_protocol import wire

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
KEYS = st.text(max_size=40) | st.binary(max_size=40) | st.integers(-(1 << 63), (1 << 64) - 1)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(KEYS, inner, max_size=20),
    max_leaves=60,
)
EDGES = [
    edge + step
    for edge in (
        0,
        32,
        127,
        128,
        255,
        256,
        65535,
        65536,
        (1 << 31),
        (1 << 32),
        (1 << 63),
        -32,
        -33,
        -128,
        -129,
    )
    for step in (-1, 0, 1)
] + [-(1 << 15), -(1 << 15) - 1, -(1 << 31), -(1 << 31) - 1, -(1 << 63), (1 << 64) - 1]


def nested(depth: int, packed: bytes = b"\xc0") -> bytes:
    return b"\x91" * depth + packed


@given(VALUES)
def test_packs_the_same_bytes_as_msgspec(value: object) -> None:
    assert wire.pack(value) == msgspec.msgpack.encode(value)


@given(VALUES)
def test_reads_what_msgspec_wrote(value: object) -> None:
    read = wire.unpack(msgspec.msgpack.encode(value))
    assert read == value
    assert wire.pack(read) == wire.pack(value)


@given(VALUES)
def test_msgspec_reads_what_was_packed(value: object) -> None:
    assert msgspec.msgpack.decode(wire.pack(value), strict=True) == value


@pytest.mark.parametrize("number", EDGES)
def test_integers_are_packed_in_their_shortest_form(number: int) -> None:
    assert wire.pack(number) == msgspec.msgpack.encode(number)
    assert wire.unpack(wire.pack(number)) == number


@pytest.mark.parametrize("size", [0, 15, 16, 31, 32, 255, 256, 65535, 65536])
@pytest.mark.parametrize("kind", [bytes, str, list, dict])
def test_lengths_are_packed_in_their_shortest_form(kind: type, size: int) -> None:
    values: dict[type, object] = {
        bytes: bytes(size),
        str: "x" * size,
        list: [None] * size,
        dict: dict.fromkeys(range(size)),
    }
    assert wire.pack(values[kind]) == msgspec.msgpack.encode(values[kind])
    assert wire.unpack(wire.pack(values[kind])) == values[kind]


@given(st.binary(max_size=400))
def test_garbage_is_a_value_that_packs_again_or_a_wire_error(untrusted: bytes) -> None:
    try:
        value = wire.unpack(untrusted)
    except wire.WireError:
        return
    assert wire.unpack(wire.pack(value)) == value


@given(VALUES, st.data())
def test_a_damaged_value_raises_nothing_but_wire_error(value: object, data: st.DataObject) -> None:
    packed = bytearray(wire.pack(value))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        wire.unpack(bytes(packed))
    except wire.WireError:
        return


@given(VALUES, st.data())
def test_every_truncation_is_refused(value: object, data: st.DataObject) -> None:
    packed = wire.pack(value)
    with pytest.raises(wire.WireError):
        wire.unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])


@given(VALUES, st.binary(min_size=1, max_size=8))
def test_what_follows_a_value_is_refused(value: object, more: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.unpack(wire.pack(value) + more)


def test_depth_is_bounded_in_both_directions() -> None:
    value: object = None
    for _ in range(wire.MAX_DEPTH):
        value = [value]
    assert wire.unpack(wire.pack(value)) == value
    with pytest.raises(wire.WireError, match="nesting"):
        wire.pack([value])
    with pytest.raises(wire.WireError, match="nesting"):
        wire.unpack(nested(wire.MAX_DEPTH + 1))
    with pytest.raises(wire.WireError, match="nesting"):
        wire.unpack(nested(1_000_000, b""))


@pytest.mark.parametrize(
    "head",
    [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"],
)
def test_a_length_beyond_the_input_is_refused_before_anything_is_allocated(head: bytes) -> None:
    with pytest.raises(wire.WireError, match="truncated"):
        wire.unpack(head + b"\xc0")


@pytest.mark.parametrize("packed", [msgspec.msgpack.encode(1.5), b"\xc1", b"\xd4\x01\x00", b"\xc7\x00\x05"])
def test_floats_and_extension_types_do_not_exist(packed: bytes) -> None:
    with pytest.raises(wire.WireError, match="type code"):
        wire.unpack(packed)


@pytest.mark.parametrize("value", [1.5, object(), {1, 2}, 1 << 64, -(1 << 63) - 1, "\udc80"])
def test_what_cannot_travel_is_not_packed(value: object) -> None:
    with pytest.raises(wire.WireError):
        wire.pack(value)


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(wire.WireError, match="UTF-8"):
        wire.unpack(b"\xa2\xff\xfe")


@pytest.mark.parametrize("key", [b"\x90", b"\x80", b"\xc0"])
def test_a_map_key_is_text_bytes_or_a_number(key: bytes) -> None:
    with pytest.raises(wire.WireError, match="key"):
        wire.unpack(b"\x81" + key + b"\xc0")


@given(st.binary(max_size=200), st.integers(0, wire.MAX_FDS))
def test_a_frame_says_its_size_and_its_descriptors(body: bytes, fds: int) -> None:
    framed = wire.frame(body, fds)
    assert wire.parse_header(framed[: wire.HEADER_BYTES]) == (len(body), fds)
    assert framed[wire.HEADER_BYTES :] == body


def test_a_frame_over_a_limit_is_neither_made_nor_read() -> None:
    with pytest.raises(wire.WireError, match="over the limit"):
        wire.frame(bytes(wire.MAX_BODY + 1))
    with pytest.raises(wire.WireError, match="over the limit"):
        wire.frame(b"", wire.MAX_FDS + 1)
    with pytest.raises(wire.WireError, match="over the limit"):
        wire.parse_header((wire.MAX_BODY + 1).to_bytes(4, "big"))
    with pytest.raises(wire.WireError, match="over the limit"):
        wire.parse_header(bytes((wire.MAX_FDS + 1, 0, 0, 0)))
    with pytest.raises(wire.WireError, match="4 bytes"):
        wire.parse_header(b"\0\0\0")
