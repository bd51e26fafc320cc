"""What the trampoline starts, with what, and what it refuses (docs/protocol.md, sections 2 and 3)."""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path

import pytest

from ral_broker.envelope.warrant import UNLIMITED, Warrant, encode
from support.facilities import require
from support.native import (
    FAILED,
    GO,
    SEALS,
    STARTED,
    Output,
    Ran,
    Sandbox,
    memfd,
    program,
    run,
)
from support.running import ON_TERMINAL, PATH, PYTHON, python, shell

pytestmark = pytest.mark.needs("bubblewrap", "fresh /proc")


@pytest.mark.parametrize("status", [0, 1, 7, 126, 127, 137, 141, 143, 255])
def test_exit_status_is_the_program_s(status: int) -> None:
    with Sandbox(shell(f"exit {status}")) as sandbox:
        sandbox.ready()
        sandbox.go([sandbox.status_fd] * 3)
        sandbox.expect(STARTED)
        assert sandbox.wait() == status
        assert sandbox.exit_code() == status


@pytest.mark.parametrize("number", [1, 2, 3, 6, 9, 11, 13, 15, 34, 64])
def test_end_by_a_signal_is_128_plus_it(number: int) -> None:
    assert run(shell(f"ulimit -c 0; kill -{number} $$; sleep 5")).status == 128 + number


def test_arguments_and_environment_arrive_byte_for_byte() -> None:
    argv = (PYTHON.encode(), b"-I", b"-c",
            b"import os,sys; b=os.fsencode; print([b(a) for a in sys.argv[1:]], os.environb)",
            b"", b" a  b ", b"line\nbreak\t", b"\xff\xfe", b"'\"$`\\", b"-x", b"\xc3\xa4")  # fmt: skip
    environment = (b"A=", b"B=x=y", b"C=\xff\n", b"D= ", b"LC_ALL=C.UTF-8")
    ran = run(encode(Warrant(argv=argv, environment=environment)))
    wanted = {b"A": b"", b"B": b"x=y", b"C": b"\xff\n", b"D": b" ", b"LC_ALL": b"C.UTF-8"}
    assert ran.stdout.decode() == f"{list(argv[4:])} environ({wanted})\n"


def test_empty_environment_stays_empty() -> None:
    assert run(encode(Warrant(argv=(b"/usr/bin/env",)))) == Ran(0, b"", b"")


def test_large_command_line() -> None:
    text = b"x" * 100_000
    ran = run(
        encode(Warrant(argv=(b"/bin/sh", b"-c", b"echo $#", b"sh", *(text,) * 10), environment=(PATH,)))
    )
    assert ran == Ran(0, b"10\n", b"")


def test_command_is_looked_up_on_the_path_of_the_warrant(tmp_path: Path) -> None:
    for name, text, mode in (
        ("plain", "#!/bin/sh\necho plain $0 $1", 0o755),
        ("none", "echo none $0 $1", 0o755),
        ("closed", "#!/bin/sh\n", 0o644),
        ("orphan", "#!/nowhere/interpreter\n", 0o755),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    (tmp_path / "directory").mkdir()
    path = b"PATH=/nonexistent:/etc/passwd:" + bytes(tmp_path) + b":/usr/bin:/bin"
    show = (
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--ro-bind",
        str(tmp_path),
        str(tmp_path),
    )

    def tried(*argv: bytes, environment: tuple[bytes, ...] = (path,)) -> Ran:
        return run(encode(Warrant(argv=argv, environment=environment)), options=show)

    assert tried(b"plain", b"1").stdout == b"plain %s/plain 1\n" % bytes(tmp_path)
    assert tried(b"none", b"1").stdout == b"none %s/none 1\n" % bytes(tmp_path)
    assert tried(bytes(tmp_path / "none"), b"1").stdout == b"none %s/none 1\n" % bytes(tmp_path)
    assert tried(b"closed") == Ran(126, b"", b"failed 8 13")
    assert tried(b"orphan") == Ran(127, b"", b"failed 8 2")
    assert tried(b"directory") == Ran(126, b"", b"failed 8 13")
    assert tried(b"nowhere") == Ran(127, b"", b"failed 7 2")
    assert tried(b"") == Ran(127, b"", b"failed 7 2")
    assert tried(b"x" * 300) == Ran(127, b"", b"failed 7 36")
    assert tried(b"/nowhere/at/all") == Ran(127, b"", b"failed 8 2")
    assert tried(bytes(tmp_path / "closed")) == Ran(126, b"", b"failed 8 13")
    assert tried(b"env", environment=()).status == 0
    assert tried(b"true", environment=(b"PATH=" + b"/" * 5000 + b":/usr/bin",)).status == 0
    assert tried(b"true", environment=(b"PATH=/nowhere",)) == Ran(127, b"", b"failed 7 2")


def test_start_takes_less_than_a_millisecond() -> None:
    """From ready, sent and go received, to started: the fork and the execve are in it."""
    times: list[float] = []
    for _ in range(15):
        with Sandbox(encode(Warrant(argv=(b"/bin/true",)))) as sandbox:
            sandbox.ready()
            begun = time.perf_counter()
            sandbox.go([sandbox.status_fd] * 3)
            sandbox.expect(STARTED)
            times.append(time.perf_counter() - begun)
            sandbox.wait()
    assert min(times) < 0.001, times


def test_signals_are_default_but_those_the_caller_ignores() -> None:
    ran = run(encode(Warrant(argv=(b"grep", b"Sig", b"/proc/self/status"), environment=(PATH,))))
    assert {
        line.split()[1] for line in ran.stdout.splitlines() if line.startswith((b"SigIgn", b"SigBlk"))
    } == {b"0" * 16}
    ignored = frozenset({1, 2, 13, 17, 32, 33, 64})
    ran = run(
        encode(Warrant(argv=(b"grep", b"Sig", b"/proc/self/status"), environment=(PATH,), ignored=ignored))
    )
    fields = dict(line.split() for line in ran.stdout.splitlines())
    assert int(fields[b"SigIgn:"], 16) == sum(1 << (number - 1) for number in ignored)
    assert int(fields[b"SigBlk:"], 16) == 0


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o777])
def test_umask(mask: int) -> None:
    assert run(shell("umask", umask=mask)).stdout == b"%04o\n" % mask


def test_limits_are_the_caller_s() -> None:
    wanted = {
        resource.RLIMIT_NOFILE: (50, 60),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_FSIZE: (4096, 8192),
        resource.RLIMIT_CPU: (30, 40),
        resource.RLIMIT_NPROC: (20, 30),
    }
    limits = tuple((number, *pair) for number, pair in wanted.items())
    script = f"import resource; print({{n: resource.getrlimit(n) for n in {list(wanted)}}})"
    argv = (PYTHON.encode(), b"-I", b"-c", script.encode())
    assert run(encode(Warrant(argv=argv, limits=limits))).stdout.decode().strip() == str(wanted)


def test_limit_above_the_hard_limit_becomes_the_hard_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = ((resource.RLIMIT_NOFILE, UNLIMITED, UNLIMITED),)
    assert run(shell("ulimit -Sn; ulimit -Hn", limits=limits)).stdout == b"%d\n%d\n" % (hard, hard)


def test_limits_are_of_the_program_and_not_of_pid_1() -> None:
    limits = ((resource.RLIMIT_NOFILE, 5, 5), (resource.RLIMIT_CPU, 1, 1))
    ran = run(shell("grep 'open files' /proc/1/limits; ulimit -n", limits=limits))
    assert ran.stdout.endswith(b"\n5\n")
    assert int(ran.stdout.split()[3]) > 100, ran


def test_no_descriptor_at_all_still_starts() -> None:
    assert run(encode(Warrant(argv=(b"/bin/true",), limits=((resource.RLIMIT_NOFILE, 3, 3),)))).status in {
        0,
        127,
    }
    ran = run(
        encode(
            Warrant(argv=(program("holder").as_posix().encode(),), limits=((resource.RLIMIT_NOFILE, 0, 0),))
        )
    )
    assert (ran.status, ran.stderr[:11]) == (2, b"ral-holder:")


def test_nice_is_raised_and_never_lowered() -> None:
    assert run(encode(Warrant(argv=(b"nice",), environment=(PATH,), nice=7))).stdout == b"7\n"
    assert run(encode(Warrant(argv=(b"nice",), environment=(PATH,), nice=-5))).stdout == b"0\n"


def test_affinity() -> None:
    usable = sorted(os.sched_getaffinity(0))
    argv = (b"grep", b"Cpus_allowed_list", b"/proc/self/status")
    ran = run(encode(Warrant(argv=argv, environment=(PATH,), affinity=frozenset({usable[-1]}))))
    assert ran.stdout.split()[1] == b"%d" % usable[-1]
    # Processors that we may not use are no reason not to start.
    assert run(encode(Warrant(argv=argv, environment=(PATH,), affinity=frozenset({8000})))).status == 0


def test_program_has_exactly_0_1_2() -> None:
    ran = run(shell("exec ls -1 /proc/self/fd"))
    assert ran.stdout == b"0\n1\n2\n3\n"  # 3 is the listing's own
    ran = run(
        python("import os\nfor n in range(3, 4096):\n try: os.fstat(n); print(n)\n except OSError: pass")
    )
    assert ran == Ran(0, b"", b"")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2), (0, 0, 0)])
def test_descriptors_come_in_order(order: tuple[int, int, int]) -> None:
    files = [memfd(f"file{number}", b"") for number in range(3)]
    script = (
        "import os,sys; names=[os.readlink(f'/proc/self/fd/{n}') for n in range(3)];"
        "sys.exit(sum(int(n[11]) << 2*i for i, n in enumerate(names)))"
    )
    with Sandbox(python(script)) as sandbox:
        sandbox.ready()
        sandbox.go([files[number] for number in order])
        sandbox.expect(STARTED)
        assert sandbox.wait() == sum(number << 2 * index for index, number in enumerate(order))
    for file in files:
        os.close(file)


def test_pipe_closes_when_the_program_closes_it() -> None:
    with Sandbox(shell("exec 1>&-; read x; exit 3")) as sandbox:
        sandbox.ready()
        out = Output()
        given, ours = os.pipe2(os.O_CLOEXEC)
        sandbox.go([given, out.write_end, sandbox.status_fd])
        os.close(given)
        out.close_write()
        assert out.until_end(5) == b""
        assert not sandbox.ended(0.1)
        os.write(ours, b"\n")
        assert sandbox.wait() == 3
        os.close(ours)


def test_pipe_breaks_when_the_program_closes_its_input() -> None:
    with Sandbox(shell("exec 0<&-; sleep 100")) as sandbox:
        sandbox.ready()
        given, ours = os.pipe2(os.O_CLOEXEC)
        sandbox.go([given, sandbox.status_fd, sandbox.status_fd])
        os.close(given)
        sandbox.expect(STARTED)
        poll = select.poll()
        poll.register(ours, 0)
        assert poll.poll(5000), "somebody still reads from the pipe"
        os.close(ours)


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5])
def test_go_with_another_number_of_descriptors_is_refused(count: int) -> None:
    with Sandbox(shell("exit 0")) as sandbox:
        sandbox.ready()
        sandbox.go([sandbox.status_fd] * count)
        packet = sandbox.expect(FAILED)
        assert (packet.a, packet.b) == (5, 74)
        assert sandbox.wait() == 126


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<IiiI", GO, 1, 0, 0),
        struct.pack("<IiiI", GO, 0, 1, 0),
        struct.pack("<IiiI", GO, 0, 0, 1),
        struct.pack("<IiiI", 7, 15, 0, 0),
        struct.pack("<IiiI", GO, 0, 0, 0)[:-1],
        struct.pack("<IiiI", GO, 0, 0, 0) + b"\0",
    ],
)
def test_anything_but_go_is_refused(data: bytes) -> None:
    with Sandbox(shell("exit 0")) as sandbox:
        sandbox.ready()
        rights = array.array("i", [sandbox.status_fd] * 3)
        sandbox.lease.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        assert sandbox.expect(FAILED).a == 5
        assert sandbox.wait() == 126


@pytest.mark.parametrize("seals", [0, SEALS & ~fcntl.F_SEAL_WRITE, SEALS & ~fcntl.F_SEAL_SEAL])
def test_unsealed_warrant_runs_nothing(seals: int) -> None:
    with Sandbox(shell("exit 0"), seals=seals) as sandbox:
        packet = sandbox.expect(FAILED)
        assert (packet.a, packet.b) == (1, 1)
        assert sandbox.wait() == 126
        assert "not sealed or malformed" in sandbox.errors()


@pytest.mark.parametrize("damage", [b"", b"ral-warrant/1\0\0\0", b"x" * 100])
def test_malformed_warrant_runs_nothing(damage: bytes) -> None:
    """What counts as malformed: tests/unit/test_warrant_decoder.py."""
    with Sandbox(damage) as sandbox:
        assert sandbox.expect(FAILED).a == 1
        assert sandbox.receive() is None
        assert sandbox.wait() == 126


def test_promised_ruleset_that_is_missing_runs_nothing() -> None:
    with Sandbox(shell("exit 0", ruleset=True)) as sandbox:
        packet = sandbox.expect(FAILED)
        assert (packet.a, packet.b) == (3, 9)
        assert sandbox.wait() == 126


def make_ruleset() -> int:
    """A Landlock ruleset that allows no writing (landlock_create_ruleset(2)); -1 without Landlock."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    handled = struct.pack("Q", 1 << 1)  # LANDLOCK_ACCESS_FS_WRITE_FILE
    # The kernel sets close-on-exec itself.
    return int(syscall(444, ctypes.c_char_p(handled), ctypes.c_size_t(len(handled)), ctypes.c_uint(0)))


def test_ruleset_is_entered() -> None:
    if make_ruleset() < 0:
        require("landlock")
    script = "echo x 2>/dev/null >/tmp/file || echo refused"
    for ruleset, wanted in ((-1, b""), (make_ruleset(), b"refused\n")):
        with Sandbox(shell(script, ruleset=ruleset >= 0), ruleset=ruleset) as sandbox:
            sandbox.ready()
            out = Output()
            sandbox.go([sandbox.status_fd, out.write_end, sandbox.status_fd])
            out.close_write()
            assert out.until_end() == wanted
            sandbox.wait()


def test_ruleset_that_is_not_one_runs_nothing() -> None:
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    with Sandbox(shell("exit 0", ruleset=True), ruleset=null) as sandbox:
        assert sandbox.expect(FAILED).a == 3
    os.close(null)


def test_terminal_without_devpts_is_refused() -> None:
    options = ("--ro-bind", "/", "/", "--proc", "/proc", "--tmpfs", "/dev")
    with Sandbox(shell("exit 0", terminals=ON_TERMINAL), options=options) as sandbox:
        packet = sandbox.expect(FAILED)
        assert (packet.a, packet.b) == (2, 2)
        assert sandbox.wait() == 126


def test_closing_the_lease_instead_of_go_runs_nothing(tmp_path: Path) -> None:
    options = ("--bind", "/", "/", "--proc", "/proc", "--dev", "/dev")
    with Sandbox(shell(f"touch {tmp_path}/ran"), options=options) as sandbox:
        sandbox.ready()
        sandbox.lease.close()
        assert sandbox.wait() == 137
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_signal_before_go_ends_with_128_plus_it(number: int) -> None:
    with Sandbox(shell("exit 0")) as sandbox:
        sandbox.ready()
        signal.pidfd_send_signal(sandbox.init, number)
        assert sandbox.wait() == 128 + number


@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, signal.SIGTSTP, signal.SIGWINCH, signal.SIGCONT, signal.SIGALRM]
)
def test_other_signals_before_go_change_nothing(number: int) -> None:
    with Sandbox(shell("exit 5")) as sandbox:
        sandbox.ready()
        signal.pidfd_send_signal(sandbox.init, number)
        sandbox.go([sandbox.status_fd] * 3)
        sandbox.expect(STARTED)
        assert sandbox.wait() == 5


def test_binaries_need_no_loader_no_library_and_no_relocation() -> None:
    for name in ("trampoline", "holder"):
        shown = subprocess.run(
            ["readelf", "-lrdW", program(name)], capture_output=True, text=True, check=True
        ).stdout
        assert "INTERP" not in shown
        assert "NEEDED" not in shown
        assert "There are no relocations in this file" in shown
        assert re.search(r"GNU_STACK .* RW ", shown)
        assert not re.search(r"LOAD .* RWE ", shown)
