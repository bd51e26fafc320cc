"""The environment of a session's program: the caller's, less what a sandbox must not hold, plus our markers.
Pure.

Loader variables (LD_LIBRARY_PATH and its kin) stay: they act inside, on programs that see no more than the
session does, and neither bwrap nor the trampoline is started with them.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Sequence

import msgspec

from ral_protocol import exits

PROJECT_VARIABLE = b"RAL_PROJECT_DIR"
_OWN_PREFIX = b"RAL_"


class EnvironmentPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Which variables a session gets.

    ``blocked_names`` and ``blocked_patterns`` hold secrets back; a pattern is a glob (fnmatch), with ``/i``
    at its end it ignores case. ``pointless`` name what does not exist inside. ``allowed`` beats these three.
    ``hidden`` beats everything but PATH.
    """

    blocked_names: frozenset[bytes]
    blocked_patterns: tuple[bytes, ...]
    allowed: frozenset[bytes]
    hidden: frozenset[bytes]
    pointless: frozenset[bytes]


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
    second. Every RAL_ variable of the caller goes. What stays keeps its order; HOME, USER, LOGNAME, PWD and
    the markers RAL_SESSION and RAL_PROJECT_DIR are ours and come last.
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
    blocked_pattern = _compiled(policy.blocked_patterns)
    kept: dict[bytes, bytes] = {}
    seen: set[bytes] = set()
    blocked = 0
    for entry in environment:
        name, separator, value = entry.partition(b"=")
        if not separator or not name or name in seen:
            continue
        seen.add(name)
        if name in ours or name in hidden or name.startswith(_OWN_PREFIX):
            continue
        if name not in policy.allowed:
            if name in policy.blocked_names or blocked_pattern.fullmatch(name.decode("latin-1")):
                blocked += 1
                continue
            if name in policy.pointless or (name in _TEMPORARY and not _exists_inside(value, project)):
                continue
        kept[name] = value
    kept.update((name, value) for name, value in ours.items() if name not in hidden)
    return tuple(name + b"=" + value for name, value in kept.items()), blocked


def _exists_inside(directory: bytes, project: bytes) -> bool:
    return directory.rstrip(b"/") in _TEMPORARY_INSIDE or (directory + b"/").startswith(project + b"/")


@functools.lru_cache(maxsize=16)
def _compiled(patterns: tuple[bytes, ...]) -> re.Pattern[str]:
    # Latin-1 maps every byte to one character, so a name that is no UTF-8 is matched as well.
    alternatives = []
    for pattern in patterns:
        text = pattern.decode("latin-1")
        insensitive = text.endswith("/i")
        expression = fnmatch.translate(text.removesuffix("/i"))
        alternatives.append(f"(?i:{expression})" if insensitive else f"(?:{expression})")
    return re.compile("|".join(alternatives) or r"(?!)", re.ASCII)
