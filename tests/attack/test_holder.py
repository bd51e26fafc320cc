"""Who may attach to a detached session (its user, from where its holder stands); hostile output."""

from __future__ import annotations

import random
import select
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.holder import ID, Detached, Sessions

pytestmark = [pytest.mark.attack, pytest.mark.needs("bubblewrap")]

CONNECT = (
    "import socket,struct,sys\n"
    "s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET); s.connect(sys.argv[1])\n"
    "try:\n"
    "  s.send(struct.pack('<cBHHHH',b'A',0,24,80,0,0)); answer=s.recv(9)\n"
    "except (BrokenPipeError,ConnectionResetError): answer=b''\n"
    "print('served' if answer==b'H\\0' else 'closed')\n"
)

PIECES = (
    b"\x1b", b"[", b"]", b"?", b";" * 40, b"1049", b"h", b"l", b"\x07", b"\x1b\\", b"\x18", b"\n", b"text ",
    b"\xe2\x82\xac", b"P", b"9" * 30, b"\x1b[?1049h", b"\x1b[?1049l", b"$p", b"\x1bc", b"x" * 3000,
    b"\x1b[" + b"1;" * 100 + b"h", b"\x1b]0;" + b"z" * 20000 + b"\x07", b"\x1bP" + b"q" * 40000,
)  # fmt: skip


@pytest.fixture
def start(runtime: Path) -> Iterator[Sessions]:
    """Start a detached session: a script for sh, or another command."""
    with Sessions(runtime) as sessions:
        yield sessions


def connect_as(path: Path, *prefix: str) -> str:
    """What a peer that is started through ``prefix`` gets."""
    command = [*prefix, "/usr/bin/python3", "-I", "-c", CONNECT, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_peer_in_the_same_namespaces_is_served(start: Sessions) -> None:
    session = start("read x")
    assert connect_as(session.path) == "served"


@pytest.mark.parametrize(
    "prefix",
    [
        ("unshare", "--user", "--map-current-user"),
        ("unshare", "--user", "--map-current-user", "--mount"),
        ("unshare", "--user", "--map-current-user", "--pid", "--fork"),
        ("bwrap", "--unshare-user", "--dev-bind", "/", "/"),
    ],
    ids=["user", "mount", "pid", "bwrap"],
)
def test_peer_in_other_namespaces_is_refused(start: Sessions, prefix: tuple[str, ...]) -> None:
    session = start("read x")
    assert connect_as(session.path, *prefix) == "closed"
    assert connect_as(session.path) == "served"


@pytest.mark.root
@pytest.mark.parametrize("flag", ["--mount", "--pid"])
def test_peer_in_another_namespace_with_the_same_owner_is_refused(start: Sessions, flag: str) -> None:
    session = start("read x")
    assert connect_as(session.path, "unshare", flag, "--fork") == "closed"
    assert connect_as(session.path) == "served"


@pytest.mark.root
def test_peer_of_another_user_is_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="ral-t-", dir="/var/tmp") as name:
        directory = Path(name)
        directory.chmod(0o755)
        with Detached(directory, (b"sh", b"-c", b"read x")) as session:
            session.path.chmod(0o777)
            other = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
            assert connect_as(session.path, *other) == "closed"
            assert connect_as(session.path) == "served"


def test_program_inside_cannot_attach_although_it_sees_the_socket(start: Sessions, runtime: Path) -> None:
    path = runtime / f"{ID}.sock"
    (runtime / "connect.py").write_text(CONNECT)
    wait = f"while ! test -S {path}; do sleep 0.02; done"
    session = start(f"read x; {wait}; /usr/bin/python3 -I {runtime}/connect.py {path}; read y")
    viewer = session.attach()
    assert viewer.wait_greeting() == 0
    viewer.type(b"\n")
    viewer.expect(rb"closed\r\n")


@pytest.mark.parametrize("seed", range(4))
def test_hostile_output_does_not_harm_the_holder(start: Sessions, runtime: Path, seed: int) -> None:
    chosen = random.Random(seed)
    (runtime / "output").write_bytes(b"".join(chosen.choices(PIECES, k=800)) + chosen.randbytes(5000))
    show = f"cat {runtime}/output; printf '\\030\\033c'; echo mark$x"
    session = start(f"stty raw -echo; while read x; do {show}; done")
    writer = session.attach()
    assert writer.wait_greeting() == 0
    for number in range(4):
        writer.type(b"%d\n" % number)
        watcher = session.attach(read_only=True)
        watcher.quiet(0.01)
        watcher.close()
        writer.expect(b"mark%d\n" % number)
    assert not select.select([session.sandbox.init], [], [], 0)[0]
