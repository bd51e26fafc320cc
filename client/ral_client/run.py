"""``ral run``: hands the caller's command to the broker."""

import _signal
import posix
import sys

from ral_client.answer import Answer
from ral_client.call import Failure, ask, escape, refusal, say
from ral_client.signals import Signals
from ral_protocol import exits, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ral_client.standby import Standby

S_IFMT, S_IFREG, S_IFIFO = 0o170000, 0o100000, 0o010000
OVERRIDES = (
    "PRIVATE_TMP", "PRIVATE_IPC", "FILTER_PASSWD", "NETWORK_FILTER_MODE", "NETWORK_FILTER_FALLBACK",
    "NETWORK_MAIL_BLOCK", "HOME_ACCESS", "SANDBOX_BACKEND", "SANDBOX_QUIET", "SANDBOX_NPROC_LIMIT",
    "SLURM_SCOPE", "MOUNT_GUARD", "MOUNT_GUARD_INTERVAL", "CLEANUP_MATERIALIZED_BLOCKED_FILES",
    "LANDLOCK_REQUIRED_ABI", "LANDLOCK_HARD_REQUIREMENT",
)  # fmt: skip
"""Settings that the caller's environment may override; an empty value is none."""
CONF_VARIABLES = (b"RAL_CONF=", b"SANDBOX_CONF=")
"""Name another user file; the second is the first one's older name."""


def caller_environment() -> "list[bytes]":
    """The environment as it was given to us: Python's own start adds LC_CTYPE to ``posix.environ``."""
    fd = posix.open("/proc/self/environ", posix.O_RDONLY)
    parts = []
    # Memory for more is mapped, not taken from the heap, at four times the price of all this.
    while part := posix.read(fd, 1 << 16):
        parts.append(part)
    posix.close(fd)
    return [
        _absolute(entry) if entry.startswith(CONF_VARIABLES) else entry
        for entry in b"".join(parts).split(b"\0")
        if entry
    ]


def _absolute(entry: bytes) -> bytes:
    """A variable that names a file, with its absolute name: only we know the caller's directory."""
    name, _, path = entry.partition(b"=")
    return entry if not path or path.startswith(b"/") else name + b"=" + posix.getcwdb() + b"/" + path


def encode_argument(argument: str) -> bytes:
    """The bytes of an argument, as they were before the interpreter decoded it."""
    return argument.encode(sys.getfilesystemencoding(), "surrogateescape")


def payload_memfd(argv: "list[bytes]", environment: "list[bytes]") -> int:
    """A memory file with a command and its caller's environment."""
    fd = posix.memfd_create("ral-payload", posix.MFD_CLOEXEC | posix.MFD_ALLOW_SEALING)
    view = memoryview(wire.pack([argv, environment]))
    while view:
        view = view[posix.write(fd, view) :]
    return fd


def open_directory(path: bytes, what: str) -> "tuple[int, bytes]":
    """A handle on a directory and its physical path. Raises Failure; ``what`` names it there."""
    try:
        fd = posix.open(path, posix.O_PATH | posix.O_DIRECTORY)
    except OSError as error:
        reason = posix.strerror(error.errno or 0)
        raise Failure(f"{what} {escape(path)} refused: {reason}", exits.REFUSED) from None
    physical = posix.readlink(b"/proc/self/fd/%d" % fd)
    if not posix.fstat(fd).st_nlink:
        raise Failure(
            f"{what} {escape(physical)} refused: it was removed; change to another one", exits.REFUSED
        )
    return fd, physical


def overrides_of(environment: "list[bytes]") -> "dict[str, object]":
    """The settings that an environment overrides. Raises Failure for one that is no text."""
    found: dict[str, object] = {}
    for entry in environment:
        name, _, value = entry.partition(b"=")
        if value and name.decode("ascii", "replace") in OVERRIDES:
            try:
                found[name.decode()] = value.decode()
            except UnicodeDecodeError:
                raise Failure(f"{name.decode()} refused: its value is not UTF-8", exits.REFUSED) from None
    return found


def _request(
    options: "dict[str, str]", command: "list[str]", ignored: int, terminals: "tuple[bool, ...]"
) -> "tuple[dict[str, object], tuple[int, ...]]":
    """The request and the descriptors that go with it (docs/protocol.md, section 1)."""
    environment = caller_environment()
    cwd_fd, cwd = open_directory(b".", "working directory")
    project_fd, project = cwd_fd, cwd
    if "project" in options:
        project_fd, project = open_directory(encode_argument(options["project"]), "project")
    request: dict[str, object] = {
        "t": "run",
        "project": project,
        "cwd": cwd,
        "terminals": terminals,
        "detach": "detach" in options,
        "dry_run": "dry-run" in options,
        "profile": options.get("profile"),
        "ignored": ignored,
        "overrides": overrides_of(environment),
    }
    payload_fd = payload_memfd([encode_argument(argument) for argument in command], environment)
    kept = [fd for fd in (0, 1, 2) if not terminals[fd]]
    return request, (payload_fd, cwd_fd, project_fd, *kept)


def run(options: "dict[str, str]", command: "list[str]", ignored: int) -> int:
    """Run a command in a sandbox; returns the exit status.

    ``ignored`` has bit n-1 set for each signal n that the caller ignores.
    """
    if "detach" in options or "dry-run" in options:
        return _run_unattended(options, command, ignored)
    terminals = tuple(posix.isatty(fd) for fd in (0, 1, 2))
    signals = Signals(ignored)
    request, fds = _request(options, command, ignored, terminals)
    pump = None
    if True in terminals:
        from ral_client.terminal import Pump, Screen

        pump = Pump(Screen(terminals))
        request["size"], request["modes"] = pump.screen.size(), pump.screen.modes()
    # The import takes less time than the broker, so nobody waits for it.
    connection, answer = ask(request, fds, meanwhile=_standby)
    if answer.kind != "started":
        raise refusal(answer)
    _show_notices(options, answer)
    return _standby()(connection, answer, signals, pump, command[0]).wait()


def _standby() -> "type[Standby]":
    from ral_client.standby import Standby

    return Standby


def _run_unattended(options: "dict[str, str]", command: "list[str]", ignored: int) -> int:
    if not ignored >> (_signal.SIGINT - 1) & 1:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    # A detached program gets a terminal of its own: `id=$(ral run -d …)` must not wait until it closes our
    # output.
    # Only input that was prepared for it is handed over.
    prepared = posix.fstat(0).st_mode & S_IFMT in (S_IFREG, S_IFIFO)
    connection, answer = ask(*_request(options, command, ignored, (not prepared, True, True)))
    from ral_client.show import show_id, show_plan

    if answer.kind == "argv":
        return show_plan(connection, answer, as_json="json" in options)
    if answer.kind != "started":
        raise refusal(answer)
    _show_notices(options, answer)
    show_id(answer.text("id"), as_json="json" in options)
    return exits.OK


def _show_notices(options: "dict[str, str]", started: Answer) -> None:
    for warning in started.texts("warnings"):
        say(warning)
    if "quiet" not in options:
        for notice in started.texts("notices"):
            say(notice)
