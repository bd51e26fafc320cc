"""From what a session is to be, to its plan. Pure: (policy, facts of the host) → Plan.

The order is the security: system, scratch, home, project, protected installation, masks, /proc and /dev over
every bind, and last the root made read-only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ral_broker.envelope.facts import ABSENT, PathFact
from ral_broker.envelope.plan import (
    Bind,
    Dev,
    Mask,
    Operation,
    PinName,
    Pinned,
    Plan,
    Proc,
    ReadOnly,
    Symlink,
    Tmpfs,
    is_under,
    shown_names,
)
from ral_broker.errors import Refused
from ral_protocol import exits

SYSTEM_PATHS = (
    b"/usr", b"/bin", b"/sbin", b"/lib", b"/lib32", b"/lib64", b"/libx32", b"/etc", b"/opt", b"/app",
    b"/nix/store",
    b"/home/linuxbrew/.linuxbrew", b"/var/lib/dpkg", b"/var/lib/rpm", b"/sys/devices/system/cpu",
    b"/sys/kernel/mm/transparent_hugepage",
)  # fmt: skip
"""Shown read-only where they exist."""

CREDENTIAL_NAMES = (
    b".ssh", b".aws", b".gnupg", b".netrc", b".git-credentials", b".config/gh", b".config/hub",
    b".docker/config.json",
    b".kube", b".config/gcloud", b".azure", b".config/op", b".config/helm", b".terraform.d",
    b".vault-token", b".pgpass",
    b".pypirc", b".cargo/credentials.toml", b".cargo/credentials",
)  # fmt: skip
"""Names below the home directory that no session shows. The home itself is empty inside; these matter where
the project holds them."""

ROOT_HIDDEN = (
    b"/etc/shadow", b"/etc/shadow-", b"/etc/gshadow", b"/etc/gshadow-", b"/etc/sudoers", b"/etc/sudoers.d",
    b"/etc/krb5.keytab", b"/etc/ssl/private", b"/etc/letsencrypt", b"/etc/NetworkManager/system-connections",
    b"/etc/ppp", b"/etc/ipsec.secrets", b"/etc/openvpn", b"/etc/security/opasswd", b"/etc/polkit-1",
    b"/etc/wireguard",
    b"/etc/ssh/ssh_host_rsa_key", b"/etc/ssh/ssh_host_ecdsa_key", b"/etc/ssh/ssh_host_ed25519_key",
    b"/etc/ssh/ssh_host_dsa_key",
)  # fmt: skip
"""Files that only root reads: hidden where the session is root's, for uid 0 inside is uid 0 of the host."""

ROOT_READ_ONLY = (
    b"/proc/sys", b"/proc/sysrq-trigger", b"/proc/irq", b"/proc/bus", b"/proc/fs", b"/proc/pressure",
)  # fmt: skip
"""Files of proc(5) that uid 0 writes without any capability (core_pattern among them)."""

ROOT_MASKED = (
    b"/proc/kcore",
    b"/proc/keys",
    b"/proc/acpi",
    b"/proc/scsi",
    b"/proc/timer_list",
    b"/proc/kmsg",
)

_RESOLVER = b"/etc/resolv.conf"

_SHARED_PLACES = (b"/tmp", b"/var/tmp", b"/run", b"/dev/shm")
"""Directories of the whole host: what lies in them belongs to other programs."""


class SessionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What a session is to be. Paths are canonical and absolute, except ``home`` (as the passwd entry spells
    it; ``home_path`` is its canonical path).

    ``hidden``: the broker's own directories. ``installation``: directories whose change would poison the
    next broker. ``denied``: paths nobody inside may read or change.
    """

    uid: int
    home: bytes
    home_path: bytes
    project: bytes
    cwd: bytes
    session: str
    hidden: tuple[bytes, ...] = ()
    installation: tuple[bytes, ...] = ()
    denied: tuple[bytes, ...] = ()
    pins: tuple[tuple[PinName, bytes], ...] = ()
    fresh_proc: bool = True


def paths_of_interest(policy: SessionPolicy) -> Iterator[bytes]:
    """Yield every name whose state the builder will look up."""
    yield from SYSTEM_PATHS
    yield _RESOLVER
    yield policy.project
    yield from policy.hidden
    yield from policy.installation
    yield from policy.denied
    yield from (policy.home_path + b"/" + name for name in CREDENTIAL_NAMES)
    if policy.uid == 0:
        yield from ROOT_HIDDEN
        yield from ROOT_READ_ONLY
        yield from ROOT_MASKED


def plan_session(policy: SessionPolicy, facts: Mapping[bytes, PathFact]) -> Plan:
    """Return the plan of a session.

    Raises Refused when the project would show what a session must never show, or lies where the kernel's own
    file systems go.
    """
    _check_project(policy, facts)
    operations: list[Operation] = [*_system(facts), *_scratch(), *_resolver(facts), *_home(policy)]
    operations.append(
        Bind(
            dest=policy.project, source=policy.project, writable=True, required=True, layer="project",
            why="project",
            identity=facts.get(policy.project, ABSENT).identity,
        )
    )  # fmt: skip
    protected = (*_protected(policy, facts, tuple(operations)), *_masks(policy, facts, tuple(operations)))
    operations += _anchors(tuple(operations), protected)  # wall
    operations += protected
    operations += _kernel(policy, facts)
    operations.append(
        Symlink(
            dest=exits.SESSION_MARKER.encode(),
            target=policy.session.encode(),
            layer="final",
            why="session marker",
        )
    )
    why = "nothing is created outside the mounts above"
    operations.append(ReadOnly(dest=b"/", layer="final", why=why))  # wall
    return Plan(operations=tuple(operations), cwd=policy.cwd)


def _check_project(policy: SessionPolicy, facts: Mapping[bytes, PathFact]) -> None:
    project = policy.project
    name = project.decode("utf-8", "backslashreplace")
    for spelling in (policy.home_path, policy.home):
        if is_under(spelling, project):  # wall
            raise Refused(
                f"the project {name} is your home directory or an ancestor of it: everything below would be "
                "writable inside; run ral in a project directory (or name one with --project)"
            )
    for place in (*_SHARED_PLACES, b"/run/user/%d" % policy.uid):
        if is_under(place, project):  # wall
            raise Refused(
                f"the project {name} holds {place.decode()}, where other programs of yours keep sockets "
                "and files: a program inside could use them to act outside; make a directory of its own "
                "for the project"
            )
    for place in (b"/proc", b"/dev", b"/sys", b"/run/ral-session"):
        if is_under(project, place):  # wall
            raise Refused(
                f"the project {name} lies in {place.decode()}, which a sandbox gets anew; choose another"
            )
    credentials = (policy.home_path + b"/" + name for name in CREDENTIAL_NAMES)
    for secret in (*policy.hidden, *policy.denied, *credentials, *(ROOT_HIDDEN if policy.uid == 0 else ())):
        if is_under(project, facts.get(secret, ABSENT).resolved or secret):  # wall
            raise Refused(
                f"the project {name} lies in {secret.decode('utf-8', 'backslashreplace')}, which is hidden"
            )


def _system(facts: Mapping[bytes, PathFact]) -> Iterator[Operation]:
    shown = [p for p in SYSTEM_PATHS if facts.get(p, ABSENT).kind in ("directory", "file")]
    for path in SYSTEM_PATHS:
        fact = facts.get(path, ABSENT)
        if fact.kind in ("directory", "file") and fact.resolved == path:
            yield Bind(
                dest=path,
                source=path,
                writable=False,
                identity=fact.identity,
                layer="system",
                why="readonly_mounts",
            )
        elif fact.resolved is not None and fact.reaches == "directory":
            if (
                fact.kind == "link"
                and fact.target
                and any(is_under(fact.resolved, other) for other in shown)
            ):
                yield Symlink(dest=path, target=fact.target, layer="system", why="readonly_mounts")
            else:
                yield Bind(
                    dest=path, source=fact.resolved, writable=False, identity=fact.identity, layer="system",
                    why="readonly_mounts",
                )  # fmt: skip


def _scratch() -> Iterator[Operation]:
    yield Tmpfs(dest=b"/tmp", mode=0o1777, layer="scratch", why="private_tmp")
    yield Tmpfs(dest=b"/var/tmp", mode=0o1777, layer="scratch", why="private_tmp")
    yield Tmpfs(dest=b"/run", layer="scratch", why="a fresh /run: no socket of the host")
    yield Symlink(
        dest=b"/var/run", target=b"/run", layer="scratch", why="a fresh /run: no socket of the host"
    )


def _resolver(facts: Mapping[bytes, PathFact]) -> Iterator[Operation]:
    """Where resolv.conf is a link into /run, show the directory it lives in: it is replaced by rename
    there."""
    fact = facts.get(_RESOLVER, ABSENT)
    if fact.kind == "link" and fact.reaches == "file" and fact.resolved and is_under(fact.resolved, b"/run"):
        directory = fact.resolved.rsplit(b"/", 1)[0]
        if directory != b"/run":
            yield Bind(
                dest=directory, source=directory, writable=False, layer="scratch", why="/etc/resolv.conf"
            )


def _home(policy: SessionPolicy) -> Iterator[Operation]:
    if policy.home_path == b"/":
        return
    yield Tmpfs(dest=policy.home_path, mode=0o700, layer="home", why="home_access = tmpwrite")
    if policy.home != policy.home_path:
        yield Symlink(dest=policy.home, target=policy.home_path, layer="home", why="home_access = tmpwrite")


def _protected(
    policy: SessionPolicy, facts: Mapping[bytes, PathFact], operations: tuple[Operation, ...]
) -> Iterator[Operation]:
    writable = tuple(o for o in operations if isinstance(o, Bind) and o.writable)
    for path in policy.installation:
        fact = facts.get(path, ABSENT)
        if fact.resolved is None or fact.reaches == "absent":
            continue
        for name in shown_names(writable, fact.resolved):
            yield Bind(
                dest=name, source=fact.resolved, writable=False, identity=fact.identity, layer="protect",
                why="ral's own installation",
            )  # fmt: skip
    for pin, path in policy.pins:
        for name in shown_names(operations, path):
            yield Pinned(dest=name, pin=pin, layer="protect", why="the broker executes this file")  # wall


def _anchors(operations: tuple[Operation, ...], protected: tuple[Operation, ...]) -> Iterator[Operation]:
    """Bind each directory between a writable bind and something protected in it on itself: what is a mount
    cannot be renamed inside, so nothing of the program's making takes the place of a protected path."""
    anchors: dict[bytes, bytes] = {}
    for bind in (o for o in operations if isinstance(o, Bind) and o.writable):
        for operation in protected:
            above = operation.dest.rpartition(b"/")[0]
            while above != bind.dest and is_under(above, bind.dest):
                anchors[above] = bind.source + above[len(bind.dest) :]
                above = above.rpartition(b"/")[0]
    for dest in sorted(anchors, key=len):
        yield Bind(
            dest=dest, source=anchors[dest], writable=True, layer="protect", why="holds something protected"
        )  # fmt: skip


def _masks(
    policy: SessionPolicy, facts: Mapping[bytes, PathFact], operations: tuple[Operation, ...]
) -> Iterator[Operation]:
    wanted = [(path, "the broker's own directory") for path in policy.hidden]  # wall
    wanted += [(policy.home_path + b"/" + name, "credentials") for name in CREDENTIAL_NAMES]  # wall
    if policy.uid == 0:
        wanted += [(path, "readable by root only") for path in ROOT_HIDDEN]  # wall
    wanted += [(path, "denied") for path in policy.denied]  # wall
    masked: set[bytes] = set()
    for path, why in wanted:
        fact = facts.get(path, ABSENT)
        # What exists in the end is masked, at every name that shows it; a link itself stays as it is.
        if fact.resolved is None or fact.reaches not in ("file", "directory"):
            continue
        for name in shown_names(operations, fact.resolved):
            if not any(is_under(name, other) for other in masked):
                masked.add(name)
                yield Mask(dest=name, directory=fact.reaches == "directory", layer="mask", why=why)


def _kernel(policy: SessionPolicy, facts: Mapping[bytes, PathFact]) -> Iterator[Operation]:
    if policy.fresh_proc:
        yield Proc(dest=b"/proc", layer="kernel", why="always")
    else:
        # Read-only: it has files of every process of this user, and for some of them (oom_score_adj,
        # coredump_filter, clear_refs, autogroup) the uid is all that a write is asked for.
        yield Bind(
            dest=b"/proc", source=b"/proc", writable=False, required=True, layer="kernel",  # wall
            why="this host refuses a fresh /proc",
        )  # fmt: skip
    yield Dev(dest=b"/dev", layer="kernel", why="always")
    if policy.uid != 0:
        return
    for path in ROOT_READ_ONLY:  # wall
        fact = facts.get(path, ABSENT)
        if fact.kind in ("directory", "file"):
            yield Bind(
                dest=path,
                source=path,
                writable=False,
                layer="kernel",
                why="uid 0 could write the host's /proc",
            )
    for path in ROOT_MASKED:  # wall
        fact = facts.get(path, ABSENT)
        if fact.kind in ("directory", "file"):
            yield Mask(
                dest=path, directory=fact.kind == "directory", layer="kernel", why="uid 0 could read it"
            )
