"""Records are files. Whoever writes one in the user's name must not make a new broker hang, die, or kill."""

from __future__ import annotations

import base64
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ral_broker.errors import Refused
from ral_broker.sessions import lineage
from ral_protocol.records import SessionRecord
from support.broker import Broker, Ral
from support.hostile import run_group
from support.installed import python_path, ral_path, session_environment

pytestmark = [pytest.mark.attack, pytest.mark.needs("bubblewrap")]

Record = dict[str, object]


def mark(pid: int) -> dict[str, int]:
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return {"pid": pid, "start": int(stat.rpartition(b") ")[2].split()[19])}


def namespace(pid: int, name: str) -> int:
    return os.stat(f"/proc/{pid}/ns/{name}").st_ino


def record_of(session: str, init: int, monitor: int, **changes: object) -> Record:
    """A record that is right in everything but what it names."""
    return {
        "schema": 1, "id": session, "uid": os.getuid(), "version": "0.1.0", "kind": "session",
        "host": os.uname().nodename,
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_namespace": namespace(os.getpid(), "pid"), "project": base64.b64encode(b"/tmp").decode(),
        "command": [base64.b64encode(b"true").decode()], "started": "2026-11-30T00:00:00Z",
        "monitor": mark(monitor), "init": mark(init), "mount_namespace": namespace(init, "mnt"),
        "user_namespace": namespace(init, "user"), "client": None, "holder": None, "plan": {},
    } | changes  # fmt: skip


@pytest.fixture
def sessions(stopped_broker: Broker, runtime: Path) -> Path:
    directory = runtime / "sessions"
    directory.mkdir(mode=0o700)
    return directory


def plant(sessions: Path, record: Record, *, status: bool = True) -> Path:
    path = sessions / f"{record['id']}.json"
    path.write_text(json.dumps(record))
    if status:
        (sessions / f"{record['id']}.status").write_text("")
    return path


@pytest.fixture
def innocent() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the user's that has nothing to do with any sandbox."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def survives(process: subprocess.Popen[bytes], seconds: float = 0.5) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


GONE = {"pid": 2**22 - 1, "start": 1}


@pytest.mark.parametrize("monitor", ["itself", "gone"])
@pytest.mark.parametrize("status", [True, False])
@pytest.mark.parametrize("client", [None, GONE])
def test_a_record_that_names_an_innocent_process_as_its_sandbox_kills_nothing(
    stopped_broker: Broker, ral: Ral, sessions: Path, innocent: subprocess.Popen[bytes],
    monitor: str, status: bool, client: dict[str, int] | None,
) -> None:  # fmt: skip
    record = record_of("0123abcd", innocent.pid, innocent.pid, client=client)
    if monitor == "gone":
        record["monitor"] = GONE
    plant(sessions, record, status=status)
    stopped_broker.start()
    assert ral.live() == []
    assert ral("kill", "0123abcd").status == 1
    assert survives(innocent)
    assert "cannot be adopted" in stopped_broker.said()


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A sandbox of the user's that another program made: pid 1 of namespaces below ours."""
    command = [
        "bwrap",
        "--unshare-user",
        "--unshare-pid",
        "--as-pid-1",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
    ]
    with subprocess.Popen(
        [*command, "sh", "-c", "echo up; exec sleep 600"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        inits = children(process.pid)
        yield process
        for pid in (*inits, process.pid):
            os.kill(pid, 9)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("monitor", ["right", "gone"])
def test_a_record_that_names_the_sandbox_of_another_program_kills_nothing(
    stopped_broker: Broker, ral: Ral, sessions: Path, foreign: subprocess.Popen[bytes], monitor: str
) -> None:
    (init,) = children(foreign.pid)
    record = record_of("0123abcd", init, foreign.pid, client=GONE)
    if monitor == "gone":
        record["monitor"] = GONE
    plant(sessions, record)
    stopped_broker.start()
    assert ral.live() == []
    assert survives(foreign)
    assert "not ral's trampoline" in stopped_broker.said()


@pytest.mark.parametrize("part", ["mount_namespace", "user_namespace", "monitor", "gone"])
def test_a_record_that_lies_about_a_real_session_does_not_end_it(
    stopped_broker: Broker, ral: Ral, sessions: Path, innocent: subprocess.Popen[bytes], part: str
) -> None:
    stopped_broker.start()
    session = json.loads(ral("run", "-d", "-q", "--json", "--", "sleep", "600").stdout)["id"]
    stopped_broker.crash()
    genuine = json.loads((sessions / f"{session}.json").read_text())
    changed = {
        "mount_namespace": {"mount_namespace": namespace(os.getpid(), "mnt")},
        "user_namespace": {"user_namespace": namespace(os.getpid(), "user")},
        "monitor": {"monitor": mark(innocent.pid)},
        "gone": {"monitor": GONE},
    }
    plant(sessions, genuine | changed[part] | {"id": "0000abcd", "holder": None})
    stopped_broker.start()
    assert ral.live() == [session]
    assert survives(innocent, 0.1)
    assert "session 0000abcd cannot be adopted" in stopped_broker.said()


def test_a_genuine_record_is_believed_and_a_sandbox_without_its_monitor_is_ended(
    stopped_broker: Broker, ral: Ral, sessions: Path
) -> None:
    """The positive control of everything above."""
    stopped_broker.start()
    kept, orphan = (
        json.loads(ral("run", "-d", "-q", "--json", "--", "sleep", "600").stdout)["id"] for _ in range(2)
    )
    stopped_broker.crash()
    record = json.loads((sessions / f"{orphan}.json").read_text())
    holder, monitor, init = (record[name]["pid"] for name in ("holder", "monitor", "init"))
    os.kill(holder, 19)  # it would end the sandbox by itself
    pidfd = os.pidfd_open(init)
    try:
        os.kill(monitor, 9)
        stopped_broker.start()
        assert ral.live() == [kept]
        assert pidfd_ended(pidfd)
    finally:
        os.close(pidfd)
        os.kill(holder, 9)


def pidfd_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 5)[0])


def as_record(sessions: Path, content: bytes) -> None:
    (sessions / "0123abcd.json").write_bytes(content)


GARBAGE: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"\0\xff{",
    "a list": b"[1]",
    "deep": b"[" * 200000,
    "a key more": b'{"schema":1,"id":"0123abcd","more":1}',
    "another schema": b'{"schema":2}',
    "huge": b'"' + b"x" * (5 << 20) + b'"',
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_named_and_left_alone(
    stopped_broker: Broker, ral: Ral, sessions: Path, content: bytes
) -> None:
    as_record(sessions, content)
    stopped_broker.start()
    assert ral.live() == []
    assert ral("run", "-q", "--", "true").status == 0
    assert (sessions / "0123abcd.json").read_bytes() == content
    assert "0123abcd.json is ignored" in stopped_broker.said()


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "aaaaaaaa"}, {"id": "../../xx"}, {"uid": 0x7FFFFFFF}, {"uid": "0"}, {"kind": "program"},
        {"init": {"pid": 1, "start": 0}}, {"init": {"pid": -1, "start": 0}}, {"boot_id": "x" * 65},
        {"monitor": {"pid": 2**40, "start": 0}}, {"version": "0;rm -rf /"}, {"project": 7},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_with_one_wrong_field_is_ignored(
    stopped_broker: Broker, ral: Ral, sessions: Path, innocent: subprocess.Popen[bytes], changes: Record
) -> None:
    as_record(sessions, json.dumps(record_of("0123abcd", innocent.pid, innocent.pid) | changes).encode())
    stopped_broker.start()
    assert ral.live() == []
    assert survives(innocent, 0.1)
    assert "0123abcd.json is ignored" in stopped_broker.said()


def test_a_record_of_another_host_is_neither_believed_nor_pruned(
    stopped_broker: Broker, ral: Ral, sessions: Path
) -> None:
    """A home directory on NFS: boot and processes of the other host mean nothing here."""
    gone = {"init": GONE, "monitor": GONE, "boot_id": "another"}
    path = plant(sessions, record_of("0123abcd", os.getpid(), os.getpid()) | gone | {"host": "another-host"})
    here = plant(sessions, record_of("0123abce", os.getpid(), os.getpid()) | gone)
    stopped_broker.start()
    assert ral.live() == []
    assert path.exists()
    assert not here.exists()


NAMES = (
    "0123abcd.json",
    "0123abcd.status",
    "0123abcd.ended",
    "0123abcd.log",
    "0123abcd.sock",
    ".0123abcd.json",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "directory", "socket"])
def test_what_is_no_file_neither_stops_the_broker_nor_is_followed(
    stopped_broker: Broker, ral: Ral, sessions: Path, tmp_path: Path, name: str, kind: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    put(sessions / name, kind, precious)
    if not name.endswith("json"):
        gone = {"init": GONE, "monitor": GONE, "holder": GONE}
        as_record(sessions, json.dumps(record_of("0123abcd", os.getpid(), os.getpid()) | gone).encode())
    stopped_broker.start()
    assert ral.live() == []
    assert ral("run", "-q", "--", "true").status == 0
    assert precious.read_text() == "kept"
    if kind == "directory":
        (sessions / name).rmdir()  # named in the log and left


def put(path: Path, kind: str, target: Path) -> None:
    match kind:
        case "link":
            path.symlink_to(target)
        case "dangling link":
            path.symlink_to(target.with_name("nothing"))
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case _:
            with socket.socket(socket.AF_UNIX) as planted:
                here = os.open(path.parent, os.O_PATH)
                planted.bind(f"/proc/self/fd/{here}/{path.name}")
                os.close(here)


@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_what_lies_in_the_way_of_an_end_does_not_stop_the_broker(
    stopped_broker: Broker, ral: Ral, sessions: Path, tmp_path: Path, kind: str
) -> None:
    """Planted while the session runs, where its end is going to be written."""
    stopped_broker.start()
    first = json.loads(ral("run", "-d", "-q", "--json", "--", "sleep", "600").stdout)["id"]
    put(sessions / f".{first}.ended", kind, tmp_path)
    if kind == "directory":
        (sessions / f"{first}.ended").mkdir()
    assert ral("kill", first).status == 0
    assert ral("run", "-q", "--", "true").status == 0


FILES = ("broker.lock", "control.sock", "empty")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_a_planted_file_of_the_brokers_own_is_refused_with_a_sentence_or_replaced(
    stopped_broker: Broker, runtime: Path, tmp_path: Path, name: str, kind: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    put(runtime / name, kind, precious)
    done = start_by_hand(runtime)
    if done.returncode == -1:  # it serves: what was in its place is gone
        assert name == "control.sock"
        assert kind != "directory"
    else:
        assert done.returncode == 1, done
        assert done.stderr.startswith(b"ral-broker: "), done
        assert done.stderr.count(b"\n") == 1, done
        assert f"{runtime}/{name}".encode() in done.stderr
    assert precious.read_text() == "kept"


def start_by_hand(runtime: Path) -> subprocess.CompletedProcess[bytes]:
    """Start a broker; status -1 if it was ready and therefore ended by us."""
    command = [str(python_path()), "-I", "-m", "ral_broker", "run"]
    with subprocess.Popen(
        command, env=session_environment(runtime), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/"
    ) as process:
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        said = b""
        deadline = time.monotonic() + 10
        while process.poll() is None:
            said += process.stderr.read() or b""
            assert time.monotonic() < deadline, said
            if b"serves" in said:
                process.terminate()
                assert process.wait(10) == 0
                return subprocess.CompletedProcess(command, -1, b"", said)
            time.sleep(0.01)
        said += process.stderr.read() or b""
        return subprocess.CompletedProcess(command, process.returncode, b"", said)


@pytest.mark.parametrize("state", ["link", "dangling link", "group", "others", "file"])
def test_a_runtime_directory_that_others_could_use_is_refused_with_a_sentence(
    runtime: Path, project: Path, tmp_path: Path, state: str
) -> None:
    """Client and broker choose it alike; either refuses."""
    own = runtime / "own"
    if state in ("link", "dangling link"):
        put(own, state, tmp_path)
        tmp_path.chmod(0o700)
    elif state == "file":
        own.write_text("")
    else:
        own.mkdir()
        own.chmod(0o770 if state == "group" else 0o701)
    done = Ral(own, project)("run", "--", "true")
    assert done.status == 69
    assert f"{own}".encode() in done.stderr
    broker = start_by_hand(own)
    assert broker.returncode == 1
    assert f"{own} is not used".encode() in broker.stderr or b"cannot be made" in broker.stderr
    assert broker.stderr.count(b"\n") == 1, broker
    own.unlink() if state in ("link", "dangling link", "file") else own.rmdir()


# In a mount namespace with a /tmp of its own and no /run/user. Prints what client and broker say, and
# whether they came.
IN_OWN_TMP = """
import json, os, socket, subprocess, sys
env, python, ral, contents = json.loads(sys.argv[1])
place = f"/tmp/ral-{os.getuid()}"
os.mkdir(place, 0o755)
listener = socket.socket(socket.AF_UNIX)
if contents == "socket":
    listener.bind(place + "/control.sock"); listener.listen(); os.chmod(place + "/control.sock", 0o777)
os.chown(place, 65534, 65534)
run = lambda *c: subprocess.run(c, env=env, cwd="/", capture_output=True)
client, broker = run(ral, "run", "--", "true"), run(python, "-I", "-m", "ral_broker", "run")
listener.setblocking(False)
try: came = listener.accept() and True
except (BlockingIOError, OSError): came = False
said = lambda done: [done.returncode, done.stderr.decode()]
print(json.dumps([said(client), said(broker), came]))
"""


@pytest.mark.root
@pytest.mark.parametrize("contents", ["empty", "socket"])
def test_a_directory_in_tmp_that_another_user_made_first_is_refused(runtime: Path, contents: str) -> None:
    """Where a host has no /run/user: the name in /tmp can be guessed, and everybody can make it."""
    environment = session_environment(runtime)
    del environment["RAL_RUNTIME_DIR"]
    script = 'mount -t tmpfs tmpfs /tmp; test ! -d /run/user || mount -t tmpfs tmpfs /run/user; exec "$@"'
    arguments = json.dumps([environment, str(python_path()), str(ral_path()), contents])
    enter = ["unshare", "-m", "sh", "-ec", script, "sh", "/usr/bin/python3", "-c"]
    done = run_group([*enter, IN_OWN_TMP, arguments])
    assert done.returncode == 0, done
    client, broker, came = json.loads(done.stdout)
    assert client[0] == 69
    assert f"/tmp/ral-{os.getuid()} refused" in client[1]
    assert broker[0] == 1
    assert f"/tmp/ral-{os.getuid()} is not used: it must belong to you" in broker[1]
    assert came is False, "an environment was sent to a stranger"


def test_a_pid_that_was_given_to_another_process_is_not_the_sessions(
    stopped_broker: Broker, ral: Ral, sessions: Path
) -> None:
    """A real session's record with another start time: what runs under that pid is somebody else."""
    stopped_broker.start()
    session = json.loads(ral("run", "-d", "-q", "--json", "--", "sleep", "600").stdout)["id"]
    stopped_broker.crash()
    genuine = json.loads((sessions / f"{session}.json").read_text())
    earlier = {"pid": genuine["init"]["pid"], "start": genuine["init"]["start"] - 1}
    plant(sessions, genuine | {"id": "0000abcd", "holder": None, "init": earlier})
    stopped_broker.start()
    assert ral.live() == [session]
    assert not (sessions / "0000abcd.json").exists()


@pytest.mark.parametrize("word", ["no init", "own namespaces"])
def test_each_word_of_a_lineage_counts(
    stopped_broker: Broker, ral: Ral, sessions: Path, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of the very function, for a process that is right in everything else."""
    stopped_broker.start()
    session = json.loads(ral("run", "-d", "-q", "--json", "--", "sleep", "600").stdout)["id"]
    record = msgspec.json.decode((sessions / f"{session}.json").read_bytes(), type=SessionRecord)
    lineage.check_lineage(record)
    lineage.check_parent(record, monitor_runs=True)
    if word == "no init":
        # The program itself: in the same namespaces, but pid 2 there.
        (program,) = children(record.init.pid)
        monkeypatch.setattr(lineage, "_TRAMPOLINES", (b"",))
        other = msgspec.structs.replace(record, init=msgspec.structs.replace(record.init, pid=program))
        with pytest.raises(Refused, match="no init"):
            lineage.check_lineage(other)
    else:
        shared = f"/proc/{record.init.pid}/ns/mnt"
        real = os.stat
        monkeypatch.setattr(os, "stat", lambda path: real(shared if path == "/proc/self/ns/mnt" else path))
        with pytest.raises(Refused, match="of this broker's own"):
            lineage.check_lineage(record)
        monkeypatch.undo()


@pytest.mark.root
def test_a_record_of_another_users_is_ignored(stopped_broker: Broker, ral: Ral, sessions: Path) -> None:
    stopped_broker.start()
    session = json.loads(ral("run", "-d", "-q", "--json", "--", "sleep", "600").stdout)["id"]
    stopped_broker.crash()
    path = sessions / f"{session}.json"
    os.chown(path, 65534, 65534)
    stopped_broker.start()
    assert ral.live() == []
    assert f"{session}.json is ignored: not a small file of yours" in stopped_broker.said()
    stopped_broker.crash()
    os.chown(path, 0, 0)
    stopped_broker.start()
    assert ral.live() == [session]


def test_a_sandbox_of_another_users_is_not_believed(
    stopped_broker: Broker, ral: Ral, sessions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root could end any process. A namespace that somebody else made is not root's session."""
    stopped_broker.start()
    session = json.loads(ral("run", "-d", "-q", "--json", "--", "sleep", "600").stdout)["id"]
    record = msgspec.json.decode((sessions / f"{session}.json").read_bytes(), type=SessionRecord)
    lineage.check_lineage(record)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(Refused, match="user namespace of another user"):
        lineage.check_lineage(record)
    monkeypatch.undo()


def test_a_record_that_is_too_large_is_not_decoded(stopped_broker: Broker, ral: Ral, sessions: Path) -> None:
    """Valid but for its size."""
    stopped_broker.start()
    session = json.loads(ral("run", "-d", "-q", "--json", "--", "sleep", "600").stdout)["id"]
    stopped_broker.crash()
    path = sessions / f"{session}.json"
    genuine = path.read_bytes()
    path.write_bytes(genuine + b" " * (5 << 20))
    stopped_broker.start()
    assert ral.live() == []
    assert f"{session}.json is ignored: not a small file of yours" in stopped_broker.said()
    stopped_broker.crash()
    path.write_bytes(genuine)
    stopped_broker.start()
    assert ral.live() == [session]


@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "nothing"])
def test_a_session_whose_status_file_is_no_file_any_more_is_ended(
    stopped_broker: Broker, ral: Ral, sessions: Path, tmp_path: Path, kind: str
) -> None:
    """Nobody could tell how it ends; a status that is read elsewhere would be somebody's word."""
    stopped_broker.start()
    session = json.loads(ral("run", "-d", "-q", "--json", "--", "sleep", "600").stdout)["id"]
    stopped_broker.crash()
    path = sessions / f"{session}.status"
    path.unlink()
    if kind != "nothing":
        (tmp_path / "forged").write_text('{ "exit-code": 0 }\n')
        put(path, kind, tmp_path / "forged")
    stopped_broker.start()
    assert ral.live() == []
    (line,) = json.loads(ral("sessions", "--all", "--json").stdout)
    assert (line["exit"], line["lost"]) == (137, True)
    assert ral("run", "-q", "--", "true").status == 0
    if kind == "directory":
        path.rmdir()
