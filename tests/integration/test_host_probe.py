"""The probe against this host's bwrap, and against a wrapper of it that behaves like an older or a broken
one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import trio

from ral_broker import host, spawn
from ral_broker.host import launch_obstacle, launch_refusal, probe_host
from ral_broker.pins import Pin, take_bwrap, take_helper
from support.processes import descendants, wait_without

pytestmark = pytest.mark.needs("bubblewrap")

# Refuses one option as bwrap does one it does not know, else becomes the real bwrap.
WRAPPER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv) {
    char buffer[65536];
    ssize_t size = pread(atoi(argv[2]), buffer, sizeof buffer, 0);
    for (char *at = buffer; at < buffer + size; at += strlen(at) + 1)
        if (!strcmp(at, OPTION)) { BEHAVE; }
    execv("/usr/bin/bwrap", argv);
    return 99;
}
"""


@pytest.fixture
def payload() -> Iterator[Pin]:
    pin = take_helper("trampoline")
    yield pin
    os.close(pin.fd)


@pytest.fixture
def bwrap() -> Iterator[Pin]:
    pin = take_bwrap()
    yield pin
    os.close(pin.fd)


def wrapper(directory: Path, option: str, behave: str) -> Pin:
    (directory / "w.c").write_text(WRAPPER)
    subprocess.run(
        ["gcc", f'-DOPTION="{option}"', f"-DBEHAVE={behave}", "-o", directory / "bwrap", directory / "w.c"],
        check=True, timeout=60,
    )  # fmt: skip
    return take_bwrap(os.fsencode(directory))


def unknown(option: str) -> str:
    return f'fprintf(stderr, "bwrap: Unknown option {option}\\n"); return 1'


class _Counter:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spawned = 0
        real = spawn.spawn

        def counting(
            executable_fd: int,
            argv: Sequence[bytes],
            environment: Mapping[bytes, bytes],
            descriptors: Mapping[int, int],
        ) -> int:
            self.spawned += 1
            return real(executable_fd, argv, environment, descriptors)

        monkeypatch.setattr(spawn, "spawn", counting)


async def test_one_spawn_tells_everything_where_everything_works(
    bwrap: Pin, payload: Pin, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = _Counter(monkeypatch)
    facts = await probe_host(bwrap, payload)
    if facts.refused:
        pytest.skip(f"this host refuses {facts.refused}")
    assert counter.spawned == 1
    assert facts.builds
    assert facts.by_handle
    assert facts.why is None
    assert facts.fresh_proc
    assert facts.virtual_dev
    assert facts.private_cgroup
    assert facts.private_network
    assert launch_refusal(facts) is None


async def test_the_probe_leaves_neither_descriptors_nor_processes(bwrap: Pin, payload: Pin) -> None:
    await probe_host(bwrap, payload)
    known = {process.pid for process in descendants()}
    before = sorted(os.listdir("/proc/self/fd"))
    await probe_host(bwrap, payload)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert {process.pid for process in descendants()} == known


@pytest.mark.needs("gcc")
async def test_a_bwrap_that_cannot_mount_by_descriptor_is_refused_with_its_path(
    tmp_path: Path, payload: Pin
) -> None:
    pin = wrapper(tmp_path, "--ro-bind-fd", unknown("--ro-bind-fd"))
    facts = await probe_host(pin, payload)
    assert facts.builds
    assert not facts.by_handle
    assert not facts.fresh_proc
    refusal = launch_refusal(facts)
    assert refusal is not None
    assert refusal.kind == "host"
    for part in (
        f"{tmp_path}/bwrap",
        "Unknown option --ro-bind-fd",
        "0.10.0",
        "0.8.0-2+deb12u1",
        "apt install",
    ):
        assert part in refusal.message


@pytest.mark.needs("gcc")
async def test_a_bwrap_too_old_for_the_namespaces_is_refused(tmp_path: Path, payload: Pin) -> None:
    facts = await probe_host(wrapper(tmp_path, "--disable-userns", unknown("--disable-userns")), payload)
    assert not facts.builds
    assert facts.why == "Unknown option --disable-userns"
    obstacle = launch_obstacle(facts)
    assert obstacle is not None
    assert "too old" in obstacle.text


@pytest.mark.needs("gcc")
@pytest.mark.parametrize(
    ("option", "attribute"),
    [("--proc", "fresh_proc"), ("--unshare-cgroup", "private_cgroup"), ("--unshare-net", "private_network")],
)
async def test_what_a_host_does_not_give_is_found_by_itself_and_does_not_stop_sessions(
    tmp_path: Path, payload: Pin, option: str, attribute: str
) -> None:
    pin = wrapper(tmp_path, option, 'fprintf(stderr, "bwrap: said no\\n"); return 1')
    facts = await probe_host(pin, payload)
    known = {"fresh_proc", "virtual_dev", "private_cgroup", "private_network"}
    assert {name for name in known if not getattr(facts, name)} == {attribute}
    assert list(facts.refused.values()) == ["said no"]
    assert launch_refusal(facts) is None


@pytest.mark.needs("gcc")
@pytest.mark.parametrize("option", ["--dev", "--add-seccomp-fd", "/etc"])
async def test_what_every_session_needs_is_refused_in_the_words_of_bwrap(
    tmp_path: Path, payload: Pin, option: str
) -> None:
    pin = wrapper(
        tmp_path, option, 'fprintf(stderr, "bwrap: Can\'t do it: Operation not permitted\\n"); return 1'
    )
    facts = await probe_host(pin, payload)
    refusal = launch_refusal(facts)
    assert refusal is not None
    assert f"{tmp_path}/bwrap with " in refusal.message
    assert option in refusal.message
    assert "Can't do it: Operation not permitted" in refusal.message


@pytest.mark.needs("gcc")
async def test_words_of_bwrap_are_printed_harmlessly_and_shortened(tmp_path: Path, payload: Pin) -> None:
    behave = (
        'fputs("\\033[31mred\\n\\n", stderr); for (int i = 9000; i--;) fputs("\\001x", stderr); return 1'
    )
    facts = await probe_host(wrapper(tmp_path, "--unshare-user", behave), payload)
    assert facts.why is not None
    assert facts.why.isprintable()
    assert len(facts.why) < 3000


@pytest.mark.needs("gcc")
@pytest.mark.parametrize(
    ("behave", "words"),
    [("return 3", "status 3"), ("abort()", "signal 6"), ("return 0", "status 0"), ("return 126", None)],
)
async def test_a_silent_end_is_told_by_its_status(
    tmp_path: Path, payload: Pin, behave: str, words: str | None
) -> None:
    facts = await probe_host(wrapper(tmp_path, "--unshare-user", behave), payload)
    if words is None:  # the one status that means success
        assert facts.builds
        return
    assert not facts.builds
    assert facts.why is not None
    assert words in facts.why


@pytest.mark.needs("gcc")
async def test_a_bwrap_that_hangs_is_ended_with_all_it_started(
    tmp_path: Path, payload: Pin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "DEADLINE", 0.2)
    known = {process.pid for process in descendants()}
    started = time.monotonic()
    facts = await probe_host(wrapper(tmp_path, "--unshare-user", "fork(); pause()"), payload)
    assert time.monotonic() - started < 3
    assert facts.why == "did not finish in 0.2 seconds"
    await _wait_until_only(known)


@pytest.mark.needs("gcc")
async def test_a_bwrap_that_fails_halfway_leaves_no_child_of_its_own(tmp_path: Path, payload: Pin) -> None:
    known = {process.pid for process in descendants()}
    pin = wrapper(tmp_path, "--unshare-user", "if (fork()) return 1; pause()")
    assert not (await probe_host(pin, payload)).builds
    await _wait_until_only(known)


@pytest.mark.needs("gcc")
async def test_a_cancelled_probe_leaves_nothing(tmp_path: Path, payload: Pin) -> None:
    pin = wrapper(tmp_path, "--unshare-user", "fork(); pause()")
    known = {process.pid for process in descendants()}
    before = sorted(os.listdir("/proc/self/fd"))
    with trio.move_on_after(0.2) as scope:
        await probe_host(pin, payload)
    assert scope.cancelled_caught
    assert sorted(os.listdir("/proc/self/fd")) == before
    await _wait_until_only(known)


async def _wait_until_only(known: set[int]) -> None:
    with trio.fail_after(5):
        await trio.to_thread.run_sync(wait_without, known)
    assert {process.pid for process in descendants()} <= known


async def test_a_file_that_is_no_program_cannot_be_started(tmp_path: Path, payload: Pin) -> None:
    (tmp_path / "bwrap").write_text("nothing")
    (tmp_path / "bwrap").chmod(0o755)
    facts = await probe_host(take_bwrap(os.fsencode(tmp_path)), payload)
    assert facts.why == "cannot be started: Exec format error"


@pytest.mark.root
def test_a_setuid_bwrap_is_refused_with_the_command_that_mends_it() -> None:
    known = {process.pid for process in descendants()}
    directory = Path(tempfile.mkdtemp(prefix="ral-setuid-", dir="/var/tmp"))
    try:
        directory.chmod(0o755)
        shutil.copy("/usr/bin/bwrap", directory / "bwrap")
        (directory / "bwrap").chmod(0o4755)
        script = (
            "import os, sys, trio\n"
            "from ral_broker.host import launch_refusal, probe_host\n"
            "from ral_broker.pins import take_bwrap, take_helper\n"
            "payload = take_helper('trampoline')\n"
            "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
            "print(launch_refusal(trio.run(probe_host, take_bwrap(os.fsencode(sys.argv[1])), payload)))\n"
        )
        done = subprocess.run(
            [sys.executable, "-I", "-c", script, directory],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done
        assert wait_without(known) == []
        assert f"{directory}/bwrap is setuid root" in done.stdout
        assert "dpkg-statoverride" in done.stdout
        (directory / "bwrap").chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-I", "-c", script, directory],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stdout == "None\n", done
    finally:
        shutil.rmtree(directory)
