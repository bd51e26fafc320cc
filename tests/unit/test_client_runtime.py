"""Where the client looks for its broker, what it refuses there, and how it starts one."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ral_client import call, spawn
from ral_protocol import exits
from support.peer import Incoming, Peer, client_command


def status(environment: dict[str, str], *arguments: str) -> tuple[int, bytes, bytes]:
    ended = subprocess.run(
        client_command(*(arguments or ("broker", "status"))),
        capture_output=True,
        env=environment,
        timeout=30,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    environment: dict[bytes, bytes] = {}
    monkeypatch.setattr("posix.environ", environment)
    return environment


def test_the_named_directory_wins(environment: dict[bytes, bytes], runtime: Path) -> None:
    environment[b"XDG_RUNTIME_DIR"] = os.fsencode(runtime)
    assert call.runtime_dir() == os.fsencode(runtime) + b"/ral"
    environment[b"RAL_RUNTIME_DIR"] = b"/some/where"
    assert call.runtime_dir() == b"/some/where"


def test_another_users_directory_is_passed_over(environment: dict[bytes, bytes]) -> None:
    """As after su: the variable still names the first user's."""
    other = Path("/proc/1") if os.getuid() else Path("/proc/self/cwd")
    environment[b"XDG_RUNTIME_DIR"] = b"/nonexistent"
    expected = call.runtime_dir()
    assert expected in (b"/run/user/%d/ral" % os.getuid(), b"/tmp/ral-%d" % os.getuid())
    if os.getuid():
        environment[b"XDG_RUNTIME_DIR"] = os.fsencode(other)
        assert call.runtime_dir() == expected
    environment[b"XDG_RUNTIME_DIR"] = b"relative"
    assert call.runtime_dir() == expected


def test_a_relative_name_is_refused(environment: dict[bytes, bytes]) -> None:
    environment[b"RAL_RUNTIME_DIR"] = b"here"
    with pytest.raises(call.Failure, match="not an absolute path"):
        call.runtime_dir()


@pytest.mark.parametrize(
    ("kind", "says"),
    [("link", "symbolic link"), ("file", "not a directory"), ("open", r"others may enter it \(mode 0750\)")],
)
def test_an_unsafe_directory_is_refused(tmp_path: Path, kind: str, says: str) -> None:
    place = tmp_path / "place"
    real = tmp_path / "real"
    real.mkdir(0o700)
    if kind == "link":
        place.symlink_to(real)
    elif kind == "file":
        place.touch()
    else:
        place.mkdir()
        place.chmod(0o750)
    with pytest.raises(call.Failure, match=says) as raised:
        call.open_dir(os.fsencode(place))
    assert raised.value.status == exits.UNAVAILABLE


def test_a_directory_of_another_user_is_refused() -> None:
    if os.getuid() == 0:
        pytest.skip("root owns every directory that surely exists; run as an ordinary user")
    with pytest.raises(call.Failure, match="belongs to uid 0, not to you"):
        call.open_dir(b"/usr")


def test_a_missing_directory_and_a_dead_socket_are_no_broker(tmp_path: Path, runtime: Path) -> None:
    assert call.open_dir(os.fsencode(tmp_path / "none")) is None
    directory = call.open_dir(os.fsencode(runtime))
    assert directory is not None
    assert call.connect(directory, b"control.sock") is None
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(runtime / "control.sock"))
    assert call.connect(directory, b"control.sock") is None
    os.close(directory)


def test_status_without_a_broker_starts_none(runtime: Path) -> None:
    environment = {"RAL_RUNTIME_DIR": str(runtime)}
    assert status(environment) == (1, b"no broker is running; `ral run` starts one\n", b"")
    assert status(environment, "broker", "status", "--json") == (1, b'{\n  "running": false\n}\n', b"")
    assert status(environment, "broker", "stop") == (0, b"", b"ral: no broker is running\n")
    assert list(runtime.iterdir()) == []


def test_inside_a_session_no_broker_is_started(runtime: Path) -> None:
    code, stdout, stderr = status(
        {"RAL_RUNTIME_DIR": str(runtime), "RAL_SESSION": "0123abcd"}, "run", "true"
    )
    assert (code, stdout) == (exits.REFUSED, b"")
    assert stderr.startswith(b"ral: not started: this is already inside session 0123abcd")
    assert list(runtime.iterdir()) == []


def test_inside_a_session_also_a_refused_directory_names_the_session(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    code, _, stderr = status(
        {"RAL_RUNTIME_DIR": str(tmp_path / "x"), "RAL_SESSION": "0123abcd"}, "run", "true"
    )
    assert code == exits.REFUSED
    assert b"inside session 0123abcd" in stderr


FAKE = """
import os, sys, socket
ready = int(sys.argv[sys.argv.index("--ready-fd") + 1])
directory = os.environ["RAL_RUNTIME_DIR"]
with open(directory + "/seen", "w") as seen:
    for fd in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        try:
            print(fd, os.readlink(f"/proc/self/fd/{fd}"), file=seen)
        except OSError:
            pass
    mask = os.umask(0)
    ignored = [line.split()[1] for line in open("/proc/self/status") if line.startswith("SigIgn")][0]
    print(*sorted(os.environ), os.getcwd(), oct(mask), os.getsid(0) == os.getpid(), sys.argv, file=seen)
MODE
"""


def fake_broker(monkeypatch: pytest.MonkeyPatch, runtime: Path, mode: str) -> None:
    """Another program in place of the interpreter: it is started exactly as the broker is."""
    script = runtime.parent / f"{runtime.name}-broker"
    script.write_text(f"#!{sys.executable} -IS\n{FAKE.replace('MODE', mode)}")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(
        "posix.environ",
        {b"RAL_RUNTIME_DIR": os.fsencode(runtime), b"HOME": b"/h", b"SECRET": b"s", b"PYTHONPATH": b"/x"},
    )


LISTEN = """
listener = socket.socket(socket.AF_UNIX)
listener.bind(directory + "/control.sock")
listener.listen()
os.write(ready, b"x")
listener.accept()[0].recv(1)
"""


def test_the_broker_starts_with_a_fixed_environment_and_no_descriptor_of_ours(
    monkeypatch: pytest.MonkeyPatch, runtime: Path, tmp_path: Path
) -> None:
    fake_broker(monkeypatch, runtime, LISTEN)
    before = (os.getcwd(), os.umask(0o022))
    os.umask(before[1])
    try:
        with (tmp_path / "secret").open("w") as inherited:
            os.set_inheritable(inherited.fileno(), True)
            sock = spawn.start_broker(os.fsencode(runtime))
        sock.close()
        os.wait()
    finally:
        Path(sys.executable).unlink()
    seen = (runtime / "seen").read_text()
    assert str(tmp_path / "secret") not in seen
    *descriptors, told = seen.splitlines()
    assert [line.split(" ", 1)[1] for line in descriptors[:3]] == ["/dev/null"] * 3
    assert descriptors[3].startswith("3 pipe:")
    # What the script itself has open beside them: its own file, `seen` and the directory list.
    assert {line.split()[1] for line in descriptors[4:]} <= {str(runtime / "seen"), sys.executable}
    assert told.startswith("HOME LANG PATH RAL_RUNTIME_DIR / 0o77 True")
    assert re.search(r"'-I', '[^']*/ral_broker/__main__\.py', 'run', '--ready-fd', '3'", told)
    assert (os.getcwd(), os.umask(before[1])) == before


def test_a_broker_that_fails_is_reported_with_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    fake_broker(
        monkeypatch,
        runtime,
        "open(directory + '/broker.log', 'w').write('x' * 2000 + '\\nno \\x1b[31mbwrap\\n'); sys.exit(3)",
    )
    monkeypatch.setattr(spawn, "RACE_SECONDS", 0.1)
    try:
        with pytest.raises(call.Failure) as raised:
            spawn.start_broker(os.fsencode(runtime))
    finally:
        Path(sys.executable).unlink()
    assert raised.value.status == exits.UNAVAILABLE
    assert "no broker can be started: it ended with status 3" in raised.value.message
    assert raised.value.message.endswith("broker.log:\n  no \\x1b[31mbwrap")


def test_losing_the_race_against_another_client_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    fake_broker(monkeypatch, runtime, "sys.exit(0)")

    def never(incoming: Incoming, request: dict[str, object], fds: list[int]) -> None:
        raise AssertionError

    peer = Peer(runtime, never)
    try:
        spawn.start_broker(os.fsencode(runtime)).close()
        # It may have been collected already.
        with contextlib.suppress(ChildProcessError):
            os.wait()
    finally:
        Path(sys.executable).unlink()
        peer.close()
