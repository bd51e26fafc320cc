"""``ral doctor``: tries what a session needs on this host and names what is missing and the command that
mends it.

Every line is a fact that was tried, not a version that was read, and comes from the code that launches use.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from typing import Literal

import msgspec
import trio

from ral_broker import causes, host
from ral_broker.envelope import slots
from ral_broker.envelope.landlock import SCOPE_ABI, landlock_abi, missing_scope
from ral_broker.envelope.seccomp import session_programs
from ral_broker.errors import HostLacks
from ral_broker.log import shown
from ral_broker.pins import Pin, take_bwrap, take_helper
from ral_broker.runtime import find_runtime_dir
from ral_broker.spawn import CHILD_PATH
from ral_protocol import exits

KERNEL_FLOOR = (5, 14)
HELPERS = ("trampoline", "holder", "zygote")
_FEW_DESCRIPTORS = 4096
"""Below this number of open files a large plan may not fit."""
_RECORD_SPACE = 64 << 10
"""Bytes below which a launch would fail."""
_LOG_SPACE = 64 << 20
"""Bytes below which the file system of the logs is called full."""

State = Literal["ok", "note", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """One fact. A ``problem`` keeps every session from starting; a ``note`` changes what a session can
    promise.

    ``remedy``: what mends it, None where there is nothing to mend.
    """

    name: str
    state: State
    detail: str
    remedy: str | None = None


def examine(search_path: bytes = CHILD_PATH) -> list[Finding]:
    """Try everything; bwrap is looked for on ``search_path``. Makes the runtime directory if it is
    absent."""
    settings = causes.read_settings()
    bwrap, bwrap_finding = _bwrap(search_path)
    helpers, helper_findings = _helpers()
    findings = [_kernel(), _python(), *_circumstances(settings), bwrap_finding, *helper_findings, _seccomp()]
    trampoline = helpers.get("trampoline")
    if bwrap is not None and trampoline is not None:
        findings += _sandbox(bwrap, trampoline)
    return [*findings, _landlock(), *_directories(), _descriptors(), *_settings(settings), _manager()]


def _bwrap(search_path: bytes) -> tuple[Pin | None, Finding]:
    try:
        pin = take_bwrap(search_path)
    except HostLacks as error:
        elsewhere = shutil.which("bwrap")
        detail = error.message
        if elsewhere is not None and os.path.dirname(elsewhere).encode() not in search_path.split(b":"):
            detail += f". {shown(elsewhere)} is not used: only system directories are searched"
        return None, Finding("bwrap", "problem", detail, "sudo apt install bubblewrap")
    return pin, Finding("bwrap", "ok", shown(pin.argv0))


def _helpers() -> tuple[dict[str, Pin], list[Finding]]:
    pins: dict[str, Pin] = {}
    findings: list[Finding] = []
    for name in HELPERS:
        try:
            pins[name] = take_helper(name)
        except HostLacks as error:
            findings.append(Finding(name, "problem", error.message, "install ral again"))
            continue
        if pins[name].in_memory:
            findings.append(Finding(name, "ok", f"{platform.machine()}, run from sealed memory"))
        else:
            findings.append(
                Finding(
                    name,
                    "note",
                    f"run from {shown(pins[name].argv0)}: this host does not execute memory files "
                    "(vm.memfd_noexec is 2), so whoever can write that file can change what runs",
                    "sudo sysctl vm.memfd_noexec=1",
                )
            )
    return pins, findings


def _kernel() -> Finding:
    release = os.uname().release
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if numbers >= KERNEL_FLOOR:
        return Finding("kernel", "ok", f"Linux {release}")
    needed = ".".join(map(str, KERNEL_FLOOR))
    return Finding(
        "kernel", "problem", f"Linux {release}; ral needs {needed}", f"boot Linux {needed} or later"
    )


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()}, {sys.executable}")


def _circumstances(settings: causes.HostSettings) -> Iterator[Finding]:
    if os.geteuid() == 0:
        yield Finding(
            "user",
            "note",
            "you are root: such a session shows what only root reads, except what ral hides",
            "run sessions as an ordinary user",
        )
    if settings.container is not None:
        yield Finding(
            "container", "note", f"this is a container ({settings.container}); its limits are ral's limits"
        )


def _seccomp() -> Finding:
    try:
        programs = session_programs()
    except HostLacks as error:
        return Finding("seccomp", "problem", error.message, "sudo apt install libseccomp2")
    return Finding(
        "seccomp", "ok", f"filter of {sum(map(len, programs)) // 8} instructions for {platform.machine()}"
    )


def _sandbox(bwrap: Pin, trampoline: Pin) -> Iterator[Finding]:
    try:
        facts = trio.run(host.probe_host, bwrap, trampoline)
    except HostLacks:
        return  # what Landlock answered is said in its own line
    obstacle = host.launch_obstacle(facts)
    if obstacle is not None:
        yield Finding("sandbox", "problem", obstacle.text, obstacle.remedy)
        return
    yield Finding("sandbox", "ok", "was made: user, pid, ipc, uts namespaces, mounts by descriptor, seccomp")
    if facts.fresh_proc:
        yield Finding("proc", "ok", "a session has a /proc of its own")
    else:
        cause = causes.recognise(facts.refused["proc"], causes.read_settings())
        yield Finding(
            "proc",
            "note",
            "a session sees the host's /proc and lists the host's processes: "
            f"{facts.refused['proc']}. {cause.text}",
            cause.remedy,
        )
    for piece, loss in (
        ("cgroup", "a session sees the path of its cgroup"),
        ("network", "a session cannot be cut off from the network"),
    ):
        if piece in facts.refused:
            cause = causes.recognise(facts.refused[piece], causes.read_settings())
            yield Finding(piece, "note", f"{loss}: {facts.refused[piece]}. {cause.text}", cause.remedy)
    if not facts.peer_pidfd or not facts.pidfd_namespaces:
        yield Finding(
            "peers",
            "note",
            "who calls the broker is read from /proc: this kernel gives no pidfd of a peer or namespace",
            "boot Linux 6.11 or later",
        )


def _landlock() -> Finding:
    try:
        abi = landlock_abi()
    except HostLacks as error:
        return Finding(
            "landlock", "problem", error.message, "allow landlock_create_ruleset in the outer filter"
        )
    if abi is None or abi < SCOPE_ABI:
        return Finding(
            "landlock", "note", missing_scope(abi), "boot Linux 6.12 or later with lsm=landlock,…"
        )
    return Finding("landlock", "ok", f"ABI {abi}: abstract sockets and signals stay inside")


def _directories() -> Iterator[Finding]:
    try:
        directory = find_runtime_dir(os.environb)
    except (HostLacks, OSError) as error:
        yield Finding(
            "runtime directory", "problem", str(error), f"name another with {exits.RUNTIME_VARIABLE}"
        )
        return
    rights = os.fstat(directory.fd).st_mode & 0o7777
    yield Finding("runtime directory", "ok", f"{shown(directory.path)}, mode {rights:04o}")
    space = os.fstatvfs(directory.sessions_fd)
    free = space.f_bavail * space.f_frsize
    detail = f"{shown(directory.sessions_path)}: {free >> 20} MiB free"
    if free < _RECORD_SPACE:
        yield Finding(
            "records and logs", "problem", f"{detail}: no session can be recorded", "free some space there"
        )
    elif free >= _LOG_SPACE:
        yield Finding("records and logs", "ok", detail)
    else:
        yield Finding(
            "records and logs",
            "note",
            f"{detail}; output of detached sessions may be lost",
            "free some space",
        )


def _descriptors() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = "raise it: ulimit -Hn 524288, or LimitNOFILE= in the unit"
    if hard == resource.RLIM_INFINITY or hard >= _FEW_DESCRIPTORS:
        return Finding("open files", "ok", f"hard limit {hard}")
    # Every lent descriptor is copied above the highest slot before it is handed over.
    if hard < 2 * slots.MOUNTS:
        return Finding(
            "open files", "problem", f"hard limit {hard}: a sandbox needs {2 * slots.MOUNTS}", remedy
        )
    return Finding(
        "open files", "note", f"hard limit {hard}: sessions with many paths may be refused", remedy
    )


def _settings(settings: causes.HostSettings) -> Iterator[Finding]:
    if settings.legacy_tiocsti == 1:
        yield Finding(
            "tiocsti",
            "note",
            "dev.tty.legacy_tiocsti is 1: programs outside of sandboxes can type into their terminals; "
            "those inside cannot, their filter refuses it",
            "sudo sysctl dev.tty.legacy_tiocsti=0",
        )


def _manager() -> Finding:
    if os.path.exists(f"/run/user/{os.geteuid()}/systemd/private"):
        return Finding("systemd", "ok", "your user manager runs: it can start the broker and limit sessions")
    if not os.path.isdir("/run/systemd/system"):
        return Finding("systemd", "note", "not the init of this host: ral starts its broker itself")
    return Finding(
        "systemd",
        "note",
        "you have no user manager: ral starts its broker itself",
        "log in, or loginctl enable-linger",
    )


_USAGE = "usage: ral doctor [--json]\n"


def main(arguments: list[str]) -> int:
    """Print the findings; return 0 if sessions can start on this host, else 1, and 2 for a wrong
    argument."""
    if arguments not in ([], ["--json"]):
        sys.stderr.write(f"ral: doctor: unknown argument {shown(' '.join(arguments))}\n{_USAGE}")
        return exits.USAGE
    findings = examine()
    failed = any(finding.state == "problem" for finding in findings)
    try:
        sys.stdout.write(_as_json(findings) if arguments else _as_text(findings))
        sys.stdout.flush()
    except OSError as error:
        sys.stderr.write(f"ral: standard output cannot be written: {error.strerror}\n")
        # What is still buffered would be written, and fail, once more at exit.
        os._exit(exits.FAILED)
    return exits.FAILED if failed else exits.OK


def _as_json(findings: list[Finding]) -> str:
    return msgspec.json.format(msgspec.json.encode(findings), indent=2).decode() + "\n"


def _as_text(findings: list[Finding]) -> str:
    width = max(len(finding.name) for finding in findings)
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.state:<8} {finding.name:<{width}}  {finding.detail}")
        if finding.remedy is not None:
            lines.append(f"{'':<8} {'':<{width}}  → {finding.remedy}")
    problems = sum(finding.state == "problem" for finding in findings)
    lines.append(
        "Sessions can start." if problems == 0 else f"No session can start: {problems} to mend first."
    )
    return "\n".join(lines) + "\n"
