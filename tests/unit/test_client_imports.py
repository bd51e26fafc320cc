"""The client starts fast because it imports next to nothing: exact lists, which no machine makes flaky."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.peer import Peer, Session, client_command
from support.terminal import Terminal

COMMON = {
    "_signal",
    "_socket",
    "errno",
    "posix",
    "select",
    "sys",
    "time",
    "ral_client",
    "ral_client.answer",
    "ral_client.call",
    "ral_client.main",
    "ral_client.run",
    "ral_client.standby",
    "ral_protocol",
    "ral_protocol.exits",
    "ral_protocol.wire",
}
ON_A_TERMINAL = {"fcntl", "termios", "ral_client.terminal"}

# Prints sys.modules at the end of a run, at the point where the client leaves.
LIST = """
import posix, sys
before = set(sys.modules)
leave = posix._exit
def report(status):
    posix.write(3, " ".join(sorted(set(sys.modules) - before)).encode())
    leave(status)
posix._exit = report
sys.argv = sys.argv[1:]
sys.path.append(sys.argv[0].rpartition("/ral_client/")[0])
from ral_client.main import main
main(sys.argv)
"""


def bare_modules() -> set[str]:
    listed = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import sys; print(*sys.modules)"],
        capture_output=True,
        check=True,
    )
    return set(listed.stdout.decode().split())


def listing_command(*arguments: str) -> list[str]:
    python, isolated, no_site, *rest = client_command(*arguments)
    return [python, isolated, no_site, "-c", LIST, *rest]


def test_a_run_without_a_terminal_imports_exactly_this(runtime: Path, project: Path) -> None:
    session = Session()
    peer = Peer(runtime, session)
    listed = project / "modules"
    try:
        command = ["sh", "-c", 'exec 3>"$0" "$@"', str(listed), *listing_command("run", "true")]
        environment = {"PATH": os.environ["PATH"], "RAL_RUNTIME_DIR": str(runtime)}
        ended = subprocess.run(
            command, cwd=project, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=20
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
        session.reap()
    finally:
        peer.close()
    assert set(listed.read_text().split()) == COMMON - bare_modules()


def test_a_run_on_a_terminal_imports_exactly_this(runtime: Path, project: Path) -> None:
    session = Session()
    peer = Peer(runtime, session)
    listed = project / "modules"
    try:
        command = ["sh", "-c", 'exec 3>"$0" "$@"', str(listed), *listing_command("run", "true")]
        environment = {"PATH": os.environ["PATH"], "RAL_RUNTIME_DIR": str(runtime)}
        with Terminal(command, cwd=project, env=environment) as terminal:
            assert terminal.wait() == 0, terminal.output
        session.reap()
    finally:
        peer.close()
    assert set(listed.read_text().split()) == (COMMON | ON_A_TERMINAL) - bare_modules()
