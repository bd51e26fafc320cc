"""``ral run`` with real parts: what a session shows, how its program starts and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ral_broker.config.settings import Settings
from support.broker import Broker, Ral
from support.installed import home_dir

pytestmark = pytest.mark.usefixtures("broker")


def inside(ral: Ral, script: str, *arguments: str | bytes, env: dict[str, str] | None = None) -> str:
    """Run a shell script inside; its standard output. It has to end with 0."""
    done = ral("run", "-q", "--", "sh", "-c", script, "sh", *arguments, env=env)
    assert done.status == 0, done
    return done.stdout.decode()


def test_the_system_is_read_only_and_the_project_is_not(ral: Ral, project: Path) -> None:
    refused = ral(
        "run", "-q", "--", "sh", "-c", "echo x >new; echo y >/usr/new; echo z >/etc/new; echo w >/new"
    )
    assert refused.stderr.count(b"Read-only file system") == 3
    assert (project / "new").read_text() == "x\n"


def test_the_home_has_settings_of_shells_and_the_way_to_the_project_and_is_lost(
    ral: Ral, project: Path
) -> None:
    """Of a program that no profile is for."""
    defaults = Settings()
    named = (*defaults.home_readonly, *defaults.home_seeded_files)
    there = {name.split("/")[0] for name in named if (home_dir() / name).exists()}
    done = ral("run", "-q", "--", "ls", "-A", str(home_dir()))
    assert set(done.stdout.decode().split()) == {project.name} | there
    if (home_dir() / ".bashrc").exists():
        assert "Read-only" in inside(ral, "{ echo alias ls=rm >>~/.bashrc; } 2>&1 || true")
    inside(ral, "echo kept >~/kept && test -s ~/kept")
    assert not (home_dir() / "kept").exists()


def test_no_directory_of_the_broker_and_no_socket_of_the_host_is_visible(ral: Ral, runtime: Path) -> None:
    assert inside(ral, 'ls -A "$1" 2>/dev/null | wc -l', str(runtime)).strip() == "0"
    assert inside(ral, "ls -A /run").split() == ["ral-session"]
    assert inside(ral, "find / -xdev -type s 2>/dev/null | wc -l").strip() == "0"


def test_the_brokers_directory_is_masked_even_inside_the_project(project: Path, tmp_path: Path) -> None:
    """A runtime directory below the project is the hardest place for it."""
    own = project / "runtime"
    own.mkdir(mode=0o700)
    broker = Broker(own, tmp_path / "second.log")
    broker.start()
    try:
        ral = Ral(own, project)
        assert inside(ral, "ls -A runtime | wc -l").strip() == "0"
        assert "Read-only" in inside(ral, "touch runtime/x 2>&1 || true")
        assert "control.sock" in os.listdir(own)
    finally:
        broker.stop()


@pytest.mark.parametrize("status", [0, 1, 7, 126, 127, 255])
def test_the_programs_status_is_passed_on(ral: Ral, status: int) -> None:
    assert ral("run", "-q", "--", "sh", "-c", f"exit {status}").status == status


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGSEGV]
)
def test_a_death_by_signal_is_128_and_the_signal(ral: Ral, number: signal.Signals) -> None:
    done = ral("run", "-q", "--", "sh", "-c", f"kill -{number.value} $$")
    assert done.status == 128 + number


def test_a_broken_pipe_is_141(ral: Ral) -> None:
    assert inside(ral, "yes | head -n 1").strip() == "y"
    client = ral.start("run", "-q", "--", "yes")
    assert client.stdout is not None
    client.stdout.readline()
    client.stdout.close()
    client.communicate(timeout=10)
    assert client.returncode == 141


def test_a_missing_command_a_missing_interpreter_and_one_that_may_not_run(ral: Ral, project: Path) -> None:
    script = project / "script"
    script.write_text("#!/does/not/exist\n")
    script.chmod(0o755)
    assert ral("run", "-q", "--", "no-such-command").status == 127
    assert ral("run", "-q", "--", "./script").status == 127
    assert ral("run", "-q", "--", "/etc/passwd").status == 126
    script.write_text("echo plain\n")
    assert ral("run", "-q", "./script").stdout == b"plain\n"


ARGUMENTS = [b"a b", b"", b"'\"$x`", b"new\nline", b"\xff\xfe", b"--", b"-d", b"*"]


@pytest.mark.parametrize("dashes", [("--",), ()])
def test_arguments_arrive_unchanged(ral: Ral, dashes: tuple[str, ...]) -> None:
    done = ral("run", "-q", *dashes, "printf", "%s\\0", *ARGUMENTS)
    assert done.stdout == b"\0".join(ARGUMENTS) + b"\0"


@pytest.mark.parametrize(
    "name", [b"with space", b"new\nline", b"not-utf8-\xff", "ünïcode".encode(), b"-dash"]
)
def test_a_project_of_any_name(ral: Ral, project: Path, name: bytes) -> None:
    directory = os.fsencode(project) + b"/" + name
    os.mkdir(directory)
    done = ral("run", "-q", "--", "sh", "-c", "pwd && touch made", cwd=Path(os.fsdecode(directory)))
    assert done.stdout == directory + b"\n"
    assert os.listdir(directory) == [b"made"]
    plan = ral("run", "--dry-run", "--json", "--", "true", cwd=Path(os.fsdecode(directory)))
    assert json.loads(plan.stdout)["argv"][0].endswith("bwrap")


def test_the_working_directory_inside_the_project_is_kept_and_one_outside_is_not(
    ral: Ral, project: Path
) -> None:
    (project / "sub").mkdir()
    done = ral("run", "-q", "--project", str(project), "--", "pwd", cwd=project / "sub")
    assert done.stdout.decode().strip() == str(project / "sub")
    done = ral("run", "-q", "--project", str(project), "--", "pwd", cwd=home_dir())
    assert done.stdout.decode().strip() == str(project)


def test_a_project_reached_through_a_link_is_the_real_one(ral: Ral, project: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(project)
    done = ral("run", "-q", "--project", str(link), "--", "pwd")
    assert done.stdout.decode().strip() == str(project)


@pytest.mark.parametrize("place", ["home", "root", "proc", "runtime", "file"])
def test_a_project_that_would_show_too_much_is_refused(ral: Ral, runtime: Path, place: str) -> None:
    target = {
        "home": home_dir(),
        "root": Path("/"),
        "proc": Path("/proc/self"),
        "runtime": runtime,
        "file": Path("/etc/passwd"),
    }
    done = ral("run", "--project", str(target[place]), "--", "true")
    assert done.status == 78
    assert done.stderr.startswith(b"ral: ")


def test_exactly_three_descriptors(ral: Ral, project: Path) -> None:
    (project / ".env").write_text("secret")
    with open(project / ".env", "rb") as secret:
        os.set_inheritable(secret.fileno(), True)
        script = f"ls /proc/self/fd; cat <&{secret.fileno()}"
        with subprocess.Popen(
            [*_command(ral), "sh", "-c", script], env=ral.environment, cwd=project, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[secret.fileno()],
        ) as client:  # fmt: skip
            out, err = client.communicate(timeout=20)
    # 3 is the directory that ls reads.
    assert out.split() == [b"0", b"1", b"2", b"3"]
    assert b"secret" not in out + err


def _command(ral: Ral) -> list[str]:
    return [str(Path(ral.environment["PATH"].split(":")[0]) / "ral"), "run", "-q", "--"]


def test_secrets_in_the_environment_stay_outside_and_only_their_number_is_told(ral: Ral) -> None:
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "s1",
        "GITHUB_PAT": "s2",
        "FOO_TOKEN": "s3",
        "MY_PASSWORD": "s4",
        "TMUX": "s5",
    }
    done = ral("run", "--", "env", env={**secrets, "PLAIN": "kept", "EDITOR": "vi"})
    names = {line.split(b"=")[0] for line in done.stdout.splitlines()}
    assert not names & {name.encode() for name in secrets}
    assert {b"PLAIN", b"EDITOR", b"HOME", b"PATH", b"RAL_SESSION"} <= names
    assert b"AWS" not in done.stderr
    assert b"variables" in done.stderr


def test_nothing_of_the_caller_is_left_in_pid_1(ral: Ral) -> None:
    script = (
        'for f in environ mem fd/0 root; do cat "/proc/1/$f" >/dev/null 2>&1 && echo "open $f"; done; true'
    )
    assert inside(ral, script, env={"FOO_TOKEN": "secret"}) == ""
    # Root may list the names; what they lead to is closed to it, too.
    assert inside(ral, "cat /proc/1/fd/* 2>/dev/null; readlink /proc/1/fd/*; true") == ""


def test_limits_mask_and_niceness_are_the_callers(ral: Ral) -> None:
    habits = "umask 027; ulimit -Sn 200; ulimit -Hn 300; ulimit -f 2048; exec nice -n 3"
    script = f"{habits} {' '.join(_command(ral))} sh -c 'umask; nice; ulimit -n; ulimit -Hn; ulimit -f'"
    done = subprocess.run(
        ["/bin/sh", "-c", script], env=ral.environment, cwd=ral.directory, stdin=subprocess.DEVNULL,
        capture_output=True, check=False, timeout=20,
    )  # fmt: skip
    assert done.stdout.split() == [b"0027", b"%d" % (os.nice(0) + 3), b"200", b"300", b"2048"]


@pytest.mark.parametrize("name", ["HUP", "INT", "QUIT", "USR1", "PIPE", "TERM"])
def test_ignored_signals_are_the_callers(ral: Ral, name: str) -> None:
    number = getattr(signal, f"SIG{name}").value
    script = f"trap '' {name}; exec {' '.join(_command(ral))} grep SigIgn /proc/self/status"
    for text, expected in ((script, 1), (script.partition("; ")[2], 0)):
        # dash would not let a trap reset what it found ignored at its start: start from defaults.
        done = subprocess.run(
            ["/bin/bash", "-c", text], env=ral.environment, cwd=ral.directory, stdin=subprocess.DEVNULL,
            capture_output=True, check=False, timeout=20, restore_signals=True,
        )  # fmt: skip
        mask = int(done.stdout.split()[1], 16)
        assert mask >> (number - 1) & 1 == expected


def test_a_background_child_is_gone_after_the_command_ends(ral: Ral, project: Path) -> None:
    inside(ral, "(while :; do date >>alive; sleep 0.05; done) >/dev/null 2>&1 & sleep 0.2")
    size = (project / "alive").stat().st_size
    time.sleep(0.3)
    assert (project / "alive").stat().st_size == size


def test_a_pipe_closes_when_the_program_closes_it(ral: Ral) -> None:
    client = ral.start("run", "-q", "--", "sh", "-c", "echo first; exec >&-; sleep 30")
    assert client.stdout is not None
    before = time.monotonic()
    assert client.stdout.read() == b"first\n"
    assert time.monotonic() - before < 10
    client.terminate()
    client.communicate(timeout=10)
    assert client.returncode == 143


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1", "WINCH"])
def test_signals_are_forwarded_to_the_program(ral: Ral, name: str) -> None:
    client = ral.start(
        "run",
        "-q",
        "--",
        "sh",
        "-c",
        f"trap 'echo got; exit 5' {name}; echo ready; while :; do sleep 0.05; done",
    )
    assert client.stdout is not None
    assert client.stdout.readline() == b"ready\n"
    client.send_signal(getattr(signal, f"SIG{name}"))
    out, _ = client.communicate(timeout=10)
    assert (out, client.returncode) == (b"got\n", 5)


def test_a_killed_client_ends_its_session(ral: Ral, project: Path) -> None:
    client = ral.start(
        "run",
        "-q",
        "--",
        "sh",
        "-c",
        "trap '' HUP TERM INT; echo x; while :; do date >alive; sleep 0.02; done",
    )
    assert client.stdout is not None
    client.stdout.readline()
    assert len(ral.live()) == 1
    client.kill()
    client.communicate(timeout=10)
    deadline = time.monotonic() + 5
    while ral.live():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stamp = (project / "alive").stat().st_mtime_ns
    time.sleep(0.2)
    assert (project / "alive").stat().st_mtime_ns == stamp


def test_a_closed_stdin_and_a_directory_as_stdin(ral: Ral) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"{' '.join(_command(ral))} sh -c 'cat; echo end' <&-"], env=ral.environment,
        cwd=ral.directory, capture_output=True, check=False, timeout=20,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, b"end\n")
    fd = os.open("/", os.O_RDONLY)
    try:
        refused = subprocess.run(
            [*_command(ral), "true"], env=ral.environment, cwd=ral.directory, stdin=fd, capture_output=True,
            check=False, timeout=20,
        )  # fmt: skip
    finally:
        os.close(fd)
    assert refused.returncode == 78
    assert b"directory" in refused.stderr


@pytest.mark.parametrize("kind", ["pidfd", "namespace", "path", "eventfd"])
def test_a_handle_of_the_kernel_as_stdin_is_refused(ral: Ral, kind: str) -> None:
    fd = {
        "pidfd": lambda: os.pidfd_open(os.getpid()),
        "namespace": lambda: os.open("/proc/self/ns/mnt", os.O_RDONLY),
        "path": lambda: os.open("/etc/passwd", os.O_PATH),
        "eventfd": lambda: os.eventfd(0),
    }[kind]()
    try:
        refused = subprocess.run(
            [*_command(ral), "true"], env=ral.environment, cwd=ral.directory, stdin=fd, capture_output=True,
            check=False, timeout=20,
        )  # fmt: skip
    finally:
        os.close(fd)
    assert refused.returncode == 78, refused
    assert refused.stderr.startswith(b"ral: ")


def test_a_full_pipe_as_stdout_does_not_stop_the_broker(ral: Ral) -> None:
    client = ral.start("run", "-q", "--", "head", "-c", "300000", "/dev/zero")
    time.sleep(0.2)
    assert ral("run", "-q", "--", "echo", "meanwhile").stdout == b"meanwhile\n"
    assert len(client.communicate(timeout=10)[0]) == 300000


def test_ral_inside_ral_is_refused(ral: Ral, project: Path) -> None:
    """The client is visible inside: it must name the session and start nothing."""
    source = Path(ral.environment["PATH"].split(":")[0]) / "ral"
    launcher = subprocess.run(["/bin/cat", str(source)], capture_output=True, check=True).stdout
    (project / "note").write_bytes(launcher)
    import ral_client

    site = Path(ral_client.__file__).parent.parent
    for room in ("ral_client", "ral_protocol"):
        subprocess.run(["/bin/cp", "-rL", str(site / room), str(project / room)], check=True)
    script = "/usr/bin/python3 -I -S ral_client/start.py 0 run -- true; echo $?; echo $RAL_SESSION"
    done = ral("run", "-q", "--", "sh", "-c", script)
    status, session = done.stdout.split()
    assert status == b"78"
    assert session in done.stderr


def test_dry_run_starts_nothing_and_names_a_reason_for_everything(ral: Ral, runtime: Path) -> None:
    done = ral("run", "--dry-run", "--json", "--", "touch", "made")
    document = json.loads(done.stdout)
    assert set(document) == {"argv", "options", "plan"}
    assert document["argv"][1:] == ["--args", "98", "--", "/proc/self/fd/102"]
    assert all(line["why"] and line["layer"] for line in document["plan"])
    assert not (ral.directory / "made").exists()
    assert os.listdir(runtime / "sessions") == []


def test_a_gigabyte_through_cat_is_the_same_gigabyte(ral: Ral) -> None:
    script = "head -c 1073741824 /dev/urandom | tee >(sha256sum >&2) | RAL | sha256sum"
    done = subprocess.run(
        ["/bin/bash", "-c", script.replace("RAL", " ".join(_command(ral)) + " cat")], env=ral.environment,
        cwd=ral.directory, capture_output=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.split()[0] == done.stderr.split()[0]


@pytest.mark.parametrize(
    "arguments", [("sessions", "--json"), ("--help",), ("run", "--dry-run", "true"), ("doctor",)]
)
def test_an_output_that_takes_nothing_is_no_success(ral: Ral, arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [str(Path(ral.environment["PATH"].split(":")[0]) / "ral"), *arguments], env=ral.environment,
            cwd=ral.directory, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, check=False,
            timeout=20,
        )  # fmt: skip
    assert done.returncode == 1
    assert b"No space left on device" in done.stderr


def test_a_program_that_is_only_outside_is_named(ral: Ral, project: Path, tmp_path: Path) -> None:
    tool = tmp_path / "only-outside"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    path = f"{ral.environment['PATH']}:{tmp_path}"
    done = ral("run", "-q", "--", "only-outside", env={"PATH": path})
    assert done.status == 127
    assert str(tool).encode() in done.stderr


def test_the_log_of_a_session_that_ended_by_itself_blames_nobody(ral: Ral) -> None:
    for _ in range(5):
        assert ral("run", "-q", "--", "true").status == 0
    for line in json.loads(ral("sessions", "--all", "--json").stdout):
        assert b"client left" not in ral("logs", line["id"]).stderr


def test_installed_packages_are_known_inside(ral: Ral) -> None:
    databases = [path for path in ("/var/lib/dpkg", "/var/lib/rpm") if Path(path).is_dir()]
    for path in databases:
        assert inside(ral, 'ls "$1"', path).split() == sorted(os.listdir(path))
