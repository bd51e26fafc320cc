"""What a launch takes from its caller, and what it refuses to replace in silence."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ral_broker.errors import Refused, RequestError
from ral_broker.peers import Peer
from ral_broker.sessions.caller import Habits, check_habits, habits_of, read_payload
from ral_protocol.control import MAX_PAYLOAD


@pytest.fixture
def own() -> Iterator[Peer]:
    peer = Peer(os.getpid(), os.getuid(), os.pidfd_open(os.getpid()))
    yield peer
    peer.close()


def test_habits_are_the_kernels_word(own: Peer) -> None:
    habits = habits_of(own)
    assert habits.affinity == os.sched_getaffinity(0)
    assert habits.nice == os.nice(0)
    assert habits.groups == frozenset(os.getgroups())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert (resource.RLIMIT_NOFILE, soft, hard) in habits.limits
    numbers = [number for number, _, _ in habits.limits]
    assert numbers == sorted(set(numbers))
    check_habits(habits)


def test_a_caller_that_is_gone_is_refused() -> None:
    gone = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(gone.pid)
    gone.wait()
    with pytest.raises(Refused, match="cannot be read"):
        habits_of(Peer(gone.pid, os.getuid(), pidfd))
    os.close(pidfd)


@pytest.mark.parametrize("change", ["one more", "none"])
def test_other_supplementary_groups_are_refused(own: Peer, change: str) -> None:
    """Files would be open or closed to the program that are not to its caller."""
    habits = habits_of(own)
    groups = habits.groups | {54321} if change == "one more" else frozenset({54321})
    with pytest.raises(Refused, match="supplementary groups"):
        check_habits(msgspec.structs.replace(habits, groups=groups))


def test_another_control_group_is_refused_where_there_is_no_systemd(own: Peer) -> None:
    """A batch job's limits would not hold for what the broker of the login starts."""
    moved = msgspec.structs.replace(habits_of(own), cgroup=b"0::/batch/job-1\n")
    if Path("/run/systemd/system").is_dir():
        check_habits(moved)
        return
    with pytest.raises(Refused, match="RAL_RUNTIME_DIR"):
        check_habits(moved)


def memory_file(content: bytes, flags: int = os.MFD_ALLOW_SEALING) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | flags)
    os.write(fd, content)
    return fd


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be decoded"), (b"\xc1", "cannot be decoded"), (b"\x92\x90\x90", "a command is needed"),
        (b"\x92\x91\xc4\x00\x90", "a command is needed"), (b"\x92\x91\xa1a\x90", "cannot be decoded"),
        (b"\x92\x91\xc4\x02a\x00\x90", "NUL"), (b"\x92\x91\xc4\x01a\x91\xc4\x03A=\x00", "NUL"),
    ],
)  # fmt: skip
def test_a_crooked_payload_is_the_clients_fault(content: bytes, words: str) -> None:
    fd = memory_file(content)
    with pytest.raises(RequestError, match=words):
        read_payload(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_payload_has_to_be_sealable_and_of_a_bounded_size(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="sealed"):
        read_payload(memory_file(b"\x92\x90\x90", 0))
    with pytest.raises(RequestError, match="sealed"):
        read_payload(os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR))
    large = memory_file(b"")
    os.truncate(large, MAX_PAYLOAD + 1)
    with pytest.raises(RequestError, match="at most"):
        read_payload(large)


def test_a_good_payload_is_decoded_and_final() -> None:
    fd = memory_file(msgspec.msgpack.encode([[b"a", b"\xff"], [b"A=1"]]))
    kept = os.dup(fd)
    payload = read_payload(fd)
    assert (payload.argv, payload.environment) == ([b"a", b"\xff"], [b"A=1"])
    with pytest.raises(PermissionError):
        os.pwrite(kept, b"x", 0)
    os.close(kept)


def test_habits_have_a_value_for_every_field(own: Peer) -> None:
    assert all(getattr(habits_of(own), field) is not None for field in Habits.__struct_fields__)
