"""What is shown at each path, and how: of overlapping grants the one with the most precise path decides,
whatever their order. Pure.

Every grant is at the canonical path of its object, so that an object has one name, and what a link inside
leads to is what it leads to outside. Cost is linear in the number of paths times their depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from ral_broker.envelope.facts import ABSENT, PathFact
from ral_broker.envelope.places import ANCHOR
from ral_broker.envelope.plan import Bind, Identity, Layer, Operation, Symlink, Tmpfs

Kind = Literal["readonly", "writable", "tmpfs"]

_RANK: dict[Kind, int] = {"readonly": 0, "writable": 1, "tmpfs": 2}


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """One object and how it is shown: a bind of the host's, or a file system of the sandbox's own.

    ``kept``: it has an operation of its own even where a wider grant shows the same.
    """

    path: bytes
    kind: Kind
    layer: Layer
    why: str
    identity: Identity | None = None
    required: bool = False
    kept: bool = False
    mode: int = 0o755

    def is_host(self) -> bool:
        """Tell whether this shows the host's tree, in which nothing may be made."""
        return self.kind != "tmpfs"


class Link(msgspec.Struct, frozen=True):
    """A name of a setting that leads to ``resolved``, the canonical path of what is shown."""

    path: bytes
    target: bytes
    resolved: bytes
    why: str
    layer: Layer = "system"


Grants = dict[bytes, Grant]
"""By path."""


def ancestors(path: bytes) -> Iterator[bytes]:
    """Yield every directory above an absolute path, the nearest first."""
    while path != b"/":
        path = path.rpartition(b"/")[0] or b"/"
        yield path


def lineage(path: bytes) -> Iterator[bytes]:
    """Yield the path itself and every directory above it, the nearest first."""
    yield path
    yield from ancestors(path)


def depth(path: bytes) -> int:
    """Return the number of components."""
    return 0 if path == b"/" else path.count(b"/")


def arranged(grants: Iterable[Grant]) -> Grants:
    """Return the grants by path. For the same path what is kept wins, then a file system of the sandbox's
    own, then writable."""
    found: Grants = {}
    for grant in grants:
        other = found.get(grant.path)
        if other is None or (grant.kept, _RANK[grant.kind]) > (other.kept, _RANK[other.kind]):
            found[grant.path] = grant
    return found


def above(grants: Mapping[bytes, Grant], path: bytes) -> Grant | None:
    """Return what shows the directories above ``path``; None: the sandbox's own root."""
    return next((grants[name] for name in ancestors(path) if name in grants), None)


def at(grants: Mapping[bytes, Grant], path: bytes) -> Grant | None:
    """Return what shows ``path``; None: the sandbox's own root."""
    return next((grants[name] for name in lineage(path) if name in grants), None)


def pruned(grants: Grants) -> Grants:
    """Return the grants without those that a wider one makes needless: bwrap's work grows with the square of
    the mounts."""
    kept: Grants = {}
    for path, grant in grants.items():
        outer = above(grants, path)
        if grant.kept or grant.kind == "tmpfs" or outer is None or outer.kind != grant.kind:
            kept[path] = grant
    return kept


def anchors(grants: Mapping[bytes, Grant], protected: Iterable[bytes]) -> Grants:
    """Return a writable grant for each directory between a writable one and something protected below it:
    what is a mount cannot be renamed inside, so nothing of the program's making takes a protected path's
    place.

    Each of them exists in the host, for something below it does.
    """
    found: Grants = {}
    for path in protected:
        pending: list[bytes] = []
        for name in ancestors(path):
            if name in found:
                found.update({p: _anchor(p) for p in pending})
                break
            grant = grants.get(name)
            if grant is None:
                pending.append(name)
            elif grant.kind == "writable":
                found.update({p: _anchor(p) for p in pending})
                pending.clear()
            else:
                break
    return found


def _anchor(path: bytes) -> Grant:
    return Grant(path=path, kind="writable", layer="protect", why=ANCHOR, kept=True)


def link_text(path: bytes, fact: PathFact) -> bytes:
    """Return the text of a link at ``path`` that leads to ``fact.resolved``: the host's own where it leads
    there in one step."""
    assert fact.resolved is not None
    if fact.target is None:
        return fact.resolved
    return fact.target if leads_to(path, fact.target) == fact.resolved else fact.resolved


def leads_to(path: bytes, target: bytes) -> bytes:
    """Return the path that a link at ``path`` with this text names, if no other link is on the way."""
    parts = [] if target.startswith(b"/") else path.split(b"/")[1:-1]
    for part in target.split(b"/"):
        if part == b"..":
            del parts[-1:]
        elif part not in (b"", b"."):
            parts.append(part)
    return b"/" + b"/".join(parts)


def links(wanted: Iterable[Link], grants: Mapping[bytes, Grant]) -> dict[bytes, Symlink]:
    """Return the links that have to be made: those whose name no bind shows. Never one below another, nor
    one that something shown lies below."""
    holding = {name for path in grants for name in lineage(path)}
    made: dict[bytes, Symlink] = {}
    for link in sorted(wanted, key=lambda link: depth(link.path)):
        shown = at(grants, link.path)
        if link.path in holding or (shown is not None and shown.is_host()):  # wall
            continue
        if not any(name in made for name in lineage(link.path)):
            made[link.path] = Symlink(dest=link.path, target=link.target, layer=link.layer, why=link.why)
    return made


def is_fit(grant: Grant, grants: Mapping[bytes, Grant], facts: Mapping[bytes, PathFact]) -> bool:
    """Tell whether the place of a file system of the sandbox's own is there already, or can be made without
    making it in the host."""
    outer = above(grants, grant.path)
    if outer is None or not outer.is_host():
        return True
    fact = facts.get(grant.path, ABSENT)
    return fact.reaches == "directory" and fact.resolved == grant.path


def operation_of(grant: Grant) -> Operation:
    """Return the operation that a grant becomes."""
    if grant.kind == "tmpfs":
        return Tmpfs(dest=grant.path, mode=grant.mode, layer=grant.layer, why=grant.why)
    return Bind(
        dest=grant.path, source=grant.path, writable=grant.kind == "writable", identity=grant.identity,
        required=grant.required, layer=grant.layer, why=grant.why,
    )  # fmt: skip
