"""``ral completion``: completion scripts, made from the table of options and the help texts, so that they
say what the client takes."""

from ral_client.completion_templates import BASH, FISH, ZSH
from ral_client.main import CHOICES, OPTIONS, SHORT
from ral_client.usage import COMMANDS, GENERAL

VALUES = {
    "project": "directory",
    "as-user": "user",
    "signal": "signal",
    "profile": "word",
}
"""What completes the value of an option."""
OPERANDS = {
    "run": "command",
    "attach": "session",
    "logs": "session",
    "kill": "session",
    "explain": "session-or-file",
}
"""What completes the operands of a command; nothing for those that are not here."""

SIGNALS = "TERM INT HUP QUIT USR1 USR2 TSTP CONT WINCH KILL"
"""Those that do something to a session (ral-kill(1))."""
LIST_SESSIONS = "command ral broker status >/dev/null 2>&1 && command ral sessions 2>/dev/null"
"""Lists the sessions without starting a broker: a key that completes must change nothing."""


def commands() -> "list[tuple[str, str]]":
    """Every command with its description, in the order of the help text."""
    found = []
    for line in GENERAL.splitlines():
        name, _, what = line.strip().partition(" ")
        if line.startswith("  ") and name in COMMANDS:
            found.append((name, what.strip()))
    return found


def words_after(command: str) -> "list[tuple[str, str]]":
    """The words that a command begins with (``show``), with their descriptions."""
    if command not in CHOICES:
        return []
    described = dict(_columns(command, ""))
    return [(word, described.get(word, "")) for word in CHOICES[command]]


def options_of(verb: str) -> "list[tuple[str, str, bool]]":
    """Long options of a command (``config show``): name, description, whether it takes a value."""
    flags, valued = (names.split() for names in OPTIONS[verb])
    described = dict(_columns(verb.partition(" ")[0], "--"))
    return [
        (name, described.get(name, "describe the command" if name == "help" else ""), name in valued)
        for name in [*flags, *valued]
    ]


def short_of(name: str) -> str:
    """The letter of an option, or nothing."""
    return next((letter for letter, long in SHORT.items() if long == name), "")


def _columns(command: str, mark: str) -> "list[tuple[str, str]]":
    """First words of a help text's lists with what is said of them, whole sentences only at their
    beginning: a completion has room for some words."""
    found = []
    for line in COMMANDS[command].splitlines():
        left, _, what = line.strip().partition("  ")
        if not what or line.startswith("       "):
            continue
        name = left.rpartition(", ")[2].split(" ")[0]
        if name.startswith(mark):
            found.append((name.removeprefix(mark), what.strip().split(";")[0].split(". ")[0]))
    return found


def _quoted(text: str) -> str:
    """A word for a shell, in single quotes."""
    return "'" + text.replace("'", "'\\''") + "'"


SHELLS = CHOICES["completion"]


def script(shell: str) -> str:
    """The completion script for ``bash``, ``zsh`` or ``fish``."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()


def _bash() -> str:
    verbs = []
    for verb in OPTIONS:
        if verb in CHOICES:
            continue
        options = options_of(verb)
        names = [f"--{name}" for name, _, _ in options]
        names += [f"-{short_of(name)}" for name, _, _ in options if short_of(name)]
        valued = [name for name, _, takes in options if takes]
        verbs.append(
            f"        {_quoted(verb)}) options={_quoted(' '.join(names))} "
            f"valued={_quoted(' '.join(valued))} kind={OPERANDS.get(verb, '')} ;;"
        )
    choices = [f"        {name}) sub={_quoted(' '.join(words))} ;;" for name, words in CHOICES.items()]
    values = [f'            {name}) _ral_complete {kind} "$current" ;;' for name, kind in VALUES.items()]
    return BASH % {
        "signals": SIGNALS,
        "list": LIST_SESSIONS,
        "commands": " ".join(name for name, _ in commands()),
        "choices": "\n".join(choices),
        "verbs": "\n".join(verbs),
        "values": "\n".join(values),
    }


ZSH_VALUES = {
    "directory": "_directories",
    "user": "_users",
    "signal": f"({SIGNALS})",
    "word": " ",
}
ZSH_OPERANDS = {
    "command": ("'(-)1:command: _command_names -e'", "'*::argument: _normal'"),
    "session": ("'1:session:_ral_sessions'",),
    "session-or-file": ("'1:path or session:_ral_session_or_file'", "'2:path:_files'"),
}


def _zsh_text(text: str) -> str:
    return text.translate({ord(c): "\\" + c for c in "[]:\\"}).replace("'", "'\\''")


def _zsh_arguments(verb: str) -> str:
    parts = []
    for name, what, takes in options_of(verb):
        value = f":{name}:{ZSH_VALUES[VALUES[name]]}" if takes else ""
        equals = "=" if takes else ""
        said = f"[{_zsh_text(what)}]{value}"
        short = short_of(name)
        parts.append(
            f"'(-{short} --{name})'{{-{short},--{name}{equals}}}'{said}'"
            if short
            else f"'--{name}{equals}{said}'"
        )
    parts += ZSH_OPERANDS.get(OPERANDS.get(verb, ""), ())
    return "_arguments " + " ".join(parts)


def _zsh() -> str:
    verbs = []
    for command, _ in commands():
        words = words_after(command)
        if not words:
            verbs.append(f"                {command}) {_zsh_arguments(command)} ;;")
            continue
        described = " ".join(f"'{word}:{_zsh_text(what)}'" if what else word for word, what in words)
        lines = [
            f"                {command})",
            "                    if ((CURRENT == 2)); then",
            f"                        words_after=({described})",
            "                        _describe -t words word words_after",
            "                    else",
            "                        shift words; ((CURRENT--))",
            "                        case $words[1] in",
        ]
        lines += [
            f"                            {word}) {_zsh_arguments(f'{command} {word}')} ;;"
            for word, _ in words
            if f"{command} {word}" in OPTIONS
        ]
        lines += ["                        esac", "                    fi ;;"]
        verbs.append("\n".join(lines))
    return ZSH % {
        "list": LIST_SESSIONS,
        "commands": "\n".join(f"        '{name}:{_zsh_text(what)}'" for name, what in commands()),
        "verbs": "\n".join(verbs),
    }


FISH_VALUES = {
    "directory": " -xa '(__fish_complete_directories)'",
    "user": " -xa '(__fish_complete_users)'",
    "signal": f" -xa '{SIGNALS}'",
    "word": " -x",
}
FISH_OPERANDS = {
    "command": "-n '__ral_at run; and not __ral_ran' -xa '(__fish_complete_command)'",
    "session": "-n '__ral_at %s; and test (count (commandline -opc)) = 2' -xa '(__ral_sessions)'",
    "session-or-file": "-n '__ral_at %s' -Fa '(__ral_sessions)'",
}


def _fish() -> str:
    valued = " ".join(f"--{name}" for name, _, takes in options_of("run") if takes)
    lines = [FISH % {"list": LIST_SESSIONS.replace("&&", "; and"), "valued": valued}]
    for command, what in commands():
        lines.append(
            f"complete -c ral -n 'test (count (commandline -opc)) = 1' -a {command} -d {_quoted(what)}\n"
        )
        for word, said in words_after(command):
            described = f" -d {_quoted(said)}" if said else ""
            lines.append(
                f"complete -c ral -n '__ral_at {command}; and test (count (commandline -opc)) = 2' "
                f"-a {word}{described}\n"
            )
    for verb in OPTIONS:
        at = f"__ral_at {verb}; and not __ral_ran" if verb == "run" else f"__ral_at {verb}"
        for name, what, takes in options_of(verb):
            short = f" -s {short_of(name)}" if short_of(name) else ""
            described = f" -d {_quoted(what)}" if what else ""
            value = FISH_VALUES[VALUES[name]] if takes else ""
            lines.append(f"complete -c ral -n '{at}'{short} -l {name}{described}{value}\n")
        if verb in OPERANDS:
            operand = FISH_OPERANDS[OPERANDS[verb]]
            lines.append(f"complete -c ral {operand % verb if '%s' in operand else operand}\n")
    lines.append("complete -c ral -n __ral_ran -xa '(__fish_complete_subcommand --fcs-skip=2)'\n")
    return "".join(lines)
