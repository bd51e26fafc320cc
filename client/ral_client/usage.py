"""Help texts. Only imported when one is asked for."""

GENERAL = """\
usage: ral COMMAND [OPTION…] [ARGUMENT…]

Runs coding agents and other programs in sandboxes.

  run         run a command in a sandbox
  sessions    list the sessions
  attach      attach this terminal to a detached session
  logs        show the events and the output of a session
  kill        end a session, or send its program a signal
  config      show, check or begin the configuration
  explain     say why a path is visible, writable, masked or absent inside
  doctor      say what this host can do, what is missing, and what mends it
  broker      run, ask or stop the broker of this user
  completion  print a completion script for a shell

`ral COMMAND --help` describes a command, `ral --version` prints the version.
"""

COMMANDS = {
    "run": """\
usage: ral run [OPTION…] [--] COMMAND [ARGUMENT…]

Runs COMMAND in a sandbox around the project, and ends with its exit status.
Options end at COMMAND.

  -q, --quiet       no notices about the session
  -d, --detach      start it, print its id and return; see `ral attach`
  --project DIR     the project (default: the working directory)
  --profile NAME    this profile instead of the one that COMMAND's name chooses
  --as-user NAME    root only: become that user first
  --dry-run         only show what would be mounted and started
  --json            with --dry-run or --detach: print a JSON document

Exit status: the command's own, or 128 plus the signal that ended it; 127 it
does not exist inside, 126 it cannot be executed, 137 its end was lost, 78 ral
refused, 69 no broker can be reached or started, 2 wrong usage.
""",
    "sessions": """\
usage: ral sessions [--all] [--json]

Lists the live sessions.

  --all     also those that ended in the last 24 hours
  --json    print a JSON document
""",
    "attach": """\
usage: ral attach [--read-only] ID

Attaches this terminal to the detached session whose id begins with ID.
Ctrl-P Ctrl-Q detaches, and the session goes on. The exit status is the
program's if it ends meanwhile, and 0 after detaching.

  --read-only    only watch; any number of clients may. Ctrl-C detaches too
""",
    "logs": """\
usage: ral logs [--follow] ID

Prints the events of a session to standard error and the captured output of a
detached one to standard output.

  --follow    go on until the session has ended
""",
    "kill": """\
usage: ral kill [--signal NAME] ID

Ends a session: TERM to its program, and KILL five seconds later. Returns when
it has ended.

  --signal NAME    only send this signal (with or without SIG, or a number)
""",
    "config": """\
usage: ral config show [--project DIR] [--profile NAME] [--json]
       ral config check [--project DIR] [--profile NAME] [--json]
       ral config init

show     print the value of every setting, and the layer it comes from
check    print what is wrong in the files; exit status 1 if no session would
         start, 0 with warnings only
init     write a commented template where your configuration file is looked for;
         a file that exists is left alone

  --project DIR     as in this project (default: the working directory)
  --profile NAME    as with this profile
  --json            print a JSON document
""",
    "explain": """\
usage: ral explain [--project DIR] [--profile NAME] [--json] PATH
       ral explain [--json] ID PATH

Says whether a session shows PATH read-only, writable, masked or not at all, by
which rule, and which setting would change it: of a session that were started
now, or of the running one whose id begins with ID.

  --project DIR     as in this project (default: the working directory)
  --profile NAME    as with this profile
  --json            print a JSON document
""",
    "completion": """\
usage: ral completion bash|zsh|fish

Prints a completion script for the shell. For bash: . <(ral completion bash)
""",
    "doctor": """\
usage: ral doctor [--json]

Says what this host can do for a sandbox, what is missing, and the command that
mends it.

  --json    print a JSON document
""",
    "broker": """\
usage: ral broker run
       ral broker status [--json]
       ral broker stop

run      be the broker, in the foreground; `ral run` starts one where needed
status   version, pid and number of sessions. Exit status 1 if none runs
stop     stop it. Its sessions go on, and the next broker finds them

  --json   print a JSON document
""",
}
