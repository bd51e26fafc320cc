"""Overlapping rules: a slow and obvious oracle says what each path must be, on random trees with links."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from ral_broker.envelope.explain import deciding
from ral_broker.envelope.facts import ABSENT, PathFact
from ral_broker.envelope.plan import (
    Bind,
    Copy,
    Directory,
    Identity,
    Mask,
    Operation,
    Plan,
    ReadOnly,
    Symlink,
    Tmpfs,
    is_under,
)
from ral_broker.envelope.policy import HomeAccess, Rule, SessionPolicy
from ral_broker.envelope.session_plan import paths_of_interest, plan_session
from ral_broker.errors import Refused

HOME = b"/h/u"
PROJECT = b"/h/u/p"
SCRATCH = (b"/tmp", b"/var/tmp", b"/run")


class Tree:
    """A host: directories, and links to paths of it."""

    def __init__(self, directories: set[bytes], links: dict[bytes, bytes]) -> None:
        self.directories = {b"/"}
        for path in directories:
            parts = path.split(b"/")
            self.directories |= {b"/".join(parts[:n]) for n in range(2, len(parts) + 1)}
        self.links = {p: t for p, t in links.items() if p not in self.directories}
        self.links = {p: t for p, t in self.links.items() if p.rpartition(b"/")[0] in self.directories}

    def resolve(self, path: bytes, steps: int = 0) -> bytes | None:
        """The canonical path; None where there is nothing, or links go round."""
        at = b""
        for part in path.split(b"/")[1:]:
            at += b"/" + part
            if at in self.links:
                rest = path[len(at) :]
                return None if steps > 10 else self.resolve(self.links[at] + rest, steps + 1)
            if at not in self.directories:
                return None
        return at or b"/"

    def fact(self, path: bytes) -> PathFact:
        resolved = self.resolve(path)
        target = self.links.get(path)
        if resolved is None:
            return ABSENT if target is None else PathFact("link", target, target)
        identity = Identity(1, sorted(self.directories).index(resolved))
        return PathFact("directory" if target is None else "link", target, resolved, "directory", identity)


names = st.sampled_from([b"a", b"b", b"c"])
places = st.one_of(
    st.lists(names, min_size=1, max_size=4).map(lambda p: b"/" + b"/".join(p)),
    st.lists(names, min_size=0, max_size=3).map(lambda p: HOME + b"".join(b"/" + n for n in p)),
    st.lists(names, min_size=0, max_size=3).map(lambda p: PROJECT + b"".join(b"/" + n for n in p)),
)
modes: st.SearchStrategy[HomeAccess] = st.sampled_from(["tmpwrite", "restricted", "read", "write"])


@st.composite
def hosts(draw: st.DrawFn) -> tuple[SessionPolicy, Tree]:
    """A tree, and a policy whose rules mostly name what is in it."""
    directories = draw(st.sets(places, min_size=3, max_size=14)) | {PROJECT, *SCRATCH}
    there = st.sampled_from(sorted(directories))
    inside = st.one_of(there, places)
    new = st.one_of(places, st.builds(lambda path, name: path + b"/l" + name, there, names))
    tree = Tree(directories, draw(st.dictionaries(new, inside, max_size=4)))
    path = st.one_of(there, st.sampled_from(sorted(tree.links) or [b"/a"]), places)
    below = st.builds(lambda path, name: path + b"/" + name, path, names)

    def rules(name: str, most: int, *, home: bool = False, restricts: bool = False) -> tuple[Rule, ...]:
        found = draw(st.lists(st.one_of(path, path, below), max_size=most))
        if home:
            found = [x for x in found if is_under(x, HOME) and x != HOME]
        if restricts:
            # What would take the project along is refused: another test.
            found = [x for x in found if not is_under(PROJECT, tree.resolve(x) or x)]
        return tuple(Rule(x, name) for x in found)

    policy = SessionPolicy(
        uid=1000, home=HOME, home_path=HOME, project=PROJECT, cwd=PROJECT, session="0123abcd",
        home_access=draw(modes), readonly=rules("r", 4), writable=rules("w", 4),
        home_readonly=rules("hr", 4, home=True), home_writable=rules("hw", 4, home=True),
        protected=rules("p", 3, restricts=True), blocked=rules("b", 3, restricts=True),
        denied_writable=rules("d", 1, restricts=True),
    )  # fmt: skip
    return policy, tree


def facts_of(policy: SessionPolicy, tree: Tree) -> dict[bytes, PathFact]:
    return {path: tree.fact(path) for path in paths_of_interest(policy)}


def granted(policy: SessionPolicy, tree: Tree) -> list[tuple[bytes, int, str]]:
    """(canonical path, precedence among equals, state) of every rule that counts."""
    resolve = tree.resolve
    hidden = [x for r in policy.blocked for x in (r.path, resolve(r.path)) if x is not None]
    denied = [x for r in policy.denied_writable for x in (r.path, resolve(r.path)) if x is not None]
    to_write = [(PROJECT, PROJECT)]
    if policy.home_access == "write":
        to_write.append((HOME, HOME))
    for rule in (*policy.writable, *policy.home_writable):
        if (there := resolve(rule.path)) is not None:
            to_write += [(rule.path, there), (there, there)]
    found = [(PROJECT, 3, "writable")]
    found.append((HOME, 2, {"read": "read-only", "write": "writable"}.get(policy.home_access, "absent")))
    found += [(path, 2, "absent") for path in SCRATCH]
    lists = (
        ("read-only", 0, policy.readonly), ("read-only", 0, policy.home_readonly),
        ("writable", 1, policy.writable), ("writable", 1, policy.home_writable),
    )  # fmt: skip
    for state, rank, listed in lists:
        for rule in listed:
            there = resolve(rule.path)
            if there is None or any(is_under(x, h) for h in hidden for x in (rule.path, there)):
                continue
            # A link where a program can write: the nearest such place has to hold what it leads to.
            above = [p for p in to_write if is_under(rule.path, p[0]) and rule.path != p[0]]
            if rule.path != there and above and not is_under(there, max(above, key=lambda p: len(p[0]))[1]):
                continue
            if state == "writable" and any(
                is_under(HOME, x) or any(is_under(x, d) for d in denied) for x in (there, rule.path)
            ):
                continue
            found.append((there, rank, state))
    return found


def expected(policy: SessionPolicy, tree: Tree, path: bytes) -> str:
    """What must be at an existing canonical path."""
    over = [g for g in granted(policy, tree) if is_under(path, g[0])]
    if not over:
        return "absent"
    state = max(over, key=lambda g: (len(g[0]), g[1]))[2]
    if state == "absent":
        return "absent"
    if any((there := tree.resolve(r.path)) is not None and is_under(path, there) for r in policy.blocked):
        return "masked"
    kept = [tree.resolve(r.path) for r in (*policy.protected, *policy.denied_writable)]
    if any(there is not None and is_under(path, there) for there in kept):
        return "read-only"
    return state


def actual(plan: Plan, path: bytes) -> str:
    match deciding(plan, path):
        case Mask():
            return "masked"
        case Bind(writable=True, source=source, dest=dest) if source == dest:
            return "writable"
        case Bind(source=source, dest=dest) if source == dest:
            return "read-only"
        case None | Tmpfs() | Directory() | Symlink():
            return "absent"
        case other:
            raise AssertionError(other)


def assert_nothing_is_made_in_the_host(plan: Plan, tree: Tree) -> None:
    """Each destination is there already, or lies in a file system of the sandbox's own; and none is reached
    through a link, which the program that mounts would follow."""
    made: list[Operation] = []
    for operation in plan.operations:
        dest = operation.dest
        if isinstance(operation, ReadOnly):
            continue
        cover = next((o for o in reversed(made) if is_under(dest, o.dest) and o.dest != dest), None)
        again = next((o for o in reversed(made) if is_under(dest, o.dest)), None)
        assert not isinstance(cover, Symlink), operation
        if isinstance(again, Bind):
            assert tree.resolve(dest) == dest, operation
            assert not isinstance(operation, Symlink | Directory | Copy), operation
        made.append(operation)


@settings(max_examples=600)
@given(hosts())
def test_the_most_precise_rule_decides_in_every_order(host: tuple[SessionPolicy, Tree]) -> None:
    policy, tree = host
    try:
        plan = plan_session(policy, facts_of(policy, tree))
    except Refused:
        return
    for path in sorted(tree.directories):
        assert actual(plan, path) == expected(policy, tree, path), (path, plan)
    assert_nothing_is_made_in_the_host(plan, tree)
    order: dict[str, tuple[Rule, ...]] = {}
    for name in ("readonly", "writable", "home_readonly", "home_writable", "protected", "blocked"):
        order[name] = tuple(reversed(getattr(policy, name)))
    other = plan_session(msgspec.structs.replace(policy, **order), facts_of(policy, tree))
    for path in sorted(tree.directories):
        assert actual(plan, path) == actual(other, path)


@settings(max_examples=300)
@given(hosts())
def test_no_parent_of_what_is_protected_can_be_renamed(host: tuple[SessionPolicy, Tree]) -> None:
    """A directory that a program may write, and that holds something it may not, is a mount."""
    policy, tree = host
    try:
        plan = plan_session(policy, facts_of(policy, tree))
    except Refused:
        return
    mounts = {o.dest for o in plan.operations if isinstance(o, Bind | Mask)}
    for path in mounts & tree.directories:
        above = path.rpartition(b"/")[0]
        if actual(plan, path) in ("masked", "read-only"):
            while above and actual(plan, above) == "writable":
                assert above in mounts, (path, above, plan)
                above = above.rpartition(b"/")[0]
