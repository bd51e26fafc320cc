"""The file systems of the kernel's own in a session, over every bind, and the devices of the host. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ral_broker.envelope.checks import Admission, Facts
from ral_broker.envelope.facts import ABSENT
from ral_broker.envelope.masks import Hidden, hiding, shifted
from ral_broker.envelope.places import DEVICES_ALREADY_THERE, ROOT_MASKED, ROOT_READ_ONLY
from ral_broker.envelope.plan import Bind, Dev, Device, Mask, Operation, Proc, Symlink, is_under
from ral_broker.envelope.policy import Rule, SessionPolicy

SHARED_MEMORY = b"/dev/shm"


def kernel(policy: SessionPolicy, facts: Facts, hidden: Mapping[bytes, Hidden]) -> Iterator[Operation]:
    """Yield /proc, /dev, and for a session of root's what keeps it from the kernel's switches."""
    if policy.fresh_proc:
        yield Proc(dest=b"/proc", layer="kernel", why="always")
    else:
        # Read-only: it has files of every process of this user, and for some of them (oom_score_adj,
        # coredump_filter, clear_refs, autogroup) the uid is all that a write is asked for.
        yield Bind(
            dest=b"/proc", source=b"/proc", writable=False, required=True, layer="kernel",  # wall
            why="this host refuses a fresh /proc",
        )  # fmt: skip
    yield Dev(dest=b"/dev", layer="kernel", why="always")
    fact = ABSENT if policy.private_ipc else facts.get(SHARED_MEMORY, ABSENT)
    if fact.resolved is not None and fact.reaches == "directory":
        yield Bind(
            dest=SHARED_MEMORY, source=fact.resolved, writable=True, identity=fact.identity, layer="kernel",
            why="private_ipc = false",
        )  # fmt: skip
        yield from shifted(hidden, fact.resolved, SHARED_MEMORY)  # wall
    if policy.uid != 0:
        return
    for path in ROOT_READ_ONLY:  # wall
        fact = facts.get(path, ABSENT)
        if fact.kind in ("directory", "file"):
            yield Bind(
                dest=path, source=path, writable=False, layer="kernel",
                why="uid 0 could write the host's /proc",
            )  # fmt: skip
    for path in ROOT_MASKED:  # wall
        fact = facts.get(path, ABSENT)
        if fact.kind in ("directory", "file"):
            yield Mask(
                dest=path, directory=fact.kind == "directory", layer="kernel", why="uid 0 could read it"
            )


def devices(
    policy: SessionPolicy, facts: Facts, hidden: Mapping[bytes, Hidden], admission: Admission
) -> Iterator[Operation]:
    """Yield the devices of the host that are shown, at the names they have there."""
    made: set[bytes] = set()
    for path in policy.devices:
        fact = facts.get(path, ABSENT)
        if fact.resolved is None or fact.reaches != "file":
            continue
        if fact.device is None or not is_under(fact.resolved, b"/dev"):  # wall
            admission.leave_out(Rule(path, "devices"), "is no device and is left out")
            continue
        if hiding(hidden, fact.resolved, path) is not None:
            continue
        if fact.resolved not in made and not _is_provided(fact.resolved):
            made.add(fact.resolved)
            yield Device(
                dest=fact.resolved, source=fact.resolved, device=fact.device, identity=fact.identity,
                layer="kernel", why="devices",
            )  # fmt: skip
        if path not in made and path != fact.resolved and not _is_provided(path):
            made.add(path)
            yield Symlink(dest=path, target=fact.resolved, layer="kernel", why="devices")


def _is_provided(path: bytes) -> bool:
    """Tell whether a session's own /dev decides what is at this name."""
    own = (b"/dev/pts", SHARED_MEMORY, b"/dev/mqueue")
    return path in DEVICES_ALREADY_THERE or any(is_under(path, place) for place in own)
