"""Session records on disk: written whole, read back with suspicion.

A record is renamed into place before its program may start, so there is no running program without a record.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from typing import Annotated

import msgspec

from ral_broker.log import logger, shown
from ral_protocol.control import SessionLine
from ral_protocol.records import MAX_RECORD, EndedRecord, ProcessMark, SessionRecord

RECORD = ".json"
STATUS = ".status"
ENDED = ".ended"
ATTACH = ".sock"
LOGS = (".log.1", ".log")
"""Captured output, oldest first."""

_decode_session = msgspec.json.Decoder(SessionRecord).decode
_decode_ended = msgspec.json.Decoder(EndedRecord).decode
_encode = msgspec.json.Encoder().encode


def boot_id() -> str:
    """Return the identity of this boot (random(4), /proc/sys/kernel/random/boot_id)."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def host_name() -> str:
    """Return the name of this host: the directory of the records may be shared with others (NFS)."""
    return os.uname().nodename[:256]


def own_pid_namespace() -> int:
    """Return the inode of this process's pid namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def process_mark(pid: int) -> ProcessMark:
    """Return pid and start time of a process. OSError if it is gone."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        untrusted_stat = file.read()
    # The command's name may hold spaces and parentheses; the fields start after the last one.
    return ProcessMark(pid, int(untrusted_stat.rpartition(b") ")[2].split()[19]))


def is_same_process(mark: ProcessMark) -> bool:
    """Tell whether the marked process still has its pid. A zombie has, too."""
    try:
        return process_mark(mark.pid) == mark
    except (OSError, IndexError, ValueError):
        return False


def write_record(sessions_fd: int, record: SessionRecord | EndedRecord) -> None:
    """Put a record into place in one step. Survives a crash of the broker; a crash of the host ends the
    sessions anyway, so nothing is synced. OSError."""
    suffix = RECORD if isinstance(record, SessionRecord) else ENDED
    temporary = f".{record.id}{suffix}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC  # wall
    try:
        fd = os.open(temporary, flags, 0o600, dir_fd=sessions_fd)
    except FileExistsError:
        # Of a broker that died here, or planted: a FIFO would stop us, a link lead elsewhere.
        os.unlink(temporary, dir_fd=sessions_fd)
        fd = os.open(temporary, flags, 0o600, dir_fd=sessions_fd)
    try:
        data = memoryview(_encode(record))
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)
    os.rename(temporary, record.id + suffix, src_dir_fd=sessions_fd, dst_dir_fd=sessions_fd)


def write_ended(sessions_fd: int, record: SessionRecord, line: SessionLine) -> None:
    """Keep what is known of an ended session; where that cannot be written, say so and go on."""
    try:
        write_record(sessions_fd, ended_record(record, line))
    except OSError as error:
        logger.warning("the end of session %s cannot be recorded: %s", record.id, error)


def remove(sessions_fd: int, name: str) -> None:
    """Remove a file of the sessions directory if it is there. What is no file stays and is named."""
    try:
        os.unlink(name, dir_fd=sessions_fd)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s cannot be removed: %s", shown(name), error.strerror)


def remove_session_files(sessions_fd: int, session: str, *, keep_logs: bool) -> None:
    """Remove everything that belongs to a session that has ended."""
    for suffix in (RECORD, STATUS, ATTACH):
        remove(sessions_fd, session + suffix)
    if not keep_logs:
        for suffix in (*LOGS, ENDED):
            remove(sessions_fd, session + suffix)


def read_sessions(sessions_fd: int) -> Iterator[SessionRecord]:
    """Yield every valid record. One that cannot be read back is named in the log and left alone."""
    for name, content in _read_all(sessions_fd, RECORD):
        try:
            record = _decode_session(content)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            logger.warning("record %s is ignored: %s", shown(name), error)
            continue
        if record.id + RECORD == name and record.uid == os.geteuid():  # wall
            yield record
        else:
            logger.warning("record %s is ignored: it names another session or user", shown(name))


def read_ended(sessions_fd: int) -> Iterator[EndedRecord]:
    """Yield every valid record of an ended session."""
    for name, content in _read_all(sessions_fd, ENDED):
        try:
            record = _decode_ended(content)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            logger.warning("record %s is ignored: %s", shown(name), error)
            continue
        if record.id + ENDED == name and record.uid == os.geteuid():
            yield record


def _read_all(sessions_fd: int, suffix: str) -> Iterator[tuple[str, bytes]]:
    for name in sorted(os.listdir(sessions_fd)):
        if not name.endswith(suffix) or name.startswith("."):
            continue
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # wall
            fd = os.open(name, flags, dir_fd=sessions_fd)
        except OSError as error:
            logger.warning("record %s is ignored: %s", shown(name), error.strerror)
            continue
        try:
            status = os.fstat(fd)
            own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()  # wall
            if not own or status.st_size > MAX_RECORD:  # wall
                logger.warning("record %s is ignored: not a small file of yours", shown(name))
                continue
            yield name, os.read(fd, MAX_RECORD + 1)
        finally:
            os.close(fd)


class _Status(msgspec.Struct, rename={"exit_code": "exit-code"}):
    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)] | None = None


class StatusFile:
    """bwrap's --json-status-fd as a file: it outlives the broker, and the last line says how the program
    ended."""

    @staticmethod
    def create(sessions_fd: int, session: str) -> tuple[int, int]:
        """Return (descriptor for bwrap, read-only descriptor) of a new file. OSError if the name exists."""
        name = session + STATUS
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        writing = os.open(name, flags, 0o600, dir_fd=sessions_fd)
        try:
            # An empty line, which every reader skips: a full disk must be found before bwrap has to write.
            os.write(writing, b"\n")
            return writing, StatusFile.open(sessions_fd, session)
        except BaseException:
            os.close(writing)
            remove(sessions_fd, name)
            raise

    @staticmethod
    def open(sessions_fd: int, session: str) -> int:
        """Return a read-only descriptor of the status file. OSError, also if it is no regular file."""
        # Without O_NONBLOCK a FIFO in its place would stop the broker.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # wall
        fd = os.open(session + STATUS, flags, dir_fd=sessions_fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # wall
            os.close(fd)
            raise OSError(errno.EINVAL, "the status file is no regular file", session + STATUS)
        return fd

    @staticmethod
    def exit_code(fd: int) -> int | None:
        """Return the recorded exit status; None while there is none. A line without its newline is not there
        yet."""
        untrusted = os.pread(fd, 65536, 0)
        for line in reversed(untrusted.split(b"\n")[:-1]):
            try:
                value = msgspec.json.decode(line, type=_Status)
            except (msgspec.ValidationError, msgspec.DecodeError):
                continue
            if value.exit_code is not None:
                return value.exit_code
        return None


def ended_within(record: EndedRecord, now: float, seconds: float) -> bool:
    """Tell whether the session ended in the last ``seconds`` (of the clock, which may have been set
    back)."""
    return 0 <= now - record.ended_epoch < seconds


def ended_record(record: SessionRecord, line: SessionLine) -> EndedRecord:
    """Return what is kept on disk of a session that ended as ``line`` says."""
    return EndedRecord(
        id=record.id, uid=record.uid, version=record.version, kind=record.kind, project=record.project,
        command=record.command, started=record.started, ended=line.ended or "", ended_epoch=int(time.time()),
        pid=record.init.pid, bwrap_pid=record.monitor.pid, exit=line.exit or 0, lost=line.lost,
    )  # fmt: skip
