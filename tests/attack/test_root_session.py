"""A session of root's: uid 0 inside is uid 0 of the host, and needs no capability to do harm."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.broker import Ral
from support.hostile import Found, inside, outside
from support.installed import home_dir, python_path, ral_path, session_environment

pytestmark = [pytest.mark.attack, pytest.mark.root, pytest.mark.needs("bubblewrap", "fresh /proc")]

PLAIN = ("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc")
"""What others do for root: no user namespace, every capability."""
NO_CAPABILITIES = ["0" * 16] * 5

CAPABILITIES = """
tell(caps=[line.split()[1] for line in open("/proc/self/status") if line[:3] == "Cap"], uid=os.getuid())
"""

# Opens, and never writes. What is the process's own (below /proc/PID) is its own to change.
OPEN_FOR_WRITING = """
import stat
opened, tries = [], 0
for top in ("/proc", "/sys"):
    for directory, names, files in os.walk(top, onerror=lambda e: None, followlinks=False):
        if directory == "/proc": names[:] = [n for n in names if not n.isdigit() and "self" not in n]
        for name in files:
            path = os.path.join(directory, name)
            try:
                if not stat.S_ISREG(os.lstat(path).st_mode): continue
                tries += 1
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
                opened.append(path)
            except OSError: pass
tell(opened=opened, tries=tries)
"""


@pytest.mark.usefixtures("broker")
def test_p15_no_capability_inside(ral: Ral) -> None:
    assert inside(ral, CAPABILITIES) == {"caps": NO_CAPABILITIES, "uid": 0}
    caps = outside(CAPABILITIES, prefix=PLAIN)["caps"]
    assert isinstance(caps, list)
    assert caps[2] != "0" * 16


@pytest.mark.usefixtures("broker")
def test_no_file_of_the_kernel_can_be_opened_for_writing(ral: Ral) -> None:
    found = inside(ral, OPEN_FOR_WRITING)
    assert found["opened"] == []
    assert isinstance(found["tries"], int)
    assert found["tries"] > 500
    control = outside(
        OPEN_FOR_WRITING, prefix=(*PLAIN, "--unshare-pid", "--unshare-user", "--cap-drop", "ALL")
    )
    assert isinstance(control["opened"], list)
    assert "/proc/sys/kernel/core_pattern" in control["opened"]
    assert len(control["opened"]) > 500


SECRETS = """
paths = ["/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-", "/etc/sudoers",
         "/etc/sudoers.d/README", "/proc/kcore", "/proc/keys", "/proc/kmsg", "/proc/timer_list",
         "/proc/sysrq-trigger", "/etc/ssh/ssh_host_rsa_key", "/etc/ssh/ssh_host_ed25519_key", *sys.argv[1:]]
tell(read=[p for p in paths if isinstance(tried(lambda: open(p, "rb").read(1)), bytes)
           and tried(lambda: open(p, "rb").read(1))])
"""


@pytest.mark.usefixtures("broker")
def test_files_that_only_root_may_read_are_not_there_to_be_read(ral: Ral) -> None:
    note = home_dir() / "ral-test-note"
    note.write_text("secret")
    try:
        found = inside(ral, SECRETS, str(note))
        control = outside(SECRETS, str(note), prefix=PLAIN)["read"]
    finally:
        note.unlink()
    assert found["read"] == []
    assert isinstance(control, list)
    assert {"/etc/shadow", str(note)} <= set(control)


REMOUNT = """
MS_RDONLY, MS_REMOUNT, MS_BIND = 1, 32, 4096
points = [line.split()[4] for line in open("/proc/self/mountinfo") if "ro," in line.split()[5] + ","]
made = {}
for point in points:
    p = point.encode()
    made[point] = 0 in (call(165, b"none", p, 0, flags, 0) for flags in (MS_REMOUNT | MS_BIND, MS_REMOUNT))
    attr = struct.pack("=QQQQ", 0, 1, 0, 0)            # mount_setattr: clear MOUNT_ATTR_RDONLY
    made[point] = made[point] or call(442, -100, p, 0, attr, 32) == 0
    made[point] = made[point] or call(166, p, 2) == 0     # umount2(MNT_DETACH)
made = [point for point, done in made.items() if done]
tell(points=len(points), made=made, moved=call(155, b".", b".") != "EPERM",
     chroot=call(161, b"/tmp") != "EPERM", cloned=call(428, -100, b"/usr", 1) != "EPERM")
"""


@pytest.mark.usefixtures("broker")
def test_p16_nothing_read_only_can_be_made_writable(ral: Ral) -> None:
    found = inside(ral, REMOUNT)
    assert found["made"] == []
    assert isinstance(found["points"], int)
    assert found["points"] > 5
    assert not found["moved"]
    assert not found["chroot"]
    assert not found["cloned"]
    control = outside(REMOUNT, prefix=PLAIN)
    assert control["made"]


NESTED_SECRET = """
child = os.fork()
if child == 0:
    made = call(272, 0x10000000 | 0x20000)                # unshare(CLONE_NEWUSER | CLONE_NEWNS)
    os._exit(0 if made == 0 else 1)
tell(made=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0)
"""


@pytest.mark.usefixtures("broker")
def test_p17_no_user_namespace_can_be_made_inside(ral: Ral) -> None:
    assert inside(ral, NESTED_SECRET) == {"made": False}
    assert outside(NESTED_SECRET) == {"made": True}


@pytest.mark.usefixtures("broker")
def test_processes_of_the_host_are_out_of_reach(ral: Ral) -> None:
    script = """
found = {}
for pid in json.loads(sys.argv[1]):
    found[str(pid)] = [tried(os.kill, pid, 0), tried(os.pidfd_open, pid), tried(os.listdir, f"/proc/{pid}")]
tell(found=found)
"""
    pids = [os.getpid(), os.getppid()]
    found = inside(ral, script, json.dumps(pids))["found"]
    assert isinstance(found, dict)
    for pid in pids:
        assert found[str(pid)] == ["ESRCH", "ESRCH", "ENOENT"]


@pytest.mark.usefixtures("broker")
def test_root_is_told_what_remains_and_what_would_give_less(ral: Ral) -> None:
    done = ral("run", "--", "true")
    assert done.status == 0
    assert done.stderr.count(b"--as-user NAME") == 1


@pytest.fixture
def account() -> Iterator[pwd.struct_passwd]:
    """The account that tools/test.sh makes for the tests that are not root's."""
    try:
        entry = pwd.getpwnam("ral-test")
    except KeyError:
        pytest.skip("needs the account ral-test, which make test makes")
    environment = {"PATH": "/usr/bin:/bin", "HOME": entry.pw_dir}

    def broker(verb: str) -> int:
        command = [*as_user(entry), str(ral_path()), "broker", verb]
        return subprocess.run(command, env=environment, capture_output=True, timeout=20).returncode

    had_one = broker("status") == 0
    yield entry
    if not had_one:
        assert broker("stop") == 0


def as_user(entry: pwd.struct_passwd) -> tuple[str, ...]:
    return ("setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--init-groups")


def test_run_as_another_user_is_that_users_session_and_nothing_of_roots(
    account: pwd.struct_passwd, runtime: Path
) -> None:
    ral = Ral(runtime, Path("/"))
    with tempfile.TemporaryDirectory(dir=account.pw_dir) as name:
        os.chown(name, account.pw_uid, account.pw_gid)
        script = "id -u; id -G; echo ~; cat /etc/shadow; echo made >made; ls -A $RAL_RUNTIME_DIR/ /root"
        done = ral("run", "-q", "--as-user", account.pw_name, "--project", name, "--", "sh", "-c", script)
        made = Path(name, "made").stat()
    uid, groups, home = done.stdout.splitlines()[:3]
    assert (int(uid), os.fsdecode(home)) == (account.pw_uid, account.pw_dir), done
    assert set(map(int, groups.split())) == set(os.getgrouplist(account.pw_name, account.pw_gid))
    assert (made.st_uid, made.st_gid) == (account.pw_uid, account.pw_gid)
    assert b"/etc/shadow: Permission denied" in done.stderr
    assert not list(runtime.iterdir())


def test_only_root_becomes_another_user(account: pwd.struct_passwd) -> None:
    done = subprocess.run(
        [*as_user(account), str(ral_path()), "run", "--as-user", "root", "--", "id"],
        env={"PATH": "/usr/bin:/bin", "HOME": account.pw_dir}, cwd="/", capture_output=True, timeout=20,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (78, b"")
    assert b"only root may become another user" in done.stderr


ADMIN = Path("/etc/ral")


def in_own_etc(prepare: str, *command: str) -> subprocess.CompletedProcess[bytes]:
    """Run ``command`` where /etc is a copy that ``prepare`` changes. The host's is not touched."""
    script = (
        "set -e; mount --make-rprivate /; mkdir -p $1/etc; cp -a /etc/. $1/etc/; mount --bind $1/etc /etc\n"
        f'mkdir -p /etc/ral\n{prepare}\nshift; exec "$@"'
    )
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, "sh", scratch, *command], capture_output=True,
            timeout=60, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, check=False,
        )  # fmt: skip


# Broker and client have to be in the same mount namespace; the broker is ended by its pid.
IN_THERE = """
import json, os, signal, subprocess, sys, time
env = json.loads(sys.argv[1])
command = [sys.argv[2], "-I", "-m", "ral_broker", "run"]
broker = subprocess.Popen(command, env=env, cwd="/", stderr=subprocess.PIPE)
while b"serves" not in broker.stderr.readline(): assert broker.poll() is None
done = subprocess.run([sys.argv[3], "run", "--", "id", "-u"], env=env, cwd=sys.argv[4], capture_output=True)
broker.terminate(); broker.communicate()
print(json.dumps([done.returncode, done.stdout.decode(), done.stderr.decode()]))
"""


@pytest.fixture
def admin_file(runtime: Path, project: Path) -> Iterator[object]:
    before = sorted(ADMIN.iterdir()) if ADMIN.exists() else None

    def run(prepare: str) -> tuple[int, str, str]:
        arguments = (
            json.dumps(session_environment(runtime)),
            str(python_path()),
            str(ral_path()),
            str(project),
        )
        done = in_own_etc(prepare, "/usr/bin/python3", "-c", IN_THERE, *arguments)
        assert done.returncode == 0, done
        status, stdout, stderr = json.loads(done.stdout)
        return status, stdout, stderr

    yield run
    assert (sorted(ADMIN.iterdir()) if ADMIN.exists() else None) == before


FILE = "/etc/ral/ral.toml"
REFUSALS = {
    "forbidden": ("echo 'allow_root_session = false' >{}", "--as-user NAME"),
    "malformed": ("echo 'allow_root_session = ' >{}", FILE),
    "wrong type": ("echo 'allow_root_session = \"no\"' >{}", FILE),
    "unknown key": ("echo 'alow_root_session = false' >{}", "alow_root_session"),
    "foreign": ("echo 'allow_root_session = true' >{0}; chown 65534 {0}", "chown root"),
    "writable by others": ("echo 'allow_root_session = true' >{0}; chmod 666 {0}", "chmod go-w"),
    "writable by a group": ("echo 'allow_root_session = true' >{0}; chmod 664 {0}", "chmod go-w"),
    "directory": ("mkdir {}", FILE),
    "fifo": ("mkfifo {}", FILE),
    "dangling link": ("ln -s /nothing {}", FILE),
    "not text": ("printf '\\377' >{}", FILE),
    "huge": ("head -c 2000000 /dev/zero >{}", FILE),
    "a directory that others may write": (
        "echo 'allow_root_session = true' >{0}; chmod 777 /etc/ral", "/etc/ral"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("prepare", "word"), REFUSALS.values(), ids=REFUSALS.keys())
def test_an_admins_file_that_forbids_it_or_cannot_be_trusted_refuses_the_session(
    admin_file: object, prepare: str, word: str
) -> None:
    assert callable(admin_file)
    status, stdout, stderr = admin_file(prepare.format(FILE))
    assert (status, stdout) == (78, ""), stderr
    assert word in stderr
    assert FILE in stderr


def test_without_the_file_or_with_a_permission_in_it_root_may(admin_file: object) -> None:
    """The control of the refusals."""
    assert callable(admin_file)
    assert admin_file("")[:2] == (0, "0\n")
    assert admin_file(f"echo 'allow_root_session = true' >{FILE}")[:2] == (0, "0\n")


def test_found_is_what_the_helpers_say() -> None:
    kept: Found = outside("tell(a=1); tell(b=2)")
    assert kept == {"a": 1, "b": 2}
