"""Whether a git directory outside of the project is that of the project, as its ``.git`` file says.

That file is content of the project, which an earlier session may have written to get at any directory. So it
is believed only where the other side says the same: in places that no program in the project could write.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ral_broker.envelope.facts import canonical_name
from ral_broker.envelope.git_config import parse_git_config
from ral_broker.envelope.git_tree import AT_FDCWD, TooManyError, Tree, is_git_directory, one_line
from ral_broker.envelope.plan import Identity, is_under
from ral_broker.envelope.protection import Outside
from ral_broker.syscalls import RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS

_STRICT = RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS
_MAX_POINTER = 4096
_MAX_CONFIG = 1 << 20
_MAX_ENTRIES = 256

_GITS_OWN = frozenset(
    (
        b"HEAD", b"annex", b"branches", b"commondir", b"config", b"config.worktree", b"description",
        b"filter-repo", b"gc.log", b"gc.pid", b"git-daemon-export-ok", b"gitdir", b"hooks", b"index",
        b"info", b"lfs", b"locked", b"logs", b"lost-found", b"modules", b"objects", b"packed-refs",
        b"rebase-apply", b"rebase-merge", b"refs", b"reftable", b"remotes", b"rr-cache", b"sequencer",
        b"shallow", b"svn", b"worktrees",
    )
)  # fmt: skip
_GITS_KIND = re.compile(
    rb"(?:[A-Z]+_)*(?:HEAD|MSG|EDITMSG|MODE|RR|MERGE|AUTOSTASH|LOG|NAMES|START|RUN|REV|OK|TERMS|PARENT)"
    rb"|[A-Za-z._-]+\.lock|sharedindex\.[0-9a-f]+|fsmonitor--daemon.*|tmp_objdir-.*"
)


def look_outside(
    tree: Tree, project_fd: int, roots: tuple[bytes, ...], pointer_fd: int, git_fd: int, common_fd: int
) -> Outside:
    """Judge the directory behind ``git_fd``, which the ``.git`` file behind ``pointer_fd`` names, and the
    one that holds the repository (the same with a submodule). ``roots``: the project, and what else is
    writable."""
    path = canonical_name(common_fd)
    identity = _identity(common_fd)
    doubt = _doubt(tree, project_fd, roots, pointer_fd, git_fd, common_fd)
    if doubt is not None:
        return Outside(path, identity, doubt)
    try:
        return Outside(path, identity, None, tuple(_foreign(tree, common_fd, path, roots)))
    except TooManyError:
        return Outside(path, identity, "too much that is not git's lies in it")


def _doubt(
    tree: Tree, project_fd: int, roots: tuple[bytes, ...], pointer_fd: int, git_fd: int, common_fd: int
) -> str | None:
    git, common = canonical_name(git_fd), canonical_name(common_fd)
    if any(is_under(git, root) for root in roots):  # wall
        return "what would show that it is the project's lies where programs can write"
    if not is_git_directory(tree, common_fd):  # wall
        return "it is no git repository"
    if {os.fstat(fd).st_uid for fd in (git_fd, common_fd)} != {os.geteuid()}:  # wall
        return "it is not yours"
    if _identity(git_fd) != _identity(common_fd):
        return _worktree_doubt(tree, roots[0], pointer_fd, git_fd, common_fd)
    return _submodule_doubt(tree, project_fd, roots[0], git_fd, common)


def _worktree_doubt(tree: Tree, project: bytes, pointer_fd: int, git_fd: int, common_fd: int) -> str | None:
    """A worktree: ``COMMON/worktrees/NAME/gitdir`` names the very ``.git`` file."""
    with tree.directory(git_fd, b"../..", resolve=_STRICT) as above:
        same = above is not None and _identity(above) == _identity(common_fd)
    if not same or canonical_name(git_fd).split(b"/")[-2] != b"worktrees":  # wall
        return "a repository keeps what belongs to its worktrees in its own directory worktrees"
    back = one_line(tree.read(git_fd, b"gitdir", _MAX_POINTER))
    with tree.opened(git_fd, back, resolve=_STRICT) as fd:
        here = fd is not None and canonical_name(fd) == project + b"/.git"
        if fd is None or not here or _identity(fd) != _identity(pointer_fd):  # wall
            return "that repository knows of no worktree here (git worktree repair may mend that)"
    return None


def _submodule_doubt(tree: Tree, project_fd: int, project: bytes, git_fd: int, common: bytes) -> str | None:
    """A submodule: it lies in ``modules`` of a repository, and its core.worktree names the project."""
    above, found, _ = common.rpartition(b"/modules/")
    while found:
        with tree.directory(AT_FDCWD, above or b"/", resolve=_STRICT) as fd:
            if fd is not None and (is_git_directory(tree, fd) or tree.exists(fd, b"commondir")):
                break
        above, found, _ = above.rpartition(b"/modules/")
    if not found:  # wall
        return "it is neither a worktree's nor a submodule's"
    config = parse_git_config(tree.read(git_fd, b"config", _MAX_CONFIG) or b"")
    with tree.directory(git_fd, config.worktree or b"", resolve=_STRICT) as fd:
        if fd is None or _identity(fd) != _identity(project_fd) or canonical_name(fd) != project:  # wall
            return "that repository's core.worktree names another directory"
    return None


def _foreign(
    tree: Tree, fd: int, path: bytes, roots: tuple[bytes, ...], *, top: bool = True
) -> Iterator[bytes]:
    """Yield what lies in a repository and is not git's: with a bare one, other worktrees often do."""
    room = _MAX_ENTRIES
    for name in tree.names(fd, 4 * _MAX_ENTRIES):
        entry = path + b"/" + name
        if any(is_under(entry, root) for root in roots):
            continue
        if any(is_under(root, entry) for root in roots):
            with tree.directory(fd, name) as inner:
                if inner is not None:
                    yield from _foreign(tree, inner, entry, roots, top=False)
        elif not top or not (name in _GITS_OWN or _GITS_KIND.fullmatch(name)):
            room -= 1
            if room < 0:
                raise TooManyError
            yield entry  # wall


def _identity(fd: int) -> Identity:
    status = os.fstat(fd)
    return Identity(status.st_dev, status.st_ino)
