"""The packets between broker and trampoline (docs/protocol.md, section 3). What comes back is untrusted."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import socket
import struct
import termios

import trio

from ral_broker.errors import HostLacks, StartFailed
from ral_protocol import exits
from ral_protocol.control import Run, WindowSize

PACKET = struct.Struct("<IiiI")
READY, GO, STARTED, FAILED = 1, 2, 3, 4
LOOKUP, EXEC = 7, 8
"""Steps of a failed start that are the command's, not the sandbox's."""
_CREDENTIALS = struct.Struct("=iII")
_START_SECONDS = 20.0


async def wait_ready(ours: socket.socket) -> tuple[int, int | None] | None:
    """Wait for the trampoline's first packet: (pid of the sandbox's init here, master of its terminal).

    None if it never spoke: bwrap says why. The pid is the kernel's word (SCM_CREDENTIALS), not the packet's.
    Raises HostLacks with the step that failed.
    """
    while True:
        await trio.lowlevel.wait_readable(ours)
        try:
            untrusted, ancillary, _, _ = ours.recvmsg(64, 256, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            continue
        except OSError:
            return None
        break
    pid, master = 0, None
    for level, kind, data in ancillary:
        if level != socket.SOL_SOCKET:
            continue
        if kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            for extra in numbers[1:]:
                os.close(extra)
            master = numbers[0] if len(numbers) else None
        elif kind == socket.SCM_CREDENTIALS and len(data) == _CREDENTIALS.size:
            pid = _CREDENTIALS.unpack(data)[0]
    if len(untrusted) == PACKET.size:
        kind, step, code, _ = PACKET.unpack(untrusted)
        if kind == READY and pid > 0:
            return pid, master
        if kind == FAILED:
            if master is not None:
                os.close(master)
            word = _STEPS.get(step, f"step {step}")
            raise HostLacks(f"the sandbox was built but {word}: {os.strerror(code)}")
    if master is not None:
        os.close(master)
    return None


_STEPS = {
    1: "the trampoline's orders did not arrive whole", 2: "it has no terminal to give (/dev/ptmx)",
    3: "the Landlock rules could not be entered", 4: "the caller's limits could not be set",
    5: "descriptors could not be closed", 6: "no process could be made",
}  # fmt: skip


def check_waiting(ours: socket.socket) -> None:
    """Make sure that the trampoline still waits: then the pid it spoke from has not been given to another
    process.

    Raises HostLacks.
    """
    try:
        ours.recv(PACKET.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return
    except OSError as error:
        raise HostLacks(f"the sandbox ended while it was prepared: {error.strerror}") from error
    raise HostLacks("the sandbox ended while it was prepared")


def set_terminal(master: int | None, request: Run) -> None:
    """Give the session's terminal the size and modes of the caller's before the program sees it
    (tty_ioctl(4))."""
    if master is None:
        if request.detach or any(request.terminals):
            raise HostLacks("the sandbox sent no terminal")
        return
    if not os.isatty(master):
        raise HostLacks("the sandbox sent something that is no terminal")
    size = request.size or WindowSize(24, 80)
    numbers = (min(max(n, 0), 65535) for n in (size.rows, size.columns, size.x_pixels, size.y_pixels))
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("=HHHH", *numbers))
    if request.modes is not None:
        # Modes that no terminal has (too large a number, say): the session's keeps its defaults.
        with contextlib.suppress(termios.error, OSError, OverflowError):
            attributes = termios.tcgetattr(master)
            modes = request.modes
            cc = [bytes((c,)) for c in modes.cc][: len(attributes[6])]
            attributes[0:4] = [modes.iflag, modes.oflag, modes.cflag, modes.lflag]
            attributes[6][: len(cc)] = cc
            termios.tcsetattr(master, termios.TCSANOW, attributes)


def send_go(ours: socket.socket, stdio: list[int]) -> None:
    """Let the program start, with these descriptors for those of 0, 1, 2 that are no terminal. HostLacks."""
    packet = PACKET.pack(GO, 0, 0, 0)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", stdio))] if stdio else []
    try:
        ours.sendmsg([packet], rights)
    except OSError as error:
        raise HostLacks(
            f"the sandbox ended before its program could be started: {error.strerror}"
        ) from error


async def wait_started(ours: socket.socket, command: str) -> None:
    """Wait until the program is being executed. Raises StartFailed (126, 127) or HostLacks."""
    with trio.move_on_after(_START_SECONDS):
        while True:
            await trio.lowlevel.wait_readable(ours)
            try:
                untrusted = ours.recv(PACKET.size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:
                untrusted = b""
            break
        if len(untrusted) != PACKET.size:
            raise HostLacks("the sandbox ended before its program was started")
        kind, step, code, _ = PACKET.unpack(untrusted)
        if kind == STARTED:
            return
        if kind == FAILED and step in (LOOKUP, EXEC):
            missing = code in (errno.ENOENT, errno.ENOTDIR)
            what = "not found" if missing else "cannot be executed"
            raise StartFailed(
                f"{command}: {what} inside the sandbox: {os.strerror(code)}; "
                "`ral run -- ls DIRECTORY` shows what is there",
                status=exits.NOT_FOUND if missing else exits.CANNOT_EXECUTE,
            )
        raise HostLacks(f"the sandbox was built but {_STEPS.get(step, f'step {step}')}: {os.strerror(code)}")
    raise HostLacks(f"the program was not started within {_START_SECONDS:.0f} seconds")
