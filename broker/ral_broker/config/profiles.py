"""Profiles: what one kind of program needs beside its project, as data that somebody has read before.

A profile is a TOML file NAME.toml: shipped with ral, the user's or the administrator's (docs/profiles.md).
It runs nothing, and what it asks for is a layer of settings: an administrator's pins hold against it as they
do against a user's file.
"""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

import msgspec

import ral_broker
from ral_broker.config.profile import BUILT_IN, Profile
from ral_broker.config.profile_file import NAME, SETTING_KEYS, ProfileFile, decode
from ral_broker.config.values import ParsedFile
from ral_broker.envelope.environment import EnvironmentPolicy
from ral_broker.errors import Refused
from ral_broker.log import shown

ADMIN_DIRECTORY = "/etc/ral/profiles"
NO_PROFILE = "none"
"""The name that chooses no profile, whatever the command."""

_MAX_FILES = 16
"""A profile and all that it extends."""


class Files(Protocol):
    """How files of profiles are read: by handle, regular files of a bounded size, with a deadline."""

    async def names(self, directory: str) -> tuple[str, ...]:
        """Return the names in a directory, none where there is no directory. Raises Refused."""

    async def read(self, path: str, *, trusted: bool) -> bytes | None:
        """Return the content of a file, None where there is none. ``trusted``: root's alone, or Refused."""


Parse = Callable[[bytes, str], Awaitable[ParsedFile]]
"""From the content of a file and its name in messages to its values; raises Refused."""


@functools.cache
def built_in() -> dict[str, ProfileFile]:
    """Return the profiles that are shipped, by name. They are as trusted as the modules beside them."""
    directory = os.path.join(os.path.dirname(ral_broker.__file__), "profiles")
    found: dict[str, ProfileFile] = {}
    for entry in sorted(os.listdir(directory)):
        name, extension = os.path.splitext(entry)
        if extension == ".toml":
            with open(os.path.join(directory, entry), "rb") as file:
                values = {
                    key: tuple(value) if isinstance(value, list) else value
                    for key, value in tomllib.load(file).items()
                }
            found[name] = decode(ParsedFile(values, {}), name, BUILT_IN)
    return found


class _Layer(msgspec.Struct, frozen=True):
    """A place of profiles. ``below``: the places where what its files extend is looked for."""

    name: str
    directory: str | None
    below: tuple[str, ...]


class _Search:
    """One search through the three places. A file is read once."""

    def __init__(self, files: Files, parse: Parse, user_directory: str | None) -> None:
        self._files, self._parse = files, parse
        # An administrator's profile is never made of a user's.
        self.layers = (
            _Layer("administrator", ADMIN_DIRECTORY, ("administrator", "built-in")),
            _Layer("user", user_directory, ("administrator", "user", "built-in")),
            _Layer("built-in", None, ("built-in",)),
        )
        self._read: dict[tuple[str, str], ProfileFile | None] = {}

    async def names(self, layer: _Layer, untrusted_command: str | None = None) -> list[str]:
        """Return the names of the profiles in one place; of those shipped, which extend nothing, only those
        with the command, if there is one."""
        if layer.name == "built-in":
            return [
                name
                for name, file in built_in().items()
                if untrusted_command is None or untrusted_command in file.lists.get("commands", ())
            ]
        if layer.directory is None:
            return []
        entries = await self._files.names(layer.directory)
        names = [entry.removesuffix(".toml") for entry in entries if entry.endswith(".toml")]
        return sorted(name for name in names if NAME.fullmatch(name))

    async def file(self, layer: _Layer, name: str) -> ProfileFile | None:
        """Return what one place has under a name."""
        if layer.name == "built-in":
            return built_in().get(name)
        if layer.directory is None:
            return None
        key = (layer.name, name)
        if key not in self._read:
            path = f"{layer.directory}/{name}.toml"
            untrusted = await self._files.read(path, trusted=layer.name == "administrator")
            parsed = None if untrusted is None else await self._parse(untrusted, path)
            self._read[key] = None if parsed is None else decode(parsed, name, path)
        return self._read[key]

    async def profile(self, name: str, layers: tuple[_Layer, ...]) -> Profile | None:
        """Return the profile that a name means in these places, with all it extends. Raises Refused."""
        chain: list[ProfileFile] = []
        await self._collect(name, layers, chain, ())
        return _merged(chain) if chain else None

    async def _collect(
        self, name: str, layers: tuple[_Layer, ...], chain: list[ProfileFile], above: tuple[ProfileFile, ...]
    ) -> None:
        """Append the file that a name means to ``chain``, behind those that it extends. ``above``: the files
        that extend it."""
        for layer in layers:
            file = await self.file(layer, name)
            if file is not None:
                break
        else:
            if above:
                raise Refused(
                    f"{shown(above[-1].source)}: extends: there is no profile {name}; correct the name"
                )
            return
        if file in chain:
            return
        if file in above:
            raise Refused(f"{shown(file.source)}: extends: {name} extends itself; remove one of the names")
        if len(above) + len(chain) >= _MAX_FILES:
            raise Refused(
                f"{shown(above[0].source)}: extends: more than {_MAX_FILES} profiles; leave some out"
            )
        below = tuple(other for other in self.layers if other.name in layer.below)
        weaker = tuple(other for other in below if self.layers.index(other) > self.layers.index(layer))
        for parent in file.lists.get("extends", ()):
            # Its own name means the one that it takes the place of.
            await self._collect(parent, weaker if parent == name else below, chain, (*above, file))
        chain.append(file)


def _merged(chain: list[ProfileFile]) -> Profile:
    """Return what files come to that extend each other, the last one extending all others."""
    last = chain[-1]

    def together(key: str, files: list[ProfileFile]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(entry for file in files for entry in file.lists.get(key, ())))

    values = {key: together(key, chain) for key in SETTING_KEYS}
    return Profile(
        name=last.name,
        source=last.source,
        files=tuple(file.source for file in chain if file.source != BUILT_IN),
        values={key: entries for key, entries in values.items() if entries},
        # What extends a profile under another name is not chosen in its place.
        commands=together("commands", [file for file in chain if file.name == last.name]),
        credential_variables=together("credential_variables", chain),
        auth_markers=together("auth_markers", chain),
        protected_files=together("protected_files", chain),
        sockets=together("sockets", chain),
        login_hint=next((file.login_hint for file in reversed(chain) if file.login_hint), ""),
    )


async def find_profile(
    files: Files,
    parse: Parse,
    user_directory: str | None,
    *,
    name: str | None,
    command: bytes,
    enabled: Collection[str] = ("*",),
) -> Profile | None:
    """Return the profile of a launch, or None. Raises Refused: a profile that cannot be read, or is not
    there, starts nothing.

    ``name``: as asked for; an administrator's file of that name goes before the user's, the user's before
    the one shipped. Without it the command chooses, if it is a bare name (a path leads to whatever a project
    put there) and the profile is one of ``enabled`` (enabled_agents; ``*``: any).
    """
    search = _Search(files, parse, user_directory)
    if name is not None:
        if name == NO_PROFILE:
            return None
        profile = await search.profile(name, search.layers) if NAME.fullmatch(name) else None
        if profile is None:
            known = sorted({known for layer in search.layers for known in await search.names(layer)})
            raise Refused(f"there is no profile {shown(name)}; there are: {', '.join(known)}, {NO_PROFILE}")
        return profile
    untrusted_command = command.decode("utf-8", "surrogateescape")
    if not untrusted_command or "/" in untrusted_command:
        return None
    seen: set[str] = set()
    for layer in search.layers:
        chosen = []
        for candidate in await search.names(layer, untrusted_command):
            if candidate not in seen and ("*" in enabled or candidate in enabled):
                profile = await search.profile(candidate, (layer,))
                if profile is not None and untrusted_command in profile.commands:
                    chosen.append(profile)
            seen.add(candidate)
        if len(chosen) > 1:
            both = " and ".join(profile.title for profile in chosen[:2])
            raise Refused(
                f"the profiles {both} both have the command {shown(untrusted_command)}; choose one with "
                "--profile, or take it out of one"
            )
        if chosen:
            return chosen[0]
    return None


def login_warning(
    profile: Profile,
    variables: Collection[bytes],
    environment: EnvironmentPolicy,
    *,
    marker_exists: bool,
    suppressed: Collection[str],
) -> str | None:
    """Return what to tell a caller whose credentials do not reach the program, None where nothing is amiss.

    ``variables``: names that the caller has set. ``suppressed``: suppress_agent_warnings, names or ``all``.
    """
    if marker_exists or profile.name in suppressed or "all" in suppressed:
        return None
    have = [name for name in profile.credential_variables if name.encode() in variables]
    kept_out = [
        name for name in have if environment.blocks(name.encode()) or name.encode() in environment.hidden
    ]
    if not kept_out or len(kept_out) < len(have):
        return None
    hint = f", or {profile.login_hint}" if profile.login_hint else ""
    return (
        f"{profile.name}: {', '.join(kept_out)} is set but kept out of the sandbox, and no login was found; "
        f"add it to allowed_env_vars{hint}"
    )
