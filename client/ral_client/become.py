"""``--as-user``: root's client becomes another user's before it does anything else."""

import posix
import sys

from ral_client.call import Failure, escape
from ral_client.run import caller_environment, encode_argument
from ral_protocol import exits

FORGOTTEN = (
    b"XDG_RUNTIME_DIR", b"XDG_CONFIG_HOME", b"XDG_STATE_HOME", b"XDG_CACHE_HOME", b"XDG_DATA_HOME",
    b"DBUS_SESSION_BUS_ADDRESS", b"RAL_CONF", b"SANDBOX_CONF", exits.RUNTIME_VARIABLE.encode(),
)  # fmt: skip
"""Variables that name root's own directories."""
LAST_FD = 1 << 20


def become(name: str, ignored: int, arguments: "list[str]") -> None:
    """Become the user ``name`` and execute the client anew with ``arguments``. Does not return; raises
    Failure.

    Only a new program is again dumpable, and the broker reads /proc/PID of its client.
    """
    import pwd

    what = f"--as-user {escape(name)} refused: "
    try:
        entry = pwd.getpwnam(name)
    except (KeyError, ValueError):
        raise Failure(what + "there is no such user", exits.REFUSED) from None
    if posix.getuid() != 0:
        if posix.getuid() == posix.geteuid() == entry.pw_uid:
            return
        raise Failure(what + "only root may become another user", exits.REFUSED)
    # Not readable any more once the user has changed.
    variables = caller_environment()
    try:
        posix.initgroups(name, entry.pw_gid)
        posix.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
        posix.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
    except OSError as error:
        raise Failure(what + posix.strerror(error.errno or 0), exits.REFUSED) from None
    new = {b"HOME": entry.pw_dir, b"USER": name, b"LOGNAME": name}
    environment = {
        key: value
        for key, _, value in (variable.partition(b"=") for variable in variables)
        if key and key not in FORGOTTEN
    }
    environment.update((key, encode_argument(value)) for key, value in new.items())
    # What root had open beside 0, 1, 2 is not this user's.
    posix.closerange(3, LAST_FD)
    argv = [sys.executable, "-I", "-S", "-X", "utf8", sys.argv[0], str(ignored), *arguments]
    try:
        posix.execve(sys.executable, argv, environment)
    except OSError as error:
        reason = posix.strerror(error.errno or 0)
        reason = f"{reason}: {escape(sys.executable)}; that user must be able to execute it"
        raise Failure(what + reason, exits.REFUSED) from None
