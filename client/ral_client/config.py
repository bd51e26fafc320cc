"""``ral config``: the effective settings and where they come from, what is wrong in the files, a first
file."""

import posix
from errno import EEXIST

from ral_client.answer import Answer
from ral_client.call import Connection, Failure, ask, escape, put, refusal, say, session_around
from ral_client.run import (
    CONF_VARIABLES,
    caller_environment,
    encode_argument,
    open_directory,
    overrides_of,
    payload_memfd,
)
from ral_client.show import PLAIN, add_bytes, coloured, show_json, stream, table
from ral_protocol import exits, wire

TEMPLATE = "ral.toml.in"
COLOURS = {"error": "\x1b[31m", "warning": "\x1b[33m"}


def request_of(kind: str, options: "dict[str, str]") -> "tuple[dict[str, object], tuple[int, ...], bytes]":
    """A request about the configuration of a project, its descriptors (docs/protocol.md, section 1), and the
    project."""
    environment = caller_environment()
    try:
        project_fd, project = open_directory(encode_argument(options.get("project", ".")), "project")
        overrides = overrides_of(environment)
    except Failure as failure:
        raise Failure(failure.message, exits.FAILED) from None
    request: dict[str, object] = {
        "t": kind,
        "project": project,
        "profile": options.get("profile"),
        "overrides": overrides,
    }
    return request, (payload_memfd([], environment), project_fd), project


class Read:
    """What the broker found: files, settings with the layers of their values, problems."""

    def __init__(self, connection: Connection, answer: Answer) -> None:
        self.files: list[bytes] = []
        self.profile: str | None = None
        self.settings: list[Setting] = []
        self.problems: list[Answer] = []
        for line in stream(connection, answer):
            if line.kind == "config_files":
                self.files = line.datas("files")
                self.profile = line.text("profile") if line.has("profile") else None
            elif line.kind == "setting":
                self.settings.append(Setting(line))
            elif line.kind == "origin" and self.settings:
                self.settings[-1].origins.append(line)
            elif line.kind == "problem":
                self.problems.append(line)
            else:
                raise refusal(line, exits.FAILED)

    def errors(self) -> bool:
        """Whether no session would start."""
        return any(problem.text("severity") == "error" for problem in self.problems)


class Setting:
    """One setting and the origins of its value: one, or those of the elements of a list."""

    def __init__(self, line: Answer) -> None:
        self.name, self.state = line.text("name"), line.text("state")
        self.is_list, self.default = line.flag("is_list"), line.flag("default")
        self.origins: list[Answer] = []

    def document(self) -> "dict[str, object]":
        """One object of `ral config show --json`."""
        entries = [_entry(origin) for origin in self.origins]
        only = entries[0] if entries else {"value": None, "layer": None}
        return {
            "name": self.name,
            "value": [entry["value"] for entry in entries] if self.is_list else only["value"],
            "layer": None if self.is_list else only["layer"],
            "state": self.state,
            "default": self.default,
            "entries": entries,
        }

    def rows(self) -> "list[list[str]]":
        """Lines of the table, the name only in the first."""
        rows = [["", escape(origin.data("value")), place_of(origin, "layer")] for origin in self.origins]
        rows = rows or [["", "[]" if self.is_list else "-", "built-in" if self.default else "-"]]
        rows[0][0] = escape(self.name)
        return rows


def _entry(origin: Answer) -> "dict[str, object]":
    """One object of a setting's ``entries``."""
    value = _plain(origin.data("value"))
    document: dict[str, object] = {"value": value}
    if isinstance(value, str):
        add_bytes(document, "value", value.encode("utf-8", "surrogateescape"))
    document["layer"] = origin.text("layer")
    document["line"] = origin.number("line") if origin.has("line") else None
    return document


def _plain(toml: bytes) -> object:
    """The value of a TOML text; bytes that are no UTF-8 become surrogates."""
    from tomllib import TOMLDecodeError, loads

    try:
        value: object = loads(f"value = {toml.decode('utf-8', 'surrogateescape')}")["value"]
    except (TOMLDecodeError, KeyError):
        raise wire.WireError("a value is not TOML") from None
    return value


def place_of(line: Answer, key: str) -> str:
    """``FILE:LINE`` as far as it is known, escaped."""
    file = escape(line.text(key)) if line.has(key) else ""
    return f"{file}:{line.number('line')}" if file and line.has("line") else file


def _problem_text(problem: Answer) -> str:
    parts = (
        place_of(problem, "file"),
        problem.text("key") if problem.has("key") else "",
        problem.text("text"),
    )
    return ": ".join(part for part in parts if part)


def _problem_document(problem: Answer) -> "dict[str, object]":
    document: dict[str, object] = {"severity": problem.text("severity")}
    document["file"] = problem.text("file") if problem.has("file") else None
    document["line"] = problem.number("line") if problem.has("line") else None
    document["key"] = problem.text("key") if problem.has("key") else None
    document["text"] = problem.text("text")
    return document


def show(options: "dict[str, str]", *, check: bool) -> int:
    """``ral config show`` and, with ``check``, ``ral config check``."""
    request, fds, project = request_of("config", options)
    read = Read(*ask(request | {"check": check}, fds))
    if "json" in options:
        document: dict[str, object] = {}
        add_bytes(document, "project", project)
        add_bytes(document, "files", read.files)
        document["profile"] = read.profile
        if not check:
            document["settings"] = [setting.document() for setting in read.settings]
        show_json(document | {"problems": [_problem_document(problem) for problem in read.problems]})
    elif check:
        _show_problems(read)
    else:
        _show_settings(read)
    return exits.FAILED if check and read.errors() else exits.OK


def _show_settings(read: Read) -> None:
    for problem in read.problems:
        say(f"{problem.text('severity')}: {_problem_text(problem)}")
    rows = [["SETTING", "VALUE", "LAYER"]]
    for setting in read.settings:
        rows += setting.rows()
    put(1, table(rows).encode())


def _show_problems(read: Read) -> None:
    colours = COLOURS if coloured() else {}
    for problem in read.problems:
        severity = escape(problem.text("severity"))
        if severity in colours:
            severity = colours[severity] + severity + PLAIN
        put(1, f"{severity}: {escape(_problem_text(problem))}\n".encode())
    if not read.errors():
        for file in read.files:
            put(1, f"ok: {escape(file)}\n".encode())
        if not read.files:
            put(1, b"ok: there is no configuration file; the defaults hold (ral config init writes one)\n")


def home() -> bytes:
    """The home directory that the broker goes by too: of the passwd entry, HOME where there is none."""
    import pwd

    try:
        return encode_argument(pwd.getpwuid(posix.getuid()).pw_dir)
    except KeyError:
        return posix.environ.get(b"HOME", b"")


def user_file() -> bytes:
    """Where the user's configuration file is looked for (ral.toml(5)). Raises Failure."""
    environment = caller_environment()
    for name in CONF_VARIABLES:
        for entry in environment:
            if entry.startswith(name) and entry != name:
                return entry[len(name) :]
    base = posix.environ.get(b"XDG_CONFIG_HOME", b"")
    if not base.startswith(b"/"):
        own = home()
        if not own.startswith(b"/"):
            raise Failure(
                "config init: you have no home directory: there is no passwd entry, and HOME is not an "
                "absolute path; set HOME, or name the file with RAL_CONF",
                exits.FAILED,
            )
        base = own.rstrip(b"/") + b"/.config"
    return base.rstrip(b"/") + b"/ral/ral.toml"


def init() -> int:
    """``ral config init``: write the template, unless there is a file."""
    session = session_around()
    if session is not None:
        raise Failure(
            f"config init: refused: this is inside session {session}, and the configuration is not this "
            "program's to begin; run it outside",
            exits.FAILED,
        )
    path = user_file()
    fd = posix.open(__file__.rpartition("/")[0] + "/" + TEMPLATE, posix.O_RDONLY | posix.O_CLOEXEC)
    template = b""
    while part := posix.read(fd, 1 << 16):
        template += part
    posix.close(fd)
    _make_directories(path.rpartition(b"/")[0])
    try:
        fd = posix.open(path, posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_CLOEXEC, 0o600)
    except OSError as error:
        what = (
            "is there already and is left as it is; `ral config check` looks at it"
            if error.errno == EEXIST
            else f"cannot be written: {posix.strerror(error.errno or 0)}"
        )
        raise Failure(f"config init: {escape(path)} {what}", exits.FAILED) from None
    try:
        view = memoryview(template)
        while view:
            view = view[posix.write(fd, view) :]
        posix.fsync(fd)
    except OSError as error:
        # Half a template would be taken for the user's file, and never be written again.
        posix.unlink(path)
        reason = posix.strerror(error.errno or 0)
        raise Failure(f"config init: {escape(path)} cannot be written: {reason}", exits.FAILED) from None
    posix.close(fd)
    put(1, f"{escape(path)}: written; every setting is in it, commented out\n".encode())
    return exits.OK


def _make_directories(path: bytes) -> None:
    missing = []
    while path:
        try:
            posix.stat(path)
            break
        except FileNotFoundError:
            missing.append(path)
            path = path.rpartition(b"/")[0]
    for directory in reversed(missing):
        try:
            posix.mkdir(directory, 0o700)
        except FileExistsError:
            continue
        except OSError as error:
            reason = posix.strerror(error.errno or 0)
            raise Failure(
                f"config init: {escape(directory)} cannot be made: {reason}", exits.FAILED
            ) from None
