"""What the broker writes to its journal or stderr, and how names from outside are printed."""

from __future__ import annotations

import logging
import sys

_ESCAPES = {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t", ord("\\"): "\\\\"}


def shown(untrusted_name: bytes | str) -> str:
    """Return a name from outside as printable text: control characters and bytes that are no UTF-8 are
    escaped."""
    if isinstance(untrusted_name, bytes):
        untrusted_name = untrusted_name.decode("utf-8", "backslashreplace")
    text = untrusted_name.translate(_ESCAPES) if "\\x" not in untrusted_name else untrusted_name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


logger = logging.getLogger("ral")


def configure(*, journal: bool) -> None:
    """Send log lines to stderr. Under systemd the journal adds time and name, and ``<N>`` sets the priority
    (sd-daemon(3))."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JournalFormatter() if journal else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _JournalFormatter(logging.Formatter):
    _PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))

    def format(self, record: logging.LogRecord) -> str:
        priority = next((number for level, number in self._PRIORITIES if record.levelno >= level), 7)
        # A traceback has many lines and each is a record of its own in the journal.
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())
