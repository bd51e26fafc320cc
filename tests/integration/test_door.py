"""The control socket as a hostile or broken peer sees it."""

from __future__ import annotations

import array
import concurrent.futures
import json
import os
import random
import socket
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from ral_protocol import exits, wire
from support.broker import Broker, Ral

HELLO = {"t": "hello", "proto": exits.PROTOCOL, "version": exits.VERSION}


def connect(runtime: Path) -> socket.socket:
    """Connect to the broker of a test; a broker that does not answer in time fails it."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(10)
    peer.connect(str(runtime / exits.SOCKET_NAME))
    return peer


def message(value: object, fds: int = 0) -> bytes:
    return wire.frame(wire.pack(value), fds)


def read_all(peer: socket.socket) -> list[dict[str, object]]:
    """Read answers until the broker closes the connection or has said what ends a stream."""
    answers: list[dict[str, object]] = []
    data = b""
    while True:
        while len(data) >= 4:
            size, _ = wire.parse_header(data[:4])
            if len(data) < 4 + size:
                break
            answers.append(msgspec.msgpack.decode(data[4 : 4 + size]))
            data = data[4 + size :]
            if answers[-1]["t"] in ("done", "broker"):
                return answers
        try:
            more = peer.recv(65536)
        except ConnectionResetError:
            return answers
        if not more:
            return answers
        data += more


def descriptors_of(broker: Broker) -> int:
    assert broker.process is not None
    return len(os.listdir(f"/proc/{broker.process.pid}/fd"))


def resting(broker: Broker) -> int:
    """Number of descriptors once it has not changed for a while: whoever looked for readiness is gone."""
    seen: list[int] = []
    while len(seen) < 15 or len(set(seen[-15:])) > 1:
        seen.append(descriptors_of(broker))
        time.sleep(0.01)
    return seen[-1]


def settle(broker: Broker, count: int) -> None:
    deadline = time.monotonic() + 5
    while descriptors_of(broker) != count:
        assert time.monotonic() < deadline, f"{descriptors_of(broker)} descriptors instead of {count}"
        time.sleep(0.02)


GARBAGE = {
    "nothing": b"",
    "half a header": b"\0\0",
    "half a frame": b"\0\0\0\x40abc",
    "oversized": b"\0\xff\xff\xff" + b"x" * 100,
    "not msgpack": wire.frame(b"\xc1\xff\xff"),
    "a float": wire.frame(b"\xcb" + b"\0" * 8),
    "no greeting": message({"t": "sessions"}),
    "greeting with an unknown field": message({**HELLO, "extra": 1}),
    "greeting of another type": message({**HELLO, "proto": "1"}),
    "another protocol": message({**HELLO, "proto": 99}),
    "a version that is none": message({**HELLO, "version": "../x"}),
    "unknown request": message(HELLO) + message({"t": "nonsense"}),
    "unknown field": message(HELLO) + message({"t": "sessions", "more": True}),
    "deep nesting": message(HELLO) + wire.frame(b"\x91" * 4000 + b"\xc0"),
    "descriptors announced, none sent": message(HELLO) + message({"t": "sessions"}, fds=3),
    "a run without descriptors": message(HELLO)
    + message({"t": "run", "project": b"/", "cwd": b"/", "terminals": [False, False, False]}),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_ends_its_own_connection_only(broker: Broker, ral: Ral, runtime: Path, name: str) -> None:
    before = resting(broker)
    with connect(runtime) as peer:
        peer.sendall(GARBAGE[name])
        peer.shutdown(socket.SHUT_WR)
        for answer in read_all(peer):
            assert answer["t"] == "refused", answer
            assert answer["kind"] == "request"
    assert ral("sessions", "--json").stdout.strip() == b"[]"
    settle(broker, before)


def test_random_bytes_and_random_mutations_never_stop_the_broker(
    broker: Broker, ral: Ral, runtime: Path
) -> None:
    before = resting(broker)
    generator = random.Random(20261130)
    good = message(HELLO) + message({"t": "sessions", "ended": True})
    for _ in range(300):
        data = bytearray(good)
        for _ in range(generator.randrange(1, 6)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        with connect(runtime) as peer:
            peer.sendall(bytes(data) if generator.random() < 0.8 else generator.randbytes(200))
            peer.shutdown(socket.SHUT_WR)
            read_all(peer)
    assert ral("sessions", "--json").stdout.strip() == b"[]"
    settle(broker, before)


@pytest.mark.parametrize("count", [1, 16, 200])
def test_descriptors_that_nobody_asked_for_are_closed(broker: Broker, runtime: Path, count: int) -> None:
    before = resting(broker)
    with connect(runtime) as peer, open("/dev/null", "rb") as null:
        rights = array.array("i", [null.fileno()] * count)
        data = message(HELLO) + message({"t": "sessions"}, fds=min(count, 16))
        try:
            peer.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except OSError:
            assert count > 16
        peer.shutdown(socket.SHUT_WR)
        assert all(answer["t"] == "refused" for answer in read_all(peer))
    settle(broker, before)


def test_a_client_that_says_nothing_is_dropped_and_one_that_does_not_read_too(
    broker: Broker, runtime: Path
) -> None:
    with connect(runtime) as silent:
        assert silent.recv(1) == b""  # after the deadline of the greeting


def test_requests_byte_by_byte_are_understood(broker: Broker, runtime: Path) -> None:
    with connect(runtime) as peer:
        for byte in message(HELLO) + message({"t": "status"}):
            peer.send(bytes((byte,)))
        assert read_all(peer)[0]["t"] == "broker"


def test_sixty_four_clients_at_once(broker: Broker, ral: Ral, project: Path) -> None:
    before = resting(broker)

    def one(number: int) -> bytes:
        return ral(
            "run", "-q", "--", "sh", "-c", f"echo {number}; ls /proc/self/fd | wc -l", seconds=60
        ).stdout

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(one, range(64)))
    assert answers == [b"%d\n4\n" % number for number in range(64)]
    settle(broker, before)


def test_every_descriptor_of_the_broker_is_closed_on_exec(broker: Broker, ral: Ral) -> None:
    """Otherwise a sandbox would inherit another session's files."""
    assert broker.process is not None
    directory = Path(f"/proc/{broker.process.pid}/fdinfo")
    clients = [ral.start("run", "-q", "--", "sh", "-c", "read x") for _ in range(16)]
    seen = 0
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        for entry in directory.iterdir():
            try:
                flags = int(entry.read_text().split("flags:")[1].split()[0], 8)
            except (OSError, IndexError):
                continue
            if int(entry.name) > 2:
                seen += 1
                assert flags & os.O_CLOEXEC, entry.name
    for client in clients:
        client.communicate(b"\n", timeout=20)
    assert seen > 100


def test_a_peer_in_a_user_namespace_of_its_own_is_refused(broker: Broker, ral: Ral, runtime: Path) -> None:
    client = Path(ral.environment["PATH"].split(":")[0]) / "ral"
    done = subprocess.run(
        ["unshare", "-Ur", str(client), "sessions"],
        env=ral.environment,
        capture_output=True,
        check=False,
        timeout=20,
    )
    assert done.returncode != 0
    assert b"namespace" in done.stderr


def test_a_peer_that_sees_other_mounts_is_refused_with_the_likely_cause(broker: Broker, ral: Ral) -> None:
    client = Path(ral.environment["PATH"].split(":")[0]) / "ral"
    done = subprocess.run(
        ["unshare", "-Urm", str(client), "sessions"],
        env=ral.environment,
        capture_output=True,
        check=False,
        timeout=20,
    )
    assert done.returncode != 0
    assert b"namespace" in done.stderr or b"mounts" in done.stderr


def test_a_program_inside_cannot_reach_the_broker(broker: Broker, ral: Ral, project: Path) -> None:
    """Positive control: the same program outside, in the same directory, is answered."""
    script = project / "ask.py"
    script.write_text(
        "import socket, sys\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "s.connect(sys.argv[1])\n"
        f"s.sendall({message(HELLO) + message({'t': 'status'})!r})\n"
        "print(len(s.recv(4096)) > 10)\n"
    )
    own = str(Path(ral.environment["RAL_RUNTIME_DIR"]) / "control.sock")
    outside = subprocess.run(
        ["/usr/bin/python3", str(script), own], capture_output=True, check=False, timeout=10
    )
    assert outside.stdout == b"True\n"
    inside = ral("run", "-q", "--", "/usr/bin/python3", str(script), own)
    assert inside.status != 0
    assert b"FileNotFoundError" in inside.stderr


def test_a_newer_client_makes_the_broker_execute_itself_anew_and_keeps_its_sessions(
    broker: Broker, ral: Ral, runtime: Path
) -> None:
    session = ral("run", "-d", "-q", "--", "sleep", "60").stdout.decode().strip()
    attended = ral.start("run", "-q", "--", "sh", "-c", "read line; echo $line; exit 4")
    deadline = time.monotonic() + 5
    while len(ral.live()) < 2:
        assert time.monotonic() < deadline
    with connect(runtime) as peer:
        peer.sendall(message({**HELLO, "version": "99.0.0"}))
        assert read_all(peer)[0]["t"] == "restarting"
    listed = {line["id"] for line in json.loads(ral("sessions", "--json").stdout)}
    assert session in listed
    assert len(listed) == 2
    out, _ = attended.communicate(b"hello\n", timeout=10)
    assert (out, attended.returncode) == (b"hello\n", 4)
    assert ral("kill", session).status == 0


def test_no_growth_over_many_launches(broker: Broker, ral: Ral) -> None:
    for _ in range(3):
        ral("run", "-q", "--", "true")
    before = resting(broker)
    for _ in range(60):
        assert ral("run", "-q", "--", "true").status == 0
    settle(broker, before)
    assert broker.process is not None
    children = Path(f"/proc/{broker.process.pid}/task/{broker.process.pid}/children").read_text().split()
    assert children == []
