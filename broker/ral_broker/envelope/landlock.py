"""The Landlock domain that every session enters: no abstract socket and no signal leaves it (landlock(7)).

It restricts no file: mounts do that. A domain that handled a file right would also forbid mount(2), but the
trampoline enters it after bwrap's work is done.
"""

from __future__ import annotations

import errno

from ral_broker import syscalls
from ral_broker.errors import HostLacks

SCOPE_ABI = 6
"""First ABI with scopes (Linux 6.12)."""


def landlock_abi() -> int | None:
    """Return the ABI of this kernel's Landlock, None if it has none or it is switched off.

    Raises HostLacks if the kernel answers anything else: what is not known is not relied on.
    """
    try:
        return syscalls.landlock_abi()
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
            return None
        raise HostLacks(
            f"no session can start: asked for its Landlock ABI, the kernel answered {error.strerror}; "
            "another sandbox or container around ral may refuse landlock_create_ruleset"
        ) from error


def session_ruleset() -> tuple[int | None, str | None]:
    """Return a descriptor of the ruleset and None, or None and the sentence that says what is not held.

    Resource handling: the caller owns the descriptor. Raises HostLacks as landlock_abi does, and if the
    kernel has scopes and refuses to make the ruleset.
    """
    abi = landlock_abi()
    if abi is None or abi < SCOPE_ABI:
        return None, missing_scope(abi)
    scopes = syscalls.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | syscalls.LANDLOCK_SCOPE_SIGNAL
    try:
        return syscalls.landlock_create_ruleset(0, 0, scopes), None
    except OSError as error:
        raise HostLacks(
            f"no session can start: with Landlock ABI {abi} the kernel refused a ruleset: {error.strerror}"
        ) from error


def missing_scope(abi: int | None) -> str:
    """Return the sentence that a launch and ``ral doctor`` print where there is no scope."""
    have = "this kernel has no Landlock" if abi is None else f"this kernel's Landlock has ABI {abi}"
    return (
        f"{have}, and keeping sessions from abstract sockets of the host (D-Bus, X11) takes ABI {SCOPE_ABI} "
        "(Linux 6.12): programs reach them while a session shares the host's network"
    )
