"""Which files make a configuration, and their bytes: by handle, regular files only, with a deadline.

A lookup that the kernel's caches answer is made at once: that is the whole cost of a file that is not there.
Everything else is done in a worker thread: a home directory may be on a server that does not answer.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import msgspec
import trio

from ral_broker import admin, syscalls
from ral_broker.config.effective import Problem
from ral_broker.envelope.facts import followed, slow_opens
from ral_broker.errors import Refused
from ral_broker.log import shown

MAX_BYTES = 1 << 20
"""Of one file."""
MAX_FILES = 512
"""In one directory."""
MAX_TOTAL = 8 << 20
"""Bytes of all files of one load."""
READ_SECONDS = 5.0
"""Deadline of one look at the user's files."""
CONF_VARIABLES = (b"RAL_CONF", b"SANDBOX_CONF")
"""Name another user file; the first one that is set. The second is the older name."""

_AT_FDCWD = -100
_ABSENT = (-errno.ENOENT, -errno.ENOTDIR)
_MAX_NAMES = 10_000

T = TypeVar("T")


class FileRefused(Refused):
    """A file or directory of a configuration that cannot be used: its name, and why."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(f"{shown(path)}: {text}")
        self.path, self.text = path, text

    def problem(self, severity: Literal["error", "warning"] = "error") -> Problem:
        """Return it as one of the problems of a load."""
        return Problem(severity, shown(self.path), None, None, self.text)


class Source(msgspec.Struct, frozen=True):
    """One file as it was read. ``path``: what it was opened by; ``name``: of the layer, as in Origin."""

    kind: Literal["admin", "user", "conf.d"]
    path: str
    name: str
    content: bytes


class Selection(msgspec.Struct, frozen=True):
    """Where a caller's files are. ``directory``: of conf.d and profiles; ``named``: a variable of the caller
    chose ``user_file``, which therefore has to be there."""

    directory: str
    user_file: str
    named: str | None = None


def select(home: str, environment: Iterable[bytes]) -> Selection:
    """Return where the files are, for a caller with this environment (``NAME=VALUE``; the first of two
    counts). An empty value is none. Raises Refused for a name that is no absolute path."""
    wanted = (*CONF_VARIABLES, b"XDG_CONFIG_HOME")
    found: dict[bytes, bytes] = {}
    for entry in environment:
        name, _, value = entry.partition(b"=")
        if name in wanted:
            found.setdefault(name, value)
    base = os.fsdecode(found.get(b"XDG_CONFIG_HOME", b""))
    if not base.startswith("/"):  # as the XDG specification says
        base = f"{home}/.config"
    directory = os.path.normpath(base) + "/ral"
    for variable in CONF_VARIABLES:
        value = found.get(variable, b"")
        if value:
            path = os.fsdecode(value)
            if not path.startswith("/"):
                raise Refused(
                    f"{variable.decode()}={shown(path)} is no absolute path; write the whole path, or "
                    "unset it"
                )
            return Selection(directory, path, variable.decode())
    return Selection(directory, directory + "/ral.toml")


def out_of_reach(selection: Selection) -> str | None:
    """Return the directory above the user's files that this user may not enter and does not own, None
    without one: the home of another, as uid 0 of a container may have it. Nothing of ours can be in it."""
    if selection.named is not None:
        return None
    path = selection.directory
    while path != "/":
        try:
            status = os.stat(path)
        except PermissionError:
            path = os.path.dirname(path)
            continue
        except OSError:
            return None
        foreign = status.st_uid != os.geteuid() and not os.access(path, os.X_OK)
        return path if foreign else None
    return None


def nowhere() -> Selection:
    """Return a selection of files that never exist."""
    return Selection("/dev/null", "/dev/null/ral.toml")


async def read_sources(selection: Selection) -> tuple[list[Source], list[Problem]]:
    """Return the files that there are, weakest first, and what is wrong with others of them."""
    sources: list[Source] = []
    problems: list[Problem] = []
    try:
        content = admin.read_trusted()
        if content is not None:
            sources.append(Source("admin", admin.PATH, admin.PATH, content))
    except Refused as error:
        text = error.message.removeprefix(admin.PATH).lstrip(": ")
        problems.append(Problem("error", admin.PATH, None, None, text))
    conf_d = selection.directory + "/conf.d"
    if selection.named or _may_exist(selection.user_file) or _may_exist(conf_d):
        try:
            found, wrong = await _in_time(lambda: _read_user(selection, conf_d), selection.user_file)
            sources += found
            problems += wrong
        except FileRefused as error:
            problems.append(error.problem())
    if sum(len(source.content) for source in sources) > MAX_TOTAL:
        problems.append(
            FileRefused(
                conf_d, f"all files together are larger than {MAX_TOTAL} bytes; remove some"
            ).problem()
        )
    return sources, problems


def _may_exist(path: str) -> bool:
    """Tell whether a name has to be looked at: False only where the caches know that there is none."""
    fd = syscalls.try_openat2(
        _AT_FDCWD, os.fsencode(path), os.O_PATH | os.O_NOFOLLOW, syscalls.RESOLVE_CACHED
    )
    if fd >= 0:
        os.close(fd)
    return fd not in _ABSENT


async def _in_time(look: Callable[[], T], path: str) -> T:
    """Run ``look`` in a worker thread. Raises Refused if it takes too long; it is then left alone."""
    done: list[T] = []
    with trio.move_on_after(READ_SECONDS):
        done.append(await trio.to_thread.run_sync(look, abandon_on_cancel=True, limiter=slow_opens))
    if not done:
        raise FileRefused(
            path,
            f"it did not answer within {READ_SECONDS:g} seconds (a dead network mount?); no "
            "session is started without it",
        )
    return done[0]


def _read_user(selection: Selection, conf_d: str) -> tuple[list[Source], list[Problem]]:
    sources: list[Source] = []
    problems: list[Problem] = []
    path = selection.user_file
    try:
        if selection.named is None:
            _check_directory(selection.directory)
        content = _read_file(path)
        if content is not None:
            sources.append(Source("user", path, path, content))
        elif selection.named:
            text = f"there is no such file, and {selection.named} names it; unset that"
            problems.append(FileRefused(path, text).problem())
    except FileRefused as error:
        problems.append(error.problem())
    try:
        names = _names(conf_d, ".toml")
    except FileRefused as error:
        return sources, [*problems, error.problem()]
    for name in names:
        path = f"{conf_d}/{name}"
        try:
            if _is_other(path):
                if not os.path.isdir(path):
                    problems.append(FileRefused(path, "is no regular file; ignored").problem("warning"))
                continue
            content = _read_file(path)
        except FileRefused as error:
            problems.append(error.problem())
        else:
            if content is not None:
                sources.append(Source("conf.d", path, f"conf.d/{name}", content))
    return sources, problems


def _is_other(path: str) -> bool:
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def _check_directory(path: str) -> bool:
    """Return whether there is such a directory. Raises Refused if somebody else could change what is in
    it."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise FileRefused(path, f"it cannot be entered: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        return False
    _check_rights(path, status)
    return True


def _check_rights(path: str, status: os.stat_result) -> None:
    """Refuse a file or directory whose content could be another user's word."""
    if status.st_uid not in (0, os.geteuid()):  # wall
        raise FileRefused(path, f"it belongs to another user (uid {status.st_uid}); make it your own")
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & 0o022 and not sticky:  # wall
        raise FileRefused(path, f"others can write it; run chmod go-w {shown(path)}")


def _names(directory: str, suffix: str) -> list[str]:
    """Return the names in a directory that end so, hidden ones excepted, in byte order. Raises Refused."""
    if not _check_directory(directory):
        return []
    names: list[str] = []
    try:
        with os.scandir(directory) as entries:
            for count, entry in enumerate(entries, 1):
                if count > _MAX_NAMES:
                    raise FileRefused(directory, f"it holds more than {_MAX_NAMES} names; remove some")
                if entry.name.endswith(suffix) and not entry.name.startswith("."):
                    names.append(entry.name)
    except OSError as error:
        raise FileRefused(directory, f"it cannot be read: {error.strerror}") from error
    if len(names) > MAX_FILES:
        raise FileRefused(
            directory, f"it holds {len(names)} files; at most {MAX_FILES} are read; remove some"
        )
    return sorted(names, key=os.fsencode)


def _read_file(path: str) -> bytes | None:
    """Return the content of a file of the user's, through links; None where there is none.

    Raises Refused for what is no regular file, is too large, or could be another user's word.
    """
    # Opened by reference first: opening a device or a FIFO for reading can do something.
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.lexists(path):
            raise FileRefused(path, "it is a symbolic link to nothing; remove it or mend it") from None
        return None
    except OSError as error:
        raise FileRefused(path, f"it cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):  # wall
            raise FileRefused(path, "it is no regular file; put a file there")
        _check_rights(path, status)
        if status.st_size > MAX_BYTES:
            raise FileRefused(path, f"it is larger than {MAX_BYTES} bytes")
        with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise FileRefused(path, f"it cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)
    if len(content) > MAX_BYTES:
        raise FileRefused(path, f"it is larger than {MAX_BYTES} bytes")
    return content


class ProfileFiles:
    """How the files of profiles are read (profiles.Files)."""

    async def names(self, directory: str) -> tuple[str, ...]:
        """Return the names of the profiles in a directory, none where there is none. Raises Refused."""
        if not _may_exist(directory):
            return ()
        return tuple(await _in_time(lambda: _names(directory, ".toml"), directory))

    async def read(self, path: str, *, trusted: bool) -> bytes | None:
        """Return the content of a file, None where there is none. ``trusted``: root's alone, or Refused."""
        if not _may_exist(path):
            return None
        return await _in_time(lambda: admin.read_trusted(path) if trusted else _read_file(path), path)


async def canonical_paths(paths: Iterable[str]) -> dict[str, str]:
    """Return for each absolute path what it is with every link followed; what does not exist is taken as it
    is written below what does. One that does not answer in time is left out."""
    found: dict[str, str] = {}
    slow: list[str] = []
    for path in dict.fromkeys(paths):
        fd = syscalls.try_openat2(_AT_FDCWD, os.fsencode(path), os.O_PATH, syscalls.RESOLVE_CACHED)
        if fd < 0:
            slow.append(path)
            continue
        found[path] = os.readlink(f"/proc/self/fd/{fd}")
        os.close(fd)
    if slow:
        answers: dict[str, str] = {}
        with trio.move_on_after(READ_SECONDS):
            await trio.to_thread.run_sync(
                _follow_all, slow, answers, abandon_on_cancel=True, limiter=slow_opens
            )
        # The thread may still be at work.
        found |= {path: answers[path] for path in slow if path in answers}
    return found


def _follow_all(paths: list[str], answers: dict[str, str]) -> None:
    for path in paths:
        answers[path] = os.fsdecode(followed(os.fsencode(path)))
