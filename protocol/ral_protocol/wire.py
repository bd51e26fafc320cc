"""Frames and the MessagePack subset that ral speaks. Imports nothing, so that a client starts fast.

A frame is a big-endian 32-bit word followed by a body. The high 8 bits of the word are the number of file
descriptors that travel with the frame (``SCM_RIGHTS``, attached to its first byte), the low 24 bits the
number of bytes of the body. The body is one MessagePack value: nil, bool, int (64 bits), str, bin, array,
map. Floats, extension types and timestamps do not exist on this wire.
https://github.com/msgpack/msgpack/blob/master/spec.md
"""

HEADER_BYTES = 4
MAX_BODY = 1 << 20
"""Bytes of a body at most, in both directions."""
MAX_FDS = 16
"""Descriptors of one frame at most."""
MAX_DEPTH = 16
"""Nesting of arrays and maps at most."""


class WireError(Exception):
    """The bytes are not a frame or not a value of this wire: the peer is at fault."""


def frame(body: bytes, fds: int = 0) -> bytes:
    """Return ``body`` with its header; ``fds`` descriptors are to be attached to the first byte.

    Raises WireError when the body or the number of descriptors is over the limit.
    """
    if len(body) > MAX_BODY:
        raise WireError(f"a frame of {len(body)} bytes is over the limit of {MAX_BODY}")
    if not 0 <= fds <= MAX_FDS:
        raise WireError(f"{fds} descriptors in one frame are over the limit of {MAX_FDS}")
    return ((fds << 24) | len(body)).to_bytes(HEADER_BYTES, "big") + body


def parse_header(header: bytes) -> "tuple[int, int]":
    """Return (bytes of the body, number of descriptors) of a header of 4 bytes.

    Raises WireError before anything is allocated when either is over its limit.
    """
    if len(header) != HEADER_BYTES:
        raise WireError("a frame header has 4 bytes")
    word = int.from_bytes(header, "big")
    size, fds = word & 0xFFFFFF, word >> 24
    if size > MAX_BODY:
        raise WireError(f"a frame of {size} bytes is over the limit of {MAX_BODY}")
    if fds > MAX_FDS:
        raise WireError(f"{fds} descriptors in one frame are over the limit of {MAX_FDS}")
    return size, fds


def pack(value: object) -> bytes:
    """Encode a value as MessagePack, in the shortest form, exactly as msgspec does.

    Raises WireError for a type this wire does not carry, an integer of more than 64 bits, or a nesting that
    is too deep.
    """
    out: list[bytes] = []
    _pack(value, out, 0)
    return b"".join(out)


def _pack(value: object, out: "list[bytes]", depth: int) -> None:
    if value is None:
        out.append(b"\xc0")
    elif value is True:
        out.append(b"\xc3")
    elif value is False:
        out.append(b"\xc2")
    elif isinstance(value, int):
        out.append(_pack_int(value))
    elif isinstance(value, str):
        try:
            data = value.encode("utf-8")
        except UnicodeEncodeError:
            raise WireError("a str with lone surrogates cannot travel; send bytes") from None
        out.append(_head(len(data), 0xA0, 32, b"\xd9", b"\xda", b"\xdb") + data)
    elif isinstance(value, (bytes, bytearray)):
        out.append(_head(len(value), 0, 0, b"\xc4", b"\xc5", b"\xc6") + bytes(value))
    elif depth >= MAX_DEPTH:
        raise WireError(f"nesting is deeper than {MAX_DEPTH}")
    elif isinstance(value, (list, tuple)):
        out.append(_head(len(value), 0x90, 16, b"", b"\xdc", b"\xdd"))
        for item in value:
            _pack(item, out, depth + 1)
    elif isinstance(value, dict):
        out.append(_head(len(value), 0x80, 16, b"", b"\xde", b"\xdf"))
        for key, item in value.items():
            _pack(key, out, depth + 1)
            _pack(item, out, depth + 1)
    else:
        raise WireError(f"a {type(value).__name__} cannot travel on this wire")


def _head(count: int, fix: int, fix_limit: int, one: bytes, two: bytes, four: bytes) -> bytes:
    if count < fix_limit:
        return bytes((fix | count,))
    if one and count < 0x100:
        return one + bytes((count,))
    if count < 0x10000:
        return two + count.to_bytes(2, "big")
    if count < 0x100000000:
        return four + count.to_bytes(4, "big")
    raise WireError("too long for this wire")


def _pack_int(value: int) -> bytes:
    if 0 <= value < 0x80:
        return bytes((value,))
    if -32 <= value < 0:
        return bytes((256 + value,))
    for width, code in ((1, 0), (2, 1), (4, 2), (8, 3)):
        if 0 <= value < 1 << (8 * width):
            return bytes((0xCC + code,)) + value.to_bytes(width, "big")
        if -(1 << (8 * width - 1)) <= value < 0:
            return bytes((0xD0 + code,)) + value.to_bytes(width, "big", signed=True)
    raise WireError("an integer of more than 64 bits cannot travel")


def unpack(data: bytes) -> object:
    """Decode exactly one value. Map keys must be str, bytes or int.

    Raises WireError for anything else: another type code, a truncated or over-long input, a nesting that is
    too deep, text that is not UTF-8, a length that the remaining bytes cannot hold (checked before
    allocation).
    """
    value, end = _unpack(data, 0, 0)
    if end != len(data):
        raise WireError(f"{len(data) - end} bytes follow the value")
    return value


def _take(data: bytes, at: int, count: int) -> bytes:
    part = data[at : at + count]
    if len(part) != count:
        raise WireError("truncated value")
    return part


def _unpack(data: bytes, at: int, depth: int) -> "tuple[object, int]":
    code = _take(data, at, 1)[0]
    at += 1
    if code < 0x80:
        return code, at
    if code >= 0xE0:
        return code - 256, at
    if 0xA0 <= code < 0xC0:
        return _text(data, at, code & 0x1F)
    if 0x80 <= code < 0x90:
        return _map(data, at, code & 0x0F, depth)
    if 0x90 <= code < 0xA0:
        return _array(data, at, code & 0x0F, depth)
    if code in _CONSTANTS:
        return _CONSTANTS[code], at
    if code not in _SIZED:
        raise WireError(f"type code 0x{code:02x} does not exist on this wire")
    kind, width = _SIZED[code]
    number = int.from_bytes(_take(data, at, width), "big", signed=kind == "signed")
    at += width
    if kind == "bin":
        return _take(data, at, number), at + number
    if kind == "str":
        return _text(data, at, number)
    if kind == "array":
        return _array(data, at, number, depth)
    if kind == "map":
        return _map(data, at, number, depth)
    return number, at


_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_SIZED = {
    0xC4: ("bin", 1), 0xC5: ("bin", 2), 0xC6: ("bin", 4),
    0xCC: ("unsigned", 1), 0xCD: ("unsigned", 2), 0xCE: ("unsigned", 4), 0xCF: ("unsigned", 8),
    0xD0: ("signed", 1), 0xD1: ("signed", 2), 0xD2: ("signed", 4), 0xD3: ("signed", 8),
    0xD9: ("str", 1), 0xDA: ("str", 2), 0xDB: ("str", 4),
    0xDC: ("array", 2), 0xDD: ("array", 4), 0xDE: ("map", 2), 0xDF: ("map", 4),
}  # fmt: skip


def _text(data: bytes, at: int, count: int) -> "tuple[str, int]":
    try:
        return _take(data, at, count).decode("utf-8"), at + count
    except UnicodeDecodeError:
        raise WireError("text that is not UTF-8") from None


def _array(data: bytes, at: int, count: int, depth: int) -> "tuple[list[object], int]":
    if depth >= MAX_DEPTH:
        raise WireError(f"nesting is deeper than {MAX_DEPTH}")
    if count > len(data) - at:
        raise WireError("truncated value")
    items: list[object] = []
    for _ in range(count):
        item, at = _unpack(data, at, depth + 1)
        items.append(item)
    return items, at


def _map(data: bytes, at: int, count: int, depth: int) -> "tuple[dict[object, object], int]":
    if depth >= MAX_DEPTH:
        raise WireError(f"nesting is deeper than {MAX_DEPTH}")
    if 2 * count > len(data) - at:
        raise WireError("truncated value")
    items: dict[object, object] = {}
    for _ in range(count):
        key, at = _unpack(data, at, depth + 1)
        if not isinstance(key, (str, bytes, int)):
            raise WireError("a map key is str, bytes or int")
        items[key], at = _unpack(data, at, depth + 1)
    return items, at
