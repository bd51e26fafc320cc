"""A launch that has been planned, and the trampoline's orders for it. Pure."""

from __future__ import annotations

import resource

import msgspec

from ral_broker.envelope.plan import Identity, Plan
from ral_broker.envelope.warrant import Warrant
from ral_broker.sessions.caller import Habits
from ral_protocol.control import Payload, Run
from ral_protocol.records import Placeholder


class Prepared(msgspec.Struct, frozen=True):
    """A launch that has been planned: nothing is open yet.

    ``processes``: limit of processes (RLIMIT_NPROC), None for the caller's. ``placeholders``: what was made
    in the host for this launch; ``remove_placeholders``: they go when no session is left. ``quiet``: only
    ``warnings`` are told.
    """

    session: str
    plan: Plan
    payload: Payload
    environment: tuple[bytes, ...]
    blocked_variables: int
    cwd_identity: Identity
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    processes: int | None = None
    placeholders: tuple[Placeholder, ...] = ()
    remove_placeholders: bool = False
    quiet: bool = False


def warrant_of(prepared: Prepared, request: Run, habits: Habits, ruleset: bool) -> Warrant:
    """Return what the trampoline is to do. ``ruleset``: a Landlock ruleset waits on its slot."""
    terminals = (request.terminals[0], True, True) if request.detach else request.terminals
    return Warrant(
        argv=tuple(prepared.payload.argv), environment=prepared.environment, umask=habits.umask,
        nice=habits.nice, ignored=frozenset(n for n in range(1, 65) if request.ignored >> (n - 1) & 1 and n
        not in (9, 19)), limits=_limits(habits, prepared.processes), affinity=habits.affinity,
        ruleset=ruleset, terminals=terminals,
    )  # fmt: skip


def _limits(habits: Habits, processes: int | None) -> tuple[tuple[int, int, int], ...]:
    """Return the caller's limits, with at most ``processes`` processes of this user."""
    if processes is None:
        return habits.limits
    return tuple(
        (number, min(soft, processes), min(hard, processes))
        if number == resource.RLIMIT_NPROC
        else (number, soft, hard)
        for number, soft, hard in habits.limits
    )
