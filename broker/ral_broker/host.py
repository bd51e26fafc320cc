"""What this host can do for a sandbox, learnt by making one. Version strings are never asked: distributions
backport.

The payload of every try is the trampoline without a warrant: by contract it ends with 126 and with nothing
else, so 126 means that bwrap built the envelope and executed a file by descriptor in it. No program of the
host is needed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Sequence

import msgspec
import trio

from ral_broker import causes, spawn, syscalls
from ral_broker.envelope import slots
from ral_broker.envelope.landlock import SCOPE_ABI, landlock_abi
from ral_broker.errors import HostLacks
from ral_broker.log import shown
from ral_broker.pins import Pin, extra_rights
from ral_protocol import exits

DEADLINE = 5.0
"""Seconds that one try may take."""

_SO_PEERPIDFD = 77  # asm-generic/socket.h, Linux 6.5
# A filter that allows everything: one BPF_RET|BPF_K of SECCOMP_RET_ALLOW (linux/filter.h, linux/seccomp.h).
_ALLOW_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)

_NAMESPACES = (
    b"--unshare-user", b"--disable-userns", b"--unshare-pid", b"--unshare-uts", b"--unshare-ipc",
    b"--as-pid-1", b"--json-status-fd", b"%d" % slots.STATUS, b"--cap-drop", b"ALL", b"--die-with-parent",
)  # fmt: skip
_ROOT_BY_NAME = (b"--ro-bind", b"/", b"/")
_ROOT_BY_HANDLE = (b"--ro-bind-fd", b"%d" % slots.mount_slot(0), b"/")
_PIECES: dict[str, tuple[bytes, ...]] = {
    "etc": (b"--ro-bind-fd", b"%d" % slots.mount_slot(1), b"/etc"),
    "proc": (b"--proc", b"/proc"),
    "dev": (b"--dev", b"/dev"),
    "cgroup": (b"--unshare-cgroup",),
    "network": (b"--unshare-net",),
    "seccomp": (b"--add-seccomp-fd", b"%d" % slots.SECCOMP[0]),
}
_NEEDED = ("etc", "dev", "seccomp")
"""Pieces without which no session starts; the others change what a session can promise."""


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was learnt. ``why``: bwrap's own words where ``builds`` or ``by_handle`` is false. ``refused``:
    the pieces of an envelope that this host does not give, with bwrap's own words.

    ``bwrap_setuid``: what bwrap gets on execution beyond its user's rights, None if nothing. ``fresh_proc``:
    a proc(5) of the sandbox's own can be mounted. ``scoped``: Landlock keeps abstract sockets and signals
    in. ``pidfd_namespaces``, ``peer_pidfd``: a peer's namespaces and pidfd can be had without /proc.
    """

    bwrap_path: bytes
    bwrap_setuid: str | None
    builds: bool
    by_handle: bool
    why: str | None
    refused: dict[str, str]
    landlock_abi: int | None
    pidfd_namespaces: bool
    peer_pidfd: bool

    @property
    def fresh_proc(self) -> bool:
        """A proc(5) of the sandbox's own can be mounted; else the host's is shown and lists the host's
        processes."""
        return self.by_handle and "proc" not in self.refused

    @property
    def virtual_dev(self) -> bool:
        """A /dev with a devpts of its own can be made."""
        return self.by_handle and "dev" not in self.refused

    @property
    def private_cgroup(self) -> bool:
        """A cgroup namespace can be made."""
        return self.by_handle and "cgroup" not in self.refused

    @property
    def private_network(self) -> bool:
        """A network namespace can be made and its loopback set up."""
        return self.by_handle and "network" not in self.refused

    @property
    def scoped(self) -> bool:
        """Landlock keeps abstract sockets and signals inside."""
        return self.landlock_abi is not None and self.landlock_abi >= SCOPE_ABI


class _Prober:
    """Tries envelopes, one at a time, with the same descriptors."""

    def __init__(self, bwrap: Pin, payload: Pin, stack: contextlib.ExitStack) -> None:
        self._bwrap = bwrap
        self._null = self._open(stack, "/dev/null", os.O_RDWR)
        self._seccomp = syscalls.sealed_memfd("ral-probe", _ALLOW_ALL)
        stack.callback(os.close, self._seccomp)
        self._payload = payload.fd
        self._mounts = {
            b"%d" % slots.mount_slot(0): self._open(stack, "/", os.O_PATH),
            b"%d" % slots.mount_slot(1): self._open(stack, "/etc", os.O_PATH),
        }

    @staticmethod
    def _open(stack: contextlib.ExitStack, path: str, flags: int) -> int:
        fd = os.open(path, flags | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        return fd

    async def refusal(self, *pieces: Sequence[bytes]) -> str | None:
        """Return None if an envelope of these options was built and ran the payload, else bwrap's own
        words."""
        options = [*_NAMESPACES, *(option for piece in pieces for option in piece)]
        with contextlib.ExitStack() as stack:
            arguments = syscalls.sealed_memfd(
                "ral-probe-args", b"".join(option + b"\0" for option in options)
            )
            stack.callback(os.close, arguments)
            stderr, stderr_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            stack.callback(os.close, stderr)
            descriptors = {
                0: self._null, 1: self._null, 2: stderr_end, slots.ARGS: arguments, slots.STATUS: self._null,
                slots.TRAMPOLINE: self._payload,
            }  # fmt: skip
            if _PIECES["seccomp"][1] in options:
                os.lseek(self._seccomp, 0, os.SEEK_SET)  # bwrap reads it to its end
                descriptors[slots.SECCOMP[0]] = self._seccomp
            descriptors |= {int(slot): fd for slot, fd in self._mounts.items() if slot in options}
            try:
                child = spawn.spawn(
                    self._bwrap.fd,
                    [
                        self._bwrap.argv0,
                        b"--args",
                        b"%d" % slots.ARGS,
                        b"--",
                        b"/proc/self/fd/%d" % slots.TRAMPOLINE,
                    ],
                    {},
                    descriptors,
                )
            except OSError as error:
                return f"cannot be started: {error.strerror}"
            finally:
                os.close(stderr_end)
            status = await _wait(child)
            return None if status == exits.CANNOT_EXECUTE else _words(stderr, status)


async def _wait(child: int) -> int | None:
    """Return the exit status of a child as waitstatus_to_exitcode gives it, None if it took too long and was
    killed."""
    in_time = False
    pidfd = os.pidfd_open(child)
    try:
        with trio.move_on_after(DEADLINE):
            await trio.lowlevel.wait_readable(pidfd)
            in_time = True
    finally:
        # A session leader: its group is bwrap and all it started. One that fails between two steps leaves
        # a child behind that waits for it for ever. Not yet collected, bwrap keeps the number of the group.
        os.killpg(child, signal.SIGKILL)
        os.close(pidfd)
        status = _reap(child)
    return status if in_time else None


def _reap(child: int) -> int:
    """Collect a child that has ended, or is about to after SIGKILL."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _words(stderr: int, status: int | None) -> str:
    """Return the last line that was written, else what the status says."""
    untrusted_text = b""
    with contextlib.suppress(BlockingIOError):
        untrusted_text = os.read(stderr, 65536)
    lines = [line for line in untrusted_text.splitlines() if line.strip()]
    if status is None:
        return f"did not finish in {DEADLINE:g} seconds"
    if lines:
        return shown(lines[-1][:500].removeprefix(b"bwrap: "))
    return (
        f"ended by signal {-status} without a word"
        if status < 0
        else f"ended with status {status} without a word"
    )


async def probe_host(bwrap: Pin, payload: Pin) -> HostFacts:
    """Learn what this host can do: one spawn where everything works, up to eleven where it does not.

    ``payload`` is the trampoline. Raises HostLacks if the kernel does not say which Landlock it has.
    """
    abi = landlock_abi()
    rights = extra_rights(bwrap)
    why: str | None = None
    builds = by_handle = rights is None
    refused: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        prober = _Prober(bwrap, payload, stack)
        # One with rights of its own is not even tried: what it leaves behind could not be killed.
        if rights is None and await prober.refusal(_ROOT_BY_HANDLE, *_PIECES.values()) is not None:
            why = await prober.refusal(_ROOT_BY_NAME)
            builds = by_handle = why is None
            if builds:
                why = await prober.refusal(_ROOT_BY_HANDLE)
                by_handle = why is None
            if by_handle:
                refused = await _refused_pieces(prober)
                # All that was granted one by one must also be granted together.
                why = await prober.refusal(
                    _ROOT_BY_HANDLE, *(p for n, p in _PIECES.items() if n not in refused)
                )
                builds = by_handle = why is None
    return HostFacts(
        bwrap_path=bwrap.argv0,
        bwrap_setuid=rights,
        builds=builds,
        by_handle=by_handle,
        why=why,
        refused=refused,
        landlock_abi=abi,
        pidfd_namespaces=_has_pidfd_namespaces(),
        peer_pidfd=_has_peer_pidfd(),
    )


async def _refused_pieces(prober: _Prober) -> dict[str, str]:
    refused: dict[str, str] = {}
    for name, piece in _PIECES.items():
        words = await prober.refusal(_ROOT_BY_HANDLE, piece)
        if words is not None:
            refused[name] = words
    return refused


def _has_peer_pidfd() -> bool:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            (pidfd,) = struct.unpack("=i", ours.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))
        except OSError:
            return False
    os.close(pidfd)
    return True


def _has_pidfd_namespaces() -> bool:
    pidfd = os.pidfd_open(os.getpid())
    try:
        os.close(syscalls.pidfd_namespace(pidfd, syscalls.PIDFD_GET_PID_NAMESPACE))
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def launch_refusal(facts: HostFacts) -> HostLacks | None:
    """Return the refusal that every launch on this host gets, None if a session can start."""
    obstacle = launch_obstacle(facts)
    return None if obstacle is None else HostLacks(f"no sandbox can be made: {obstacle.sentence()}")


def launch_obstacle(facts: HostFacts) -> causes.Cause | None:
    """Return what keeps every session from starting, in bwrap's own words and with its path, and what mends
    it."""
    path = shown(facts.bwrap_path)
    if facts.bwrap_setuid is not None:
        # Tried: with --disable-userns it fails, and without it /proc/PID/ns of what it starts is closed to
        # us.
        return causes.Cause(
            f"{path} is {facts.bwrap_setuid}: the namespaces it makes are not the user's: nothing could "
            "guard or change them",
            causes.drop_rights(path),
        )
    if not facts.builds:
        return _explained(path, "", facts.why or "")
    if not facts.by_handle:
        return causes.Cause(
            f"{path} does not mount what is handed to it by descriptor (--ro-bind-fd): {facts.why}",
            "install bubblewrap 0.10.0 or later, or your distribution's update for CVE-2024-42472 "
            "(Debian 12: 0.8.0-2+deb12u1): sudo apt install bubblewrap",
        )
    for piece in _NEEDED:
        if piece in facts.refused:
            return _explained(path, " with " + b" ".join(_PIECES[piece]).decode(), facts.refused[piece])
    return None


def _explained(path: str, options: str, words: str) -> causes.Cause:
    cause = causes.recognise(words, causes.read_settings())
    return causes.Cause(f"{path}{options} says: {words}. {cause.text}", cause.remedy)
