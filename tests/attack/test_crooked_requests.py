"""Requests that contradict themselves, sent by a program that speaks the protocol: refused, each for its
reason, and the broker goes on."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import mmap
import os
import select
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ral_broker import syscalls
from ral_broker.envelope import opened as opening
from ral_broker.envelope.opened import identity_of
from ral_broker.equipment import Equipment
from ral_broker.errors import Refused
from ral_broker.runtime import RuntimeDir, find_runtime_dir
from ral_broker.sessions.launch import Launcher
from ral_protocol import exits, wire
from ral_protocol.control import MAX_PAYLOAD, Payload, Run
from support.broker import Broker

pytestmark = [pytest.mark.attack, pytest.mark.needs("bubblewrap")]

HELLO = {"t": "hello", "proto": exits.PROTOCOL, "version": exits.VERSION}


def payload(content: bytes | None = None, flags: int = os.MFD_ALLOW_SEALING) -> int:
    fd = os.memfd_create("payload", flags | os.MFD_CLOEXEC)
    os.write(fd, wire.pack([[b"true"], [b"PATH=/usr/bin"]]) if content is None else content)
    return fd


class Request:
    """A ``run`` request that is right in everything but what a test changes."""

    def __init__(self, project: Path) -> None:
        self.fields: dict[str, object] = {
            "t": "run", "project": os.fsencode(project), "cwd": os.fsencode(project),
            "terminals": (False, False, False),
        }  # fmt: skip
        directory = os.open(project, os.O_PATH)
        null = os.open("/dev/null", os.O_RDWR)
        self.fds = [payload(), directory, os.dup(directory), null, os.dup(null), os.dup(null)]

    def send(self, runtime: Path) -> dict[str, object]:
        """The broker's answer."""
        greeting, body = wire.pack(HELLO), wire.pack(self.fields)
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(20)
            peer.connect(str(runtime / "control.sock"))
            peer.sendall(wire.frame(greeting))
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self.fds))]
            peer.sendmsg([wire.frame(body, len(self.fds))], rights)
            data = b""
            while len(data) < 4 or len(data) < 4 + wire.parse_header(data[:4])[0]:
                part, ancillary, _, _ = peer.recvmsg(65536, 4096)
                for _, _, rights_data in ancillary:
                    for fd in array.array("i", rights_data):
                        os.close(fd)
                assert part, "no answer"
                data += part
        answer = wire.unpack(data[4 : 4 + wire.parse_header(data[:4])[0]])
        assert isinstance(answer, dict)
        return answer

    def close(self) -> None:
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)

    def replace(self, index: int, fd: int) -> None:
        os.close(self.fds[index])
        self.fds[index] = fd


@pytest.fixture
def request_(broker: Broker, project: Path) -> Iterator[Request]:
    made = Request(project)
    yield made
    made.close()


def test_the_request_itself_is_right(request_: Request, runtime: Path) -> None:
    """The control of every refusal below."""
    assert request_.send(runtime)["t"] == "started"


def refused(request: Request, runtime: Path, kind: str, *words: str) -> None:
    answer = request.send(runtime)
    assert (answer["t"], answer.get("kind")) == ("refused", kind), answer
    for word in words:
        assert word in str(answer["message"]), answer


@pytest.mark.parametrize("index", [1, 2], ids=["working directory", "project"])
def test_a_name_and_a_handle_that_are_not_the_same_directory(
    request_: Request, runtime: Path, index: int
) -> None:
    request_.replace(index, os.open("/usr", os.O_PATH))
    refused(request_, runtime, "refused", "now reaches /usr, not what the grant rendered")


def test_a_project_that_is_a_file(request_: Request, runtime: Path) -> None:
    request_.fields["project"] = b"/etc/passwd"
    request_.replace(2, os.open("/etc/passwd", os.O_PATH))
    refused(request_, runtime, "refused", "is no directory")


@pytest.mark.parametrize("path", [b"", b"relative", b"/etc/../etc", b"/nul\0", b"//usr", b"/usr/"])
def test_a_project_whose_name_is_not_canonical(request_: Request, runtime: Path, path: bytes) -> None:
    request_.fields["project"] = path
    answer = request_.send(runtime)
    assert answer["t"] == "refused", answer


@pytest.mark.parametrize("name", ["unsealable", "pipe", "file", "mapped"])
def test_a_payload_that_cannot_be_sealed(
    request_: Request, runtime: Path, name: str, tmp_path: Path
) -> None:
    """Whoever could change it afterwards would run something else than was checked."""
    kept: list[object] = []
    if name == "unsealable":
        request_.replace(0, payload(flags=0))
    elif name == "pipe":
        read, write = os.pipe()
        os.close(write)
        request_.replace(0, read)
    elif name == "file":
        (tmp_path / "f").write_bytes(wire.pack([[b"true"], []]))
        request_.replace(0, os.open(tmp_path / "f", os.O_RDWR))
    else:
        kept.append(mmap.mmap(request_.fds[0], 10))
    refused(request_, runtime, "request", "can be sealed")
    kept.clear()


def test_a_payload_is_sealed_before_it_is_read(request_: Request, runtime: Path) -> None:
    fd = os.dup(request_.fds[0])
    try:
        assert request_.send(runtime)["t"] == "started"
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
    finally:
        os.close(fd)


def test_a_payload_that_is_too_large_is_not_read(request_: Request, runtime: Path) -> None:
    fd = payload()
    os.truncate(fd, MAX_PAYLOAD + 1)
    request_.replace(0, fd)
    refused(request_, runtime, "request", str(MAX_PAYLOAD))


@pytest.mark.parametrize("content", [b"", b"\xc1", wire.pack([[], []]), wire.pack([[b""], []])], ids=repr)
def test_a_payload_that_says_nothing(request_: Request, runtime: Path, content: bytes) -> None:
    request_.replace(0, payload(content))
    refused(request_, runtime, "request")


@pytest.mark.parametrize(
    "fields",
    [
        {"size": [-1, 1 << 40, 65536, 0]}, {"modes": [(1 << 64) - 1, -1, 0, 0, b"\0" * 19]},
        {"modes": [0, 0, 0, 0, b"x" * 4096]}, {"modes": [0, 0, 0, 0, b""]}, {"ignored": (1 << 64) - 1},
    ],
    ids=str,
)  # fmt: skip
def test_absurd_terminals_cost_nobody_but_the_client(
    request_: Request, runtime: Path, fields: dict[str, object]
) -> None:
    for fd in request_.fds[3:]:
        os.close(fd)
    del request_.fds[3:]
    request_.fields |= {"terminals": (True, True, True), **fields}
    assert request_.send(runtime)["t"] == "started"


def test_a_terminal_that_is_called_none(request_: Request, runtime: Path) -> None:
    """A program that held the caller's terminal would read what the user types."""
    master, slave = os.openpty()
    try:
        request_.replace(3, slave)
        refused(request_, runtime, "request", "is a terminal and was sent all the same")
    finally:
        os.close(master)


@pytest.mark.parametrize("kind", ["directory", "path", "namespace", "pidfd", "event", "epoll"])
def test_descriptors_that_open_more_than_a_stream(request_: Request, runtime: Path, kind: str) -> None:
    watching = select.epoll()
    fd = {
        "directory": lambda: os.open("/", os.O_RDONLY),
        "path": lambda: os.open("/etc/passwd", os.O_PATH),
        "namespace": lambda: os.open("/proc/self/ns/mnt", os.O_RDONLY),
        "pidfd": lambda: os.pidfd_open(os.getpid()),
        "event": lambda: os.eventfd(0),
        "epoll": lambda: os.dup(watching.fileno()),
    }[kind]()
    request_.replace(4, fd)
    refused(request_, runtime, "refused", "standard output")


@pytest.mark.root
def test_a_block_device_is_no_stream(request_: Request, runtime: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        node = Path(directory, "node")
        os.mknod(node, 0o600 | 0o060000, os.makedev(7, 250))
        try:
            fd = os.open(node, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.EPERM, errno.EACCES):
                raise
            pytest.skip("needs a block device that can be opened")
        request_.replace(4, fd)
        refused(request_, runtime, "refused", "block device")


@pytest.mark.parametrize("change", ["one less", "one more"])
def test_counts_that_do_not_add_up(request_: Request, runtime: Path, change: str) -> None:
    if change == "one less":
        os.close(request_.fds.pop())
    else:
        request_.fds.append(os.dup(request_.fds[-1]))
    refused(request_, runtime, "request", "descriptors than it needs")


def test_a_request_that_takes_no_descriptors_gets_none(request_: Request, runtime: Path) -> None:
    request_.fields = {"t": "sessions"}
    refused(request_, runtime, "request", "takes no descriptors")


CONNECT_AS_ANOTHER = """
import os, socket, sys
own = socket.socket(socket.AF_UNIX); own.connect("control.sock")
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
other = socket.socket(socket.AF_UNIX); other.connect("control.sock")
for peer in (own, other):
    try: peer.sendall(bytes.fromhex(sys.argv[1]))
    except BrokenPipeError: pass  # refused already; the answer waits
    print(b"serves uid 0 only, and the caller is uid 65534" in peer.recv(4096))
"""


@pytest.mark.root
@pytest.mark.usefixtures("broker")
def test_another_user_who_reaches_the_socket_is_not_served(runtime: Path) -> None:
    """As if somebody had opened the directory: the broker's own check is left."""
    runtime.chmod(0o711)
    (runtime / "control.sock").chmod(0o777)
    ask = wire.frame(wire.pack(HELLO)) + wire.frame(wire.pack({"t": "status"}))
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-c", CONNECT_AS_ANOTHER, ask.hex()], cwd=runtime, capture_output=True,
        timeout=20, check=False,
    )  # fmt: skip
    runtime.chmod(0o700)
    assert done.stdout == b"False\nTrue\n", done


async def test_a_directory_of_the_brokers_own_that_moves_during_the_plan_refuses(
    runtime: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = find_runtime_dir({b"RAL_RUNTIME_DIR": os.fsencode(runtime)})
    equipment = Equipment()
    await equipment.probe()
    launcher = Launcher(directory, equipment, ())
    fd = os.open(project, os.O_PATH)
    asked = Run(project=os.fsencode(project), cwd=os.fsencode(project), terminals=(False, False, False))
    try:
        prepared = await launcher.prepare("0123abcd", asked, Payload([b"true"], []), fd, fd)
        assert prepared.plan.operations
        monkeypatch.setattr(RuntimeDir, "hidden", lambda own: ((os.fsencode(tmp_path), own.fd),))
        with pytest.raises(Refused, match="was moved just now"):
            await launcher.prepare("0123abcd", asked, Payload([b"true"], []), fd, fd)
    finally:
        os.close(fd)


def test_the_slow_open_follows_no_link_either(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    slow = opening._SlowOpen(os.fsencode(tmp_path / "link" / "passwd"), os.O_PATH)
    with pytest.raises(OSError, match="Too many levels") as error:
        slow.run()
    assert error.value.errno == errno.ELOOP
    straight = opening._SlowOpen(b"/etc/passwd", os.O_PATH)
    straight.run()
    fd = straight.take()
    assert identity_of(fd).inode == Path("/etc/passwd").stat().st_ino
    os.close(fd)


def test_a_memory_file_that_is_written_to_before_its_seals_are_on_is_thrown_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process of the same user can open our descriptors through /proc."""
    real = syscalls.seal

    def seal_after_a_write(fd: int) -> None:
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        os.pwrite(other, b"X", 0)
        os.close(other)
        real(fd)

    os.close(syscalls.sealed_memfd("t", b"content"))
    monkeypatch.setattr(syscalls, "seal", seal_after_a_write)
    with pytest.raises(OSError, match="changed by another process"):
        syscalls.sealed_memfd("t", b"content")


def test_seals_that_do_not_hold_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("t", os.MFD_ALLOW_SEALING)
    monkeypatch.setattr(syscalls, "ALL_SEALS", syscalls.F_SEAL_GROW | (1 << 20))
    monkeypatch.setattr(fcntl, "fcntl", lambda *arguments: 0)
    with pytest.raises(OSError, match="did not hold"):
        syscalls.seal(fd)
    os.close(fd)
