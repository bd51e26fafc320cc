"""Bwrap's words and a host's settings, read as a cause. The words are those of bwrap 0.8 and 0.11."""

from __future__ import annotations

import pytest

from ral_broker.causes import HostSettings, read_settings, recognise

EPERM = (
    "No permissions to creating new namespace, likely because the kernel does not allow non-privileged user "
    "namespaces. On e.g. debian this can be enabled with 'sysctl kernel.unprivileged_userns_clone=1'."
)
ENOSPC = "Creating new namespace failed: nesting depth or /proc/sys/user/max_*_namespaces exceeded (ENOSPC)"
UID_MAP = "setting up uid map: Permission denied"
LOOPBACK = "loopback: Failed RTM_NEWADDR: Operation not permitted"
PROC = "Can't mount proc on /newroot/proc: Operation not permitted"
NO_USERNS = (
    "Creating new namespace failed, likely because the kernel does not support user namespaces.  bwrap must "
    "be installed setuid on such systems."
)
ORDINARY = HostSettings(max_user_namespaces=15000, apparmor_restrict_userns=0, seccomp_mode=0)


@pytest.mark.parametrize(
    ("words", "settings", "cause", "remedy"),
    [
        ("Unknown option --ro-bind-fd", ORDINARY, "too old", "apt install bubblewrap"),
        (EPERM, HostSettings(userns_clone=0), "unprivileged_userns_clone is 0", "userns_clone = 1"),
        (ENOSPC, HostSettings(max_user_namespaces=0), "max_user_namespaces is 0", "_namespaces = 15000"),
        (ENOSPC, ORDINARY, "outer container", "on the outermost host"),
        (UID_MAP, HostSettings(apparmor_restrict_userns=1), "AppArmor", "-r /etc/apparmor.d/bwrap"),
        (LOOPBACK, HostSettings(apparmor_restrict_userns=1), "AppArmor", "userns,"),
        (EPERM, HostSettings(chrooted=True), "chroot", "systemd-nspawn"),
        (PROC, ORDINARY, "/proc are masked", "systempaths=unconfined"),
        (PROC, HostSettings(seccomp_mode=2, container="docker"), "/proc are masked", "unmask=ALL"),
        (EPERM, HostSettings(seccomp_mode=2), "filter", "seccomp=unconfined"),
        (NO_USERNS, ORDINARY, "CONFIG_USER_NS", "boot a kernel"),
        (EPERM, HostSettings(container="podman"), "container", "--security-opt"),
        ("Something new", ORDINARY, "does not know", "by hand"),
    ],
)  # fmt: skip
def test_a_cause_is_recognised_and_has_a_remedy(
    words: str, settings: HostSettings, cause: str, remedy: str
) -> None:
    found = recognise(words, settings)
    assert cause in found.text
    assert remedy in found.remedy
    assert found.text in found.sentence()
    assert found.remedy in found.sentence()


def test_apparmor_is_not_blamed_for_what_it_does_not_refuse() -> None:
    assert "AppArmor" not in recognise("Something new", HostSettings(apparmor_restrict_userns=1)).text


def test_a_container_is_named_whatever_the_cause() -> None:
    assert "podman" in recognise(ENOSPC, HostSettings(container="podman")).text


def test_the_settings_of_this_host_can_be_read() -> None:
    settings = read_settings()
    assert settings.seccomp_mode in {0, 1, 2}
    assert settings.max_user_namespaces is not None
    assert not settings.chrooted
