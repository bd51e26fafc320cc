"""Everything that git obeys in a project: its repositories, submodules and worktrees, one after the other.

The files of git's layout: gitrepository-layout(5), git-worktree(1), gitsubmodules(7).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Literal

from ral_broker.envelope.facts import canonical_name
from ral_broker.envelope.git_config import GitConfig, parse_git_config
from ral_broker.envelope.git_tree import AT_FDCWD, TooManyError, Tree, is_git_directory, one_line
from ral_broker.envelope.outside import look_outside
from ral_broker.envelope.plan import is_under
from ral_broker.envelope.protection import GitDirectory, Outside, ProjectLook
from ral_broker.log import shown

MAX_DIRECTORIES = 256
"""Submodules and worktrees that are looked at; beyond, the directory that holds them is closed as a
whole."""

_MAX_CONFIG = 1 << 20
_MAX_CONFIGS = 4 << 20
_MAX_POINTER = 4096
_MAX_INCLUDES = 32
_MAX_ENTRIES = 1024
_MAX_DEPTH = 8
_MAX_NOTICES = 8

_LOST = (b"/tmp", b"/var/tmp")
"""A worktree that was made there went with the session that made it."""


class GitLook:
    """One look. ``project_fd`` is borrowed; ``roots``: the project and what else the session may write."""

    def __init__(
        self, project_fd: int, project: bytes, home: bytes, roots: tuple[bytes, ...], tree: Tree
    ) -> None:
        self.project_fd, self.project, self.tree = project_fd, project, tree
        self._home, self._roots = home, roots
        self._found: dict[bytes, GitDirectory] = {}
        self._notices: dict[str, None] = {}
        self._configs: dict[bytes, GitConfig] = {}
        self._room, self._bytes = MAX_DIRECTORIES, _MAX_CONFIGS

    def look(self) -> ProjectLook:
        """Look at everything. Raises OSError where a file system fails, UncachedError."""
        outside: Outside | None = None
        kind: Literal["absent", "directory", "pointer", "link", "other"] = "absent"
        with self.tree.opened(self.project_fd, b".git") as fd:
            mode = 0 if fd is None else os.fstat(fd).st_mode
            if fd is not None and stat.S_ISDIR(mode):
                kind = "directory"
                self._main(fd, self.project + b"/.git")
            elif fd is not None and stat.S_ISREG(mode):
                kind = "pointer"
                outside = self._pointer(fd)
            elif stat.S_ISLNK(mode):
                kind = "link"
                self._link()
            elif fd is not None:
                kind = "other"
        if is_git_directory(self.tree, self.project_fd):
            if kind != "absent":
                self._note(
                    f"{shown(self.project)} has the shape of a bare repository beside its .git: git would "
                    "obey its config and hooks, were the .git damaged; if they are not yours, remove them"
                )
            self._repository(self.project_fd, self.project, self.project)
        self._named_submodules()
        notices = tuple(self._notices)
        if len(notices) > _MAX_NOTICES:
            notices = (*notices[:_MAX_NOTICES], f"and {len(notices) - _MAX_NOTICES} more of this kind")
        return ProjectLook(self.project, kind, tuple(self._found.values()), outside, notices)

    def _note(self, sentence: str) -> None:
        self._notices[sentence] = None

    def _main(self, fd: int, path: bytes) -> None:
        self._repository(fd, path, self.project)
        self._note_hooks(fd, path)
        if self.tree.exists(fd, b"commondir"):
            self._note(
                f"{shown(path)}/commondir makes git obey the configuration and hooks of another directory; "
                "git makes such a file for worktrees only: if you did not put it there, remove it"
            )

    def _link(self) -> None:
        with self.tree.directory(self.project_fd, b".git", follow=True) as fd:
            if fd is None:
                return
            path = canonical_name(fd)
            self._note(
                f"{shown(self.project)}/.git is a symbolic link, and a program can put something else in "
                "its place whose hooks git would run; a directory is protected"
            )
            if not any(is_under(path, root) for root in self._roots):
                self._note(
                    f"git does not work in {shown(self.project)} inside, for its .git is a link to "
                    f"{shown(path)}, which is not shown; to show it, list it in extra_writable_paths"
                )
            self._repository(fd, path, self.project)
            self._note_hooks(fd, path)

    def _pointer(self, pointer_fd: int) -> Outside | None:
        """Follow the ``.git`` file of a worktree or submodule (gitdir: PATH)."""
        untrusted_text = one_line(self.tree.content(pointer_fd, _MAX_POINTER))
        if not untrusted_text.startswith(b"gitdir: "):
            return None
        untrusted_path = untrusted_text.removeprefix(b"gitdir: ")
        with self.tree.directory(self.project_fd, untrusted_path, follow=True) as fd:
            if fd is None:
                return None
            path = canonical_name(fd)
            untrusted_common = one_line(self.tree.read(fd, b"commondir", _MAX_POINTER))
            if not untrusted_common:
                return self._pointed(pointer_fd, fd, fd, path)
            self._found[path] = GitDirectory(path, "worktree")
            with self.tree.directory(fd, untrusted_common, follow=True) as common_fd:
                return None if common_fd is None else self._pointed(pointer_fd, fd, common_fd, path)

    def _pointed(self, pointer_fd: int, git_fd: int, common_fd: int, git: bytes) -> Outside | None:
        common = canonical_name(common_fd)
        outside: Outside | None = None
        if not any(is_under(git, root) and is_under(common, root) for root in self._roots):
            outside = look_outside(self.tree, self.project_fd, self._roots, pointer_fd, git_fd, common_fd)
        # Whatever the answer: what the settings make writable besides is protected there too.
        self._repository(common_fd, common, self.project)
        if outside is None or outside.doubt is None:
            self._note_hooks(common_fd, common)
        return outside

    def _note_hooks(self, fd: int, path: bytes) -> None:
        if not self.tree.exists(fd, b"hooks"):
            self._note(
                f"{shown(path)}/hooks does not exist, so that a program can make it and git would run "
                f"what it puts there; mkdir {shown(path)}/hooks, and it is protected"
            )

    def _repository(self, fd: int, path: bytes, base: bytes, pointers: tuple[bytes, ...] = ()) -> None:
        """Take up a repository with its submodules and worktrees. ``base``: its working tree."""
        if path in self._found:
            return
        hooks, includes = self._configured(fd, path, base)
        self._found[path] = GitDirectory(path, "repository", pointers, hooks, includes)
        self._several(fd, path, b"worktrees", 0)
        self._several(fd, path, b"modules", 0)

    def _configured(self, fd: int, path: bytes, base: bytes) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Return what the configuration leads to: directories of hooks, and further files of it."""
        hooks: dict[bytes, None] = {}
        includes: dict[bytes, None] = {}
        waiting = [(path, name, fd) for name in (b"config", b"config.worktree")]
        for directory, name, at in waiting:
            config = self._config(at, name, os.path.join(directory, name))
            for untrusted_value in config.hooks:
                place = self._place(untrusted_value, base, stat.S_IFDIR)
                if place is None:
                    continue
                if any(is_under(root, place) for root in (path, *self._roots)):
                    self._note(f"core.hooksPath of {shown(path)} is {shown(place)}, which stays writable")
                else:
                    hooks[place] = None
            for untrusted_value in config.includes:
                place = self._place(untrusted_value, directory, stat.S_IFREG)
                if place is None or place in includes:
                    continue
                if len(includes) == _MAX_INCLUDES:
                    self._note(f"the configuration of {shown(path)} includes too many files to protect")
                    break
                includes[place] = None
                waiting.append((place.rpartition(b"/")[0], place, AT_FDCWD))
        return tuple(hooks), tuple(includes)

    def _config(self, at: int, name: bytes, path: bytes) -> GitConfig:
        if path not in self._configs:
            content = self.tree.read(at, name, min(_MAX_CONFIG, self._bytes), follow=True)
            if content is None and self.tree.exists(at, name):
                self._note(f"{shown(path)} cannot be read, or is too large: where it leads is not protected")
            self._bytes -= len(content or b"")
            self._configs[path] = parse_git_config(content or b"")
        return self._configs[path]

    def _place(self, untrusted_value: bytes, base: bytes, kind: int) -> bytes | None:
        """Return the path that a value of the configuration names, canonical where it exists; None: there is
        something of another kind (stat(2))."""
        if untrusted_value.startswith(b"~/"):
            untrusted_value = self._home + untrusted_value[1:]
        path = os.path.join(base, untrusted_value.replace(b"\0", b""))
        with self.tree.opened(AT_FDCWD, path, follow=True) as fd:
            plain = os.path.normpath(path)
            if fd is None:
                return plain
            name = canonical_name(fd)
            if name != plain and any(is_under(plain, root) for root in self._roots):
                self._note(
                    f"{shown(plain)}, which git obeys, is reached through a symbolic link: what it leads to "
                    "is protected, but a program can put something else in its place"
                )
            return name if stat.S_IFMT(os.fstat(fd).st_mode) == kind else None

    def _several(self, fd: int, path: bytes, name: bytes, depth: int) -> None:
        """Take up what lies in ``worktrees`` or ``modules``; if that is too much, close it as a whole."""
        within = path + b"/" + name
        with self.tree.directory(fd, name) as inner:
            if inner is None:
                return
            kept, room = dict(self._found), self._room
            try:
                for entry in self.tree.names(inner, _MAX_ENTRIES, directories=True):
                    with self.tree.directory(inner, entry) as one:
                        if one is None:
                            continue
                        if name == b"worktrees":
                            self._take()
                            self._worktree(one, within + b"/" + entry, path)
                        else:
                            self._module(one, within + b"/" + entry, depth)
            except TooManyError:
                self._found, self._room = kept, room
                self._found[within] = GitDirectory(within, "whole")
                self._note(
                    f"{shown(within)} holds more than {MAX_DIRECTORIES} repositories or worktrees, too many "
                    "to protect one by one: all of it is read-only inside"
                )

    def _take(self) -> None:
        if self._room == 0:  # wall
            raise TooManyError
        self._room -= 1

    def _module(self, fd: int, path: bytes, depth: int) -> None:
        """A submodule's repository, or a directory of some: a name may have slashes."""
        self._take()
        if not is_git_directory(self.tree, fd):
            if depth == _MAX_DEPTH:
                raise TooManyError
            for entry in self.tree.names(fd, _MAX_ENTRIES, directories=True):
                with self.tree.directory(fd, entry) as inner:
                    if inner is not None:
                        self._module(inner, path + b"/" + entry, depth + 1)
            return
        config = self._config(fd, b"config", path + b"/config")
        base = os.path.normpath(os.path.join(path, config.worktree or b"."))
        self._repository(fd, path, base, tuple(self._pointer_at(base + b"/.git")))

    def _worktree(self, fd: int, path: bytes, repository: bytes) -> None:
        """What a repository keeps of a worktree."""
        if path in self._found:
            return
        untrusted_pointer = one_line(self.tree.read(fd, b"gitdir", _MAX_POINTER))
        pointer = os.path.normpath(os.path.join(path, untrusted_pointer))
        pointers = tuple(self._pointer_at(pointer))
        if any(is_under(pointer, root) for root in self._roots):
            base = os.path.dirname(pointer)
            hooks, includes = self._configured(fd, path, base)
            # core.hooksPath of the repository is relative to each working tree.
            with self.tree.directory(AT_FDCWD, repository) as common:
                if common is not None:
                    hooks += self._configured(common, repository, base)[0]
            self._found[path] = GitDirectory(path, "worktree", pointers, hooks, includes)
        elif not any(is_under(pointer, place) for place in _LOST) or self.tree.exists(AT_FDCWD, pointer):
            self._found[path] = GitDirectory(path, "whole")

    def _pointer_at(self, path: bytes) -> Iterator[bytes]:
        """Yield the path of a ``.git`` file where the session may write it."""
        if not any(is_under(path, root) for root in self._roots):
            return
        with self.tree.opened(AT_FDCWD, path) as fd:
            if fd is not None and stat.S_ISREG(os.fstat(fd).st_mode):
                yield canonical_name(fd)

    def _named_submodules(self) -> None:
        """Submodules that keep their repository in their own ``.git`` directory."""
        config = self._config(self.project_fd, b".gitmodules", self.project + b"/.gitmodules")
        for number, untrusted_path in enumerate(dict.fromkeys(config.paths)):
            if number == MAX_DIRECTORIES or self._room == 0:
                self._note(f"{shown(self.project)}/.gitmodules names too many submodules to look at each")
                return
            base = os.path.normpath(os.path.join(self.project, untrusted_path.replace(b"\0", b"")))
            if base == self.project or not is_under(base, self.project):
                continue
            with self.tree.directory(AT_FDCWD, base + b"/.git") as fd:
                if fd is not None and is_git_directory(self.tree, fd):
                    self._take()
                    path = canonical_name(fd)
                    if is_under(path, self.project):
                        self._repository(fd, path, base)
