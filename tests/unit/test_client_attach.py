"""``ral attach`` and ``ral logs``, against a scripted broker and a scripted holder."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ral_client.attach import RESET, DetachKeys
from ral_protocol import exits
from support.peer import Incoming, Peer, client_command
from support.terminal import Terminal


@given(st.lists(st.lists(st.sampled_from(b"a\x10\r\x03\xff")).map(bytes)))
def test_without_ctrl_q_every_byte_is_passed_on_in_order(pieces: list[bytes]) -> None:
    keys = DetachKeys()
    results = [keys.feed(piece) for piece in pieces]
    assert not any(detach for _, detach in results)
    typed = b"".join(pieces)
    held = b"\x10" if typed.endswith(b"\x10") else b""
    assert b"".join(sent for sent, _ in results) + held == typed


@pytest.mark.parametrize(
    ("pieces", "out", "detached"),
    [
        ([b"a\x10\x11b"], b"a", True),
        ([b"a\x10", b"\x11"], b"a", True),
        ([b"\x10\x10\x11"], b"\x10", True),
        ([b"\x10x\x11"], b"\x10x\x11", False),
        ([b"\x11\x10"], b"\x11", False),
        ([b"\x10", b"x"], b"\x10x", False),
    ],
)
def test_ctrl_p_ctrl_q_detaches(pieces: list[bytes], out: bytes, detached: bool) -> None:
    keys = DetachKeys()
    results = [keys.feed(piece) for piece in pieces]
    assert b"".join(sent for sent, _ in results) == out
    assert results[-1][1] is detached


class Holder:
    """The session's end of an attach socket: packets as docs/protocol.md says."""

    def __init__(self, runtime: Path) -> None:
        (runtime / "sessions").mkdir(0o700)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(runtime / "sessions" / "0123abcd.sock"))
        self.listener.listen()
        self.listener.settimeout(10)
        self.client: socket.socket | None = None

    def accept(self) -> bytes:
        self.client, _ = self.listener.accept()
        self.client.settimeout(10)
        return self.client.recv(32769)

    def send(self, packet: bytes) -> None:
        assert self.client is not None
        self.client.send(packet)

    def receive(self) -> bytes:
        assert self.client is not None
        return self.client.recv(32769)

    def close(self) -> None:
        self.listener.close()
        if self.client is not None:
            self.client.close()


@pytest.fixture
def holder(runtime: Path) -> Iterator[Holder]:
    holder = Holder(runtime)
    yield holder
    holder.close()


def attach(runtime: Path, *arguments: str) -> Terminal:
    environment = {"PATH": os.environ["PATH"], "RAL_RUNTIME_DIR": str(runtime)}
    return Terminal(client_command("attach", *arguments), cwd=runtime, env=environment)


def test_attach_without_a_broker_finds_the_holder(runtime: Path, holder: Holder) -> None:
    with attach(runtime, "01") as terminal:
        assert holder.accept() == b"A\0" + struct.pack("<HHHH", 24, 80, 0, 0)
        holder.send(b"H\0")
        holder.send(b"Oscreen")
        terminal.expect(b"screen")
        assert not terminal.modes()[3] & termios.ICANON
        terminal.send(b"typed\r\x03")
        received = b""
        while len(received) < 7:
            packet = holder.receive()
            assert packet[:1] == b"I"
            received += packet[1:]
        assert received == b"typed\r\x03"
        terminal.resize(30, 90)
        assert holder.receive() == b"W" + struct.pack("<HHHH", 30, 90, 0, 0)
        holder.send(b"T\x14")
        terminal.expect(b"was stopped by a signal")
        holder.send(b"X" + struct.pack("<iB", 7, 0))
        assert terminal.wait() == 7
        assert terminal.modes()[3] & termios.ICANON
    assert not (runtime / "broker.log").exists()


def test_detaching_resets_the_terminal_and_is_0(runtime: Path, holder: Holder) -> None:
    with attach(runtime, "0123abcd") as terminal:
        holder.accept()
        holder.send(b"H\0")
        holder.send(b"O\x1b[?1049hfull screen")
        terminal.expect(b"full screen")
        terminal.send(b"\x10")
        terminal.send(b"\x11")
        assert terminal.wait() == 0
        assert RESET in terminal.output
        assert b"ral: detached from 0123abcd" in terminal.output
        assert terminal.modes()[3] & termios.ICANON
        # Nothing of the keys reached the program.
        assert holder.receive() == b""


def test_a_session_that_another_client_has_is_refused(runtime: Path, holder: Holder) -> None:
    with attach(runtime, "01") as terminal:
        holder.accept()
        holder.send(b"H\x01")
        assert terminal.wait() == exits.FAILED
        assert b"another client has session 0123abcd" in terminal.output
        assert b"--read-only" in terminal.output
        assert terminal.modes()[3] & termios.ICANON


def test_watching_sends_nothing_and_ctrl_c_detaches(runtime: Path, holder: Holder) -> None:
    with attach(runtime, "--read-only", "01") as terminal:
        assert holder.accept()[:2] == b"A\x01"
        holder.send(b"H\0")
        holder.send(b"Oscreen")
        terminal.expect(b"screen")
        terminal.resize(30, 90)
        terminal.send(b"typed")
        terminal.send(b"\x03")
        assert terminal.wait() == 0
        assert holder.receive() == b""


def test_watching_into_a_pipe(runtime: Path, holder: Holder) -> None:
    with subprocess.Popen(
        client_command("attach", "--read-only", "01"),
        env={"RAL_RUNTIME_DIR": str(runtime)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as client:
        holder.accept()
        holder.send(b"H\0")
        holder.send(b"Oone\r\n")
        holder.send(b"Otwo")
        holder.send(b"X" + struct.pack("<iB", 137, 1))
        stdout, stderr = client.communicate(None, 10)
    assert stdout == b"one\r\ntwo"
    assert client.returncode == exits.LOST
    assert b"lost" in stderr


def test_a_holder_that_dies_is_lost(runtime: Path, holder: Holder) -> None:
    with attach(runtime, "01") as terminal:
        holder.accept()
        holder.send(b"H\0")
        assert holder.client is not None
        holder.client.close()
        assert terminal.wait() == exits.LOST
        assert terminal.modes()[3] & termios.ICANON


def test_an_ambiguous_prefix_names_the_ids(runtime: Path, holder: Holder) -> None:
    (runtime / "sessions" / "01ffffff.sock").touch()
    with attach(runtime, "01") as terminal:
        assert terminal.wait() == exits.FAILED
        assert b"more than one id: 0123abcd, 01ffffff" in terminal.output


def test_without_a_terminal_only_watching_is_possible(runtime: Path, holder: Holder) -> None:
    ended = subprocess.run(
        client_command("attach", "01"),
        env={"RAL_RUNTIME_DIR": str(runtime)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=10,
    )
    assert ended.returncode == exits.FAILED
    assert b"--read-only" in ended.stderr


def test_attach_through_the_broker(runtime: Path, holder: Holder) -> None:
    def connect(incoming: Incoming, request: dict[str, object], fds: list[int]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(runtime / "sessions" / "0123abcd.sock"))
            incoming.answer({"t": "attach_to", "id": "0123abcd"}, [sock.fileno()])

    peer = Peer(runtime, connect)
    try:
        with attach(runtime, "0123") as terminal:
            holder.accept()
            holder.send(b"H\0")
            holder.send(b"X" + struct.pack("<iB", 0, 0))
            assert terminal.wait() == 0
    finally:
        peer.close()
    assert peer.requests == [{"t": "attach", "session": "0123"}]


def test_logs_print_events_to_stderr_and_output_to_stdout(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old\x00\xff")
    (tmp_path / "new").write_bytes(b"new")

    def log(incoming: Incoming, request: dict[str, object], fds: list[int]) -> None:
        incoming.answer({"t": "event", "time": "2026-11-30T10:00:00Z", "text": "a \x1b[31mmask"})
        with (tmp_path / "old").open("rb") as old, (tmp_path / "new").open("rb") as new:
            incoming.answer({"t": "log_files", "count": 2}, [old.fileno(), new.fileno()])
        incoming.answer({"t": "done"})

    peer = Peer(runtime, log)
    try:
        ended = subprocess.run(
            client_command("logs", "0a"),
            env={"RAL_RUNTIME_DIR": str(runtime)},
            capture_output=True,
            timeout=10,
        )
    finally:
        peer.close()
    assert (ended.returncode, ended.stdout) == (0, b"old\x00\xffnew")
    assert ended.stderr == b"2026-11-30T10:00:00Z  a \\x1b[31mmask\n"


def test_following_a_log_over_its_rotation_misses_nothing(runtime: Path, tmp_path: Path) -> None:
    log_file, older = tmp_path / "log", tmp_path / "log.1"
    following: list[Incoming] = []

    def log(incoming: Incoming, request: dict[str, object], fds: list[int]) -> None:
        files = [path.open("rb") for path in (older, log_file) if path.exists()]
        incoming.answer({"t": "log_files", "count": len(files)}, [file.fileno() for file in files])
        for file in files:
            file.close()
        if request["follow"]:
            following.append(incoming)
        else:
            incoming.answer({"t": "done"})

    def append(text: bytes) -> None:
        with log_file.open("ab") as file:
            file.write(text)

    append(b"one\n")
    peer = Peer(runtime, log)
    try:
        with subprocess.Popen(
            client_command("logs", "--follow", "0a"),
            env={"RAL_RUNTIME_DIR": str(runtime)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"one\n"
            append(b"two\n")
            assert client.stdout.readline() == b"two\n"
            append(b"three\n")
            log_file.rename(older)
            append(b"four\n")
            assert client.stdout.readline() == b"three\n"
            assert client.stdout.readline() == b"four\n"
            time.sleep(0.2)
            append(b"five\n")
            following[0].answer({"t": "done"})
            assert client.stdout.read() == b"five\n"
            assert client.wait(10) == 0
    finally:
        peer.close()
