"""``ral run`` against a scripted broker: what it sends, what it hands over, and what its exit status
says."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ral_protocol import exits
from support.peer import Incoming, Peer, Session, client_command


class Run:
    """Runs the client in the project against a peer of this test."""

    def __init__(self, runtime: Path, project: Path) -> None:
        self.runtime, self.project = runtime, project
        self.environment = {"PATH": os.environ["PATH"], "RAL_RUNTIME_DIR": str(runtime)}
        self.peers: list[Peer] = []
        self.clients: list[subprocess.Popen[bytes]] = []
        self.stdin = subprocess.PIPE
        self.ignored = 0

    def peer(self, handler: Callable[[Incoming, dict[str, object], list[int]], None]) -> Peer:
        self.peers.append(Peer(self.runtime, handler))
        return self.peers[-1]

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        client = subprocess.Popen(
            client_command("run", *arguments, ignored=self.ignored),
            cwd=self.project,
            env=self.environment | variables,
            stdin=self.stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.clients.append(client)
        return client

    def __call__(self, *arguments: str, **variables: str) -> tuple[int, bytes, bytes]:
        client = self.start(*arguments, **variables)
        stdout, stderr = client.communicate(None, 20)
        return client.returncode, stdout, stderr


@pytest.fixture
def run(runtime: Path, project: Path) -> Iterator[Run]:
    run = Run(runtime, project)
    yield run
    for client in run.clients:
        client.kill()
        client.wait()
        for stream in (client.stdin, client.stdout, client.stderr):
            if stream is not None:
                stream.close()
    for peer in run.peers:
        peer.close()


def refuse(incoming: Incoming, request: dict[str, object], fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    incoming.answer({"t": "refused", "kind": "refused", "message": "no: because; do this", "status": 78})


def wait_stopped(pid: int) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] != b"T":
        assert time.monotonic() < deadline, f"{pid} was not stopped"
        time.sleep(0.005)


def test_arguments_arrive_unchanged(run: Run) -> None:
    session = Session()
    run.peer(session)
    words = ["a b", "", "'\"", "new\nline", "-q", "--", "\udcff"]
    status, stdout, stderr = run("printf", "<%s>", *words)
    session.reap()
    assert (status, stderr) == (0, b"")
    assert stdout == b"".join(b"<" + os.fsencode(word) + b">" for word in words)


def test_the_environment_is_sent_as_it_was_given(run: Run) -> None:
    session = Session()
    run.peer(session)
    assert run("true", SECRET="s=\n\udcff", EMPTY="")[0] == 0
    session.reap()
    sent = session.payload[1]
    assert b"SECRET=s=\n\xff" in sent
    assert b"EMPTY=" in sent
    # Python's own start adds this one to its environment.
    assert not [entry for entry in sent if entry.startswith(b"LC_CTYPE=")]


def test_the_request_names_physical_directories_and_overrides(run: Run, project: Path) -> None:
    session = Session()
    peer = run.peer(session)
    (project / "real").mkdir()
    (project / "link").symlink_to("real")
    assert run("--project", "link", "true", HOME_ACCESS="read", PRIVATE_TMP="", OTHER="x")[0] == 0
    session.reap()
    request = peer.requests[0]
    assert request["project"] == os.fsencode(project / "real")
    assert request["cwd"] == os.fsencode(project)
    assert request["overrides"] == {"HOME_ACCESS": "read"}
    assert request["terminals"] == [False, False, False]
    assert peer.hellos == [{"t": "hello", "proto": exits.PROTOCOL, "version": exits.VERSION}]


@pytest.mark.parametrize(
    ("command", "expected"), [("exit 7", 7), ("kill -TERM $$", 143), ("kill -KILL $$", 137), ("exit 0", 0)]
)
def test_the_exit_status_is_the_programs_own(run: Run, command: str, expected: int) -> None:
    session = Session()
    run.peer(session)
    assert run("sh", "-c", command) == (expected, b"", b"")
    session.reap()


def test_a_refusal_is_printed_with_its_status(run: Run) -> None:
    run.peer(refuse)
    assert run("true") == (78, b"", b"ral: no: because; do this\n")


@pytest.mark.parametrize(
    ("step", "error", "status", "says"),
    [
        (7, errno.ENOENT, 127, b"nosuch: not found inside the sandbox: no such program on its PATH"),
        (8, errno.ENOENT, 127, b"its interpreter"),
        (8, errno.ENOTDIR, 127, b"not found inside"),
        (8, errno.EACCES, 126, b"cannot be executed inside the sandbox: Permission denied"),
        (8, errno.ENOEXEC, 126, b"Exec format error"),
        (3, errno.EINVAL, 78, b"not started: Landlock: Invalid argument"),
        (9, errno.ENOENT, 78, b"not started: working directory"),
        (1, errno.EPROTO, 78, b"not started: warrant"),
    ],
)
def test_a_program_that_was_not_executed(run: Run, step: int, error: int, status: int, says: bytes) -> None:
    session = Session(fail=(step, error))
    run.peer(session)
    ended = run("nosuch")
    session.reap()
    assert ended[:2] == (status, b"")
    assert ended[2].startswith(b"ral: nosuch: ")
    assert says in ended[2]


def test_a_killed_monitor_is_lost_and_the_program_killed(run: Run) -> None:
    session = Session()
    run.peer(session)
    client = run.start("sh", "-c", "echo ready; exec sleep 60")
    assert client.stdout is not None
    assert client.stdout.readline() == b"ready\n"
    init = os.pidfd_open(session.init_pid)
    session.kill_monitor()
    _, stderr = client.communicate(None, 10)
    assert client.returncode == exits.LOST
    assert b"lost" in stderr
    # Readable: it has ended.
    assert os.waitid(os.P_PIDFD, init, os.WEXITED) is not None
    os.close(init)
    session.reap()


def test_an_end_without_a_reported_start_is_78(run: Run) -> None:
    session = Session()
    run.peer(session)
    # It says nothing on the lease and ends, as a sandbox does that could not be made.
    session.fail = (-1, 0)
    status, _, stderr = run("true")
    session.reap()
    assert status == exits.REFUSED
    assert stderr.startswith(b"ral: true: not started")


def test_the_end_of_the_broker_ends_nothing(run: Run) -> None:
    session = Session()
    peer = run.peer(session)
    client = run.start("sh", "-c", "echo ready; read line; exit 5")
    assert client.stdout is not None
    assert client.stdout.readline() == b"ready\n"
    run.peers.remove(peer)
    peer.close()
    assert client.poll() is None
    client.communicate(b"go\n", 10)
    session.reap()
    assert client.returncode == 5


def test_notices_are_printed_unless_quiet(run: Run) -> None:
    session = Session(notices=["one \x1b[31m", "two"])
    run.peer(session)
    assert run("true") == (0, b"", b"ral: one \\x1b[31m\nral: two\n")
    session.reap()
    assert run("-q", "true") == (0, b"", b"")
    session.reap()


def test_a_notice_of_a_running_session_is_printed_also_when_quiet(run: Run) -> None:
    session = Session()
    peer = run.peer(session)
    client = run.start("-q", "sh", "-c", "echo ready; read line")
    assert client.stdout is not None
    assert client.stderr is not None
    assert client.stdout.readline() == b"ready\n"
    peer.connections[0].answer({"t": "notice", "text": "a mask was lost"})
    assert client.stderr.readline() == b"ral: a mask was lost\n"
    peer.connections[0].sock.sendall(b"\xff\xff\xff\xff garbage")
    client.communicate(b"\n", 10)
    session.reap()
    assert client.returncode == 0


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "WINCH"])
def test_signals_reach_the_programs_trap(run: Run, name: str) -> None:
    session = Session()
    run.peer(session)
    client = run.start(
        "sh", "-c", f"trap 'echo got; exit 5' {name}; echo ready; while :; do sleep 0.01; done"
    )
    assert client.stdout is not None
    assert client.stdout.readline() == b"ready\n"
    client.send_signal(signal.Signals[f"SIG{name}"])
    stdout, _ = client.communicate(None, 10)
    session.reap()
    assert (client.returncode, stdout) == (5, b"got\n")


def test_a_signal_before_the_start_is_delivered_after_it(run: Run) -> None:
    session = Session()
    run.peer(session)

    def interrupt(_: Incoming) -> None:
        # The program is given time to set its trap.
        run.clients[0].send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while not (run.project / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    session.before_answer = interrupt
    status, _, _ = run("sh", "-c", "trap 'exit 5' TERM; : >ready; while :; do sleep 0.01; done")
    session.reap()
    assert status == 5


def test_a_second_signal_before_the_start_ends_the_client(run: Run) -> None:
    reached = []

    def never(incoming: Incoming, request: dict[str, object], fds: list[int]) -> None:
        reached.append(request)
        for fd in fds:
            os.close(fd)

    run.peer(never)
    client = run.start("true")
    deadline = time.monotonic() + 10
    while not reached:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    client.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        client.wait(0.2)
    client.send_signal(signal.SIGTERM)
    client.communicate(None, 10)
    assert client.returncode == 143


def test_ignored_signals_stay_ignored_and_are_told(run: Run) -> None:
    session = Session()
    peer = run.peer(session)
    mask = 1 << (signal.SIGINT - 1) | 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGKILL - 1)
    run.ignored = mask
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        client = run.start("sh", "-c", "echo ready; read line; exit 3")
    finally:
        signal.signal(signal.SIGINT, before)
    assert client.stdout is not None
    assert client.stdout.readline() == b"ready\n"
    status = Path(f"/proc/{client.pid}/status").read_text()
    ignored = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn:"))
    assert ignored >> (signal.SIGINT - 1) & 1
    client.send_signal(signal.SIGINT)
    client.communicate(b"\n", 10)
    session.reap()
    assert client.returncode == 3
    assert peer.requests[0]["ignored"] == 1 << (signal.SIGINT - 1) | 1 << (signal.SIGPIPE - 1)


def test_stop_and_continue_reach_the_program(run: Run) -> None:
    session = Session()
    run.peer(session)
    client = run.start("sh", "-c", "echo $$; exec cat")
    assert client.stdout is not None
    program = int(client.stdout.readline())
    client.send_signal(signal.SIGTSTP)
    wait_stopped(client.pid)
    wait_stopped(program)
    client.send_signal(signal.SIGCONT)
    assert client.communicate(b"typed", 10)[0] == b"typed"
    session.reap()
    assert client.returncode == 0


def test_pipes_close_when_the_program_closes_them(run: Run) -> None:
    session = Session()
    run.peer(session)
    client = run.start("sh", "-c", "echo first; exec <&- >&-; while [ ! -e go ]; do sleep 0.01; done")
    assert client.stdout is not None
    assert client.stdin is not None
    assert client.stdout.read() == b"first\n"
    with pytest.raises(BrokenPipeError):
        os.write(client.stdin.fileno(), b"x")
    (run.project / "go").touch()
    assert client.wait(10) == 0
    session.reap()


def test_a_client_that_is_killed_takes_the_session_along(run: Run) -> None:
    session = Session()
    run.peer(session)
    client = run.start("sh", "-c", "echo ready; exec sleep 60")
    assert client.stdout is not None
    assert client.stdout.readline() == b"ready\n"
    client.kill()
    # The lease was the client's alone; the monitor ends after its init.
    assert session.reap() is not None


@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1, 2]])
def test_closed_descriptors_become_dev_null(run: Run, closed: list[int]) -> None:
    session = Session()
    run.peer(session)
    program = 'seen=$(for fd in 0 1 2; do readlink /proc/$$/fd/$fd; done); echo "$seen" >seen'
    shell = 'exec "$@" ' + " ".join(f"{fd}>&-" for fd in closed)
    ended = subprocess.run(
        ["sh", "-c", shell, "sh", *client_command("run", "sh", "-c", program)],
        cwd=run.project,
        env=run.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=10,
    )
    session.reap()
    assert ended.returncode == 0, ended
    names = (run.project / "seen").read_text().splitlines()
    for fd in closed:
        assert names[fd] == "/dev/null"


def test_an_inherited_descriptor_is_not_sent(run: Run) -> None:
    session = Session()
    run.peer(session)
    (run.project / ".env").write_text("secret")
    with (run.project / ".env").open() as inherited:
        ended = subprocess.run(
            client_command("run", "sh", "-c", f"cat <&{inherited.fileno()}"),
            pass_fds=[inherited.fileno()],
            cwd=run.project,
            env=run.environment,
            capture_output=True,
            timeout=10,
            stdin=subprocess.DEVNULL,
        )
    session.reap()
    assert ended.returncode != 0
    assert b"secret" not in ended.stdout


def test_detached_prints_the_id_and_hands_over_only_prepared_input(run: Run) -> None:
    sent = []

    def detached(incoming: Incoming, request: dict[str, object], fds: list[int]) -> None:
        sent.append((request["terminals"], request["detach"], len(fds)))
        for fd in fds:
            os.close(fd)
        incoming.answer(
            {"t": "started", "id": "89abcdef", "detached": True, "terminal": True, "notices": ["n"]}
        )

    run.peer(detached)
    run.stdin = subprocess.DEVNULL
    assert run("-d", "sleep", "60") == (0, b"89abcdef\n", b"ral: n\n")
    run.stdin = subprocess.PIPE
    assert run("-qd", "--json", "cat") == (0, b'{\n  "id": "89abcdef"\n}\n', b"")
    assert sent == [([True, True, True], True, 3), ([False, True, True], True, 4)]


def test_an_older_broker_is_asked_again_after_it_restarted(run: Run) -> None:
    session = Session()
    answers = ["older", "older", "same"]

    def restart(incoming: Incoming, request: dict[str, object], fds: list[int]) -> None:
        if answers.pop(0) == "older":
            for fd in fds:
                os.close(fd)
            incoming.answer({"t": "restarting", "version": "0.0.1"})
            incoming.sock.close()
        else:
            session(incoming, request, fds)

    run.peer(restart)
    assert run("sh", "-c", "exit 6")[0] == 6
    session.reap()


@pytest.mark.parametrize(
    "answer", [b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\1\0\0\1\xc0", b"\0\0\0\1\x01", b""]
)
def test_an_answer_that_cannot_be_read_is_69(run: Run, answer: bytes) -> None:
    def babble(incoming: Incoming, request: dict[str, object], fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        incoming.sock.sendall(answer)
        incoming.sock.close()

    run.peer(babble)
    status, stdout, stderr = run("true")
    assert (status, stdout) == (exits.UNAVAILABLE, b"")
    assert stderr.startswith(b"ral: no answer from the broker")
    assert b"Traceback" not in stderr


@pytest.mark.parametrize("arguments", [("--project", "nosuch"), ("--project", "file")])
def test_a_project_that_is_no_directory_is_refused(run: Run, arguments: tuple[str, ...]) -> None:
    (run.project / "file").touch()
    status, stdout, stderr = run(*arguments, "true")
    assert (status, stdout) == (exits.REFUSED, b"")
    assert stderr.startswith(b"ral: project ")


def test_a_removed_working_directory_is_refused(run: Run) -> None:
    (run.project / "gone").mkdir()
    command = ["sh", "-c", 'cd gone && rmdir ../gone && exec "$@"', "sh", *client_command("run", "true")]
    ended = subprocess.run(command, cwd=run.project, env=run.environment, capture_output=True, timeout=10)
    assert ended.returncode == exits.REFUSED
    assert b"it was removed" in ended.stderr
