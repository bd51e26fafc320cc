"""The broker's end of the zygote, the native child that changes the mounts of running sandboxes
(docs/protocol.md, section 5). What it answers is untrusted.

It is started when it is first needed, and anew after it has died. An order that was with it then fails.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import signal
import socket
import struct
from collections import deque
from collections.abc import Sequence

import msgspec
import trio

from ral_broker import spawn, syscalls
from ral_broker.envelope.plan import Identity
from ral_broker.errors import HostLacks
from ral_broker.log import logger, shown
from ral_broker.pins import Pin

MAX_ITEMS = 4096
"""Changes in one order; more are sent in several."""
ORDER_SECONDS = 5.0
"""In which a child of the zygote has to be done with one order. The kernel ends it then, else we do."""
MAX_STARTS, STARTS_SECONDS = 5, 60.0
"""A zygote that dies more often than this is not started again before the time is over."""

_VERSION = 1
_ORDERS = 3
_MAGIC = b"ral-changes/1".ljust(16, b"\0")
_LIST = struct.Struct("<16sII")
_ITEM = struct.Struct("<IIIIQII")
_MASK_FILE, _MASK_DIRECTORY = 1, 2
_HAS_IDENTITY = 1
_ORDER = struct.Struct("<IIQ")
_REPORT = struct.Struct("<IIiI")
_RESULT = struct.Struct("<Ii")
_CHILD, _RESULTS = 1, 2
_MAX_ERRNO = 4095
_GRACE_SECONDS = 0.5
_AT_ONCE = 8

FIND, IDENTITY, KIND, VERIFY = 8, 9, 10, 12
"""Stages of an item that say something about its path."""
_STAGES = {
    1: "its orders did not arrive whole",
    2: "no process could be made",
    3: "what it was lent is no mount namespace",
    4: "what it was lent is the host's own",
    5: "what it was lent belongs to another user",
    6: "the session cannot be entered",
    7: "nothing empty could be made there",
    FIND: "it cannot be found",
    IDENTITY: "it is another object than before",
    KIND: "it is another kind of object than before",
    11: "nothing can be mounted over it",
    VERIFY: "it is still visible",
}


class MaskAt(msgspec.Struct, frozen=True):
    """Hide what is at ``path`` inside (canonical, absolute): an empty read-only file over a file, an empty
    read-only directory over a directory. ``identity``: only if it is this object."""

    path: bytes
    directory: bool
    identity: Identity | None = None


class Outcome(msgspec.Struct, frozen=True):
    """What became of one change: ``stage`` 0 is done and seen; else the step that failed, and its errno."""

    stage: int
    error: int

    def __str__(self) -> str:
        return f"{_STAGES[self.stage]} ({os.strerror(self.error)})" if self.stage else "done"


class _Process:
    """A running zygote. Owns its pidfd and our end of its socket."""

    def __init__(self, pid: int, orders: socket.socket) -> None:
        self.pid, self.orders, self.pidfd = pid, orders, os.pidfd_open(pid)

    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def end(self) -> str:
        """Kill and reap it; how it ended. It holds nothing that could keep it from dying."""
        trio.lowlevel.notify_closing(self.pidfd)
        self.orders.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        how = "its status is lost"
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
            if ended is not None:
                word = "status" if ended.si_code == os.CLD_EXITED else "signal"
                how = f"{word} {ended.si_status}"
        os.close(self.pidfd)
        return how


class Zygote:
    """Changes mounts in sandboxes through one resident helper, several orders at once."""

    def __init__(self, pin: Pin, null_fd: int) -> None:
        self.pin, self._null_fd = pin, null_fd
        self._process: _Process | None = None
        self._started = trio.Event()
        self._starts: deque[float] = deque(maxlen=MAX_STARTS)
        self._at_once = trio.Semaphore(_AT_ONCE)

    @property
    def pid(self) -> int | None:
        """Process id of the running helper, None if none was needed yet or it has ended."""
        return None if self._process is None else self._process.pid

    async def supervise(self) -> None:
        """Take note of the helper's end and log it. Runs until cancelled, and then ends the helper."""
        try:
            while True:
                await self._started.wait()
                process = self._process
                if process is not None:
                    with contextlib.suppress(trio.ClosedResourceError):
                        await trio.lowlevel.wait_readable(process.pidfd)
                        self._bury(process)
        finally:
            self.close()

    def close(self) -> None:
        """End the helper if it runs; the next order starts one."""
        if self._process is not None:
            process, self._process, self._started = self._process, None, trio.Event()
            process.end()

    async def change(
        self, namespace_fd: int, changes: Sequence[MaskAt], *, seconds: float = ORDER_SECONDS
    ) -> list[Outcome]:
        """Make ``changes`` in the mount namespace behind ``namespace_fd``, in order; what became of each.

        ``seconds`` is for each MAX_ITEMS of them. Raises HostLacks if the helper, or an order as a whole,
        fails: then any part of the changes may have been made.
        """
        outcomes: list[Outcome] = []
        for at in range(0, len(changes), MAX_ITEMS):
            async with self._at_once:
                outcomes += await self._order(namespace_fd, changes[at : at + MAX_ITEMS], seconds)
        return outcomes

    async def _order(self, namespace_fd: int, changes: Sequence[MaskAt], seconds: float) -> list[Outcome]:
        with contextlib.ExitStack() as stack:
            list_fd = syscalls.sealed_memfd("ral-changes", encode(changes))
            stack.callback(os.close, list_fd)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(ours.close)
            stack.callback(theirs.close)
            ours.setblocking(False)
            process = self._send(
                _ORDER.pack(_VERSION, int(seconds * 1000), 0), [theirs.fileno(), namespace_fd, list_fd]
            )
            theirs.close()
            return await self._wait_results(process, ours, len(changes), seconds)

    def _send(self, packet: bytes, fds: Sequence[int]) -> _Process:
        """Send an order to the running helper, to a new one if it has ended."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        while True:
            process = self._running()
            try:
                process.orders.sendmsg([packet], rights)
            except BlockingIOError as error:
                raise HostLacks(
                    "the helper that changes mounts takes no orders (was it stopped?)"
                ) from error
            except (BrokenPipeError, ConnectionResetError):
                # Nobody has read it, so it can be given to another one. The bound on starts ends this.
                self._bury(process)
            else:
                return process

    def _running(self) -> _Process:
        if self._process is not None and self._process.has_ended():
            self._bury(self._process)
        if self._process is None:
            self._process = self._start()
            self._started.set()
        return self._process

    def _start(self) -> _Process:
        now = trio.current_time()
        if len(self._starts) == MAX_STARTS and now - self._starts[0] < STARTS_SECONDS:
            raise HostLacks(
                f"the helper that changes mounts ended {MAX_STARTS} times within {STARTS_SECONDS:.0f} "
                "seconds; wait a minute, and see the log of the broker if it goes on"
            )
        self._starts.append(now)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                ours.setblocking(False)
                null = self._null_fd
                slots = {0: null, 1: null, 2: null, _ORDERS: theirs.fileno()}
                return _Process(spawn.spawn(self.pin.fd, [b"ral-zygote"], {}, slots), ours)
            except OSError as error:
                ours.close()
                raise HostLacks(
                    f"the helper that changes mounts cannot be started ({shown(self.pin.argv0)}): "
                    f"{error.strerror}"
                ) from error

    def _bury(self, process: _Process) -> None:
        if self._process is process:
            self._process, self._started = None, trio.Event()
            logger.warning("the helper that changes mounts has ended: %s", process.end())

    async def _wait_results(
        self, process: _Process, ours: socket.socket, count: int, seconds: float
    ) -> list[Outcome]:
        child = -1
        try:
            with trio.move_on_after(seconds + _GRACE_SECONDS):
                while True:
                    untrusted, fd = await _receive(ours, count)
                    if fd is None or child >= 0:
                        if fd is not None:
                            os.close(fd)
                        return decode(untrusted, count)
                    child = fd
            if child < 0:
                self._bury(process)
            raise HostLacks(
                f"the mounts of the session could not be changed within {seconds:g} seconds (a dead "
                "network mount in it?); the attempt was ended"
            )
        finally:
            if child >= 0:
                # It has answered, or must not go on.
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(child, signal.SIGKILL)
                os.close(child)


def encode(changes: Sequence[MaskAt]) -> bytes:
    """Return the list of an order."""
    items: list[bytes] = []
    for change in changes:
        device, inode = (
            (0, 0) if change.identity is None else (change.identity.device, change.identity.inode)
        )
        operation = _MASK_DIRECTORY if change.directory else _MASK_FILE
        flags = 0 if change.identity is None else _HAS_IDENTITY
        items += (
            _ITEM.pack(
                operation, flags, os.major(device), os.minor(device), inode, 0, len(change.path) + 1
            ),
            change.path, b"\0",
        )  # fmt: skip
    size = _LIST.size + sum(map(len, items))
    return _LIST.pack(_MAGIC, size, len(changes)) + b"".join(items)


async def _receive(ours: socket.socket, count: int) -> tuple[bytes, int | None]:
    """Wait for a packet, b"" for the end, and the descriptor with it: only that of a child has one."""
    room = _REPORT.size + count * _RESULT.size + 1
    while True:
        await trio.lowlevel.wait_readable(ours)
        try:
            untrusted, ancillary, _, _ = ours.recvmsg(room, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            continue
        except ConnectionResetError:
            return b"", None
        break
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    wanted = untrusted == _REPORT.pack(_CHILD, 0, 0, 0)
    for fd in fds[1 if wanted else 0 :]:
        os.close(fd)
    return untrusted, fds[0] if wanted and fds else None


def decode(untrusted: bytes, count: int) -> list[Outcome]:
    """Return the outcomes of ``count`` changes. HostLacks if the order failed, or if this is no answer."""
    if not untrusted:
        raise HostLacks("the helper that changes mounts ended before it was done; run the command again")
    if len(untrusted) < _REPORT.size:
        raise _nonsense()
    kind, stage, error, results = _REPORT.unpack_from(untrusted)
    if kind != _RESULTS or len(untrusted) != _REPORT.size + results * _RESULT.size:
        raise _nonsense()
    if stage in _STAGES and 0 < error <= _MAX_ERRNO and results == 0:
        raise HostLacks(f"the mounts of the session cannot be changed: {Outcome(stage, error)}")
    if stage or error or results != count:  # wall
        raise _nonsense()
    outcomes: list[Outcome] = []
    for stage, error in _RESULT.iter_unpack(untrusted[_REPORT.size :]):
        done = stage == 0 and error == 0
        if not done and not (stage in _STAGES and 0 < error <= _MAX_ERRNO):
            raise _nonsense()
        outcomes.append(Outcome(stage, error))
    return outcomes


def _nonsense() -> HostLacks:
    return HostLacks("the helper that changes mounts gave an answer that is none; nothing is believed of it")


def reason(outcome: Outcome) -> str:
    """Word the failure of a change for the user, with what to do."""
    if outcome.stage == FIND and outcome.error == errno.ELOOP:
        return "it now goes through a symbolic link that ral will not follow"
    if outcome.stage == FIND and outcome.error in (errno.ENOENT, errno.ENOTDIR):
        return "it is no longer there"
    return str(outcome)
