"""What nobody inside may see, and where a mask has to lie. Pure.

The canonical path of an object is the one name that every link to it leads to, so one mask there covers all
of them: a link, a link to a directory, a name below a linked directory. A link that leads nowhere is left
alone, for a mask would have to be made in the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from ral_broker.envelope.coverage import Grant, at, depth, lineage
from ral_broker.envelope.facts import ABSENT, PathFact
from ral_broker.envelope.places import (
    ALWAYS_HIDDEN,
    CREDENTIALS,
    HIDDEN_UNLESS_LISTED,
    OWN,
    ROOT_HIDDEN,
    ROOT_ONLY,
    SOCKETS,
    sockets_in_tmp,
)
from ral_broker.envelope.plan import Identity, Mask
from ral_broker.envelope.policy import Rule, SessionPolicy
from ral_broker.errors import Refused
from ral_broker.log import shown


class Hidden(msgspec.Struct, frozen=True):
    """An object that is masked, by its canonical path; or (``exists`` false) a name that none may take."""

    path: bytes
    directory: bool
    why: str
    exists: bool = True
    identity: Identity | None = None


def rules(policy: SessionPolicy) -> Iterator[Rule]:
    """Yield every name that is to be hidden."""
    yield from (Rule(path, OWN) for path in policy.hidden)  # wall
    home = policy.home_path.rstrip(b"/")
    yield from (Rule(home + b"/" + name, CREDENTIALS) for name in ALWAYS_HIDDEN)  # wall
    listed = {
        rule.path
        for rules in (policy.home_readonly, policy.home_writable, policy.home_seeded)
        for rule in rules
    }
    for name in HIDDEN_UNLESS_LISTED:
        if home + b"/" + name not in listed:
            yield Rule(home + b"/" + name, CREDENTIALS)  # wall
    yield from policy.credentials  # wall
    if policy.uid == 0:
        yield from (Rule(path, ROOT_ONLY) for path in ROOT_HIDDEN)  # wall
    if not policy.private_tmp:
        named = {rule.path for rule in (*policy.readonly, *policy.writable)}
        for path in sockets_in_tmp(policy.uid):
            if path not in named:
                yield Rule(path, SOCKETS)  # wall
    yield from policy.blocked  # wall


def hidden(policy: SessionPolicy, facts: Mapping[bytes, PathFact]) -> dict[bytes, Hidden]:
    """Return what is hidden, by canonical path and by the name that the setting gives it."""
    found: dict[bytes, Hidden] = {}
    for rule in rules(policy):
        fact = facts.get(rule.path, ABSENT)
        item = None
        if fact.closed is not None:
            # Nothing below can be seen now, but a program inside could change the permissions.
            item = Hidden(fact.closed, True, rule.why)
        elif fact.resolved is not None and fact.reaches in ("file", "directory"):
            item = Hidden(fact.resolved, fact.reaches == "directory", rule.why, identity=fact.identity)
        if item is not None and (item.path not in found or not found[item.path].exists):
            found[item.path] = item
        found.setdefault(rule.path, Hidden(rule.path, False, rule.why, exists=False))
    return found


def hiding(found: Mapping[bytes, Hidden], *paths: bytes) -> Hidden | None:
    """Return what hides one of ``paths``, if anything does."""
    return next((found[name] for path in paths for name in lineage(path) if name in found), None)


def refuse_silent(
    policy: SessionPolicy, facts: Mapping[bytes, PathFact], grants: Mapping[bytes, Grant]
) -> None:
    """Raise Refused where something that has to be hidden did not answer, and would be shown."""
    for rule in rules(policy):
        grant = at(grants, rule.path)
        if facts.get(rule.path, ABSENT).silent and grant is not None and grant.is_host():  # wall
            raise Refused(
                f"{shown(rule.path)} is to be hidden ({rule.why}) and cannot be looked at (a dead network "
                f"mount?), while {shown(grant.path)} would show it; mend it, or do not show the latter"
            )


def masks(found: Mapping[bytes, Hidden], grants: Mapping[bytes, Grant]) -> list[Mask]:
    """Return the masks over what would be shown, outer before inner, none below another."""
    made: dict[bytes, Mask] = {}
    for path in sorted((h.path for h in found.values() if h.exists), key=depth):
        if path in made or any(name in made and made[name].directory for name in lineage(path)):
            continue
        grant = at(grants, path)
        if grant is not None and grant.is_host():
            item = found[path]
            made[path] = Mask(
                dest=path, directory=item.directory, identity=item.identity, layer="mask", why=item.why
            )
    return list(made.values())


def shifted(found: Mapping[bytes, Hidden], source: bytes, dest: bytes) -> Iterable[Mask]:
    """Return the masks that a bind of ``source`` at another name, ``dest``, needs."""
    grant = Grant(path=source, kind="writable", layer="kernel", why="")
    for mask in masks(found, {source: grant}):
        yield msgspec.structs.replace(mask, dest=dest + mask.dest[len(source) :], layer="kernel")
