"""The environment of a session's program: the caller's, less what a sandbox must not hold, plus what the
settings add and our markers. Pure.

Loader variables (LD_LIBRARY_PATH and its kin) stay: they act inside, on programs that see no more than the
session does, and neither bwrap nor the trampoline is started with them.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import msgspec

from ral_protocol import exits

PROJECT_VARIABLE = b"RAL_PROJECT_DIR"
_OWN_PREFIX = b"RAL_"


class EnvironmentPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Which variables a session gets.

    ``blocked_names`` and ``blocked_patterns`` hold secrets back; a pattern is a glob (fnmatch), with ``/i``
    at its end it ignores case. ``pointless`` name what does not exist inside. ``allowed`` beats these three.
    ``hidden`` beats everything but PATH. ``extra`` are set whatever the caller has; ``search`` goes in front
    of its PATH.
    """

    blocked_names: frozenset[bytes]
    blocked_patterns: tuple[bytes, ...]
    allowed: frozenset[bytes]
    hidden: frozenset[bytes]
    pointless: frozenset[bytes]
    extra: tuple[tuple[bytes, bytes], ...] = ()
    search: tuple[bytes, ...] = ()

    def blocks(self, name: bytes) -> bool:
        """Whether a variable of the caller is held back as a secret."""
        return self.filter()(name)

    def filter(self) -> Callable[[bytes], bool]:
        """Return ``blocks`` for many names."""
        allowed, names, pattern = (
            self.allowed,
            self.blocked_names,
            _compiled(self.blocked_patterns).fullmatch,
        )
        # Latin-1 maps every byte to one character, so a name that is no UTF-8 is matched as well.
        return lambda name: (
            name not in allowed and (name in names or pattern(name.decode("latin-1")) is not None)
        )


def _words(text: str) -> tuple[bytes, ...]:
    return tuple(word.encode() for word in text.split())


DEFAULT = EnvironmentPolicy(
    blocked_names=frozenset(
        _words(
            """
            GITHUB_PAT ST_AUTH SW2_URL DATABASE_URL PGPASSWORD MYSQL_PWD MONGO_URI REDIS_URL
            GOOGLE_APPLICATION_CREDENTIALS MUTT_EMAIL_ADDRESS MUTT_REALNAME MUTT_SMTP_URL KRB5CCNAME
            SLURM_CONF SLURM_CONFIG_DIR DBUS_SESSION_BUS_ADDRESS
            """
        )
    ),
    blocked_patterns=_words(
        """
        SSH_* *_TOKEN *_SECRET *_PASSWORD *_CREDENTIAL *_CREDENTIALS *_API_KEY *_SECRET_KEY *_PRIVATE_KEY
        *password*/i AWS_* AMAZON_* EC2_* AZURE_* MSAL_* GCP_* GCLOUD_* GOOGLE_CLOUD_* VAULT_* KUBECONFIG
        KUBE_* SLURM_JWT DOCKER_* REGISTRY_* CI_* GITLAB_* JENKINS_* BUILDKITE_* CIRCLECI_*
        """
    ),
    allowed=frozenset(_words("ANTHROPIC_API_KEY OPENAI_API_KEY CODEX_API_KEY GOOGLE_API_KEY")),
    hidden=frozenset(
        _words(
            # Settings of ral and of its older name: a program inside has no use for them and must not learn
            # them.
            """
            SANDBOX_ACTIVE SANDBOX_BACKEND SANDBOX_PROJECT_DIR SANDBOX_CONF SANDBOX_QUIET SANDBOX_NPROC_LIMIT
            HOME_ACCESS PRIVATE_TMP PRIVATE_IPC FILTER_PASSWD NETWORK_FILTER_MODE NETWORK_FILTER_FALLBACK
            NETWORK_MAIL_BLOCK MOUNT_GUARD MOUNT_GUARD_INTERVAL LANDLOCK_REQUIRED_ABI
            LANDLOCK_HARD_REQUIREMENT CLEANUP_MATERIALIZED_BLOCKED_FILES SLURM_SCOPE CHAPERON_LOG_LEVEL
            CHAPERON_LOG_RETAIN_DAYS
            """
        )
    ),
    pointless=frozenset(
        _words(
            # Sockets and directories of the caller's login session: /run and /tmp inside are the sandbox's
            # own, so the names lead nowhere and a program would fail later and less clearly than without
            # them. NOTIFY_SOCKET and LISTEN_* would make a program take itself for the service that ral was
            # started from.
            """
            XDG_RUNTIME_DIR DISPLAY WAYLAND_DISPLAY WAYLAND_SOCKET XAUTHORITY ICEAUTHORITY SESSION_MANAGER
            PULSE_SERVER PULSE_COOKIE GPG_AGENT_INFO TMUX TMUX_PANE TMUX_TMPDIR STY NOTIFY_SOCKET LISTEN_FDS
            LISTEN_PID LISTEN_FDNAMES JOURNAL_STREAM OLDPWD
            """
        )
    ),
)

_TEMPORARY = (b"TMPDIR", b"TMP", b"TEMP")
_TEMPORARY_INSIDE = (b"/tmp", b"/var/tmp")
_STANDARD_SEARCH = b"/usr/local/bin:/usr/bin:/bin"
_OURS = (b"HOME", b"USER", b"LOGNAME", b"PWD")
_RESERVED = (b"SANDBOX_", b"CHAPERON_", b"LANDLOCK_", b"NETWORK_", _OWN_PREFIX)
_IDENTIFIER = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")


class EnvironmentSettings(Protocol):
    """The part of the settings that is about variables."""

    @property
    def blocked_env_vars(self) -> tuple[str, ...]:
        """Names that are secrets."""

    @property
    def blocked_env_patterns(self) -> tuple[str, ...]:
        """Globs of names that are secrets."""

    @property
    def allowed_env_vars(self) -> tuple[str, ...]:
        """Names that are none."""

    @property
    def hide_from_sandbox(self) -> tuple[str, ...]:
        """Names that never get in."""

    @property
    def sandbox_env(self) -> tuple[str, ...]:
        """Variables to set, ``NAME=VALUE``."""


def environment_policy(
    settings: EnvironmentSettings, setting_names: Collection[str]
) -> tuple[EnvironmentPolicy, tuple[str, ...]]:
    """Return what the settings make of the variables, and a warning for each entry that has no effect.

    The block lists and the hidden names add to those built in, which nothing takes away. ``setting_names``:
    of all settings, in lower case; a variable of such a name would pass for one.
    """
    warnings: list[str] = []

    def names(setting: str, entries: Iterable[str]) -> frozenset[bytes]:
        warnings.extend(
            f"{setting} entry '{entry}' matches nothing: the name of a variable is not empty and has no '='"
            for entry in entries
            if not entry or "=" in entry
        )
        return frozenset(_encoded(entry) for entry in entries)

    if "PATH" in settings.hide_from_sandbox:
        warnings.append("hide_from_sandbox entry 'PATH' ignored: programs inside are found by it")
    policy = EnvironmentPolicy(
        blocked_names=DEFAULT.blocked_names | names("blocked_env_vars", settings.blocked_env_vars),
        blocked_patterns=tuple(
            dict.fromkeys((*DEFAULT.blocked_patterns, *map(_encoded, settings.blocked_env_patterns)))
        ),
        allowed=names("allowed_env_vars", settings.allowed_env_vars),
        hidden=(DEFAULT.hidden | names("hide_from_sandbox", settings.hide_from_sandbox)) - {b"PATH"},
        pointless=DEFAULT.pointless,
    )
    reserved = frozenset(name.upper().encode() for name in setting_names)
    extra: dict[bytes, bytes] = {}
    search: list[bytes] = []
    for entry in settings.sandbox_env:
        name, _, value = _encoded(entry).partition(b"=")
        if reason := _refusal(_encoded(entry), policy, reserved):
            warnings.append(f"sandbox_env entry '{entry.partition('=')[0]}' ignored: {reason}")
        elif name == b"PATH":
            search.append(value)
        else:
            extra[name] = value
    return msgspec.structs.replace(policy, extra=tuple(extra.items()), search=tuple(search)), tuple(warnings)


def _refusal(entry: bytes, policy: EnvironmentPolicy, setting_names: frozenset[bytes]) -> str | None:
    """Return why an entry of sandbox_env is not set."""
    name, separator, value = entry.partition(b"=")
    checks = (
        (not separator, "it has no '='; write NAME=VALUE"),
        (not _IDENTIFIER.fullmatch(name), "the name is not letters, digits and '_'"),
        (name.startswith(b"_"), "names that begin with '_' belong to shells"),
        (name in setting_names, "it is the name of a setting; set that instead"),
        (name in _OURS, "ral sets it itself"),
        (name.startswith(_RESERVED), "names of this kind are ral's own"),
        (name in policy.hidden, "the name is hidden (hide_from_sandbox)"),
        (policy.blocks(name), "the name is blocked; add it to allowed_env_vars too"),
        (b"\0" in value, "the value has a NUL byte, which no variable can hold"),
        (name == b"PATH" and not value, "it names no directory"),
    )
    return next((reason for applies, reason in checks if applies), None)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def filter_environment(
    environment: Sequence[bytes],
    *,
    home: bytes,
    user: bytes,
    project: bytes,
    session: str,
    cwd: bytes,
    policy: EnvironmentPolicy = DEFAULT,
) -> tuple[tuple[bytes, ...], int]:
    """Return the environment of the program, and how many variables were held back as secrets.

    ``environment`` is the caller's, each entry ``NAME=VALUE``. An entry without ``=`` or name is dropped. Of
    two entries with one name the first stays: it is what getenv(3) finds, and programs differ about the
    second. Every RAL_ variable of the caller goes. What stays keeps its order; then come those that the
    policy adds, and last HOME, USER, LOGNAME, PWD and the markers RAL_SESSION and RAL_PROJECT_DIR, which are
    ours.
    """
    ours = {
        b"HOME": home,
        b"USER": user,
        b"LOGNAME": user,
        b"PWD": cwd,
        exits.SESSION_VARIABLE.encode(): session.encode(),
        PROJECT_VARIABLE: project,
    }
    hidden = policy.hidden - {b"PATH"}
    is_secret = policy.filter()
    kept: dict[bytes, bytes] = {}
    seen: set[bytes] = set()
    blocked = 0
    for entry in environment:
        name, separator, value = entry.partition(b"=")
        if not separator or not name or name in seen:
            continue
        seen.add(name)
        if name in ours or name in hidden or name.startswith(_OWN_PREFIX):  # wall
            continue
        if is_secret(name):  # wall
            blocked += 1
            continue
        if name not in policy.allowed and (
            name in policy.pointless or (name in _TEMPORARY and not _exists_inside(value, project))
        ):
            continue
        kept[name] = value
    if policy.search:
        kept[b"PATH"] = b":".join((*policy.search, kept.get(b"PATH") or _STANDARD_SEARCH))
    for name, value in (*policy.extra, *ours.items()):
        kept.pop(name, None)
        if name not in hidden:
            kept[name] = value
    return tuple(name + b"=" + value for name, value in kept.items()), blocked


def _exists_inside(directory: bytes, project: bytes) -> bool:
    return directory.rstrip(b"/") in _TEMPORARY_INSIDE or (directory + b"/").startswith(project + b"/")


@functools.lru_cache(maxsize=16)
def _compiled(patterns: tuple[bytes, ...]) -> re.Pattern[str]:
    alternatives = []
    for pattern in patterns:
        text = pattern.decode("latin-1")
        insensitive = text.endswith("/i")
        expression = fnmatch.translate(text.removesuffix("/i"))
        alternatives.append(f"(?i:{expression})" if insensitive else f"(?:{expression})")
    return re.compile("|".join(alternatives) or r"(?!)", re.ASCII)
