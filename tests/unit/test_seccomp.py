"""The compiled filter, run by a BPF interpreter: the same table on both machines, call by call."""

from __future__ import annotations

import errno
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ral_broker.envelope import seccomp, slots
from ral_broker.envelope.seccomp import RULES, Rule, as_tables, compile_program, session_programs
from ral_broker.errors import HostLacks
from support.installed import ROOT

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
AUDIT_ARCH_I386, AUDIT_ARCH_ARM = 0x40000003, 0x40000028
X32_BIT = 0x40000000
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
MACHINES = sorted(ARCH)
# libseccomp translates a call by name when it compiles for another machine and may not know the newest names
# yet.
NATIVE = os.uname().machine
PORTABLE = [
    Rule(tuple(n for n in r.syscalls if n != "open_tree_attr"), r.reason, r.error, r.compares) for r in RULES
]


def execute(program: bytes, arch: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What the kernel's interpreter returns (linux/filter.h); only instructions that libseccomp uses."""
    padded = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number, arch, 0, *padded)
    code = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator, at = 0, 0
    while True:
        operation, true, false, constant = code[at]
        at += 1
        match operation:
            case 0x20:  # LD|W|ABS
                (accumulator,) = struct.unpack_from("<I", data, constant)
            case 0x54:  # ALU|AND|K
                accumulator &= constant
            case 0x05:  # JMP|JA
                at += constant
            case 0x15:  # JMP|JEQ|K
                at += true if accumulator == constant else false
            case 0x25:  # JMP|JGT|K
                at += true if accumulator > constant else false
            case 0x35:  # JMP|JGE|K
                at += true if accumulator >= constant else false
            case 0x06:  # RET|K
                return int(constant)
            case _:
                raise AssertionError(f"unknown instruction {operation:#x}")


_COMPILED = {
    machine: compile_program(RULES if machine == NATIVE else PORTABLE, machine) for machine in MACHINES
}


def number_of(machine: str, name: str) -> int | None:
    """Number of a call on a machine, None if it does not have it or libseccomp does not know it."""
    number = int(seccomp.load_library().resolve_syscall(ARCH[machine], name))
    if number == -1 and machine == NATIVE:
        return int(seccomp._NEWER[name])
    return number if number >= 0 else None


def verdict(machine: str, name: str, *arguments: int) -> int:
    number = number_of(machine, name)
    assert number is not None, f"{machine} has no {name}"
    return execute(_COMPILED[machine], ARCH[machine], number, arguments)


UNCONDITIONAL = [(name, rule.error) for rule in RULES if not rule.compares for name in rule.syscalls]


@pytest.mark.parametrize(("name", "error"), UNCONDITIONAL)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_call_without_condition_is_refused_whatever_its_arguments(
    machine: str, name: str, error: int
) -> None:
    if number_of(machine, name) is None:
        assert (machine, name) in {
            ("aarch64", "iopl"), ("aarch64", "ioperm"), ("aarch64", "modify_ldt"), ("aarch64", "uselib"),
        } or machine != NATIVE  # fmt: skip
        return
    for arguments in ((), (0xFFFFFFFFFFFFFFFF,) * 6):
        assert verdict(machine, name, *arguments) == ERRNO | error


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("high", [0, 1 << 32, 0xFFFFFFFF << 32])
@pytest.mark.parametrize("request_", [0x5412, 0x541C])
def test_terminal_injection_is_refused_with_high_bits_too(machine: str, high: int, request_: int) -> None:
    assert verdict(machine, "ioctl", 0, high | request_) == ERRNO | errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("request_", [0x5401, 0x5410, 0x5413, 0x541B, 0x5411, 0x5412 << 32, 0x15412])
def test_other_terminal_requests_are_allowed(machine: str, request_: int) -> None:
    assert verdict(machine, "ioctl", 0, request_) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", ["clone", "unshare"])
@pytest.mark.parametrize("flags", [0x10000000, 0x10020000, 0x7E020000, 0x110000000, 0xFFFFFFFF10000011])
def test_a_new_user_namespace_is_refused(machine: str, name: str, flags: int) -> None:
    assert verdict(machine, name, flags) == ERRNO | errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_threads_and_children_are_allowed(machine: str) -> None:
    assert verdict(machine, "clone", 0x3D0F00) == ALLOW  # pthread_create
    assert verdict(machine, "clone", 0x01200011) == ALLOW  # fork
    assert verdict(machine, "clone", 0x4111) == ALLOW  # posix_spawn
    assert verdict(machine, "clone3") == ERRNO | errno.ENOSYS  # the C library then calls clone


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", ["socket", "socketpair"])
@given(family=st.integers(0, 0xFFFF), high=st.sampled_from([0, 1, 0xFFFFFFFF]))
def test_only_four_families_of_sockets(machine: str, name: str, family: int, high: int) -> None:
    known = family in {0, 1, 2, 10, 16}  # 0 is refused by the kernel itself
    expected = ALLOW if known and not high else ERRNO | errno.EAFNOSUPPORT
    assert verdict(machine, name, high << 32 | family, 1, 0) == expected


@pytest.mark.parametrize("family", range(50))
def test_each_family_one_by_one(family: int) -> None:
    allowed = {0: "UNSPEC", 1: "UNIX", 2: "INET", 10: "INET6", 16: "NETLINK"}
    expected = ALLOW if family in allowed else ERRNO | errno.EAFNOSUPPORT
    assert verdict("x86_64", "socket", family) == expected


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", ["io_uring_setup", "io_uring_enter", "io_uring_register"])
def test_io_uring_looks_absent(machine: str, name: str) -> None:
    assert verdict(machine, name) == ERRNO | errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
@given(number=st.integers(0, 600))
def test_a_foreign_abi_is_killed_whatever_it_calls(machine: str, number: int) -> None:
    program = _COMPILED[machine]
    foreign = {AUDIT_ARCH_I386, AUDIT_ARCH_ARM, *ARCH.values()} - {ARCH[machine]}
    assert {execute(program, arch, number) for arch in foreign} == {KILL_PROCESS}


@given(number=st.integers(0, 1100))
def test_x32_is_killed_whatever_it_calls(number: int) -> None:
    assert execute(_COMPILED["x86_64"], ARCH["x86_64"], X32_BIT | number) == KILL_PROCESS


@pytest.mark.parametrize(
    "name",
    [
        "execve",
        "openat",
        "openat2",
        "ptrace",
        "process_vm_readv",
        "process_vm_writev",
        "pidfd_open",
        "pidfd_getfd",
        "personality",
        "seccomp",
        "prctl",
        "landlock_restrict_self",
        "memfd_create",
        "execveat",
        "wait4",
        "futex",
        "mmap",
        "prlimit64",
        "inotify_init1",
        "fanotify_init",
        "mbind",
        "chroot",
        "statx",
        "close_range",
        "kill",
        "tgkill",
        "name_to_handle_at",
        "move_pages",
        "adjtimex",
        "clock_adjtime",
        "fchmodat",
        "vfork",
    ],
)
@pytest.mark.parametrize("machine", MACHINES)
def test_what_ordinary_programs_and_debuggers_need_is_allowed(machine: str, name: str) -> None:
    if name == "vfork" and machine == "aarch64":
        assert number_of(machine, name) is None
        return
    assert verdict(machine, name) == ALLOW


def test_calls_listed_as_allowed_are_allowed() -> None:
    for names, _ in seccomp.ALLOWED:
        for name in names:
            assert verdict("x86_64", name) == ALLOW, name


def test_nested_user_namespaces_lift_the_rules_about_nesting_and_no_other() -> None:
    (strict,), (nested,) = session_programs(), session_programs(nested_userns=True)
    for rule in RULES:
        for name in rule.syscalls:
            number = number_of(NATIVE, name)
            if number is None:
                continue
            arguments = (0x10000000, 0x5412) if rule.compares and name != "socket" else (40,)
            assert execute(strict, ARCH[NATIVE], number, arguments) == ERRNO | rule.error, name
            expected = ALLOW if rule.nesting else ERRNO | rule.error
            assert execute(nested, ARCH[NATIVE], number, arguments) == expected, name


def test_no_call_is_in_two_rules() -> None:
    names = [name for rule in RULES for name in rule.syscalls]
    assert sorted(set(names)) == sorted(names)


def test_the_programs_fit_their_slots_and_the_kernel() -> None:
    programs = session_programs()
    assert 1 <= len(programs) <= len(slots.SECCOMP)
    for program in programs:
        assert len(program) % 8 == 0
        assert len(program) // 8 <= 4096  # BPF_MAXINSNS
    assert session_programs() is programs, "compiled again"


def test_another_machine_is_refused_by_name() -> None:
    with pytest.raises(HostLacks, match="riscv64"):
        compile_program(RULES, "riscv64")


def test_a_missing_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes.util
    import sys

    monkeypatch.delitem(sys.modules, "pyseccomp")
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None if name == "seccomp" else "libc.so.6")
    with pytest.raises(HostLacks, match="libseccomp2"):
        seccomp.load_library()


def test_the_documentation_is_current() -> None:
    text = (ROOT / "docs/seccomp.md").read_text()
    between = text.partition("<!-- tables -->\n")[2].partition("<!-- end of tables -->")[0]
    assert between == as_tables(), (
        "run python -m ral_broker.envelope.seccomp and put it into docs/seccomp.md"
    )
