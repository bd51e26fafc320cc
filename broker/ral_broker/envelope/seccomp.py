"""The system calls a session may not make, as a table, and the table as BPF for bwrap's --add-seccomp-fd.

A deny list: what the sandbox's namespaces and unix modes already decide is not decided again. Left are
ways around them, interfaces that no namespace divides, and kernel code with a long record of privilege
escalation that no ordinary program needs. The tables of docs/seccomp.md are printed from RULES and ALLOWED.

Integer arguments are compared under a 32-bit mask. The kernel looks at the lower half of the register only,
seccomp at all of it: a plain "equals TIOCSTI" lets 0x100005412 pass (seccomp(2), NOTES).
"""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Sequence
from types import ModuleType

import msgspec

from ral_broker.errors import HostLacks

_INT = 0xFFFFFFFF

# linux/sched.h, asm-generic/ioctls.h, linux/socket.h
CLONE_NEWUSER = 0x10000000
TIOCSTI = 0x5412
TIOCLINUX = 0x541C
AF_UNSPEC, AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 0, 1, 2, 10, 16
_AF_MAX = 46


class Compare(msgspec.Struct, frozen=True):
    """Argument number ``argument`` (from 0) under ``mask`` equals ``value``; or with ``at_least``, all 64
    bits of it are not below ``value``."""

    argument: int
    value: int
    mask: int = _INT
    at_least: bool = False


class Rule(msgspec.Struct, frozen=True):
    """Refuse ``syscalls`` with ``error``: every one, or those for which one of ``compares`` holds (``when``
    says it in words). ``nesting``: left out for a session that may make user namespaces of its own."""

    syscalls: tuple[str, ...]
    reason: str
    error: int = errno.EPERM
    compares: tuple[Compare, ...] = ()
    when: str = "always"
    nesting: bool = False


_FAMILIES = (AF_UNSPEC, AF_UNIX, AF_INET, AF_INET6, AF_NETLINK)
# The last compares 64 bits, so that a family with bits above the 32nd is refused as well.
_OTHER_FAMILIES = (
    *(Compare(0, family) for family in range(_AF_MAX) if family not in _FAMILIES),
    Compare(0, _AF_MAX, at_least=True),
)

RULES: tuple[Rule, ...] = (
    Rule(
        ("mount", "umount2", "pivot_root", "move_mount", "open_tree", "open_tree_attr", "fsopen", "fsmount",
         "fsconfig", "fspick", "mount_setattr"),
        "the sandbox is its mounts: none may be added, moved or taken away from inside",
        nesting=True,
    ),
    Rule(("setns",), "entering another namespace is how a sandbox is left", nesting=True),
    Rule(
        ("clone", "unshare"),
        "gives every capability in a new user namespace, and so opens most of the kernel's attack surface",
        compares=(Compare(0, CLONE_NEWUSER, mask=CLONE_NEWUSER),),
        when="flags has CLONE_NEWUSER",
        nesting=True,
    ),
    Rule(
        ("clone3",),
        "its flags are behind a pointer that a filter cannot follow; C libraries fall back to clone",
        error=errno.ENOSYS,
        nesting=True,
    ),
    Rule(
        ("ioctl",),
        "puts text into the input of a terminal, as if its user had typed it",
        compares=(Compare(1, TIOCSTI), Compare(1, TIOCLINUX)),
        when="request is TIOCSTI or TIOCLINUX",
    ),
    Rule(
        ("io_uring_setup", "io_uring_enter", "io_uring_register"),
        "its operations pass no filter, and its record of privilege escalations is long; programs fall back",
        error=errno.ENOSYS,
    ),
    Rule(
        ("keyctl", "add_key", "request_key"),
        "a session inherits the keyring of its caller (Kerberos tickets, keys of encrypted directories)",
    ),
    Rule(("bpf",), "loads programs into the kernel; the record of its verifier is long"),
    Rule(("perf_event_open",), "measures other processes and the kernel; its record is long"),
    Rule(("userfaultfd",), "stops the kernel in the middle of a copy: the standard tool of kernel exploits"),
    Rule(("open_by_handle_at",), "opens files by inode, around the mounts that hide them"),
    Rule(
        ("socket", "socketpair"),
        "AF_VSOCK reaches the hypervisor's host and is in no network namespace; AF_ALG, AF_CAN, AF_TIPC, "
        "AF_BLUETOOTH, AF_RDS and so on are code that ordinary programs do not use, or reach devices",
        error=errno.EAFNOSUPPORT,
        compares=_OTHER_FAMILIES,
        when="family is not AF_UNIX, AF_INET, AF_INET6 or AF_NETLINK",
    ),
    Rule(("syslog",), "the kernel's log shows addresses, devices and crashes of other users"),
    Rule(("lookup_dcookie",), "tells names of files that the sandbox does not show"),
    Rule(("kexec_load", "kexec_file_load", "reboot"), "replaces or stops the running kernel"),
    Rule(("init_module", "finit_module", "delete_module"), "changes the running kernel"),
    Rule(("swapon", "swapoff", "acct", "quotactl", "quotactl_fd"), "administers the host's disks"),
    Rule(("settimeofday", "clock_settime"), "sets the host's clock"),
    Rule(("iopl", "ioperm"), "talks to hardware without the kernel"),
    Rule(("modify_ldt", "uselib"), "only 16- and 32-bit programs need it, and those are killed"),
)  # fmt: skip
"""All refusals of a session. Besides them a call by a foreign ABI (i386, x32, 32-bit Arm) kills the process:
its numbers are others, so that no rule would speak of it."""

ALLOWED: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp"),
        "debuggers need them; the pid namespace is the wall, and pid 1 is not dumpable",
    ),
    (("personality",), "debuggers and sanitizers switch address randomisation off for their own children"),
    (
        ("mbind", "set_mempolicy", "get_mempolicy", "move_pages", "migrate_pages"),
        "numerical libraries and Java place their own memory; other processes are behind the pid namespace",
    ),
    (
        ("fanotify_init", "inotify_init1", "name_to_handle_at"),
        "without capabilities they tell nothing that stat(2) does not tell",
    ),
    (
        ("memfd_create", "execveat"),
        "a program can run whatever it can read; this filter is not where programs are chosen",
    ),
    (
        ("chmod", "fchmodat"),
        "package builds set S_ISUID, shared repositories S_ISGID; a file left behind can run as you",
    ),
    (("seccomp", "prctl", "landlock_restrict_self"), "a program may confine itself further"),
    (
        ("chroot", "mknodat", "clock_adjtime"),
        "the dangerous part needs a capability that nothing inside has",
    ),
)
"""Calls that were considered and are left alone, with the reason."""

# Not in the table of libseccomp 2.5; calls from 424 on have one number on every architecture.
_NEWER = {"open_tree_attr": 467}

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_… of linux/audit.h by the machine name of uname(2)."""


def load_library() -> ModuleType:
    """Return the binding of libseccomp; not at import, because it searches the disk for the library.

    Raises HostLacks if the library or its binding is not installed.
    """
    try:
        import pyseccomp
    except ImportError as error:
        raise HostLacks(
            "no session can start: the package pyseccomp is missing; install ral with its dependencies"
        ) from error
    except (RuntimeError, OSError, AttributeError) as error:
        raise HostLacks(
            f"no session can start: libseccomp.so.2 cannot be loaded ({error}), and no sandbox is made "
            "without a system call filter; install it (apt install libseccomp2, dnf install libseccomp)"
        ) from error
    library: ModuleType = pyseccomp  # typed here: it carries no type information
    return library


def compile_program(rules: Sequence[Rule], machine: str) -> bytes:
    """Return ``rules`` as one BPF program (an array of ``struct sock_filter``) for ``machine`` (uname(2)).

    A call that the machine does not have is left out. Raises HostLacks for a machine that ral does not run
    on, or if libseccomp refuses a rule.
    """
    if machine not in _AUDIT_ARCH:
        raise HostLacks(
            f"no session can start: ral has no system call filter for {machine}, only for x86_64 and aarch64"
        )
    library = load_library()
    native, target = library.system_arch(), _AUDIT_ARCH[machine]
    try:
        program = library.SyscallFilter(library.ALLOW)
        # x32 gets this too: libseccomp takes a number with bit 30 for a foreign architecture.
        program.set_attr(library.Attr.ACT_BADARCH, library.KILL_PROCESS)
        if native != target:
            program.add_arch(target)
            program.remove_arch(native)
        for rule in rules:
            for name in rule.syscalls:
                number = library.resolve_syscall(native, name)
                if number == -1:  # libseccomp does not know the name
                    number = _NEWER[name]
                elif library.resolve_syscall(target, name) < 0:  # exists on other machines only
                    continue
                for arguments in _arguments(library, rule):
                    program.add_rule(library.ERRNO(rule.error), number, *arguments)
        with open(os.memfd_create("ral-seccomp", os.MFD_CLOEXEC), "rb") as file:
            program.export_bpf(file)
            file.seek(0)
            return file.read()
    except OSError as error:
        raise HostLacks(
            f"no session can start: libseccomp refused to build the system call filter: {error}"
        ) from error


def _arguments(library: ModuleType, rule: Rule) -> list[list[object]]:
    """Return the argument lists of the rule's alternatives."""
    if not rule.compares:
        return [[]]
    return [
        [library.Arg(compare.argument, library.GE, compare.value)]
        if compare.at_least
        else [library.Arg(compare.argument, library.MASKED_EQ, compare.mask, compare.value)]
        for compare in rule.compares
    ]


@functools.cache
def session_programs(*, nested_userns: bool = False) -> tuple[bytes, ...]:
    """Return the BPF programs of a session on this machine, at most one for each slot of slots.SECCOMP.

    ``nested_userns``: leave out what keeps a program from making user namespaces of its own. Compiled once.
    Raises HostLacks.
    """
    rules = [rule for rule in RULES if not (nested_userns and rule.nesting)]
    return (compile_program(rules, os.uname().machine),)


def as_tables() -> str:
    """Return RULES and ALLOWED as the two tables of docs/seccomp.md."""
    lines = ["| call | refused when | answer | reason |", "|---|---|---|---|"]
    for rule in RULES:
        nesting = " ¹" if rule.nesting else ""
        answer = errno.errorcode[rule.error]
        lines.append(f"| {_code(rule.syscalls)} | {rule.when} | {answer} | {rule.reason}{nesting} |")
    lines += ["", "| considered and allowed | why |", "|---|---|"]
    lines += [f"| {_code(names)} | {reason} |" for names, reason in ALLOWED]
    return "\n".join(lines) + "\n"


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.stdout.write(as_tables())
