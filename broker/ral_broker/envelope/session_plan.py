"""From what a session is to be, to its plan. Pure: (policy, facts of the host) → Plan.

The order is the security: what is shown, outer before inner, so that the most precise path decides; then
masks over all of it; /proc and /dev over every bind; and last the root made read-only. Nothing is ever made
in the host: what would have to be is left out, with a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from ral_broker.envelope import masks
from ral_broker.envelope.checks import Admission, Facts, check_project
from ral_broker.envelope.coverage import (
    Grant,
    Grants,
    Link,
    anchors,
    arranged,
    at,
    depth,
    is_fit,
    link_text,
    links,
    operation_of,
    pruned,
)
from ral_broker.envelope.facts import ABSENT
from ral_broker.envelope.home_plan import (
    home_contents,
    home_grants,
    home_protected,
    is_empty_home,
)
from ral_broker.envelope.kernel_plan import devices, kernel
from ral_broker.envelope.places import (
    CREDENTIAL_NAMES,
    NAME_CACHE,
    PASSWD,
    RESOLVER,
    ROOT_HIDDEN,
    ROOT_MASKED,
    ROOT_READ_ONLY,
    SCRATCH,
    SYSTEM_PATHS,
)
from ral_broker.envelope.plan import Data, Operation, Pinned, Plan, ReadOnly, Symlink
from ral_broker.envelope.policy import Rule, SessionPolicy
from ral_broker.envelope.protect import protected
from ral_protocol import exits

__all__ = (
    "CREDENTIAL_NAMES", "ROOT_HIDDEN", "ROOT_MASKED", "ROOT_READ_ONLY", "SYSTEM_PATHS", "SessionPlan",
    "SessionPolicy", "notices", "paths_of_interest", "plan_session", "session_plan",
)  # fmt: skip

_FRESH_RUN = "a fresh /run: no socket of the host"


class SessionPlan(msgspec.Struct, frozen=True):
    """A plan, and what the user should know of it: a sentence each."""

    plan: Plan
    notices: tuple[str, ...]


def paths_of_interest(policy: SessionPolicy) -> Iterator[bytes]:
    """Yield every name whose state the builder will look up."""
    yield policy.project
    yield from SCRATCH
    if policy.share_network:
        yield RESOLVER
    if not _filters_users(policy):
        yield NAME_CACHE
    if not policy.private_ipc:
        yield b"/dev/shm"
    if not is_empty_home(policy):
        yield policy.home_path
    for rules in (
        policy.readonly, policy.writable, policy.home_readonly, policy.home_writable, policy.home_seeded,
        policy.protected, policy.denied_writable, masks.rules(policy), home_protected(policy),
    ):  # fmt: skip
        yield from (rule.path for rule in rules)
    yield from policy.installation
    yield from policy.devices
    yield from (text.path for text in policy.texts)
    yield from (path for _, path in policy.pins)
    if policy.uid == 0:
        yield from ROOT_READ_ONLY
        yield from ROOT_MASKED


def plan_session(policy: SessionPolicy, facts: Facts) -> Plan:
    """Return the plan of a session. Raises Refused, see session_plan."""
    return session_plan(policy, facts).plan


def notices(policy: SessionPolicy, facts: Facts) -> tuple[str, ...]:
    """Return what the user should know of a session's plan: a sentence each. Raises as session_plan."""
    return session_plan(policy, facts).notices


def session_plan(policy: SessionPolicy, facts: Facts) -> SessionPlan:
    """Return the plan of a session and what the user should know of it.

    Raises Refused when the project would show what a session must never show, or lies where the kernel's own
    file systems go; when the real home is to be shown and is none; or when something that has to be hidden
    did not answer.
    """
    hidden = masks.hidden(policy, facts)
    check_project(policy, facts, hidden)
    admission = Admission(policy, facts, hidden)
    grants, wanted = _granted(policy, facts, admission)
    masks.refuse_silent(policy, facts, grants)
    grants = pruned(protected(policy, facts, grants, admission))
    hiding = masks.masks(hidden, grants)
    pins = list(_pins(policy, facts, grants, hidden))
    texts = list(_texts(policy, facts, grants, hidden))
    guarded = [g.path for g in grants.values() if g.kind == "readonly"]
    guarded += [operation.dest for operation in (*hiding, *pins, *texts)]
    grants |= anchors(grants, guarded)  # wall
    made = links(wanted, grants)
    operations = _ordered(grants, made, policy)
    operations += home_contents(policy, facts, hidden, grants, made, admission)
    operations += pins
    operations += hiding
    operations += texts
    operations += kernel(policy, facts, hidden)
    operations += devices(policy, facts, hidden, admission)
    operations += _final(policy, grants)
    plan = Plan(
        operations=tuple(operations), cwd=policy.cwd, share_network=policy.share_network,
        share_ipc=not policy.private_ipc, nested_user_namespaces=policy.nested_userns,
    )  # fmt: skip
    return SessionPlan(plan, (*admission.notices, *_warnings(policy)))


def _granted(policy: SessionPolicy, facts: Facts, admission: Admission) -> tuple[Grants, list[Link]]:
    """Return what is shown before anything is protected or hidden, and the links that lead to it."""
    granted: list[Grant] = []
    wanted: list[Link] = []
    for item in (
        *_listed(policy.readonly, admission, writable=False),
        *_scratch(policy, facts),
        *home_grants(policy, facts, admission),
        Grant(
            path=policy.project, kind="writable", layer="project", why="project", required=True, kept=True,
            identity=facts.get(policy.project, ABSENT).identity,
        ),
        *_listed(policy.writable, admission, writable=True),
    ):  # fmt: skip
        if isinstance(item, Link):
            wanted.append(item)
        else:
            granted.append(item)
    for rule in policy.writable:
        if facts.get(rule.path, ABSENT).reaches == "absent":
            admission.leave_out(rule, "does not exist and is left out; make it first, with mkdir -p")
    grants = arranged(granted)
    for grant in _name_services(policy, facts, grants):
        grants.setdefault(grant.path, grant)
    for path in [g.path for g in grants.values() if g.kind == "tmpfs" and not is_fit(g, grants, facts)]:
        rule = Rule(path, grants.pop(path).why)  # wall
        admission.leave_out(rule, "does not exist below what is shown, and is not made")
    return grants, wanted


def _listed(rules: Iterable[Rule], admission: Admission, *, writable: bool) -> Iterator[Grant | Link]:
    for rule, fact, path in admission.admitted(rules, writable=writable):
        yield Grant(
            path=path, kind="writable" if writable else "readonly",
            layer="project" if writable else "system", why=rule.why, identity=fact.identity,
        )  # fmt: skip
        if path != rule.path:
            yield Link(rule.path, link_text(rule.path, fact), path, rule.why)


def _scratch(policy: SessionPolicy, facts: Facts) -> Iterator[Grant | Link]:
    for place in SCRATCH:
        fact = facts.get(place, ABSENT)
        path = fact.resolved if fact.resolved is not None and fact.reaches == "directory" else place
        if place == b"/tmp" and not policy.private_tmp:
            if fact.reaches == "directory":
                yield Grant(
                    path=path, kind="writable", layer="scratch", why="private_tmp = false",
                    identity=fact.identity, kept=True,
                )  # fmt: skip
        elif place == b"/run":
            yield Grant(path=path, kind="tmpfs", layer="scratch", why=_FRESH_RUN, kept=True)
        else:
            yield Grant(path=path, kind="tmpfs", mode=0o1777, layer="scratch", why="private_tmp", kept=True)
        if path != place:
            yield Link(place, link_text(place, fact), path, "private_tmp", "scratch")
    yield Link(b"/var/run", b"/run", b"/run", _FRESH_RUN, "scratch")


def _name_services(policy: SessionPolicy, facts: Facts, grants: Mapping[bytes, Grant]) -> Iterator[Grant]:
    """Where resolv.conf leads to a place that is not shown, show the directory it lives in below /run, for
    it is replaced by rename there; elsewhere the file."""
    fact = facts.get(RESOLVER, ABSENT) if policy.share_network else ABSENT
    named = at(grants, RESOLVER)
    if (
        fact.reaches == "file"
        and fact.resolved is not None
        and fact.resolved != RESOLVER
        and named is not None
        and named.is_host()
    ):
        target = at(grants, fact.resolved)
        if target is None or not target.is_host():
            directory = fact.resolved.rpartition(b"/")[0]
            alone = not directory.startswith(b"/run/") or directory.startswith(b"/run/user")
            yield Grant(
                path=fact.resolved if alone else directory, kind="readonly", layer="scratch",
                why="/etc/resolv.conf", identity=fact.identity if alone else None,
            )  # fmt: skip
    fact = ABSENT if _filters_users(policy) else facts.get(NAME_CACHE, ABSENT)
    if fact.resolved == NAME_CACHE and fact.reaches == "directory":
        yield Grant(
            path=NAME_CACHE, kind="readonly", layer="scratch", why="filter_passwd = false",
            identity=fact.identity,
        )  # fmt: skip


def _filters_users(policy: SessionPolicy) -> bool:
    return any(text.path == PASSWD for text in policy.texts)


def _pins(
    policy: SessionPolicy, facts: Facts, grants: Grants, hidden: Mapping[bytes, masks.Hidden]
) -> Iterator[Pinned]:
    for pin, path in policy.pins:
        grant = at(grants, path)
        gone = path in facts and facts[path].reaches == "absent"
        if grant is not None and grant.is_host() and not gone and masks.hiding(hidden, path) is None:
            yield Pinned(dest=path, pin=pin, layer="protect", why="the broker executes this file")  # wall


def _texts(
    policy: SessionPolicy, facts: Facts, grants: Grants, hidden: Mapping[bytes, masks.Hidden]
) -> Iterator[Data]:
    for text in policy.texts:
        fact = facts.get(text.path, ABSENT)
        grant = None if fact.resolved is None or fact.reaches != "file" else at(grants, fact.resolved)
        if fact.resolved is None or grant is None or not grant.is_host():
            continue
        if masks.hiding(hidden, fact.resolved) is None:
            yield Data(dest=fact.resolved, content=text.content, layer="mask", why=text.why)


def _ordered(grants: Grants, made: Mapping[bytes, Symlink], policy: SessionPolicy) -> list[Operation]:
    """Outer before inner; a link that leads to the home after the home."""
    ranked: list[tuple[int, Operation]] = []
    for layer in ("system", "scratch", "home", "project", "protect"):
        ranked += [(depth(p), operation_of(g)) for p, g in grants.items() if g.layer == layer]
        ranked += [
            (depth(policy.home_path) if link.target == policy.home_path else depth(path), link)
            for path, link in made.items()
            if link.layer == layer
        ]
    return [operation for _, operation in sorted(ranked, key=lambda item: item[0])]


def _final(policy: SessionPolicy, grants: Grants) -> Iterator[Operation]:
    run = grants.get(b"/run")
    if run is not None and not run.is_host():
        yield Symlink(
            dest=exits.SESSION_MARKER.encode(), target=policy.session.encode(), layer="final",
            why="session marker",
        )  # fmt: skip
    home = grants.get(policy.home_path)
    if policy.home_access == "restricted" and home is not None and home.kind == "tmpfs":
        # After everything that has to be made in it.
        yield ReadOnly(dest=home.path, layer="final", why=home.why)  # wall
    why = "nothing is created outside the mounts above"
    yield ReadOnly(dest=b"/", layer="final", why=why)  # wall


def _warnings(policy: SessionPolicy) -> Iterator[str]:
    if not policy.private_tmp:
        yield (
            "private_tmp = false: /tmp is the host's, and programs inside reach the sockets and files that "
            "other programs of yours keep there"
        )
    if not policy.private_ipc:
        yield (
            "private_ipc = false: System V IPC and /dev/shm are the host's, and programs inside reach the "
            "shared memory of other programs of yours"
        )
