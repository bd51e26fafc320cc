"""What stays read-only inside although something grants writing: it would run outside, or decide
there. Pure."""

from __future__ import annotations

import msgspec

from ral_broker.envelope.checks import Admission, Facts
from ral_broker.envelope.coverage import Grant, Grants, above, at, lineage
from ral_broker.envelope.facts import ABSENT
from ral_broker.envelope.home_plan import home_protected, seeds_on_host
from ral_broker.envelope.places import CONFIGURATION, INSTALLATION, RUNS_AT_LOGIN
from ral_broker.envelope.policy import Rule, SessionPolicy
from ral_broker.errors import Refused
from ral_broker.log import shown


class _Protected(msgspec.Struct, frozen=True):
    """``project_may``: a project that lies below stays writable."""

    grant: Grant
    project_may: bool


def protected(policy: SessionPolicy, facts: Facts, grants: Grants, admission: Admission) -> Grants:
    """Return the grants with everything that is protected read-only, whatever grants writing above or
    below.

    What is not there cannot be: a mount would have to be made in the host. Raises Refused where that is the
    configuration, for what a program makes there decides over the next session; and where something did not
    answer that may well be there.
    """
    rules = [(Rule(path, INSTALLATION), True) for path in policy.installation]  # wall
    rules += [(rule, True) for rule in home_protected(policy)]  # wall
    rules += [(rule, False) for rule in (*policy.protected, *policy.denied_writable)]  # wall
    rules += [(rule, False) for rule in seeds_on_host(policy, facts, grants)]  # wall
    found: dict[bytes, _Protected] = {}
    to_be_made: list[str] = []
    for rule, project_may in rules:
        fact = facts.get(rule.path, ABSENT)
        path = fact.closed or fact.resolved
        if path is None or (fact.closed is None and fact.reaches not in ("file", "directory")):
            outer = at(grants, path or rule.path)
            if rule.why == CONFIGURATION and outer is not None and outer.kind == "writable":  # wall
                raise Refused(
                    f"{shown(rule.path)} does not exist, and a program inside could make it "
                    f"({shown(outer.path)} is writable: {outer.why}); the next session would read it: "
                    f"mkdir -p {shown(rule.path)}"
                )
            if rule.why == RUNS_AT_LOGIN and outer is not None and outer.kind == "writable":
                to_be_made.append(shown(rule.path))
            if fact.silent and outer is not None and outer.kind == "writable":  # wall
                raise Refused(
                    f"{shown(rule.path)} is to stay read-only ({rule.why}) and cannot be looked at (a dead "
                    f"network mount?), while {shown(outer.path)} is writable ({outer.why}); mend it, or do "
                    "not make the latter writable"
                )
            continue
        grant = Grant(
            path=path, kind="readonly", layer="protect", why=rule.why,
            identity=None if fact.closed else fact.identity,
        )  # fmt: skip
        found.setdefault(path, _Protected(grant, project_may))
        parent = above(grants, rule.path)
        if fact.kind == "link" and parent is not None and parent.kind == "writable":
            admission.leave_out(
                rule, "is a link: what it leads to is read-only inside, the link itself is not"
            )
    if to_be_made:
        admission.note(
            f"a program inside can make what does not exist and {RUNS_AT_LOGIN}: {', '.join(to_be_made)}; "
            "make them first, empty, to keep them"
        )
    result: Grants = {}
    for path, grant in grants.items():
        over = next((found[name] for name in lineage(path) if name in found), None)
        result[path] = grant
        if grant.kind == "writable" and over is not None and not _may_write(policy, path, over):
            admission.leave_out(Rule(path, grant.why), f"stays read-only inside: {over.grant.why}")
            result[path] = msgspec.structs.replace(grant, kind="readonly", why=over.grant.why)
    for path, item in found.items():
        outer = at(grants, path)
        if outer is not None and outer.kind == "writable" and path not in result:
            result[path] = item.grant
    return result


def _may_write(policy: SessionPolicy, path: bytes, over: _Protected) -> bool:
    return over.project_may and path == policy.project and over.grant.path != path
