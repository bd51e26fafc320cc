"""What systemd gives a service it starts: the listening socket and the wish to hear when it is ready.

sd_listen_fds(3), sd_notify(3), through python-systemd, which is imported only where systemd started us.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

from ral_broker.errors import HostLacks
from ral_broker.log import logger, shown
from ral_broker.runtime import RuntimeDir
from ral_protocol import exits

_REPLACE_SECONDS = 20.0
"""A broker that is asked to end finishes the launches that it has begun."""


def inherited_socket() -> socket.socket | None:
    """Return the listening control socket that systemd passed, or None if systemd did not start us.

    Raises HostLacks if it passed something else. The variables are removed, so that no child sees them.
    """
    if "LISTEN_FDS" not in os.environ:
        return None
    from systemd.daemon import is_socket_unix, listen_fds

    fds = listen_fds(unset_environment=True)
    if len(fds) != 1 or not is_socket_unix(fds[0], socket.SOCK_STREAM, 1):
        raise HostLacks(
            "systemd passed something else than one listening unix stream socket; see ral-broker.socket"
        )
    os.set_inheritable(fds[0], False)
    listener = socket.socket(fileno=fds[0])
    listener.setblocking(False)
    return listener


def socket_directory(listener: socket.socket) -> bytes:
    """Return the directory of a bound path socket. Raises HostLacks for an abstract or unnamed one."""
    name = listener.getsockname()
    path = os.fsencode(name) if isinstance(name, str) else bytes(name)
    if not path.startswith(b"/") or os.path.basename(path) != exits.SOCKET_NAME.encode():
        raise HostLacks(
            "the control socket must be a path socket named control.sock: sandboxes can reach an abstract "
            "one"
        )
    return os.path.dirname(path)


def notify(state: str) -> None:
    """Tell systemd about our state (READY=1, STOPPING=1); nothing if it does not listen."""
    if "NOTIFY_SOCKET" in os.environ:
        from systemd.daemon import notify as sd_notify

        sd_notify(state)


def started_by_systemd() -> bool:
    """Tell whether the journal or a notify socket waits for us."""
    return "NOTIFY_SOCKET" in os.environ or "JOURNAL_STREAM" in os.environ


def replace_broker(runtime: RuntimeDir) -> None:
    """End the broker that a client started before the unit was, and take its lock; its sessions go on.

    systemd has put its socket in the place of the other's, so no client reaches that one any more. Raises
    HostLacks if it does not end in time.
    """
    deadline = time.monotonic() + _REPLACE_SECONDS
    asked = False
    while not runtime.lock():
        if time.monotonic() > deadline:
            raise HostLacks(f"another broker holds {shown(runtime.path)}/broker.lock and does not end")
        asked = asked or _ask_to_end(runtime)
        time.sleep(0.05)


def _ask_to_end(runtime: RuntimeDir) -> bool:
    """Send TERM to the process that holds the lock; False if it is gone or was not found."""
    holder = runtime.lock_holder()
    if holder is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(holder)
        try:
            # Asked again: what holds the lock now has had this pid since before the pidfd.
            if runtime.lock_holder() == holder:
                logger.info("the broker with pid %d, which a client started, gives way to this one", holder)
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
                return True
        finally:
            os.close(pidfd)
    return False
