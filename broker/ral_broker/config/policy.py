"""From the effective settings to what a session is to be. Pure: what needs a look at the host comes in as an
argument."""

from __future__ import annotations

import functools
import posixpath
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from ral_broker import admin
from ral_broker.config.effective import Effective
from ral_broker.config.settings import SETTINGS, Settings
from ral_broker.envelope.places import CONFIGURATION
from ral_broker.envelope.plan import PinName, is_under
from ral_broker.envelope.policy import Rule, SessionPolicy, Text

MINIMUM_SYSTEM = ("/usr", "/lib", "/bin", "/sbin", "/etc")
"""What nearly every program needs: a warning where one exists and readonly_mounts leaves it out."""


PINNED = "home_readonly of the administrator"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session is, and what the broker lays around it: see SessionPolicy."""

    uid: int
    home: bytes
    home_path: bytes
    project: bytes
    cwd: bytes
    session: str
    hidden: tuple[bytes, ...]
    installation: tuple[bytes, ...]
    pins: tuple[tuple[PinName, bytes], ...]
    fresh_proc: bool


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a look at the host adds to the settings: rules of the same names as in SessionPolicy."""

    readonly: tuple[Rule, ...] = ()
    writable: tuple[Rule, ...] = ()
    protected: tuple[Rule, ...] = ()
    blocked: tuple[Rule, ...] = ()
    devices: tuple[bytes, ...] = ()
    texts: tuple[Text, ...] = ()


def expand(text: str, *, home: bytes, base: bytes) -> bytes:
    """Return a setting's path as bytes, absolute and normal: ``~`` is the home, a relative one is below
    ``base``. Links are left as they are."""
    path = text.encode("utf-8", "surrogateescape")
    if path == b"~" or path.startswith(b"~/"):
        path = home + path[1:]
    elif not path.startswith(b"/"):
        path = base + b"/" + path
    # Exactly two slashes at the start are special in POSIX and nothing of the kind in Linux.
    return posixpath.normpath(b"/" + path.lstrip(b"/"))


def rules_of(settings: Settings, name: str, place: Place) -> tuple[Rule, ...]:
    """Return the paths of a setting, each once, relative ones below what that setting counts from."""
    texts: tuple[str, ...] = getattr(settings, name)
    base = place.home_path if SETTINGS[name].entries == "below home" else place.project
    paths = dict.fromkeys(expand(text, home=place.home_path, base=base) for text in texts)
    return tuple(Rule(path, name) for path in paths)


def pinned_readonly(effective: Effective, place: Place) -> Iterator[Rule]:
    """Yield the administrator's ``home_readonly``, as what nothing makes writable: a link that has changed
    since the merge compared paths must not lead a user's entry there. What the administrator makes writable
    at or around such an entry, and a project in it, is left to the order of precision."""
    home = place.home_path

    def theirs(name: str) -> Iterator[bytes]:
        entries: tuple[str, ...] = getattr(effective.settings, name)
        base = home if SETTINGS[name].entries == "below home" else place.project
        for entry, origin in zip(entries, effective.origins.get(name, ()), strict=False):
            if origin.layer == admin.PATH:
                yield expand(entry, home=home, base=base)

    writable = (*theirs("home_writable"), *theirs("extra_writable_paths"))
    for path in theirs("home_readonly"):
        around = any(is_under(path, other) or is_under(other, path) for other in writable)
        if not around and not is_under(place.project, path):
            yield Rule(path, PINNED)  # wall


def session_policy(
    settings: Settings, place: Place, found: Found, configuration: Iterable[bytes], *, share_network: bool
) -> SessionPolicy:
    """Return what the plan builder takes. ``configuration``: files and directories that a reload would
    read."""
    rules = functools.partial(rules_of, settings, place=place)
    return SessionPolicy(
        **msgspec.structs.asdict(place),
        home_access=settings.home_access,
        readonly=(*rules("readonly_mounts"), *found.readonly),
        writable=(*rules("extra_writable_paths"), *found.writable),
        home_readonly=rules("home_readonly"),
        home_writable=rules("home_writable"),
        home_seeded=rules("home_seeded_files"),
        protected=(*(Rule(path, CONFIGURATION) for path in configuration), *found.protected),  # wall
        denied_writable=rules("denied_writable_paths"),  # wall
        blocked=(*rules("blocked_files"), *rules("extra_blocked_paths"), *found.blocked),
        devices=found.devices,
        texts=found.texts,
        private_tmp=settings.private_tmp,
        private_ipc=settings.private_ipc,
        share_network=share_network,
        nested_userns=settings.nested_userns,
    )


def configuration_paths(
    environment: Mapping[bytes, bytes], home: bytes, files: Iterable[str]
) -> list[bytes]:
    """Return what inside must never change for a later load to be the user's: the directories that are
    searched, whether or not they exist, and the files that were read."""
    searched = [home + b"/.config/ral"]
    named = environment.get(b"XDG_CONFIG_HOME", b"")
    if named.startswith(b"/"):
        searched.append(posixpath.normpath(named) + b"/ral")
    return list(dict.fromkeys([*searched, *(name.encode("utf-8", "surrogateescape") for name in files)]))


def left_out(settings: Settings, exists: Iterable[str]) -> list[str]:
    """Return a warning for each directory of MINIMUM_SYSTEM that exists and is shown by no setting."""
    shown = {text.rstrip("/") for text in settings.readonly_mounts}
    return [
        f"readonly_mounts leaves out {path}, which exists on this host: most programs will not start"
        for path in exists
        if path not in shown and "/" not in settings.readonly_mounts
    ]
