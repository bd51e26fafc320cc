"""What a user's client asks of the broker through the control socket, and what it is answered.

Every message is a MessagePack map with the key ``t`` as its tag. The broker decodes requests strictly
(unknown fields refused); clients decode answers leniently, so that a newer broker may add fields. New fields
get a default and go last. Paths, arguments and environment are ``bin``: they are bytes in Linux.

A connection starts with one Hello. Its frames and their descriptors are described in docs/protocol.md.
"""

from __future__ import annotations

import msgspec

MAX_PAYLOAD = 6 << 20
"""Bytes of argv and environment together, at most: the size of the payload memfd."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    """Base of everything that travels in a frame from the client."""


class Answer(msgspec.Struct, frozen=True, tag_field="t"):
    """Base of everything that travels in a frame from the broker."""


class Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Content of the payload memfd: the command and the caller's whole environment, unfiltered."""

    argv: list[bytes]
    environment: list[bytes]


class WindowSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Size of the caller's terminal (ioctl_tty(2), TIOCGWINSZ)."""

    rows: int
    columns: int
    x_pixels: int = 0
    y_pixels: int = 0


class TerminalModes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Modes of the caller's terminal, copied to the session's (termios(3)); ``cc`` is one byte a control
    character."""

    iflag: int
    oflag: int
    cflag: int
    lflag: int
    cc: bytes


class Hello(Message, tag="hello", frozen=True):
    """First frame of every connection. Answered only by Restarting or Refused."""

    proto: int
    version: str


class Run(Message, tag="run", frozen=True):
    """Start a session. Descriptors: payload memfd, working directory, project directory, then those of 0, 1,
    2 that are not terminals, in order.

    ``project`` and ``cwd`` are physical absolute paths; the broker walks to them itself and compares
    identity with the descriptors. ``terminals`` says which of 0, 1, 2 are terminals of the caller.
    ``ignored`` has bit n-1 set for each signal n that the caller ignores. Answered by Started, Refused, or
    with ``dry_run`` by PlanArgv, PlanLine…, Done.
    """

    project: bytes
    cwd: bytes
    terminals: tuple[bool, bool, bool]
    detach: bool = False
    dry_run: bool = False
    profile: str | None = None
    size: WindowSize | None = None
    modes: TerminalModes | None = None
    ignored: int = 0
    overrides: dict[str, str] = {}


class Sessions(Message, tag="sessions", frozen=True):
    """List the live sessions, with ``ended`` also those that ended in the last 24 hours. SessionLine…,
    Done."""

    ended: bool = False


class Kill(Message, tag="kill", frozen=True):
    """Send a signal to a session's program; without one: TERM, and KILL five seconds later. Done once it has
    been sent, and without a signal once the session has ended."""

    session: str
    signal: int | None = None


class Logs(Message, tag="logs", frozen=True):
    """Events of a session (EventLine…), then LogFiles with the descriptors of its captured output, oldest
    first, then Done; with ``follow`` further EventLine until the session has ended, then Done."""

    session: str
    follow: bool = False


class Attach(Message, tag="attach", frozen=True):
    """Find the session a unique prefix names and, where it is detached, get a connection to its holder.
    Answered by AttachTo with one descriptor, a connection to the holder, or Refused."""

    session: str


class Status(Message, tag="status", frozen=True):
    """State of the broker: BrokerStatus."""


class Stop(Message, tag="stop", frozen=True):
    """Stop the broker; its sessions go on and the next broker finds them. Done, then the connection
    closes."""


class Config(Message, tag="config", frozen=True):
    """Read the configuration of a project as a launch would. Descriptors: payload memfd (its argv is empty),
    project directory. ConfigFiles, ProblemLine…, then SettingLine each with OriginLine…, Done.

    With ``check`` no settings, and an error in a file is a ProblemLine and no refusal.
    """

    project: bytes
    check: bool = False
    profile: str | None = None
    overrides: dict[str, str] = {}


class Explain(Message, tag="explain", frozen=True):
    """Say what a session shows at an absolute path, and why: Explained.

    With ``session`` of a running one, by the plan it was started with; no descriptors. With ``project`` of
    one that were started now, with the descriptors of Config. Exactly one of the two is named.
    """

    path: bytes
    project: bytes | None = None
    session: str | None = None
    profile: str | None = None
    overrides: dict[str, str] = {}


Request = Run | Sessions | Kill | Logs | Attach | Status | Stop | Config | Explain


class Started(Answer, tag="started", frozen=True):
    """The sandbox stands and the program is being executed. Not detached, descriptors: status file
    (read-only), pidfd of the monitor, pidfd of the sandbox's init, the lease (docs/protocol.md), and the pty
    master if there is one. Detached: none; the program's start was confirmed.

    ``warnings`` are for every caller, ``notices`` not for one who wants quiet."""

    id: str
    detached: bool = False
    terminal: bool = False
    notices: list[str] = []
    warnings: list[str] = []


class Refused(Answer, tag="refused", frozen=True):
    """Nothing was done. ``kind``: ``refused`` (valid but forbidden or impossible), ``host`` (this host
    cannot), ``request`` (the client is at fault), ``start`` (the program could not be executed),
    ``internal`` (a fault of the broker, logged there). ``status`` is the exit status the client should end
    with."""

    kind: str
    message: str
    status: int


class Restarting(Answer, tag="restarting", frozen=True):
    """The broker is older than the client and executes itself anew: connect again."""

    version: str


class PlanArgv(Answer, tag="argv", frozen=True):
    """What would be spawned."""

    argv: list[bytes]
    options: list[bytes]


class PlanLine(Answer, tag="plan", frozen=True):
    """One operation of a plan. ``why`` names the setting or rule that put it there."""

    op: str
    dest: bytes
    source: bytes | None
    mode: str
    layer: str
    why: str


class SessionLine(Answer, tag="session", frozen=True):
    """One session. ``started`` and ``ended`` are RFC 3339; ``exit`` is the status of an ended one."""

    id: str
    kind: str
    project: bytes
    command: list[bytes]
    pid: int
    bwrap_pid: int
    started: str
    state: str
    guard: str
    version: str
    exit: int | None = None
    lost: bool = False
    ended: str | None = None


class EventLine(Answer, tag="event", frozen=True):
    """Something that happened to a session: RFC 3339 time and a sentence."""

    time: str
    text: str


class LogFiles(Answer, tag="log_files", frozen=True):
    """Descriptors of captured output travel with this frame, oldest first."""

    count: int


class AttachTo(Answer, tag="attach_to", frozen=True):
    """Descriptor: a connection to the session's holder (docs/protocol.md)."""

    id: str


class Notice(Answer, tag="notice", frozen=True):
    """A sentence for the user of a running session."""

    text: str


class BrokerStatus(Answer, tag="broker", frozen=True):
    """State of the broker. ``stages``: microseconds that each stage of the last launch took, in order."""

    version: str
    pid: int
    started: str
    sessions: int
    activated: bool
    runtime_dir: bytes
    stages: list[tuple[str, int]] = []


class ConfigFiles(Answer, tag="config_files", frozen=True):
    """The files that were read, weakest first, and the profile that was chosen."""

    files: list[bytes]
    profile: str | None


class SettingLine(Answer, tag="setting", frozen=True):
    """A setting; an OriginLine follows for its value, or for each element of a list. ``state``: ``built`` or
    ``refused`` (docs/settings.md). ``default``: the value is the default, whatever it came from."""

    name: str
    is_list: bool
    state: str
    default: bool


class OriginLine(Answer, tag="origin", frozen=True):
    """Part of the effective value of the last SettingLine, as TOML text (no UTF-8 where the user's home or
    project is none), and the layer it came from; with the line of its key where that is a file."""

    value: bytes
    layer: str
    line: int | None = None


class ProblemLine(Answer, tag="problem", frozen=True):
    """Something in a configuration file. ``severity``: ``error`` (no session would start) or ``warning``;
    ``line`` counts from 1."""

    severity: str
    file: str | None
    line: int | None
    key: str | None
    text: str


class Explained(Answer, tag="explained", frozen=True):
    """What is at a path inside. ``state``: ``writable``, ``read-only``, ``masked``, ``own``, ``absent``.

    ``dest``, ``source``, ``mode``, ``layer``: the operation of the plan that decides (PlanLine); None where
    none does. ``why``: what put it there; ``setting``: the one that would change it; ``origin``: the layer
    of the configuration that is responsible, with its line. ``text``: all of it in sentences, a line each.
    """

    path: bytes
    state: str
    dest: bytes | None
    source: bytes | None
    mode: str | None
    layer: str | None
    why: str | None
    setting: str | None
    origin: str | None
    text: str


class Done(Answer, tag="done", frozen=True):
    """End of a stream of answers."""


AnswerUnion = (
    Started | Refused | Restarting | PlanArgv | PlanLine | SessionLine | EventLine | LogFiles | AttachTo |
    Notice | BrokerStatus | ConfigFiles | SettingLine | OriginLine | ProblemLine | Explained |
    Done
)  # fmt: skip
