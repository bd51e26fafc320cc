"""A plan as bwrap's options. Pure: the same operations give the options and the order of the lent
descriptors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ral_broker.envelope import slots
from ral_broker.envelope.plan import (
    Bind,
    Copy,
    Data,
    Dev,
    Device,
    Directory,
    Mask,
    Operation,
    Pinned,
    Plan,
    Proc,
    ReadOnly,
    Symlink,
    Tmpfs,
)


def is_lent(operation: Operation) -> bool:
    """Tell whether the operation needs a descriptor of the host: the n-th such one is at slot MOUNTS + n."""
    return isinstance(operation, (Bind, Pinned, Copy, Data, Device)) or (
        isinstance(operation, Mask) and not operation.directory
    )


def render_options(plan: Plan, operations: Sequence[Operation], *, seccomp: int) -> list[bytes]:
    """Return the content of bwrap's ``--args``, option by option. ``seccomp``: number of filters lent.

    ``operations`` are those of the plan whose sources were found. No option names a source in the host.
    """
    options = [
        b"--unshare-user", b"--unshare-pid", b"--unshare-uts", b"--unshare-cgroup-try", b"--as-pid-1",
        b"--json-status-fd", b"%d" % slots.STATUS,
        b"--cap-drop", b"ALL",  # wall
    ]  # fmt: skip
    if not plan.nested_user_namespaces:
        options.append(b"--disable-userns")  # wall
    if not plan.share_ipc:
        options.append(b"--unshare-ipc")
    if not plan.share_network:
        options.append(b"--unshare-net")
    lent = 0
    for operation in operations:
        slot = b""
        if is_lent(operation):
            slot = b"%d" % slots.mount_slot(lent)
            lent += 1
        options.extend(_render(operation, slot))
    options += [b"--chdir", plan.cwd]
    for number in range(seccomp):
        options += [b"--add-seccomp-fd", b"%d" % slots.SECCOMP[number]]  # wall
    return options


def _render(operation: Operation, slot: bytes) -> Iterator[bytes]:
    match operation:
        case Bind(dest=dest, writable=writable):
            yield from (b"--bind-fd" if writable else b"--ro-bind-fd", slot, dest)
        case Pinned(dest=dest) | Mask(dest=dest, directory=False):
            yield from (b"--ro-bind-fd", slot, dest)
        case Mask(dest=dest):
            yield from (b"--perms", b"0555", b"--tmpfs", dest, b"--remount-ro", dest)
        case Tmpfs(dest=dest, mode=mode):
            yield from (b"--perms", b"%04o" % mode, b"--tmpfs", dest)
        case Directory(dest=dest, mode=mode):
            yield from (b"--perms", b"%04o" % mode, b"--dir", dest)
        case Copy(dest=dest, mode=mode):
            yield from (b"--perms", b"%04o" % mode, b"--file", slot, dest)
        case Data(dest=dest):
            yield from (b"--perms", b"0444", b"--ro-bind-data", slot, dest)
        case Device(dest=dest):
            # bwrap 0.8 takes no descriptor for a device; this name of one is no name in the host.
            yield from (b"--dev-bind", b"/proc/self/fd/" + slot, dest)
        case Symlink(dest=dest, target=target):
            yield from (b"--symlink", target, dest)
        case Proc(dest=dest):
            yield from (b"--proc", dest)
        case Dev(dest=dest):
            yield from (b"--dev", dest)
        case ReadOnly(dest=dest):
            yield from (b"--remount-ro", dest)
