"""What is protected below a directory that the program may write: the directory is not renamed away."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from ral_broker.envelope.facts import PathFact
from ral_broker.envelope.plan import Bind, Identity, Mask
from ral_broker.envelope.policy import Rule
from ral_broker.envelope.session_plan import SessionPolicy, plan_session
from ral_broker.errors import Refused
from support.broker import Broker, Ral

pytestmark = [pytest.mark.attack, pytest.mark.needs("bubblewrap")]

SWAP = "mv a a2 2>&1; mv a/b a/b2 2>&1; mkdir -p a/b/runtime && ls -A a/b/runtime/ | wc -l"


def test_a_directory_above_the_brokers_own_cannot_be_renamed_for_a_decoy(
    project: Path, tmp_path: Path
) -> None:
    """A decoy would be where the next client looks for its broker and sends its environment to."""
    own = project / "a" / "b" / "runtime"
    own.mkdir(parents=True, mode=0o700)
    broker = Broker(own, tmp_path / "second.log")
    broker.start()
    try:
        ral = Ral(own, project)
        done = ral("run", "-q", "--", "sh", "-c", SWAP)
        assert done.stdout.count(b"Device or resource busy") == 2, done
        assert done.stdout.splitlines()[-1] == b"0"
        assert (own / "control.sock").exists()
        # Other work beside it goes on.
        done = ral(
            "run", "-q", "--", "sh", "-c", "mkdir a/c && mv a/c a/d && echo x >a/b/file && mv a/b/file ."
        )
        assert done.status == 0, done
    finally:
        broker.stop()


def test_by_hand_the_same_rename_succeeds(project: Path) -> None:
    """The control: a mask alone moves along with its parent, and the name is free."""
    own = project / "a" / "b" / "runtime"
    own.mkdir(parents=True)
    command = ["bwrap", "--ro-bind", "/", "/", "--bind", str(project), str(project), "--tmpfs", str(own)]
    script = "mv a a2; mkdir -p a/b/runtime && echo decoy"
    done = subprocess.run([*command, "sh", "-c", script], cwd=project, capture_output=True, check=False)
    assert done.stdout == b"decoy\n", done


def test_when_somebody_outside_moves_the_brokers_directory_its_present_place_is_hidden(
    project: Path, tmp_path: Path
) -> None:
    own = project / "a" / "runtime"
    own.mkdir(parents=True, mode=0o700)
    broker = Broker(own, tmp_path / "second.log")
    broker.start()
    try:
        (project / "a").rename(project / "moved")
        (project / "a" / "runtime").mkdir(parents=True)
        ral = Ral(project / "moved" / "runtime", project)
        done = ral("run", "-q", "--", "sh", "-c", "ls -A moved/runtime | wc -l; touch a/runtime/decoy")
        assert (done.status, done.stdout) == (0, b"0\n"), done
        assert "control.sock" in os.listdir(project / "moved" / "runtime")
    finally:
        (project / "a" / "runtime" / "decoy").unlink(missing_ok=True)
        (project / "a" / "runtime").rmdir()
        (project / "a").rmdir()
        (project / "moved").rename(project / "a")
        broker.stop()


P = b"/home/u/p"


def plan_of(**changes: object) -> list[object]:
    paths = [b"/home/u/p", b"/home/u/p/x/y/venv", b"/home/u/p/x/.env", b"/usr"]
    facts = {p: PathFact("directory", None, p, "directory", Identity(1, n)) for n, p in enumerate(paths)}
    policy = SessionPolicy(
        uid=1000, home=b"/home/u", home_path=b"/home/u", project=P, cwd=P, session="0123abcd"
    )
    return list(plan_session(msgspec.structs.replace(policy, **changes), facts).operations)


def test_anchors_come_before_what_they_hold_and_outer_before_inner() -> None:
    blocked = (Rule(b"/home/u/p/x/.env", "blocked_files"),)
    plan = plan_of(installation=(b"/home/u/p/x/y/venv",), blocked=blocked)
    order = [o.dest for o in plan if isinstance(o, (Bind, Mask)) and o.dest.startswith(P)]
    assert order == [P, P + b"/x", P + b"/x/y", P + b"/x/y/venv", P + b"/x/.env"]
    writable = [o.dest for o in plan if isinstance(o, Bind) and o.writable]
    assert writable == [P, P + b"/x", P + b"/x/y"]


def test_nothing_is_anchored_where_nothing_is_protected() -> None:
    assert [o.dest for o in plan_of() if isinstance(o, Bind) and o.writable] == [P]


def test_an_anchor_never_makes_writable_what_a_wider_rule_protects() -> None:
    plan = plan_of(installation=(b"/home/u/p/x/y/venv",), hidden=(b"/home/u/p/x/y/venv/deep/runtime",))
    dests = [o.dest for o in plan if isinstance(o, Bind)]
    read_only = next(
        i
        for i, o in enumerate(plan)
        if isinstance(o, Bind) and o.dest == P + b"/x/y/venv" and not o.writable
    )
    later = [o for o in plan[read_only + 1 :] if isinstance(o, Bind) and o.writable]
    assert P + b"/x/y/venv" in dests
    assert later == []


@pytest.mark.parametrize(
    "project", [b"/tmp", b"/var/tmp", b"/var", b"/run", b"/run/user", b"/run/user/1000"]
)
def test_a_project_that_holds_what_other_programs_share_is_refused(project: bytes) -> None:
    with pytest.raises(Refused, match="where other programs of yours keep sockets"):
        plan_of(project=project, cwd=project)
    assert plan_of(project=project + b"/own", cwd=project + b"/own")
