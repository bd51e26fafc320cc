"""Starting the process that holds a detached session's terminal and outlives this broker."""

from __future__ import annotations

import os
import socket

import msgspec

from ral_broker import spawn
from ral_broker.errors import HostLacks
from ral_broker.pins import Pin
from ral_broker.runtime import RuntimeDir
from ral_broker.sessions import records
from ral_broker.sessions.session import Session
from ral_protocol.records import SessionRecord

MASTER, LEASE, MONITOR, INIT, STATUS, LISTEN, DIRECTORY = range(3, 10)
"""The holder's descriptors (docs/protocol.md, section 4)."""


def start_holder(
    runtime: RuntimeDir, pin: Pin, session: Session, lease_fd: int, master_fd: int, null_fd: int
) -> SessionRecord:
    """Start a holder and return the session's record with it, written to disk; the session watches its end.

    Resource handling: the descriptors are copied; the caller closes its own. Error handling: HostLacks.
    """
    name = session.id + records.ATTACH
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(f"/proc/self/fd/{runtime.sessions_fd}/{name}")
            listener.listen(16)
            pid = spawn.spawn(
                pin.fd,
                [b"ral-holder", session.id.encode()],
                {},
                {
                    0: null_fd, 1: null_fd, 2: null_fd, MASTER: master_fd, LEASE: lease_fd,
                    MONITOR: session.monitor_pidfd, INIT: session.init_pidfd, STATUS: session.status_fd,
                    LISTEN: listener.fileno(), DIRECTORY: runtime.sessions_fd,
                },
            )  # fmt: skip
            session.holder_pidfd = os.pidfd_open(pid)
            record = msgspec.structs.replace(session.record, holder=records.process_mark(pid))
            records.write_record(runtime.sessions_fd, record)
        except OSError as error:
            raise HostLacks(f"the holder of the session cannot be started: {error.strerror}") from error
    return record
