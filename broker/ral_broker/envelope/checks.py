"""What a session is refused for, and which rules of a configuration are left out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ral_broker.envelope.coverage import ancestors, lineage
from ral_broker.envelope.facts import ABSENT, PathFact
from ral_broker.envelope.masks import Hidden, hiding
from ral_broker.envelope.places import KERNEL_PLACES, SCRATCH, SHARED_PLACES
from ral_broker.envelope.plan import is_under
from ral_broker.envelope.policy import Rule, SessionPolicy
from ral_broker.errors import Refused
from ral_broker.log import shown

Facts = Mapping[bytes, PathFact]


def check_project(policy: SessionPolicy, facts: Facts, hidden: Mapping[bytes, Hidden]) -> None:
    """Raise Refused when the project would show what a session must never show, when it must not be written,
    or when it lies where the kernel's own file systems go."""
    project, name = policy.project, shown(policy.project)
    for spelling in (policy.home_path, policy.home):
        if is_under(spelling, project):  # wall
            raise Refused(
                f"the project {name} is your home directory or an ancestor of it: everything below would be "
                "writable inside; run ral in a project directory (or name one with --project)"
            )
    for place in (*SHARED_PLACES, b"/run/user/%d" % policy.uid):
        if is_under(place, project):  # wall
            raise Refused(
                f"the project {name} holds {place.decode()}, where other programs of yours keep sockets "
                "and files: a program inside could use them to act outside; make a directory of its own "
                "for the project"
            )
    for place in (*KERNEL_PLACES, b"/run/ral-session"):
        if is_under(project, place):  # wall
            raise Refused(
                f"the project {name} lies in {place.decode()}, which a sandbox gets anew; choose another"
            )
    hider = hiding(hidden, project)
    if hider is not None:  # wall
        raise Refused(f"the project {name} lies in {shown(hider.path)}, which is hidden ({hider.why})")
    for rule in (*policy.denied_writable, *policy.protected):
        if any(is_under(project, place) for place in names_of(rule, facts)):  # wall
            if is_under(rule.path, project) and rule.path != project:
                raise Refused(
                    f"{shown(rule.path)} is to stay read-only ({rule.why}) and leads to what holds the "
                    "whole project; remove that link"
                )
            raise Refused(
                f"the project {name} lies in {shown(rule.path)}, which stays read-only inside ({rule.why}); "
                "choose another"
            )


def names_of(rule: Rule, facts: Facts) -> tuple[bytes, ...]:
    """Return the path of a rule as it is spelled, and where it leads to if that is elsewhere."""
    resolved = facts.get(rule.path, ABSENT).resolved
    return (rule.path,) if resolved is None or resolved == rule.path else (rule.path, resolved)


class Admission:
    """Decides which rules become grants. What is left out has a sentence in ``notices``, each once."""

    def __init__(self, policy: SessionPolicy, facts: Facts, hidden: Mapping[bytes, Hidden]) -> None:
        self._policy, self._facts, self._hidden = policy, facts, hidden
        self._notices: dict[str, None] = {}
        self._writable = dict(self._places_to_write())
        self._denied = {name: rule for rule in policy.denied_writable for name in names_of(rule, facts)}
        self._run = (b"/run", b"/run/user", b"/run/user/%d" % policy.uid)

    @property
    def notices(self) -> tuple[str, ...]:
        """The sentences so far."""
        return tuple(self._notices)

    def note(self, sentence: str) -> None:
        """Note what the user should know."""
        self._notices[sentence] = None

    def leave_out(self, rule: Rule, reason: str) -> None:
        """Note why a rule has no effect, or less than it says."""
        self._notices[f"{rule.why}: {shown(rule.path)} {reason}"] = None

    def admitted(self, rules: Iterable[Rule], *, writable: bool) -> Iterator[tuple[Rule, PathFact, bytes]]:
        """Yield each rule that is to be granted, what its path reaches, and the canonical path of that."""
        for rule in rules:
            fact = self._facts.get(rule.path, ABSENT)
            if fact.reaches == "unreadable":
                self.leave_out(rule, "cannot be reached by you, and is left out")
            if fact.resolved is None or fact.reaches not in ("file", "directory"):
                continue
            reason = self._objection(rule, fact.resolved, writable=writable)
            if reason is None:
                yield rule, fact, fact.resolved
            else:
                self.leave_out(rule, reason)

    def is_planted(self, path: bytes, resolved: bytes) -> bool:
        """Tell whether a path goes through a link that a program inside could have made: then it may lead
        out of what the configuration names."""
        if path == resolved:
            return False
        for name in ancestors(path):
            place = self._writable.get(name)
            if place is not None:
                return not is_under(resolved, place)
        return False

    def _places_to_write(self) -> Iterator[tuple[bytes, bytes]]:
        policy = self._policy
        yield policy.project, policy.project
        if policy.home_access == "write":
            yield policy.home_path, policy.home_path
            yield policy.home, policy.home_path
        for rule in (*policy.writable, *policy.home_writable):
            resolved = self._facts.get(rule.path, ABSENT).resolved
            if resolved is not None:
                yield rule.path, resolved
                yield resolved, resolved

    def _objection(self, rule: Rule, resolved: bytes, *, writable: bool) -> str | None:
        policy = self._policy
        secret = hiding(self._hidden, resolved, rule.path)
        if secret is not None:  # wall
            return f"lies in {shown(secret.path)}, which is hidden ({secret.why}), and is left out"
        if resolved in self._run:  # wall
            return "holds sockets of other programs and is made anew inside; name what is needed in it"
        if resolved in SCRATCH and (policy.private_tmp or resolved != b"/tmp"):
            return "is made anew inside (private_tmp); name what is needed in it"
        kernel = next((place for place in KERNEL_PLACES if is_under(resolved, place)), None)
        if kernel is not None and (writable or kernel != b"/sys"):  # wall
            hint = "name devices in devices" if kernel == b"/dev" else "it cannot be named"
            return f"lies in {kernel.decode()}, which is the kernel's; {hint}"
        if self.is_planted(rule.path, resolved):  # wall
            return (
                f"leads to {shown(resolved)} through a link that a program inside could have made; name "
                "that path itself if it is meant"
            )
        if not writable:
            return None
        for place in (resolved, rule.path):
            if is_under(policy.home_path, place) or is_under(policy.home, place):  # wall
                return "is $HOME or an ancestor of it and is left out; name directories in it"
            denied = next((self._denied[name] for name in lineage(place) if name in self._denied), None)
            if denied is not None:  # wall
                return f"lies in {shown(denied.path)}, which stays read-only ({denied.why})"
        return None
