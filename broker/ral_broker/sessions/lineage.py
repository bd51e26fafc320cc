"""Whether a process really is the init of a sandbox of ours: from the kernel, whatever a record says of it.

A record is a file, and its writer may have named any process of this user. What ends sessions must never end
the user's editor.
"""

from __future__ import annotations

import fcntl
import os
import struct

from ral_broker.errors import Refused
from ral_protocol.records import SessionRecord

# linux/nsfs.h: _IO(0xb7, n)
_NS_GET_PARENT = 0xB702
_NS_GET_OWNER_UID = 0xB704
_MAX_LEVELS = 32
"""Nesting of user namespaces at most (user_namespaces(7))."""

_TRAMPOLINES = (b"/memfd:ral-trampoline (deleted)", b"/ral_helpers/trampoline", b"/trampoline (deleted)")
"""What proc_pid_exe(5) says of our pid 1: the sealed copy, or the installed file where memory files cannot
be executed."""


def check_lineage(record: SessionRecord) -> None:
    """Make sure that the record's init is pid 1 of a pid namespace below ours, runs the trampoline, and
    lives in the recorded mount and user namespace, neither of them ours, made by this user.

    The caller holds a pidfd from before and looks at it afterwards: then it was one process throughout.
    Raises Refused with the contradiction, OSError if the process cannot be looked at (it may have ended).
    """
    pid = record.init.pid
    numbers = _status_field(pid, b"NSpid")
    if len(numbers) < 2 or numbers[-1] != 1:  # wall
        raise Refused(f"process {pid} is no init of a pid namespace")
    if not os.readlink(b"/proc/%d/exe" % pid).endswith(_TRAMPOLINES):  # wall
        raise Refused(f"process {pid} is not ral's trampoline")
    own = {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in ("mnt", "pid", "user")}
    found = {name: os.stat(f"/proc/{pid}/ns/{name}").st_ino for name in own}
    if any(found[name] == own[name] for name in own):  # wall
        raise Refused(f"process {pid} runs in a namespace of this broker's own")
    if (found["mnt"], found["user"]) != (record.mount_namespace, record.user_namespace):  # wall
        raise Refused(f"process {pid} is in other namespaces than the record says")
    _check_owner(pid, own["user"])


def check_parent(record: SessionRecord, *, monitor_runs: bool) -> None:
    """Make sure that the recorded monitor is the init's parent, or if it no longer runs, that no other
    monitor is. Raises Refused, OSError."""
    parent = _status_field(record.init.pid, b"PPid")[0]
    if monitor_runs:
        if parent != record.monitor.pid:  # wall
            raise Refused(f"process {record.monitor.pid} is not the parent of {record.init.pid}")
    elif _runs_bwrap(parent):  # wall
        raise Refused(f"process {record.init.pid} has another monitor ({parent}) than the record says")


def _check_owner(pid: int, own_user_namespace: int) -> None:
    """The user namespace must be this user's and descend from ours."""
    fd = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    try:
        owner = bytearray(4)
        fcntl.ioctl(fd, _NS_GET_OWNER_UID, owner)
        if struct.unpack("=I", owner)[0] != os.geteuid():  # wall
            raise Refused(f"process {pid} runs in a user namespace of another user")
        for _ in range(_MAX_LEVELS):
            if os.fstat(fd).st_ino == own_user_namespace:
                return
            # EPERM above our own: no descendant.
            parent = fcntl.ioctl(fd, _NS_GET_PARENT)
            os.close(fd)
            fd = parent
    except PermissionError as error:
        raise Refused(f"process {pid} runs in a user namespace that does not descend from ours") from error
    finally:
        os.close(fd)


def _status_field(pid: int, name: bytes) -> list[int]:
    with open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            key, _, value = line.partition(b":")
            if key == name:
                return [int(number) for number in value.split()]
    raise ProcessLookupError(f"no {name.decode()} of process {pid}")


def _runs_bwrap(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(b"/proc/%d/exe" % pid)).startswith(b"bwrap")
    except OSError:
        return False  # another user's: the reaper of orphans
