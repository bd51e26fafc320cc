"""The home directory of a session: empty, or the real one, and what is shown of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ral_broker.envelope.checks import Admission, Facts
from ral_broker.envelope.coverage import Grant, Kind, Link, ancestors, at, lineage, link_text
from ral_broker.envelope.facts import ABSENT
from ral_broker.envelope.masks import Hidden, hiding
from ral_broker.envelope.places import HOME_FILE_ENDINGS, HOME_PROTECTED, RUNS_AT_LOGIN
from ral_broker.envelope.plan import Copy, Directory, Operation, Symlink, is_under
from ral_broker.envelope.policy import Rule, SessionPolicy
from ral_broker.errors import Refused
from ral_broker.log import shown


def is_empty_home(policy: SessionPolicy) -> bool:
    """Tell whether the home is one in memory, in which only what is listed is shown."""
    return policy.home_access in ("tmpwrite", "restricted")


def home_grants(policy: SessionPolicy, facts: Facts, admission: Admission) -> Iterator[Grant | Link]:
    """Yield the home itself, then what the settings say of it.

    Raises Refused where the real home is to be shown and is none.
    """
    why = f"home_access = {policy.home_access}"
    home = policy.home_path
    kinds: dict[str, Kind] = {"read": "readonly", "write": "writable"}
    if is_empty_home(policy):
        if home != b"/":
            yield Grant(path=home, kind="tmpfs", mode=0o700, layer="home", why=why, kept=True)
    else:
        fact = facts.get(home, ABSENT)
        if home == b"/" or fact.reaches != "directory":
            raise Refused(
                f"{why}: {shown(home)} is no home directory that could be shown; use home_access = tmpwrite"
            )
        yield Grant(
            path=home, kind=kinds[policy.home_access], layer="home", why=why, identity=fact.identity,
            required=True,
        )  # fmt: skip
    if policy.home != home:
        yield Link(policy.home, home, home, why, "home")
    seeded = {rule.path for rule in policy.home_seeded if is_seed(rule, facts)}
    shown_only = [r for r in policy.home_readonly if not (is_empty_home(policy) and r.path in seeded)]
    lists: tuple[tuple[Kind, tuple[Rule, ...]], ...] = (
        ("readonly", tuple(shown_only)), ("writable", policy.home_writable),
    )  # fmt: skip
    for kind, rules in lists:
        for rule, fact, path in admission.admitted(rules, writable=kind == "writable"):
            yield Grant(path=path, kind=kind, layer="home", why=rule.why, identity=fact.identity)
            if path != rule.path:
                yield Link(rule.path, link_text(rule.path, fact), path, rule.why, "home")


def home_protected(policy: SessionPolicy) -> Iterator[Rule]:
    """Yield the names below the home that must not be written although what holds them may be, for they run
    outside at the next login."""
    home = policy.home_path.rstrip(b"/") + b"/"
    listed = {rule.path for rule in policy.home_writable}
    places = {rule.path for rule in (*policy.home_writable, *policy.writable)} | {policy.project}
    for name in HOME_PROTECTED:
        path = home + name
        # With an empty home a name is shown only where something that is listed holds it.
        if path in listed or is_under(policy.project, path):
            continue
        if not is_empty_home(policy) or any(name in places for name in lineage(path)):
            yield Rule(path, RUNS_AT_LOGIN)


def is_seed(rule: Rule, facts: Facts) -> bool:
    """Tell whether a seeded file is there to be copied."""
    fact = facts.get(rule.path, ABSENT)
    return fact.reaches == "file" and fact.regular and fact.resolved is not None


def seeds_on_host(policy: SessionPolicy, facts: Facts, grants: Mapping[bytes, Grant]) -> Iterator[Rule]:
    """Yield the seeded files that a bind shows: no copy can be made there, and what is inside must not be
    written, for the host's file never changes."""
    writable = {rule.path for rule in policy.home_writable}
    for rule in policy.home_seeded:
        grant = at(grants, rule.path)
        if grant is not None and grant.is_host() and is_seed(rule, facts) and rule.path not in writable:
            yield rule


def home_contents(
    policy: SessionPolicy, facts: Facts, hidden: Mapping[bytes, Hidden], grants: Mapping[bytes, Grant],
    links: Mapping[bytes, Symlink], admission: Admission,
) -> Iterator[Operation]:  # fmt: skip
    """Yield what is made in an empty home: copies of seeded files, and directories to write that the host
    has not got."""
    made = {name for path in (*grants, *links) for name in ancestors(path)}
    for rule in policy.home_writable:
        fact = facts.get(rule.path, ABSENT)
        if fact.reaches != "absent" or rule.path.endswith(HOME_FILE_ENDINGS):
            continue
        if policy.home_access == "tmpwrite" and fact.kind == "absent" and _is_free(rule.path, grants, links):
            yield Directory(dest=rule.path, layer="home", why=rule.why)
            made.update(lineage(rule.path))
        else:
            admission.leave_out(rule, f"does not exist and is left out; mkdir -p {shown(rule.path)}")
    writable = {rule.path for rule in policy.home_writable}
    for rule in policy.home_seeded:
        fact = facts.get(rule.path, ABSENT)
        if fact.resolved is None or fact.reaches == "absent" or rule.path in writable:
            continue
        secret = hiding(hidden, fact.resolved, rule.path)
        if secret is not None:  # wall
            reason = f"lies in {shown(secret.path)}, which is hidden ({secret.why}), and is left out"
            admission.leave_out(rule, reason)
        elif not is_seed(rule, facts):
            admission.leave_out(rule, "is no file and is left out; list it in home_readonly")
        elif admission.is_planted(rule.path, fact.resolved):
            reason = "through a link that a program inside could have made, and is left out"
            admission.leave_out(rule, f"leads to {shown(fact.resolved)} {reason}")
        elif rule.path not in made and _is_free(rule.path, grants, links):  # wall
            made.update(lineage(rule.path))
            yield Copy(
                dest=rule.path, source=fact.resolved, mode=0o600, identity=fact.identity, layer="home",
                why=rule.why,
            )  # fmt: skip


def _is_free(path: bytes, grants: Mapping[bytes, Grant], links: Mapping[bytes, Symlink]) -> bool:
    """Tell whether a name can be made without making it in the host, or through a link."""
    grant = at(grants, path)
    if grant is None or grant.is_host() or grant.path == path:
        return False
    return not any(name in links for name in lineage(path))
