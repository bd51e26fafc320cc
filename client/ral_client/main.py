"""From the command line to a verb, from its end to an exit status. The parser is by hand: argparse is 15
ms."""

import _signal
import posix
import sys

from ral_client.call import Failure, escape, put, say
from ral_protocol import exits, wire

OPTIONS = {
    "run": ("quiet detach dry-run json help", "project profile as-user"),
    "sessions": ("all json help", ""),
    "attach": ("read-only help", ""),
    "logs": ("follow help", ""),
    "kill": ("help", "signal"),
    "config show": ("json help", "project profile"),
    "config check": ("json help", "project profile"),
    "config init": ("help", ""),
    "config": ("help", ""),
    "explain": ("json help", "project profile"),
    "completion": ("help", ""),
    "doctor": ("json help", ""),
    "broker run": ("help", ""),
    "broker status": ("json help", ""),
    "broker stop": ("help", ""),
    "broker": ("help", ""),
}
"""Of each command: its flags, and its options that take a value."""
CHOICES = {
    "broker": ("run", "status", "stop"),
    "config": ("show", "check", "init"),
    "completion": ("bash", "zsh", "fish"),
}
"""Of these, one of the words has to follow."""
SHORT = {"q": "quiet", "d": "detach", "h": "help"}


class Usage(Exception):
    """The command line is wrong; the text says how."""


def main(argv: "list[str]") -> None:
    """Do what ``argv`` says and end the process: ``[start.py, IGNORED, COMMAND, ARGUMENT…]``.

    IGNORED is the mask of signals that the caller ignores (bit n-1 for signal n), decimal or with 0x:
    Python has
    changed two of them before any of our code runs.
    """
    # A fault of the client must not look like the program's exit status 1.
    sys.excepthook = _fault
    fill_standard_descriptors()
    posix._exit(_main(argv))


def _main(argv: "list[str]") -> int:
    try:
        try:
            # 9 and 19 cannot be ignored.
            ignored = int(argv[1], 0) & ~(1 << 8 | 1 << 18)
        except (IndexError, ValueError):
            raise Usage(
                "the first argument of start.py is the mask of ignored signals; run `ral` instead"
            ) from None
        return _command(argv[2:], ignored)
    except Usage as wrong:
        say(str(wrong))
        return exits.USAGE
    except Failure as failure:
        if failure.message:
            say(failure.message)
        return failure.status
    except wire.WireError as error:
        say(f"no answer from the broker that could be read: {error}; see `ral broker status`")
        return exits.UNAVAILABLE
    except BrokenPipeError:
        return exits.FAILED
    except OSError as error:
        name = f"{escape(str(error.filename))}: " if error.filename is not None else ""
        say(f"{name}{posix.strerror(error.errno or 0)}")
        return exits.REFUSED if argv[2:3] == ["run"] else exits.FAILED


def _fault(_: "type[BaseException]", error: BaseException, _trace: object) -> None:
    from traceback import format_exception

    put(2, "".join(format_exception(error)).encode("utf-8", "backslashreplace"))
    say("a fault of the client; please report it")
    posix._exit(exits.REFUSED)


def _command(arguments: "list[str]", ignored: int) -> int:
    verb = arguments[0] if arguments else ""
    if verb == "run":
        return _run(arguments[1:], ignored)
    if verb in ("--version", "-V"):
        put(1, f"ral {exits.VERSION}\n".encode())
        return exits.OK
    if verb in ("", "--help", "-h"):
        from ral_client.usage import GENERAL

        put(1 if verb else 2, GENERAL.encode())
        return exits.OK if verb else exits.USAGE
    if verb.startswith("-"):
        raise Usage(f"{escape(verb)} is not an option; see `ral --help`")
    if verb not in OPTIONS or " " in verb:
        raise Usage(f"{escape(verb)}: unknown command; see `ral --help`")
    rest = arguments[1:]
    if rest and f"{verb} {rest[0]}" in OPTIONS:
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    if verb != "attach":
        # These die like any program of the user's; Python's own handlers print a traceback.
        for number in (_signal.SIGINT, _signal.SIGPIPE):
            if not ignored >> (number - 1) & 1:
                _signal.signal(number, _signal.SIG_DFL)
    options, operands = parse(verb, rest)
    if "help" in options:
        return _help(verb)
    return _other(verb, options, operands, ignored)


def _run(arguments: "list[str]", ignored: int) -> int:
    options, command = parse("run", arguments)
    if "help" in options:
        return _help("run")
    if not command:
        raise Usage("run: no command; see `ral run --help`")
    if "json" in options and not ("dry-run" in options or "detach" in options):
        raise Usage("run: --json needs --dry-run or --detach; the output is the command's own")
    if "as-user" in options:
        from ral_client.become import become

        user = options.pop("as-user")
        again = ["run", *(f"--{name}={value}" if value else f"--{name}" for name, value in options.items())]
        become(user, ignored, [*again, "--", *command])
    from ral_client.run import run

    return run(options, command, ignored)


def _help(verb: str) -> int:
    from ral_client.usage import COMMANDS

    put(1, COMMANDS[verb.partition(" ")[0]].encode())
    return exits.OK


def _other(verb: str, options: "dict[str, str]", operands: "list[str]", ignored: int) -> int:
    if verb == "explain":
        return _explain(options, operands)
    words = CHOICES.get(verb)
    if words and (not operands or operands[0] not in words):
        listed = " or ".join((", ".join(words[:-1]), words[-1]))
        what = f"{escape(operands[0])} is not {listed}" if operands else f"{listed} is missing"
        raise Usage(f"{verb}: {what}; see `ral {verb} --help`")
    wanted = 1 if verb in ("attach", "logs", "kill", "completion") else 0
    if len(operands) > wanted:
        raise Usage(f"{verb}: one argument too many: {escape(operands[wanted])}; see `ral {verb} --help`")
    if len(operands) < wanted:
        raise Usage(f"{verb}: the id of a session is missing; `ral sessions` lists them")
    if verb == "doctor" or verb == "broker run":
        return _become_broker(verb.rpartition(" ")[2], options)
    if verb == "completion":
        from ral_client.completion import script

        put(1, script(operands[0]).encode())
        return exits.OK
    if verb.startswith("config "):
        from ral_client import config

        return config.init() if verb == "config init" else config.show(options, check=verb == "config check")
    if verb == "attach":
        from ral_client.attach import attach

        return attach(options, session_id(operands[0]), ignored)
    if verb == "logs":
        from ral_client.logs import logs

        return logs(options, session_id(operands[0]))
    from ral_client import show

    if verb == "kill":
        number = signal_number(options["signal"]) if "signal" in options else None
        return show.kill(session_id(operands[0]), number)
    if verb == "sessions":
        return show.sessions(options)
    return show.broker_stop() if verb == "broker stop" else show.broker_status(options)


def _explain(options: "dict[str, str]", operands: "list[str]") -> int:
    if not 1 <= len(operands) <= 2 or not operands[-1]:
        what = f"one argument too many: {escape(operands[2])}" if operands[2:] else "a path is missing"
        raise Usage(f"explain: {what}; see `ral explain --help`")
    if len(operands) == 2 and ("project" in options or "profile" in options):
        raise Usage(
            "explain: a session has its project and profile already; leave out its id, or the option"
        )
    from ral_client.explain import explain

    return explain(options, operands[-1], session_id(operands[0]) if len(operands) == 2 else None)


def _become_broker(verb: str, options: "dict[str, str]") -> int:
    from ral_client.spawn import broker_program

    json = ["--json"] if "json" in options else []
    posix.execv(sys.executable, [sys.executable, "-I", broker_program(), verb, *json])


def parse(verb: str, arguments: "list[str]") -> "tuple[dict[str, str], list[str]]":
    """Split into options (a flag has an empty value) and operands. Those of ``run`` end at the first
    operand."""
    flags, valued = (names.split() for names in OPTIONS[verb])
    options: dict[str, str] = {}
    operands: list[str] = []
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        if argument == "--":
            operands += reversed(waiting)
            break
        if argument == "-" or not argument.startswith("-"):
            operands.append(argument)
            if verb == "run":
                operands += reversed(waiting)
                break
            continue
        if not argument.startswith("--"):
            letters = argument[1:]
            if not all(SHORT.get(letter) in flags for letter in letters):
                raise Usage(f"{verb}: {escape(argument)} is not an option; see `ral {verb} --help`")
            options.update((SHORT[letter], "") for letter in letters)
            continue
        name, assigned, value = argument[2:].partition("=")
        if name in flags:
            if assigned:
                raise Usage(f"{verb}: --{name} takes no value")
            options[name] = ""
        elif name in valued:
            if not assigned:
                if not waiting:
                    raise Usage(f"{verb}: --{name} needs a value")
                value = waiting.pop()
            if not value:
                raise Usage(f"{verb}: the value of --{name} is empty")
            options[name] = value
        else:
            raise Usage(f"{verb}: --{escape(name)} is not an option; see `ral {verb} --help`")
    return options, operands


def session_id(prefix: str) -> str:
    """Check that ``prefix`` may begin an id. Raises Failure."""
    if not prefix or len(prefix) > 8 or prefix.strip("0123456789abcdef"):
        raise Failure(
            f"no session is named '{escape(prefix)}': an id has up to 8 hex digits (see `ral sessions`)",
            exits.FAILED,
        )
    return prefix


def signal_number(name: str) -> int:
    """The number of a signal given as ``TERM``, ``SIGTERM``, ``term`` or ``15``. Raises Usage."""
    upper = name.upper().removeprefix("SIG")
    # SIG_DFL and its like are constants of the module too, as is the number of signals.
    found = getattr(_signal, f"SIG{upper}", None) if upper.isalnum() else None
    number = int(upper) if upper.isascii() and upper.isdigit() else found
    if not isinstance(number, int) or not 0 < number < _signal.NSIG:
        raise Usage(f"kill: {escape(name)} is not a signal; `kill -l` lists them")
    return number


def fill_standard_descriptors() -> None:
    """Put /dev/null where 0, 1 or 2 is closed, before anything else takes the number."""
    for fd in (0, 1, 2):
        try:
            posix.fstat(fd)
        except OSError as error:
            from errno import EBADF

            if error.errno == EBADF:
                posix.set_inheritable(
                    posix.open("/dev/null", posix.O_WRONLY if fd else posix.O_RDONLY), True
                )
