"""Launches with many masks: bwrap's work grows with the square of the number of mounts, so most of the masks
are attached by the zygote, in the finished sandbox, while the trampoline waits for its go.

Nothing of the session has run then, so nobody sees the time in between.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from ral_broker.envelope.plan import Mask, Operation, Plan, ReadOnly, is_under
from ral_broker.errors import HostLacks, Refused
from ral_broker.log import shown
from ral_broker.sessions.handshake import check_waiting
from ral_broker.zygote import MaskAt, Zygote, reason

MASKS_BY_BWRAP = 12
"""So many are left to bwrap: for fewer the zygote saves a millisecond at most (benchmarks/masks.py)."""


def split_masks(plan: Plan) -> tuple[tuple[Operation, ...], tuple[Mask, ...]]:
    """Return what of a plan bwrap gets, and the masks that are attached afterwards; in their order. Pure.

    A mask can come last only if nothing that follows it lies at, above or below it: else the order decides
    what is visible. And the program must not stand in what it hides: bwrap enters the working directory
    before, and from there it would stay open.
    """
    if sum(isinstance(operation, Mask) for operation in plan.operations) <= MASKS_BY_BWRAP:
        return plan.operations, ()
    kept: list[Operation] = []
    masks: list[Mask] = []
    followed: set[bytes] = set()
    holding: set[bytes] = set()
    for operation in reversed(plan.operations):
        dest = operation.dest
        free = dest not in holding and not _is_covered(dest, followed)  # wall
        if isinstance(operation, Mask) and free and not is_under(plan.cwd, dest):  # wall
            masks.append(operation)
        else:
            kept.append(operation)
        # What makes one mount read-only says nothing about those below it.
        if not isinstance(operation, ReadOnly):
            followed.add(dest)
        while dest not in holding:
            holding.add(dest)
            dest = _parent(dest)
    if len(masks) <= MASKS_BY_BWRAP:
        return plan.operations, ()
    return tuple(reversed(kept)), tuple(reversed(masks))


def _parent(path: bytes) -> bytes:
    return path.rpartition(b"/")[0] or b"/"


def _is_covered(dest: bytes, followed: set[bytes]) -> bool:
    """Tell whether ``dest`` or a directory above it is in ``followed``."""
    while dest not in followed:
        if dest == b"/":
            return False
        dest = _parent(dest)
    return True


async def attach_masks(
    zygote: Zygote | None, lease: socket.socket, init_pid: int, masks: Sequence[Mask]
) -> None:
    """Attach ``masks`` in the sandbox whose trampoline waits at the other end of ``lease``; each is looked
    at once more.

    Raises Refused if one of them does not hold, HostLacks: then the program must not get its go.
    """
    if not masks:
        return
    if zygote is None:
        raise HostLacks("the helper that changes mounts is not installed; install ral again")
    try:
        namespace = os.open(f"/proc/{init_pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise HostLacks(f"the sandbox ended while it was prepared: {error.strerror}") from error
    try:
        check_waiting(lease)  # the pid was still its own when it was looked up
        changes = [MaskAt(mask.dest, mask.directory, mask.identity) for mask in masks]  # wall
        outcomes = await zygote.change(namespace, changes)
    finally:
        os.close(namespace)
    for mask, outcome in zip(masks, outcomes, strict=True):
        if outcome.stage:  # wall
            raise Refused(
                f"{shown(mask.dest)} cannot be hidden: {reason(outcome)}; nothing was started; run the "
                "command again if something was changed there just now"
            )
