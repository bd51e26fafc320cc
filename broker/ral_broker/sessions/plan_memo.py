"""The last plan of each project, used again where everything that it was made from is equal.

The builders are pure, so equal arguments give an equal result. Nothing here has an age: what the host may
have changed is looked at anew before it is compared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from ral_broker.config.policy import Found, Place, session_policy
from ral_broker.config.settings import Settings
from ral_broker.envelope.facts import PathFact
from ral_broker.envelope.plan import Symlink
from ral_broker.envelope.policy import SessionPolicy
from ral_broker.envelope.session_plan import SessionPlan, paths_of_interest, session_plan
from ral_protocol import exits

_KEPT = 32
_MARKER = exits.SESSION_MARKER.encode()


class Given(msgspec.Struct, frozen=True):
    """What a policy is made from. ``place`` names no session."""

    settings: Settings
    place: Place
    found: Found
    configuration: tuple[bytes, ...]
    share_network: bool


class _Kept:
    """One project's last policy, the names that its plan asks about, and that plan."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.policy = session_policy(
            given.settings, given.place, given.found, given.configuration, share_network=given.share_network
        )
        self.names = tuple(dict.fromkeys(paths_of_interest(self.policy)))
        self.facts: Mapping[bytes, PathFact] | None = None
        self.made: SessionPlan | None = None


class PlanMemo:
    """Remembers for some projects."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()

    def policy(self, given: Given) -> tuple[SessionPolicy, tuple[bytes, ...]]:
        """Return the policy, and the names to look at for its plan."""
        kept = self._of(given)
        return kept.policy, kept.names

    def plan(self, given: Given, facts: Mapping[bytes, PathFact], session: str) -> SessionPlan:
        """Return the plan of ``session``. Raises as session_plan."""
        kept = self._of(given)
        if kept.made is None or kept.facts != facts:
            kept.facts, kept.made = None, None
            made = session_plan(kept.policy, facts)
            kept.facts, kept.made = facts, made
        plan = kept.made.plan
        operations = tuple(
            msgspec.structs.replace(operation, target=session.encode())
            if operation.dest == _MARKER and isinstance(operation, Symlink)
            else operation
            for operation in plan.operations
        )
        return SessionPlan(msgspec.structs.replace(plan, operations=operations), kept.made.notices)

    def _of(self, given: Given) -> _Kept:
        project = given.place.project
        kept = self._kept.get(project)
        if kept is None or kept.given != given:
            kept = self._kept[project] = _Kept(given)
        self._kept.move_to_end(project)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return kept
