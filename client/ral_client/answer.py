"""Messages of the broker, read field by field: msgspec would cost more than the rest of the client."""

import posix

from ral_protocol import wire


class Answer:
    """One message of the broker. The getters check types; a missing key gives the default, if there is
    one."""

    def __init__(self, untrusted: object, fds: "list[int]") -> None:
        if not isinstance(untrusted, dict):
            raise wire.WireError("an answer is a map")
        self._fields = untrusted
        self.fds = fds
        self.kind = self.text("t")

    def _get(self, key: str, default: object) -> object:
        value = self._fields.get(key, default)
        if value is ...:
            raise wire.WireError(f"an answer lacks {key}")
        return value

    def text(self, key: str, default: object = ...) -> str:
        """A str."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise wire.WireError(f"{key} is not text")
        return value

    def number(self, key: str, default: object = ...) -> int:
        """An int."""
        value = self._get(key, default)
        if not isinstance(value, int):
            raise wire.WireError(f"{key} is not a number")
        return value

    def flag(self, key: str) -> bool:
        """A bool; False if missing."""
        return self._get(key, False) is True

    def has(self, key: str) -> bool:
        """Whether ``key`` is there and not nil."""
        return self._fields.get(key) is not None

    def data(self, key: str) -> bytes:
        """Bytes, as a path is."""
        value = self._get(key, ...)
        if not isinstance(value, bytes):
            raise wire.WireError(f"{key} is not bytes")
        return value

    def datas(self, key: str) -> "list[bytes]":
        """A list of bytes."""
        value = self._get(key, ...)
        if not isinstance(value, list) or not all(isinstance(item, bytes) for item in value):
            raise wire.WireError(f"{key} is not a list of bytes")
        return value

    def texts(self, key: str) -> "list[str]":
        """A list of str; empty if missing."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise wire.WireError(f"{key} is not a list of texts")
        return value

    def pairs(self, key: str) -> "list[tuple[str, int]]":
        """A list of names and numbers; empty if missing."""
        found = []
        value = self._get(key, [])
        for item in value if isinstance(value, list) else [None]:
            if not (isinstance(item, list) and len(item) == 2):
                raise wire.WireError(f"{key} is not a list of pairs")
            name, number = item
            if not (isinstance(name, str) and isinstance(number, int)):
                raise wire.WireError(f"{key} is not a list of names and numbers")
            found.append((name, number))
        return found

    def close(self) -> None:
        """Close the descriptors that came with the message."""
        while self.fds:
            posix.close(self.fds.pop())
