"""What systemd gives a service it starts: the listening socket and the wish to hear when it is ready.

sd_listen_fds(3), sd_notify(3), through python-systemd, which is imported only where systemd started us.
"""

from __future__ import annotations

import os
import socket

from ral_broker.errors import HostLacks
from ral_protocol import exits


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
