"""The one table of descriptor numbers in bwrap and the trampoline. Pure.

Everything from FIRST up belongs to the handoff; nothing else above stderr reaches the child.
"""

from __future__ import annotations

from ral_broker.errors import Refused

FIRST = 98
ARGS = 98
WARRANT = 99
REPORT = 100
RULESET = 101
TRAMPOLINE = 102
SECCOMP = (103, 104)
STATUS = 105
SPARE = 106
MOUNTS = 107
MAX_MOUNTS = 65536


def mount_slot(index: int) -> int:
    """Return the descriptor number of the ``index``-th lent mount (from 0).

    Raises Refused over MAX_MOUNTS.
    """
    if index >= MAX_MOUNTS:
        raise Refused(
            f"{index + 1} mounts were asked for and at most {MAX_MOUNTS} can be handed over; "
            "name directories instead of the files in them"
        )
    return MOUNTS + index
