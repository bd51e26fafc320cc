"""Why a path is visible, writable, masked or absent in a session, and what would change it. Pure: from the
plan, which is what the kernel was given."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from ral_broker.envelope.coverage import leads_to
from ral_broker.envelope.facts import ABSENT, PathFact
from ral_broker.envelope.places import (
    ALWAYS_HIDDEN,
    ANCHOR,
    CREDENTIALS,
    INSTALLATION,
    KERNEL_PLACES,
    OWN,
    RUNS_AT_LOGIN,
)
from ral_broker.envelope.plan import (
    Bind,
    Copy,
    Data,
    Dev,
    Device,
    Directory,
    Mask,
    Operation,
    Pinned,
    Plan,
    Proc,
    ReadOnly,
    Symlink,
    Tmpfs,
    is_under,
)
from ral_broker.envelope.policy import Rule
from ral_broker.log import shown

State = Literal["read-only", "writable", "masked", "absent", "own"]
"""``own``: in a file system of the sandbox's own; what is written there is gone when the session ends."""

_MAX_LINKS = 8


class Explanation(msgspec.Struct, frozen=True):
    """``by``: the operation that decides; None where none does. ``why``: what put it there. ``setting``: the
    one that would change it, None where none can. ``sentence``: all of it."""

    path: bytes
    state: State
    by: Operation | None
    why: str
    setting: str | None
    sentence: str


def explain(
    plan: Plan, facts: Mapping[bytes, PathFact], path: bytes, hidden: Iterable[Rule] = ()
) -> Explanation:
    """Explain an absolute, normal path. ``facts``: what the host has at it, and at every name that links
    lead to on the way; without one it counts as absent. ``hidden``: the policy's rules that hide
    (masks.rules): what is not shown needs no mask, and would get one if a setting showed it."""
    found = _explain(plan, facts, path, path, 0)
    if found.state != "absent" or facts.get(path, ABSENT).kind == "absent":
        return found
    rule = next((rule for rule in hidden if is_under(path, rule.path)), None)
    if rule is None:
        return found
    setting, hint = _unmasked(plan, Mask(dest=path, directory=False, layer="mask", why=rule.why))
    sentence = f"{shown(path)} exists in the host and is hidden ({rule.why}){hint}"
    return Explanation(path, "absent", found.by, rule.why, setting, sentence)


def deciding(plan: Plan, path: bytes) -> Operation | None:
    """Return the operation that decides what is at ``path``; None where only the sandbox's own root is."""
    return next(
        (o for o in reversed(plan.operations) if not isinstance(o, ReadOnly) and is_under(path, o.dest)),
        None,
    )


def _explain(
    plan: Plan, facts: Mapping[bytes, PathFact], asked: bytes, path: bytes, links: int
) -> Explanation:
    by = deciding(plan, path)
    fact = facts.get(path, ABSENT)
    elsewhere: bytes | None = None
    if isinstance(by, Symlink):
        elsewhere = leads_to(by.dest, by.target) + path[len(by.dest) :]
    elif isinstance(by, Bind) and fact.resolved is not None and fact.resolved != path:
        elsewhere = fact.resolved
    if elsewhere is not None and links < _MAX_LINKS:
        found = _explain(plan, facts, asked, elsewhere, links + 1)
        sentence = f"{shown(path)} leads to {shown(elsewhere)}; {found.sentence}"
        return msgspec.structs.replace(found, path=asked, sentence=sentence)
    state, setting, text = _judged(plan, by, fact, path)
    return Explanation(asked, state, by, by.why if by is not None else "", setting, f"{shown(path)} {text}")


def _judged(plan: Plan, by: Operation | None, fact: PathFact, path: bytes) -> tuple[State, str | None, str]:
    exists = fact.kind not in ("absent", "unreadable")
    match by:
        case Mask(why=why):
            setting, hint = _unmasked(plan, by)
            return "masked", setting, f"is hidden ({why}): it looks empty and cannot be written{hint}"
        case Bind(writable=True):
            why = _granting(plan, by)
            setting = _setting(why)
            much = "is writable" if exists else "does not exist in the host and may be made there"
            return "writable", setting, f"{much} ({why}){_lifted(setting, why)}"
        case Bind() if not exists:
            setting, hint = _opened(plan, by, path)
            text = f"does not exist in the host and cannot be made: {shown(by.dest)} is read-only ({by.why})"
            return "absent", setting, text + hint
        case Bind():
            setting, hint = _opened(plan, by, path)
            return "read-only", setting, f"is read-only ({by.why}){hint}"
        case Pinned(why=why):
            return "read-only", None, f"is read-only ({why})"
        case Data(why=why):
            return "read-only", _setting(why), f"is a file made for this session ({why}), read-only"
        case Copy(why=why):
            return "own", _setting(why), f"is a copy ({why}): what is written to it is gone at the end"
        case Device(why=why):
            return "writable", _setting(why), f"is the host's device ({why})"
        case Proc() | Dev():
            return (
                "own",
                "devices" if isinstance(by, Dev) else None,
                "is in a file system made for this session",
            )
        case Tmpfs() | Directory() if path == by.dest or not exists or _holds(plan, path):
            return _own(plan, by)
        case Tmpfs() | Directory():
            setting, hint = _shown_by(plan, path)
            return "absent", setting, f"exists in the host and is not shown ({by.why}){hint}"
        case _ if _holds(plan, path):
            return "own", None, "is a directory made for what is shown below it; nothing can be made in it"
        case _:
            if not exists:
                return "absent", None, "does not exist in the host, and no setting names it"
            setting, hint = _shown_by(plan, path)
            return "absent", setting, f"exists in the host and is not shown{hint}"


def _own(plan: Plan, by: Tmpfs | Directory) -> tuple[State, str | None, str]:
    closed = any(
        isinstance(o, ReadOnly) and o.dest != b"/" and is_under(by.dest, o.dest) for o in plan.operations
    )
    much = "nothing can be made there" if closed else "what is written there is gone at the end"
    return "own", _setting(by.why), f"is in memory ({by.why}): {much}"


def _unmasked(plan: Plan, mask: Mask) -> tuple[str | None, str]:
    home = _home(plan)
    if mask.why == OWN or home is None:
        return _setting(mask.why), ""
    if mask.why == CREDENTIALS:
        always = any(is_under(mask.dest, home + b"/" + name) for name in ALWAYS_HIDDEN)
        if always or not is_under(mask.dest, home):
            return None, ""
        name = shown(mask.dest[len(home) + 1 :])
        return "home_readonly", f'; home_readonly = ["{name}"] would show it read-only'
    setting = _setting(mask.why)
    return setting, _lifted(setting, mask.why)


def _lifted(setting: str | None, why: str) -> str:
    """Return the hint for what a setting brought about: an entry of a list, or the value of a word."""
    if setting is None:
        return ""
    return f"; {f'set {setting} otherwise' if ' = ' in why else f'take it out of {setting}'} to change that"


def _opened(plan: Plan, by: Bind, path: bytes) -> tuple[str | None, str]:
    home = _home(plan)
    if by.layer == "protect":
        if by.why == INSTALLATION:
            return None, ""
        if by.why == RUNS_AT_LOGIN and home is not None and is_under(by.dest, home):
            name = shown(by.dest[len(home) + 1 :])
            return "home_writable", f'; home_writable = ["{name}"] would make it writable'
        setting = _setting(by.why)
        return setting, "" if setting is None else f"; that is for {setting} to change"
    if by.layer in ("kernel", "scratch"):
        return None, ""
    setting = (
        "home_writable"
        if home is not None and home != path and is_under(path, home)
        else "extra_writable_paths"
    )
    return setting, f"; list it in {setting} to write to it"


def _shown_by(plan: Plan, path: bytes) -> tuple[str | None, str]:
    """Return the setting that would show ``path``, and the hint that says so."""
    home = _home(plan)
    if any(is_under(path, place) for place in KERNEL_PLACES):
        return "devices", "; devices are listed in devices"
    if home is not None and path != home and is_under(path, home):
        return "home_readonly", "; list it in home_readonly, or to write to it in home_writable"
    return "readonly_mounts", "; list it in readonly_mounts, or to write to it in extra_writable_paths"


def _granting(plan: Plan, bind: Bind) -> str:
    """Return what granted writing: a directory that holds something protected is bound only to hold it."""
    if bind.why != ANCHOR:
        return bind.why
    wider = (
        o
        for o in reversed(plan.operations)
        if isinstance(o, Bind) and o.writable and o.why != ANCHOR and is_under(bind.dest, o.dest)
    )
    return next((o.why for o in wider), bind.why)


def _holds(plan: Plan, path: bytes) -> bool:
    return any(is_under(o.dest, path) and o.dest != path for o in plan.operations)


def _home(plan: Plan) -> bytes | None:
    return next(
        (
            o.dest
            for o in plan.operations
            if o.layer == "home" and o.why.startswith("home_access") and isinstance(o, (Tmpfs, Bind))
        ),
        None,
    )


def _setting(why: str) -> str | None:
    """Return the setting that a reason names, if it names one."""
    name = re.match(r"[a-z]+(?:_[a-z]+)+\b|devices\b", why)
    return None if name is None else name[0]
