"""The only place that starts a process: descriptors in exact places, a clean environment, no fork of this
process.

posix_spawn(3) runs its file actions in order, so no source may have the number of a target, or an earlier
dup2 would replace a later source. DUP2 clears close-on-exec on the copy; everything else of this process is
close-on-exec.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Self

from ral_broker.errors import Refused

# Signals that have a default to return to. KILL and STOP cannot be changed; 32 and 33 belong to glibc, which
# refuses them (the trampoline resets those).
_DEFAULT_SIGNALS = frozenset(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}

CHILD_PATH = b"/usr/local/bin:/usr/bin:/bin"
"""PATH of every child and of the search for bwrap: no directory that an ordinary user can write."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one; return it. The trampoline restores the
    caller's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class _Lifted:
    """Copies, above every target number, of descriptors that have the number of a target; closed on exit."""

    def __init__(self, targets: Collection[int]) -> None:
        self._targets = targets
        self._base = max(targets) + 1
        self._copies: list[int] = []
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if self._base > limit:
            raise self._refusal(limit)

    def _refusal(self, limit: int) -> Refused:
        return Refused(
            f"the sandbox needs descriptor numbers up to {self._base} and the hard limit of open files is "
            f"{limit}; raise it (ulimit -Hn, LimitNOFILE=) or show fewer paths"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._copies:
            os.close(fd)

    def lift(self, fd: int) -> int:
        if fd not in self._targets:
            return fd
        try:
            copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, self._base)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.EINVAL):
                raise
            raise self._refusal(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) from error
        self._copies.append(copy)
        return copy


def spawn(
    executable_fd: int,
    argv: Sequence[bytes],
    environment: Mapping[bytes, bytes],
    descriptors: Mapping[int, int],
) -> int:
    """Execute the file behind ``executable_fd`` and return the pid of the child, a session leader.

    ``descriptors`` maps the number in the child to an open descriptor here; it must name 0, 1 and 2. Signals
    are at their defaults and unblocked in the child. posix_spawn(3) returns when the exec is done or has
    failed.

    Resource handling: nothing of ``descriptors`` is closed here. Error handling: OSError of the exec,
    Refused if the limit of open files is too low.
    """
    with _Lifted(descriptors.keys()) as lifted:
        actions = [
            (os.POSIX_SPAWN_DUP2, lifted.lift(source), target)
            for target, source in sorted(descriptors.items())
        ]
        return os.posix_spawn(
            f"/proc/self/fd/{lifted.lift(executable_fd)}",
            list(argv),
            dict(environment),
            file_actions=actions,
            setsid=True,
            setsigdef=_DEFAULT_SIGNALS,
            setsigmask=(),
        )
