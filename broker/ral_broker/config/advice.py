"""What ``ral explain`` adds to a plan's reasons: whose setting it is, and what to write into which file.
Pure."""

from __future__ import annotations

import os

import msgspec

from ral_broker.config.document import toml_text
from ral_broker.config.effective import Effective, Origin
from ral_broker.config.policy import expand
from ral_broker.config.profile import BUILT_IN
from ral_broker.config.settings import SETTINGS
from ral_broker.envelope.explain import Explanation
from ral_broker.envelope.plan import is_under
from ral_broker.log import shown

_SWITCHES = {"project_protected_paths": "protect_project"}
"""Lists that one boolean switches off."""


class Sources(msgspec.Struct, frozen=True):
    """Where things are written: the administrator's file and the user's. ``homes``: the home directory in
    each spelling; ``project``: what relative paths count from."""

    admin_file: str
    user_file: str
    homes: tuple[bytes, ...]
    project: bytes


class Advice(msgspec.Struct, frozen=True):
    """``origin``: the layer that is responsible, with its line, if a setting is. ``sentences``: whose it is
    and how to change it."""

    origin: str | None = None
    sentences: tuple[str, ...] = ()


def advise(explanation: Explanation, effective: Effective, sources: Sources) -> Advice:
    """Return what the configuration has to say about an explanation."""
    name = explanation.setting
    if name is None or name not in SETTINGS:
        return Advice()
    if not isinstance(getattr(effective.settings, name), tuple):
        return _of_scalar(name, effective, sources)
    found = _entry(name, explanation, effective, sources)
    if found is None:
        shown_already = explanation.state in ("own", "masked")
        return Advice() if shown_already else Advice(None, _addition(name, explanation, effective, sources))
    origin, entry = found
    sentences = [f"The entry {_text(entry)} of {name} is {_whose(origin)}."]
    if _is_pinned(name, origin, sources):
        sentences.append("Only the administrator of this host can take it out.")
    elif (switch := _SWITCHES.get(name)) is not None:
        sentences += _of_scalar(switch, effective, sources).sentences
    elif origin.layer == BUILT_IN:
        sentences.append(
            f"A list under [replace] in {shown(sources.user_file)} takes the place of the defaults."
        )
    elif origin.layer.startswith("profile "):
        sentences.append("`ral run --profile none` goes without.")
    return Advice(_place(origin), tuple(sentences))


def _of_scalar(name: str, effective: Effective, sources: Sources) -> Advice:
    value = getattr(effective.settings, name)
    origin = next(iter(effective.origins[name]), None)
    if origin is None:
        return Advice()
    sentences = [f"{name} = {toml_text(value)} is {_whose(origin)}."]
    if _is_pinned(name, origin, sources):
        sentences.append("Only the administrator of this host can change it.")
    elif isinstance(value, bool):
        sentences.append(f"To change that: {name} = {toml_text(not value)} in {shown(sources.user_file)}.")
    return Advice(_place(origin), tuple(sentences))


def _is_pinned(name: str, origin: Origin, sources: Sources) -> bool:
    return origin.layer == sources.admin_file and SETTINGS[name].merge != "free"


def _addition(
    name: str, explanation: Explanation, effective: Effective, sources: Sources
) -> tuple[str, ...]:
    """Say what to write for a list to have this path too."""
    path = explanation.path
    if SETTINGS[name].entries == "below home":
        home = next((home for home in sources.homes if is_under(path, home) and path != home), None)
        if home is None:
            return ()
        path = path[len(home) + 1 :]
    entry = _text(os.fsdecode(path))
    for origin in effective.origins[name]:
        if origin.layer == shown(sources.user_file):
            return (f"To change that: add {entry} to {name} in {_place(origin)}.",)
    return (f"To change that: {name} = [{entry}] in {shown(sources.user_file)}.",)


def _entry(
    name: str, explanation: Explanation, effective: Effective, sources: Sources
) -> tuple[Origin, str] | None:
    """Return the entry of a list that put the deciding operation there: the one that names it most
    precisely."""
    if explanation.by is None or not explanation.why.startswith(name):
        return None
    bases = sources.homes if SETTINGS[name].entries == "below home" else (sources.project,)
    best: tuple[int, Origin, str] | None = None
    for entry, origin in zip(getattr(effective.settings, name), effective.origins[name], strict=True):
        for base in bases:
            path = expand(entry, home=sources.homes[0], base=base)
            covers = is_under(explanation.by.dest, path) or is_under(explanation.path, path)
            if covers and (best is None or len(path) > best[0]):
                best = len(path), origin, entry
    return None if best is None else best[1:]


def _text(entry: str) -> str:
    return shown(toml_text(entry.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")))


def _place(origin: Origin) -> str:
    return origin.layer if origin.line is None else f"{origin.layer}:{origin.line}"


def _whose(origin: Origin) -> str:
    return "a default" if origin.layer == BUILT_IN else f"from {_place(origin)}"
