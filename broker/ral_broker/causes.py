"""Why a host refuses a sandbox, and the command that changes it: settings read from /proc, bwrap's words
read with them."""

from __future__ import annotations

import os
import re

import msgspec

_SYSCTL_FILE = "/etc/sysctl.d/60-ral.conf"


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that decide about user namespaces. None where this kernel does not have the setting, or hides
    it."""

    userns_clone: int | None = None
    max_user_namespaces: int | None = None
    apparmor_restrict_userns: int | None = None
    memfd_noexec: int | None = None
    legacy_tiocsti: int | None = None
    seccomp_mode: int | None = None
    container: str | None = None
    chrooted: bool = False


class Cause(msgspec.Struct, frozen=True):
    """What stands in the way, as a clause, and the command or setting that removes it."""

    text: str
    remedy: str

    def sentence(self) -> str:
        """Return both for a message."""
        return f"{self.text}. To mend it: {self.remedy}"


def read_settings() -> HostSettings:
    """Read the settings of this host as this process sees them."""
    return HostSettings(
        userns_clone=_number("/proc/sys/kernel/unprivileged_userns_clone"),
        max_user_namespaces=_number("/proc/sys/user/max_user_namespaces"),
        apparmor_restrict_userns=_number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"),
        memfd_noexec=_number("/proc/sys/vm/memfd_noexec"),
        legacy_tiocsti=_number("/proc/sys/dev/tty/legacy_tiocsti"),
        seccomp_mode=_status_field("Seccomp"),
        container=_container(),
        chrooted=_chrooted(),
    )


def _number(path: str) -> int | None:
    try:
        with open(path, "rb") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _status_field(name: str) -> int | None:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        found = re.search(rf"^{name}:\s*(\d+)$", file.read(), re.MULTILINE)
    return int(found[1]) if found else None


def _container() -> str | None:
    """Return the kind of container this is, None outside of one (systemd's container interface, podman,
    docker)."""
    try:
        with open("/run/systemd/container", encoding="utf-8", errors="replace") as file:
            return file.read().strip() or "a container"
    except OSError:
        pass
    if os.path.exists("/run/.containerenv"):
        return "podman"
    if os.path.exists("/.dockerenv"):
        return "docker"
    if os.path.exists("/var/run/secrets/kubernetes.io"):
        return "kubernetes"
    return None


def _chrooted() -> bool:
    """Tell whether the root of this process is not the root of its mount namespace: there the kernel makes
    no user namespace for it (user_namespaces(7), EPERM)."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            return not any(line.split()[4] == b"/" for line in file)
    except OSError:
        return False


def _sysctl(name: str, value: int) -> str:
    return f"echo '{name} = {value}' | sudo tee -a {_SYSCTL_FILE} && sudo sysctl -p {_SYSCTL_FILE}"


def drop_rights(path: str) -> str:
    """Return the command that makes an executable an ordinary one, and that package upgrades respect."""
    return (
        f"sudo dpkg-statoverride --update --add root root 0755 {path} (elsewhere: sudo chmod u-s,g-s {path})"
    )


def recognise(words: str, settings: HostSettings) -> Cause:
    """Return the likeliest cause of bwrap's ``words`` under these settings. Pure.

    A setting that forbids user namespaces outright comes before what is only likely.
    """
    refused = any(
        part in words for part in ("Permission denied", "Operation not permitted", "No permissions")
    )
    exhausted = "ENOSPC" in words or "No space left" in words
    possible: tuple[tuple[bool, Cause], ...] = (
        ("Unknown option" in words, _TOO_OLD),
        (
            settings.userns_clone == 0,
            Cause(
                "kernel.unprivileged_userns_clone is 0: only root makes user namespaces here",
                _sysctl("kernel.unprivileged_userns_clone", 1),
            ),
        ),
        (
            settings.max_user_namespaces == 0,
            Cause(
                "user.max_user_namespaces is 0: nobody makes user namespaces here",
                _sysctl("user.max_user_namespaces", 15000),
            ),
        ),
        (
            exhausted,
            Cause(
                f"The limit of user namespaces is reached: user.max_user_namespaces is "
                f"{settings.max_user_namespaces} here, and an outer container may allow fewer",
                _sysctl("user.max_user_namespaces", 15000) + " (on the outermost host)",
            ),
        ),
        (settings.apparmor_restrict_userns == 1 and refused, _APPARMOR),
        (settings.chrooted, _CHROOT),
        ("mount proc" in words, _MASKED_PROC),
        (settings.seccomp_mode == 2 and refused, _SECCOMP),
        ("does not support user namespaces" in words, _NO_USER_NAMESPACES),
        (settings.container is not None, _CONTAINER),
    )
    found = next((cause for holds, cause in possible if holds), _UNKNOWN)
    if settings.container is None:
        return found
    return Cause(f"{found.text} (this is a container: {settings.container})", found.remedy)


_TOO_OLD = Cause(
    "This bubblewrap is too old",
    "install bubblewrap 0.10.0 or later, or the update of your distribution for CVE-2024-42472: "
    "sudo apt install bubblewrap",
)
_APPARMOR = Cause(
    "AppArmor allows user namespaces only to programs that a profile names "
    "(kernel.apparmor_restrict_unprivileged_userns is 1)",
    "printf 'abi <abi/4.0>,\\nprofile bwrap /usr/bin/bwrap flags=(unconfined) {\\n  userns,\\n}\\n' | "
    "sudo tee /etc/apparmor.d/bwrap && sudo apparmor_parser -r /etc/apparmor.d/bwrap",
)
_CHROOT = Cause(
    "ral runs in a chroot, where the kernel makes no user namespaces",
    "enter the tree with systemd-nspawn or bwrap instead of chroot",
)
_MASKED_PROC = Cause(
    "Parts of /proc are masked, as containers do, and then the kernel mounts no other one",
    "docker: --security-opt systempaths=unconfined; podman: --security-opt unmask=ALL",
)
_SECCOMP = Cause(
    "ral runs under a filter that refuses a system call a sandbox needs",
    "docker, podman: --security-opt seccomp=unconfined; in a systemd unit remove SystemCallFilter= and "
    "RestrictNamespaces=",
)
_NO_USER_NAMESPACES = Cause(
    "The kernel was built without CONFIG_USER_NS", "boot a kernel that has user namespaces"
)
_CONTAINER = Cause(
    "The container does not allow what a sandbox needs",
    "docker, podman: --security-opt seccomp=unconfined --security-opt systempaths=unconfined",
)
_UNKNOWN = Cause("ral does not know the cause", "try bwrap by hand: bwrap --unshare-user --ro-bind / / true")
