"""Which masks may be attached after everything else: the outcome is the one that bwrap would give."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ral_broker.envelope.plan import (
    Bind,
    Dev,
    Mask,
    Operation,
    Plan,
    Proc,
    ReadOnly,
    Symlink,
    Tmpfs,
    is_under,
)
from ral_broker.sessions.many import MASKS_BY_BWRAP, split_masks


def mask(dest: bytes, *, directory: bool = True) -> Mask:
    return Mask(dest=dest, directory=directory, layer="mask", why="denied")


def bind(dest: bytes) -> Bind:
    return Bind(dest=dest, source=dest, writable=True, layer="project", why="project")


def tmpfs(dest: bytes) -> Tmpfs:
    return Tmpfs(dest=dest, layer="scratch", why="test")


def read_only(dest: bytes) -> ReadOnly:
    return ReadOnly(dest=dest, layer="final", why="test")


MANY = tuple(mask(b"/p/many/%d" % number, directory=False) for number in range(MASKS_BY_BWRAP + 1))
LAST = (
    Proc(dest=b"/proc", layer="kernel", why="always"),
    Dev(dest=b"/dev", layer="kernel", why="always"),
    Symlink(dest=b"/.session", target=b"x", layer="final", why="marker"),
    read_only(b"/"),
)


def split(*operations: Operation, cwd: bytes = b"/p") -> tuple[tuple[Operation, ...], tuple[Mask, ...]]:
    """What is kept and what comes later, with enough other masks that there is something to split."""
    plan = Plan(operations=(bind(b"/p"), *operations, *MANY, *LAST), cwd=cwd)
    kept, later = split_masks(plan)
    assert sorted(map(str, (*kept, *later))) == sorted(map(str, plan.operations)), "nothing is lost"
    assert [o for o in plan.operations if o in kept] == list(kept)
    assert [o for o in plan.operations if o in later] == list(later)
    assert set(later) >= set(MANY)
    return kept, tuple(m for m in later if m not in MANY)


def test_few_masks_are_bwraps_and_more_are_not() -> None:
    few = Plan(operations=(bind(b"/p"), *MANY[:-1], *LAST), cwd=b"/p")
    assert split_masks(few) == (few.operations, ())
    more = Plan(operations=(bind(b"/p"), *MANY, *LAST), cwd=b"/p")
    assert split_masks(more) == ((bind(b"/p"), *LAST), MANY)


def test_what_makes_the_root_read_only_does_not_matter() -> None:
    hidden = mask(b"/p/hidden")
    assert split(hidden)[1] == (hidden,)
    assert split(hidden, read_only(b"/p"))[1] == (hidden,)


@pytest.mark.parametrize(
    "follows",
    [
        bind(b"/p/a/hidden"), bind(b"/p/a/hidden/below"), bind(b"/p/a/hidden/far/below"), bind(b"/p/a"),
        bind(b"/p"), bind(b"/"), tmpfs(b"/p/a"), tmpfs(b"/p/a/hidden/x"), mask(b"/p/a"),
        mask(b"/p/a/hidden", directory=False), mask(b"/p/a/hidden/x"), read_only(b"/p/a/hidden"),
        read_only(b"/p/a/hidden/x"),
        Symlink(dest=b"/p/a/hidden/link", target=b"x", layer="final", why="test"),
    ],
    ids=lambda o: f"{type(o).__name__} {o.dest.decode()}",
)  # fmt: skip
def test_a_mask_that_something_follows_at_above_or_below_it_keeps_its_place(follows: Operation) -> None:
    hidden = mask(b"/p/a/hidden")
    kept, later = split(hidden, follows)
    assert hidden in kept
    assert hidden not in later
    assert split(hidden, bind(b"/p/a/hidden2"), bind(b"/p/b"))[1] == (hidden,), "the control"


def test_one_that_the_kernels_own_come_over_keeps_its_place() -> None:
    for dest in (b"/proc/kcore", b"/dev/x", b"/proc"):
        assert split(mask(dest))[1] == ()


def test_one_that_holds_the_working_directory_keeps_its_place() -> None:
    """bwrap enters that directory before: from there the program would see what is hidden."""
    for cwd in (b"/p/hidden", b"/p/hidden/below"):
        kept, later = split(mask(b"/p/hidden"), mask(b"/p/other"), cwd=cwd)
        assert (kept[1], later) == (mask(b"/p/hidden"), (mask(b"/p/other"),))
    assert split(mask(b"/p/hidden"), cwd=b"/p/hidden2")[1] == (mask(b"/p/hidden"),)


NAMES = st.lists(st.sampled_from([b"a", b"b"]), max_size=3).map(lambda parts: b"/" + b"/".join(parts))
OPERATIONS = st.one_of(
    st.builds(mask, NAMES), st.builds(bind, NAMES), st.builds(tmpfs, NAMES), st.builds(read_only, NAMES)
)


def shown(operations: Iterable[Operation], path: bytes) -> tuple[Operation | None, bool]:
    """The operation whose mount a path leads to in the end, and whether it was made read-only afterwards."""
    found: Operation | None = None
    closed = False
    for operation in operations:
        above = is_under(path, operation.dest)
        if isinstance(operation, ReadOnly):
            closed = closed or (found is not None and operation.dest == found.dest)
        elif above:
            found, closed = operation, False
    return found, closed


@given(st.lists(OPERATIONS, max_size=8), NAMES, NAMES)
def test_every_path_shows_the_same_whoever_attaches(
    operations: list[Operation], path: bytes, cwd: bytes
) -> None:
    plan = Plan(operations=(*operations, *MANY), cwd=cwd)
    kept, later = split_masks(plan)
    before, after = shown(plan.operations, path), shown((*kept, *later), path)
    assert before == after
