"""What of a project is read-only inside, and what of git's data outside of it is writable. Pure: (what was
seen of the project, settings) → rules.

Files that the host later executes or obeys are protected: hooks and configuration of git foremost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from ral_broker.envelope.plan import Identity, is_under
from ral_broker.envelope.policy import Rule
from ral_broker.errors import Refused

PROTECT = "protect_project"
_NAMES = "project_protected_paths"
_WRITABLE = "the project's git directory (denied_writable_paths takes it away)"
_FOREIGN = "lies in the project's git directory and is not git's"

REPOSITORY_PARTS = (b"config", b"config.worktree", b"hooks", b"info/attributes", b"commondir")
"""What git obeys in a repository. ``commondir`` sends it to another configuration; a repository has none."""

WORKTREE_PARTS = (b"commondir", b"gitdir", b"config.worktree")
"""The same in the directory that a repository keeps of a worktree."""

_SHARED_PLACES = (b"/tmp", b"/var/tmp", b"/run", b"/dev/shm", b"/etc", b"/usr", b"/var")


class GitDirectory(msgspec.Struct, frozen=True):
    """A directory of git's data. ``path`` is canonical.

    ``kind``: ``repository``; ``worktree``: what a repository keeps of a worktree that the session may write;
    ``whole``: nothing in it is the session's to write. ``pointers``: the ``.git`` files that lead to it;
    ``hooks``: directories that core.hooksPath names; ``includes``: further configuration files.
    """

    path: bytes
    kind: Literal["repository", "worktree", "whole"] = "repository"
    pointers: tuple[bytes, ...] = ()
    hooks: tuple[bytes, ...] = ()
    includes: tuple[bytes, ...] = ()


class Outside(msgspec.Struct, frozen=True):
    """A git directory outside of the project that the project's ``.git`` file names, at a canonical path.

    ``doubt``: why it is not taken for that of this project; None: it says itself that it is. ``foreign``:
    what else lies in it, without the way to the project.
    """

    path: bytes
    identity: Identity
    doubt: str | None = None
    foreign: tuple[bytes, ...] = ()


class ProjectLook(msgspec.Struct, frozen=True):
    """What was seen of a project: its ``.git``, and every directory of git's data that belongs to it."""

    project: bytes
    git: Literal["absent", "directory", "pointer", "link", "other"] = "absent"
    directories: tuple[GitDirectory, ...] = ()
    outside: Outside | None = None
    notices: tuple[str, ...] = ()


class Protection(msgspec.Struct, frozen=True):
    """Rules for a session's policy, of the same names.

    ``identities``: what a path of ``writable`` was when it was looked at; the launch shows that object or
    nothing. ``notices``: sentences for the user.
    """

    protected: tuple[Rule, ...] = ()
    writable: tuple[Rule, ...] = ()
    blocked: tuple[Rule, ...] = ()
    identities: tuple[tuple[bytes, Identity], ...] = ()
    notices: tuple[str, ...] = ()


def project_protection(
    look: ProjectLook,
    *,
    names: Iterable[str],
    protect: bool,
    closed: Iterable[bytes] = (),
    homes: Iterable[bytes] = (),
) -> Protection:
    """Return the rules of a project.

    ``names``: project_protected_paths. ``protect``: protect_project. ``closed``: canonical paths that are
    hidden, denied or hold credentials; ``homes``: the home directory, in each spelling: nothing in the
    former and nothing that holds the latter becomes writable. Raises Refused for a name that leads out of
    the project.
    """
    protected: dict[bytes, Rule] = {}
    notices: list[str] = []
    if protect:
        for name in names:
            path = _below(look.project, name)
            protected.setdefault(path, Rule(path, _NAMES))
        for path in _git_paths(look):
            # What a hostile .git names may hold the project, which would then be read-only as a whole.
            if not is_under(look.project, path):
                protected.setdefault(path, Rule(path, PROTECT))
        notices += look.notices
    writable: tuple[Rule, ...] = ()
    blocked: tuple[Rule, ...] = ()
    identities: tuple[tuple[bytes, Identity], ...] = ()
    if look.outside is not None:
        path = look.outside.path
        doubt = look.outside.doubt or _misplaced(path, closed, homes)
        if doubt is None:
            writable = (Rule(path, _WRITABLE),)
            blocked = tuple(Rule(entry, _FOREIGN) for entry in look.outside.foreign)
            identities = ((path, look.outside.identity),)
        else:
            shown = path.decode("utf-8", "backslashreplace")
            notices.append(
                f"git cannot write in this project: its .git names {shown}, which is not made writable, "
                f"for {doubt}; if you want that, list it in extra_writable_paths"
            )
    return Protection(tuple(protected.values()), writable, blocked, identities, tuple(notices))


def _below(project: bytes, name: str) -> bytes:
    """Return the path of a name of the list."""
    parts = [part for part in name.encode("utf-8", "surrogateescape").split(b"/") if part not in (b"", b".")]
    if not parts or name.startswith("/") or b".." in parts or b"\0" in name.encode("utf-8", "replace"):
        raise Refused(
            f"project_protected_paths: {name!r} is not the name of something in the project; "
            "write it relative to the project and without .."
        )
    return b"/".join([project, *parts])


def _git_paths(look: ProjectLook) -> Iterator[bytes]:
    # A link is followed by whoever looks: as a rule it would close everything that git writes.
    if look.git in ("pointer", "other"):
        yield look.project + b"/.git"  # wall
    for directory in look.directories:
        match directory.kind:
            case "repository":
                yield from (directory.path + b"/" + part for part in REPOSITORY_PARTS)  # wall
            case "worktree":
                yield from (directory.path + b"/" + part for part in WORKTREE_PARTS)  # wall
            case "whole":
                yield directory.path
        yield from directory.pointers  # wall
        yield from directory.hooks  # wall
        yield from directory.includes  # wall


def _misplaced(path: bytes, closed: Iterable[bytes], homes: Iterable[bytes]) -> str | None:
    """Say why a place is never made writable by what a project says, None if it may be."""
    for home in homes:
        if is_under(home, path):  # wall
            return "it is your home directory or above it"
    for place in closed:
        if is_under(path, place):  # wall
            return f"it lies in {place.decode('utf-8', 'backslashreplace')}, which is closed to programs"
    if any(is_under(place, path) for place in _SHARED_PLACES):  # wall
        return "other programs keep their files there"
    return None
