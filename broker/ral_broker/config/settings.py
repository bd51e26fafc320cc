"""Every setting: its type, its default, how layers combine it, and what becomes of it. Pure data.

The field names of Settings are the keys of the file. docs/settings.md and docs/ral.schema.json say the same
and are compared with this module by a test.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ral_broker.envelope.policy import HomeAccess

Network = Literal["open", "filtered", "proxied", "isolated"]
Fallback = Literal["open", "stricter", "strict"]
Guard = Literal["off", "warn", "repair", "kill"]

Merge = Literal["enforced", "additive", "free", "admin", "narrow", "hard", "ordered"]
"""How a layer's value and the weaker ones' combine (docs/settings.md). What the administrator's file does
not name is not pinned. A list adds, in ``[replace]`` it replaces.

``enforced``, ``additive``: list; what the administrator listed cannot be taken away, with the first not
silently. ``free``: the last layer's scalar, the lists of all. ``admin``: the administrator's, if that file
names it. ``narrow``: list; only entries below one of the administrator's. ``hard``: boolean; the
administrator's true stays. ``ordered``: word; the administrator's or a stricter one."""

State = Literal["built", "refused"]
"""``refused``: a value other than the default is refused with the sentence of ``note``."""

Entries = Literal[
    "absolute", "below project", "in project", "below home", "device", "variable", "pattern", "assignment",
    "word",
]  # fmt: skip
"""What the elements of a list are. ``absolute``: paths; a leading ``~/``, ``$HOME/`` or ``${HOME}/`` is the
home directory. ``below project``: the same, or relative to the project. ``in project``: the same, and stays
relative. ``below home``: relative to the home directory. ``device``: globs below /dev. ``variable``: names
of environment variables; ``pattern``: globs of such, ``/i`` at the end ignores case; ``assignment``:
``NAME=VALUE``. ``word``: anything else."""

Reload = Literal["live", "restart", "none"]
"""What becomes of a change while a session runs: it is seen in the plan (``live``), it waits for the next
start, or the session has nothing to do with it (``none``)."""

LINUX_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/app", "/nix/store",
    "/home/linuxbrew/.linuxbrew", "/var/lib/dpkg", "/var/lib/rpm", "/sys/devices/system/cpu",
    "/sys/kernel/mm/transparent_hugepage",
)  # fmt: skip

HOME_READONLY = (
    ".bashrc", ".bash_profile", ".bash_aliases", ".profile", ".zshrc", ".zshenv", ".zprofile", ".inputrc",
    ".vimrc", ".config/nvim", ".tmux.conf", ".linuxbrew", ".local/bin", "micromamba", ".condarc",
    ".nix-profile",
)  # fmt: skip

PROTECTED_IN_PROJECT = (
    ".git/hooks", ".git/config", ".git/config.worktree", ".git/info/attributes", ".gitmodules", ".envrc",
    ".vscode/tasks.json", ".vscode/settings.json", ".vscode/launch.json", ".idea", ".devcontainer",
    ".pre-commit-config.yaml", ".husky", ".claude/settings.json", ".claude/settings.local.json", ".mcp.json",
    ".codex/config.toml",
)  # fmt: skip


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Effective values; the defaults are those of a host without any file. What the texts of paths look like
    is said in effective.py."""

    allow_root_session: bool = True
    allowed_project_parents: tuple[str, ...] = ("/",)
    readonly_mounts: tuple[str, ...] = LINUX_SYSTEM
    home_access: HomeAccess = "tmpwrite"
    home_readonly: tuple[str, ...] = HOME_READONLY
    home_writable: tuple[str, ...] = ()
    home_seeded_files: tuple[str, ...] = (".gitconfig",)
    extra_writable_paths: tuple[str, ...] = ()
    denied_writable_paths: tuple[str, ...] = ()
    extra_blocked_paths: tuple[str, ...] = ()
    blocked_files: tuple[str, ...] = ()
    protect_project: bool = True
    project_protected_paths: tuple[str, ...] = PROTECTED_IN_PROJECT
    devices: tuple[str, ...] = ("/dev/nvidia*", "/dev/nvidia-caps/*")
    devices_blacklist: tuple[str, ...] = (
        "/dev/mem", "/dev/kmem", "/dev/port", "/dev/pts", "/dev/pts/*", "/dev/sd*", "/dev/nvme*",
        "/dev/loop*", "/dev/vd*", "/dev/xvd*", "/dev/dm-*", "/dev/mapper/*", "/dev/md*", "/dev/tty*",
        "/dev/input/*", "/dev/uinput", "/dev/hidraw*", "/dev/kmsg", "/dev/console",
    )  # fmt: skip
    bind_dev_pts: bool = False
    blocked_env_vars: tuple[str, ...] = ()
    blocked_env_patterns: tuple[str, ...] = ()
    allowed_env_vars: tuple[str, ...] = (
        "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "CODEX_API_KEY", "GOOGLE_API_KEY",
    )  # fmt: skip
    hide_from_sandbox: tuple[str, ...] = ()
    sandbox_env: tuple[str, ...] = ()
    sandbox_backend: Literal["auto", "bwrap"] = "auto"
    sandbox_modules: tuple[str, ...] = ()
    private_tmp: bool = True
    private_ipc: bool = True
    filter_passwd: bool = True
    sandbox_nproc_limit: int | None = None
    sandbox_quiet: bool = False
    network_filter_mode: Network = "open"
    network_filter_fallback: Fallback = "open"
    network_mail_block: Literal["off", "auto", "on"] = "off"
    network_blocklist: tuple[str, ...] = ()
    network_blocklist_except: tuple[str, ...] = ()
    slurm_scope: Literal["session", "project", "user", "none"] = "project"
    chaperon_log_level: str = "info"
    chaperon_log_retain_days: int = 7
    enabled_agents: tuple[str, ...] = ("*",)
    suppress_agent_warnings: tuple[str, ...] = ()
    landlock_required_abi: int = 0
    landlock_hard_requirement: bool = True
    mount_guard: Guard = "off"
    mount_guard_interval: int = 300
    mount_guard_rebind: bool = True
    materialize_blocked_files: bool = False
    cleanup_materialized_blocked_files: bool = False
    nested_userns: bool = False
    reload_attach: bool = False
    trust_project_config: bool = False
    allow_foreign_cgroup: bool = False


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one setting beside its type and default.

    ``override``: the environment variable of the caller that sets it for one launch. ``order``: words of an
    ``ordered`` setting from weak to strict. ``least``: smallest number. ``note``: why a refused one is
    refused, and what to do. ``admin_only``: in the administrator's file and nowhere else.
    """

    merge: Merge
    doc: str
    state: State = "built"
    override: str | None = None
    entries: Entries = "word"
    order: tuple[str, ...] = ()
    least: int = 0
    note: str = ""
    reload: Reload = "restart"
    admin_only: bool = False


_LATER = "is not built yet; leave it out"
_NO_HOST_COMMANDS = "commands of the host cannot be called from a sandbox of this version; leave it out"
_NO_FILTER = 'this version filters no network; use network_filter_mode = "isolated", or leave it out'
_NO_GUARD = 'this version has no mount guard; leave it out, or set mount_guard = "off"'
_NO_MODULES = "environment modules are not loaded; load them before ral run"
_NO_RELOAD = "running sessions cannot be changed by this version; leave it out"


def _list(merge: Merge, entries: Entries, doc: str, *, reload: Reload = "live") -> Setting:
    return Setting(merge=merge, entries=entries, doc=doc, reload=reload)


def _scalar(
    merge: Merge, doc: str, override: str | None = None, *, order: tuple[str, ...] = (), least: int = 0,
    reload: Reload = "restart",
) -> Setting:  # fmt: skip
    return Setting(merge=merge, doc=doc, override=override, order=order, least=least, reload=reload)


def _refused(
    merge: Merge, note: str, doc: str, override: str | None = None, *, order: tuple[str, ...] = (),
    reload: Reload = "restart",
) -> Setting:  # fmt: skip
    return Setting(
        merge=merge, note=note, doc=doc, override=override, order=order, state="refused", reload=reload
    )


SETTINGS: dict[str, Setting] = {
    "allow_root_session": Setting(
        merge="admin", admin_only=True, reload="none", doc="whether sessions may run as root"
    ),
    "allowed_project_parents": _list(
        "narrow", "absolute", "a project has to be one of these or below one", reload="none"
    ),
    "readonly_mounts": _list("additive", "absolute", "shown read-only; what does not exist is left out"),
    "home_access": _scalar(
        "free",
        "the home directory inside: an empty one in memory, the same read-only, the real one read-only, the "
        "real one",
        "HOME_ACCESS",
    ),
    "home_readonly": _list("additive", "below home", "shown read-only in the home directory"),
    "home_writable": _list("additive", "below home", "shown writable in the home directory"),
    "home_seeded_files": _list(
        "additive",
        "below home",
        "copied into the home directory inside: changes stay inside",
        reload="restart",
    ),
    "extra_writable_paths": _list("additive", "below project", "shown writable beside the project"),
    "denied_writable_paths": _list("admin", "absolute", "never writable, whatever grants it"),
    "extra_blocked_paths": _list("enforced", "below project", "directories that are empty inside"),
    "blocked_files": _list("enforced", "below project", "files that are empty inside"),
    "protect_project": _scalar(
        "hard", "whether project_protected_paths are read-only inside", reload="live"
    ),
    "project_protected_paths": _list(
        "enforced", "in project", "read-only in the project: these would later run outside of the sandbox"
    ),
    "devices": _list("free", "device", "devices that are there inside", reload="restart"),
    "devices_blacklist": _list(
        "enforced", "device", "devices that are not there inside, whatever lists them", reload="restart"
    ),
    "bind_dev_pts": _scalar("free", "without effect: a session always has terminals of its own"),
    "blocked_env_vars": _list(
        "enforced", "variable", "variables held back beside the built-in ones", reload="restart"
    ),
    "blocked_env_patterns": _list(
        "enforced",
        "pattern",
        "variables held back, by pattern; `/i` at the end ignores case",
        reload="restart",
    ),
    "allowed_env_vars": _list(
        "additive", "variable", "variables passed on although a block list has them", reload="restart"
    ),
    "hide_from_sandbox": _list(
        "enforced", "variable", "variables never passed on, whatever allows them", reload="restart"
    ),
    "sandbox_env": _list("free", "assignment", "variables set inside; a later one wins", reload="restart"),
    "sandbox_backend": _scalar("free", "what makes the sandbox", "SANDBOX_BACKEND"),
    "sandbox_modules": _refused("free", _NO_MODULES, "environment modules to load"),
    "private_tmp": _scalar("hard", "whether /tmp and /var/tmp are the session's own", "PRIVATE_TMP"),
    "private_ipc": _scalar("hard", "whether System V IPC and /dev/shm are the session's own", "PRIVATE_IPC"),
    "filter_passwd": _scalar(
        "hard", "whether passwd and group show only system users and you", "FILTER_PASSWD"
    ),
    "sandbox_nproc_limit": _scalar(
        "free", "most processes of the session's user", "SANDBOX_NPROC_LIMIT", least=1
    ),
    "sandbox_quiet": _scalar(
        "free", "whether notices at the start are left out (as `ral run -q`)", "SANDBOX_QUIET", reload="none"
    ),
    "network_filter_mode": _scalar(
        "ordered",
        "what of the network is there",
        "NETWORK_FILTER_MODE",
        order=("open", "filtered", "proxied", "isolated"),
    ),
    "network_filter_fallback": _scalar(
        "ordered",
        "what happens where that cannot be held: the next weaker mode, the next stricter one, a refusal",
        "NETWORK_FILTER_FALLBACK",
        order=("open", "stricter", "strict"),
    ),
    "network_mail_block": _refused(
        "ordered", _NO_FILTER, "mail ports", "NETWORK_MAIL_BLOCK", order=("off", "auto", "on")
    ),
    "network_blocklist": _refused("enforced", _NO_FILTER, "hosts and ports to block"),
    "network_blocklist_except": _refused("enforced", _NO_FILTER, "hosts and ports not to block"),
    "slurm_scope": _refused("free", _NO_HOST_COMMANDS, "batch jobs that are seen inside", "SLURM_SCOPE"),
    "chaperon_log_level": _refused("free", _NO_HOST_COMMANDS, "log of host commands"),
    "chaperon_log_retain_days": _refused("free", _NO_HOST_COMMANDS, "how long that log is kept"),
    "enabled_agents": _list(
        "free", "word", "profiles that a command's name may choose; `*` for any", reload="restart"
    ),
    "suppress_agent_warnings": _list(
        "free", "word", "profiles whose warnings are left out; `all` for every one", reload="none"
    ),
    "landlock_required_abi": _scalar("free", "lowest Landlock ABI of the kernel", "LANDLOCK_REQUIRED_ABI"),
    "landlock_hard_requirement": _scalar(
        "free", "whether a lower one refuses (else it is said)", "LANDLOCK_HARD_REQUIREMENT"
    ),
    "mount_guard": _refused(
        "ordered",
        _NO_GUARD,
        "what happens when a mount of a session is lost",
        "MOUNT_GUARD",
        order=("off", "warn", "repair", "kill"),
        reload="none",
    ),
    "mount_guard_interval": _refused(
        "free", _NO_GUARD, "seconds between looks without an event", "MOUNT_GUARD_INTERVAL", reload="none"
    ),
    "mount_guard_rebind": _refused(
        "free", _NO_GUARD, "whether lost writable mounts are put back", reload="none"
    ),
    "materialize_blocked_files": _scalar(
        "free", "whether a blocked file that does not exist is made, empty, in the host", reload="live"
    ),
    "cleanup_materialized_blocked_files": _scalar(
        "free",
        "whether such a file is removed at the end",
        "CLEANUP_MATERIALIZED_BLOCKED_FILES",
        reload="none",
    ),
    "nested_userns": _scalar("free", "whether user namespaces can be made inside"),
    "reload_attach": _refused(
        "free", _NO_RELOAD, "whether a reload shows paths that were not visible", reload="none"
    ),
    "trust_project_config": _refused(
        "free", _LATER, "whether a file that the session can write may configure it", reload="none"
    ),
    "allow_foreign_cgroup": _refused(
        "free", _LATER, "whether a caller in another control group is served", reload="none"
    ),
}
"""Every field of Settings, in its order."""
