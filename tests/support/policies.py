"""Policies and the facts of a host for the plan builder, without a host."""

from __future__ import annotations

import msgspec

from ral_broker.envelope.facts import PathFact, Reach
from ral_broker.envelope.plan import Identity, Operation, Plan
from ral_broker.envelope.policy import Rule, SessionPolicy

HOME = b"/home/u"
PROJECT = b"/home/u/work/p"


def directory(path: bytes, inode: int = 7) -> PathFact:
    """A directory at its canonical path."""
    return PathFact("directory", None, path, "directory", Identity(1, inode))


def regular(path: bytes) -> PathFact:
    """A file at its canonical path."""
    return PathFact("file", None, path, "file", Identity(1, 8))


def link(target: bytes, resolved: bytes, reaches: Reach = "directory") -> PathFact:
    """A symbolic link, and where it leads."""
    return PathFact("link", target, resolved, reaches, Identity(1, 9))


def usual(**more: PathFact) -> dict[bytes, PathFact]:
    """A merged /usr and the project."""
    facts = {
        b"/usr": directory(b"/usr"),
        b"/etc": directory(b"/etc"),
        b"/bin": link(b"usr/bin", b"/usr/bin"),
        b"/lib": link(b"usr/lib", b"/usr/lib"),
        PROJECT: directory(PROJECT),
    }
    return facts | {key.encode(): value for key, value in more.items()}


def policy(**changes: object) -> SessionPolicy:
    """An ordinary user's session in PROJECT."""
    base = SessionPolicy(
        uid=1000,
        home=HOME,
        home_path=HOME,
        project=PROJECT,
        cwd=PROJECT,
        session="0123abcd",
        hidden=(b"/run/user/1000/ral",),
    )
    return msgspec.structs.replace(base, **changes)


def blocked(*paths: bytes) -> tuple[Rule, ...]:
    """Entries of blocked_files."""
    return tuple(Rule(path, "blocked_files") for path in paths)


def index(plan: Plan, kind: type[Operation], dest: bytes) -> int:
    """Where the first operation of that kind at ``dest`` is. StopIteration if there is none."""
    return next(i for i, o in enumerate(plan.operations) if isinstance(o, kind) and o.dest == dest)
