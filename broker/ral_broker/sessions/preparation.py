"""From a request to a plan: configuration, a look at the host, the pure builders. Starts nothing.

The one place where settings become a session: launches, ``--dry-run`` and ``ral explain`` ask here.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ral_broker.config.effective import Effective
from ral_broker.config.load import Loader
from ral_broker.config.network import choose_network
from ral_broker.config.policy import (
    MINIMUM_SYSTEM,
    Found,
    Place,
    configuration_paths,
    left_out,
    pinned_readonly,
    rules_of,
)
from ral_broker.config.profile import Profile
from ral_broker.config.profiles import login_warning
from ral_broker.config.settings import SETTINGS, Settings
from ral_broker.config.sockets import Socket, named_sockets
from ral_broker.envelope.devices import Devices, expand_devices
from ral_broker.envelope.environment import EnvironmentPolicy, environment_policy
from ral_broker.envelope.facts import PathFact, look, observe
from ral_broker.envelope.landlock import landlock_abi
from ral_broker.envelope.opened import identity_of
from ral_broker.envelope.passwd import GROUP, MAX_BYTES, NSSWITCH, PASSWD, Account, filter_accounts
from ral_broker.envelope.places import CREDENTIAL_NAMES
from ral_broker.envelope.plan import Identity, Plan, is_under
from ral_broker.envelope.policy import Rule, SessionPolicy, Text
from ral_broker.envelope.project import look_at_project
from ral_broker.envelope.protection import Protection, project_protection
from ral_broker.equipment import Equipment
from ral_broker.errors import HostLacks, Refused
from ral_broker.log import shown
from ral_broker.runtime import RuntimeDir, home_directory, user_name
from ral_broker.sessions.caller import read_small
from ral_broker.sessions.plan_memo import Given, PlanMemo


class Planned(msgspec.Struct, frozen=True):
    """A session as it would be started now. ``warnings`` are told even to a caller who wants quiet."""

    effective: Effective
    policy: SessionPolicy
    facts: Mapping[bytes, PathFact]
    plan: Plan
    environment: EnvironmentPolicy
    warnings: tuple[str, ...]
    notices: tuple[str, ...]


class Planner:
    """Plans sessions with one broker's equipment."""

    def __init__(self, runtime: RuntimeDir, equipment: Equipment, installation: tuple[bytes, ...]) -> None:
        self._runtime, self._equipment, self._installation = runtime, equipment, installation
        # Asked once: the directory service behind passwd may be far away, and would stop every client.
        self.home, self.user = home_directory(), user_name()
        self._account, self._groups = _account(), _groups()
        self._loader = Loader(self.home)
        self._memo = PlanMemo()

    @property
    def loader(self) -> Loader:
        """Loads configurations of this user."""
        return self._loader

    async def effective(
        self, environment: Sequence[bytes], overrides: Mapping[str, str], project: bytes,
        profile: str | None, command: bytes,
    ) -> Effective:  # fmt: skip
        """Return the configuration of one launch. Raises Refused."""
        return await self._loader.load(environment, overrides, project, profile, command)

    async def plan(
        self, session: str, effective: Effective, environment: Sequence[bytes], project: bytes,
        project_fd: int, cwd: bytes,
    ) -> Planned:  # fmt: skip
        """Plan a session in ``project``, whose handle is ``project_fd``. Raises Refused, HostLacks."""
        _, _, host = await self._equipment.require()
        settings = effective.settings
        warnings = list(effective.warnings)
        network = choose_network(settings.network_filter_mode, settings.network_filter_fallback)
        warnings += [network.warning] if network.warning else []
        warnings += _landlock_warnings(settings)
        hidden = self._runtime.hidden()
        place = Place(
            uid=os.geteuid(), home=self.home, home_path=look(self.home).resolved or self.home,
            project=project, cwd=cwd if is_under(cwd, project) else project, session="",
            hidden=tuple(name for name, _ in hidden), installation=self._installation,
            pins=self._equipment.pin_names(), fresh_proc=host.fresh_proc,
        )  # fmt: skip
        variables = _variables(environment)
        protection = await self._protection(settings, place, project_fd)
        devices = _devices(settings)
        profile = effective.profile
        sockets, doubts = named_sockets(profile.sockets if profile else (), variables)
        warnings += [*doubts, *devices.notices, *protection.notices]
        found = Found(
            protected=(
                *protection.protected,
                *_protected_files(profile, place.home_path),
                *pinned_readonly(effective, place),
            ),
            writable=protection.writable, blocked=protection.blocked,
            readonly=tuple(Rule(s.path, s.why) for s in sockets),
            devices=devices.names,
            texts=self._texts() if settings.filter_passwd else (),
        )  # fmt: skip
        given = Given(
            settings, place, found,
            tuple(configuration_paths(variables, place.home_path, effective.files)),
            network.mode == "open",
        )  # fmt: skip
        policy, interesting = self._memo.policy(given)
        facts = await observe(interesting)
        for name, fd in hidden:
            if facts[name].identity != identity_of(fd):  # wall
                raise Refused(
                    f"ral's own directory {shown(name)} was moved just now, so it cannot be hidden; "
                    "run the command again, or name a safer place with RAL_RUNTIME_DIR"
                )
        # The objects that were looked into are the ones to show, whatever their names reach a moment later.
        for name, identity in ((project, identity_of(project_fd)), *protection.identities):
            facts[name] = msgspec.structs.replace(facts[name], identity=identity)
        warnings += [text for socket in sockets if (text := _socket_doubt(socket, facts))]
        made = self._memo.plan(given, facts, session)
        names = tuple(name for socket in sockets for name in socket.variables)
        variables_policy, remarks = _environment_policy(settings, names)
        warnings += [*remarks, *made.notices, *left_out(settings, _existing_system())]
        warnings += await self._login(effective, variables, variables_policy, place)
        notices = [f"profile {profile.title}"] if profile else []
        return Planned(
            effective, policy, facts, made.plan, variables_policy, tuple(warnings), tuple(notices)
        )

    async def _protection(self, settings: Settings, place: Place, project_fd: int) -> Protection:
        writable = [rule.path for rule in rules_of(settings, "extra_writable_paths", place)]
        if settings.home_access == "write":
            writable.append(place.home_path)
        seen = await look_at_project(
            project_fd, place.project, home=place.home_path, also_writable=await _canonical(writable)
        )
        closed: list[bytes] = []
        if seen.outside is not None:
            names = ("denied_writable_paths", "blocked_files", "extra_blocked_paths")
            closed += [place.home_path + b"/" + name for name in CREDENTIAL_NAMES]
            closed += [rule.path for name in names for rule in rules_of(settings, name, place)]
            closed = [*place.hidden, *place.installation, *closed, *await _canonical(closed)]
        return project_protection(
            seen, names=settings.project_protected_paths, protect=settings.protect_project,
            closed=closed, homes=(place.home, place.home_path),
        )  # fmt: skip

    def _texts(self) -> tuple[Text, ...]:
        return _filtered(
            *(_content(path) for path in (PASSWD, GROUP, NSSWITCH)), self._account, self._groups, self.home
        )

    async def _login(
        self, effective: Effective, variables: Mapping[bytes, bytes], policy: EnvironmentPolicy, place: Place
    ) -> list[str]:
        profile, quiet = effective.profile, effective.settings.suppress_agent_warnings
        if profile is None:
            return []
        ask = functools.partial(login_warning, profile, variables, policy, suppressed=quiet)
        if ask(marker_exists=False) is None:
            return []
        markers = await observe(place.home_path + b"/" + os.fsencode(m) for m in profile.auth_markers)
        text = ask(marker_exists=any(fact.reaches != "absent" for fact in markers.values()))
        return [] if text is None else [text]


def _protected_files(profile: Profile | None, home: bytes) -> Iterator[Rule]:
    if profile is None:
        return
    for name in profile.protected_files:
        yield Rule(home + b"/" + os.fsencode(name), f"profile {profile.name}")


async def _canonical(paths: Sequence[bytes]) -> list[bytes]:
    """Return what the paths lead to; those that lead nowhere as they are."""
    return [fact.resolved or path for path, fact in (await observe(paths)).items()]


def _variables(environment: Sequence[bytes]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for entry in environment:
        name, _, value = entry.partition(b"=")
        found.setdefault(name, value)
    return found


@functools.lru_cache(maxsize=8)
def _environment_policy(
    settings: Settings, also_allowed: tuple[bytes, ...]
) -> tuple[EnvironmentPolicy, tuple[str, ...]]:
    policy, warnings = environment_policy(settings, SETTINGS)
    return msgspec.structs.replace(policy, allowed=policy.allowed | {*also_allowed}), warnings


def _devices(settings: Settings) -> Devices:
    """Return the devices to show. An old list may lack a device that has just appeared, which is as well."""
    directories = sorted({pattern.rpartition("/")[0] for pattern in settings.devices} | {"/dev"})
    if any(set("*?[") & set(directory) for directory in directories):
        return expand_devices(settings.devices, settings.devices_blacklist)
    times = tuple(_change_time(directory) for directory in directories)
    return _expanded(settings.devices, settings.devices_blacklist, times)


def _change_time(path: str) -> int | None:
    try:
        return os.stat(path).st_ctime_ns
    except OSError:
        return None


@functools.lru_cache(maxsize=8)
def _expanded(
    patterns: tuple[str, ...], blacklist: tuple[str, ...], times: tuple[int | None, ...]
) -> Devices:
    """Expand, again when ``times`` of the directories differ."""
    del times
    return expand_devices(patterns, blacklist)


def _landlock_warnings(settings: Settings) -> list[str]:
    """Hold landlock_required_abi. Raises HostLacks."""
    wanted = settings.landlock_required_abi
    if not wanted:
        return []
    have = landlock_abi() or 0
    if have >= wanted:
        return []
    text = f"landlock_required_abi = {wanted}, and this kernel's Landlock has ABI {have}"
    if settings.landlock_hard_requirement:
        raise HostLacks(f"{text}; boot a newer kernel, or set landlock_hard_requirement = false")
    return [text]


def _socket_doubt(socket: Socket, facts: Mapping[bytes, PathFact]) -> str | None:
    """Say why a socket cannot be passed, None if it can. Raises Refused for anything else in its place."""
    fact = facts[socket.path]
    if fact.reaches == "absent":
        return f"{socket.why}: there is no {shown(socket.path)}"
    try:
        status = os.stat(fact.resolved or socket.path, follow_symlinks=False)
    except OSError as error:
        return f"{socket.why}: {shown(socket.path)}: {error.strerror}"
    if not stat.S_ISSOCK(status.st_mode) or Identity(status.st_dev, status.st_ino) != fact.identity:  # wall
        raise Refused(
            f"{socket.why}: {shown(socket.path)} is no socket, and nothing else is passed this way; use "
            "extra_writable_paths or readonly_mounts for files"
        )
    return None


def _existing_system() -> tuple[str, ...]:
    return tuple(path for path in MINIMUM_SYSTEM if os.path.exists(path))


def _content(path: bytes) -> bytes | None:
    """Return a file of the system, None where there is none. Raises HostLacks if it is too large."""
    try:
        content = read_small(path, MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HostLacks(f"{shown(path)} cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise HostLacks(f"{shown(path)} is larger than {MAX_BYTES} bytes; set filter_passwd = false")
    return content


@functools.lru_cache(maxsize=2)
def _filtered(
    passwd: bytes | None, group: bytes | None, nsswitch: bytes | None, account: Account | None,
    groups: tuple[tuple[bytes, int], ...], home: bytes,
) -> tuple[Text, ...]:  # fmt: skip
    return filter_accounts(
        passwd=passwd, group=group, nsswitch=nsswitch, uid=os.geteuid(),
        gids=frozenset((os.getegid(), *os.getgroups())), account=account, groups=groups, home=home,
    )  # fmt: skip


def _account() -> Account | None:
    try:
        entry = pwd.getpwuid(os.geteuid())
    except KeyError:
        return None
    name, comment, home, shell = map(
        os.fsencode, (entry.pw_name, entry.pw_gecos, entry.pw_dir, entry.pw_shell)
    )
    return Account(name, entry.pw_gid, comment, home, shell)


def _groups() -> tuple[tuple[bytes, int], ...]:
    found: list[tuple[bytes, int]] = []
    for gid in sorted({os.getegid(), *os.getgroups()}):
        try:
            found.append((os.fsencode(grp.getgrgid(gid).gr_name), gid))
        except KeyError:
            continue
    return tuple(found)
