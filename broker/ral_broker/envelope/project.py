"""A look at a project: where git keeps its data, and what git obeys there. Looks by handle and keeps nothing
open.

Everything in a project is untrusted: an earlier session may have written it, and another may change it
meanwhile. What is read is bounded, regular, and read from the handle that was checked.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable

import trio

from ral_broker.envelope.facts import LOOK_SECONDS, slow_opens
from ral_broker.envelope.git_look import GitLook
from ral_broker.envelope.git_tree import Tree, UncachedError
from ral_broker.envelope.protection import ProjectLook
from ral_broker.errors import Refused
from ral_broker.log import shown


async def look_at_project(
    project_fd: int, project: bytes, *, home: bytes, also_writable: Iterable[bytes] = ()
) -> ProjectLook:
    """Describe the project behind ``project_fd``, which the kernel calls ``project``.

    ``also_writable``: canonical paths of other directories that the session may write: worktrees there stay
    usable. The kernel's caches are asked first; what they do not know, a worker thread with a deadline.
    Raises Refused when that passes, or a file system fails.
    """
    roots = (project, *also_writable)
    try:
        try:
            return GitLook(project_fd, project, home, roots, Tree(None)).look()
        except UncachedError:
            tree = Tree(time.monotonic() + LOOK_SECONDS)
            slow = _SlowLook(GitLook(os.dup(project_fd), project, home, roots, tree))
    except OSError as error:
        raise _refusal(project, error) from error
    try:
        with trio.move_on_after(LOOK_SECONDS):
            return await trio.to_thread.run_sync(slow.run, abandon_on_cancel=True, limiter=slow_opens)
    except OSError as error:
        raise _refusal(slow.at, error) from error
    finally:
        slow.abandon()
    raise _refusal(slow.at, OSError(errno.ETIMEDOUT, ""))


def _refusal(path: bytes, error: OSError) -> Refused:
    if error.errno == errno.ETIMEDOUT:
        return Refused(
            f"{shown(path)} did not answer within {LOOK_SECONDS:g} seconds, so that it is not known which "
            "files of the project git obeys (a dead network mount?); mend or unmount it"
        )
    return Refused(
        f"{shown(path)} cannot be looked at: {error.strerror}; git's files in the project would be "
        "unprotected, so nothing was started"
    )


class _SlowLook:
    """A look in a thread that may be given up: the descriptor is closed by the thread, or by whoever gives
    up before it starts."""

    def __init__(self, look: GitLook) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._taken = False

    @property
    def at(self) -> bytes:
        """What is looked at just now."""
        at = self._look.tree.at
        return at if at.startswith(b"/") else self._look.project

    def run(self) -> ProjectLook:
        """Look; called in the thread."""
        with self._lock:
            if self._taken:
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            self._taken = True
        try:
            return self._look.look()
        finally:
            os.close(self._look.project_fd)

    def abandon(self) -> None:
        """Close what no thread will close."""
        with self._lock:
            if not self._taken:
                self._taken = True
                os.close(self._look.project_fd)
