"""Names of the host that every session treats alike: what a system is, what holds secrets, what runs later
outside. Pure data."""

from __future__ import annotations

# Why an operation is there, where no setting put it there (plan.py).
OWN = "the broker's own directory"
CREDENTIALS = "credentials"
ROOT_ONLY = "readable by root only"
SOCKETS = "sockets of other programs"
INSTALLATION = "ral's own installation"
CONFIGURATION = "ral's configuration"
RUNS_AT_LOGIN = "runs outside at the next login"
ANCHOR = "holds something protected"

SYSTEM_PATHS = (
    b"/usr", b"/bin", b"/sbin", b"/lib", b"/lib32", b"/lib64", b"/libx32", b"/etc", b"/opt", b"/app",
    b"/nix/store",
    b"/home/linuxbrew/.linuxbrew", b"/var/lib/dpkg", b"/var/lib/rpm", b"/sys/devices/system/cpu",
    b"/sys/kernel/mm/transparent_hugepage",
)  # fmt: skip
"""Shown read-only where they exist, unless the configuration says otherwise."""

ALWAYS_HIDDEN = (b".ssh", b".aws", b".gnupg")
"""Names below the home directory that no session shows, whatever is configured."""

HIDDEN_UNLESS_LISTED = (
    b".netrc", b".git-credentials", b".config/gh", b".config/hub", b".docker/config.json", b".kube",
    b".config/gcloud", b".azure", b".config/op", b".config/helm", b".terraform.d", b".vault-token",
    b".pgpass", b".pypirc", b".cargo/credentials.toml", b".cargo/credentials",
)  # fmt: skip
"""Names below the home directory that a session shows only where a setting lists that very name."""

CREDENTIAL_NAMES = (*ALWAYS_HIDDEN, *HIDDEN_UNLESS_LISTED)

HOME_PROTECTED = (
    b".bashrc", b".bash_profile", b".bash_login", b".bash_logout", b".bash_aliases", b".profile", b".zshrc",
    b".zshenv", b".zprofile", b".zlogin", b".zlogout", b".kshrc", b".cshrc", b".tcshrc", b".login",
    b".config/fish", b".xprofile", b".xinitrc", b".xsession", b".xsessionrc", b".pam_environment",
    b".config/systemd", b".local/share/systemd", b".config/environment.d", b".config/autostart",
    b".config/plasma-workspace",
)  # fmt: skip
"""Names below the home directory that run outside at the next login: not to be written from inside, unless
home_writable lists that very name."""

HOME_FILE_ENDINGS = (b".json", b".yml", b".yaml", b".toml", b".conf")
"""A name of home_writable with one of these endings is a file; where it is absent it stays so."""

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
    b"/proc/kcore", b"/proc/keys", b"/proc/acpi", b"/proc/scsi", b"/proc/timer_list", b"/proc/kmsg",
)  # fmt: skip

RESOLVER = b"/etc/resolv.conf"
PASSWD = b"/etc/passwd"
NAME_CACHE = b"/run/nscd"
"""Where nscd(8) answers; it knows users that no file names."""

SCRATCH = (b"/tmp", b"/var/tmp", b"/run")
"""Made anew in every session."""

SHARED_PLACES = (b"/tmp", b"/var/tmp", b"/run", b"/dev/shm")
"""Directories of the whole host: what lies in them belongs to other programs."""

KERNEL_PLACES = (b"/proc", b"/dev", b"/sys")
"""File systems of the kernel's own."""

DEVICES_ALREADY_THERE = frozenset(
    b"/dev/" + name
    for name in (
        b"null", b"zero", b"full", b"random", b"urandom", b"tty", b"console", b"ptmx", b"core", b"fd",
        b"stdin", b"stdout", b"stderr",
    )
)  # fmt: skip
"""What every session's /dev holds by itself."""


def sockets_in_tmp(uid: int) -> tuple[bytes, ...]:
    """Return the directories of the host's /tmp in which programs of this user take orders by socket."""
    return (b"/tmp/.X11-unix", b"/tmp/.ICE-unix", b"/tmp/tmux-%d" % uid)
