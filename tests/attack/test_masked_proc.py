"""A host that refuses a fresh /proc, as containers with a masked one do: the host's is bound, and lists
its processes. Nothing of them can be opened through it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.hostile import PRELUDE, PYTHON, run_group
from support.installed import python_path, ral_path, session_environment

pytestmark = [pytest.mark.attack, pytest.mark.needs("bubblewrap", "fresh /proc")]

MASKED = next((p for p in ("/proc/acpi", "/proc/scsi", "/proc/irq", "/proc/fs") if os.path.isdir(p)), "")

# For everything below /proc/PID: what of it can be read, opened for writing, listed, and where does it lead.
# Writes nothing. What everybody may read is not asked about: the list of processes is what such a host
# shows.
TRY_EVERYTHING = """
import stat
WORLD = set("stat status statm cmdline comm cgroup limits sched schedstat loginuid cpuset sessionid oom_adj "
            "oom_score oom_score_adj wchan cpu_resctrl_groups children autogroup coredump_filter uid_map "
            "gid_map projid_map setgroups mountinfo mounts mountstats latency arch_status timens_offsets "
            "patch_state ksm_stat ksm_merging_pages".split())
OWN = ("environ mem auxv maps smaps smaps_rollup pagemap io stack syscall personality numa_maps clear_refs "
       "timers timerslack_ns root cwd exe fd fdinfo ns map_files task attr net".split())
def works(action):
    answer = tried(action)
    return not isinstance(answer, str) or answer not in errno.errorcode.values()
def opened(path, flags, size=0):
    fd = os.open(path, flags | os.O_NONBLOCK)
    try: return size and os.read(fd, size)
    finally: os.close(fd)
def look(pid):
    found = {"read": [], "write": [], "list": [], "follow": []}
    base = f"/proc/{pid}"
    try: names = sorted({*os.listdir(base), *OWN})
    except FileNotFoundError: return found
    names += [f"ns/{n}" for n in ("mnt", "user", "pid", "net", "ipc", "uts", "cgroup")]
    names += [f"task/{pid}/{n}" for n in "environ mem maps root cwd exe fd ns/mnt fd/0".split()]
    names += [f"{d}/{n}" for d in ("fd", "fdinfo") for n in (0, 1, 2, 3, 4, 5)]
    for name in names:
        path = f"{base}/{name}"
        try: mode = os.lstat(path).st_mode
        except OSError: continue
        if stat.S_ISLNK(mode):
            ways = [lambda: os.readlink(path), lambda: opened(path, os.O_PATH | os.O_DIRECTORY)]
            if any(map(works, ways)): found["follow"].append(name)
        elif stat.S_ISDIR(mode):
            # Open descriptors are numbered to everybody of the same uid; where they lead is another thing.
            if name.rpartition("/")[2] not in ("task", "attr", "net", "fd", "ns"):
                if works(lambda: os.listdir(path)): found["list"].append(name)
        else:
            if name not in WORLD and works(lambda: opened(path, os.O_RDONLY, 1)): found["read"].append(name)
            if works(lambda: opened(path, os.O_WRONLY)): found["write"].append(name)
    return found
caps = [line.split()[1] for line in open("/proc/self/status") if line[:3] == "Cap"]
tell(found={str(pid): look(pid) for pid in json.loads(sys.argv[1])}, uid=os.getuid(), caps=caps)
"""

# Runs in the container: a broker, a client and the victims. The trying script is handed on.
CONTAINER = """
import json, os, subprocess, sys, time
env, python, ral, project, script = json.loads(sys.argv[1])
serve = [python, "-I", "-m", "ral_broker", "run"]
broker = subprocess.Popen(serve, env=env, cwd="/", stderr=subprocess.PIPE)
while b"serves" not in broker.stderr.readline(): assert broker.poll() is None
victim = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
start = [ral, "run", "-q", "--", "sleep", "600"]
other = subprocess.Popen(start, env=env, cwd=project, stdin=subprocess.DEVNULL)
deadline = time.monotonic() + 10
while True:
    listed = json.loads(subprocess.run([ral, "sessions", "--json"], env=env, capture_output=True).stdout)
    if listed: break
    assert time.monotonic() < deadline
session = listed[0]
time.sleep(.2)
inner = open(f"/proc/{session['pid']}/task/{session['pid']}/children").read().split()
pids = [victim.pid, broker.pid, other.pid, session["bwrap_pid"], session["pid"], *map(int, inner)]
command = ["/usr/bin/python3", "-I", "-S", "-c", script, json.dumps(pids)]
def run(*command):
    return subprocess.run(command, env=env, cwd=project, stdin=subprocess.DEVNULL, capture_output=True)
inside, outside = run(ral, "run", "--", *command), run(*command)
plan = run(ral, "run", "--dry-run", "--json", "--", "true")
other.terminate(); other.wait()
victim.kill(); victim.wait()
broker.terminate(); broker.communicate()
text = lambda d: [d.returncode, d.stdout.decode(), d.stderr.decode()]
print(json.dumps({"inside": text(inside), "outside": text(outside), "plan": text(plan), "pids": pids}))
"""


class Contained:
    """What happened in the container."""

    def __init__(self, runtime: Path, project: Path, prepare: str, uid: int) -> None:
        description = [
            session_environment(runtime), str(python_path()), str(ral_path()), str(project),
            PRELUDE + TRY_EVERYTHING,
        ]  # fmt: skip
        own = f"unshare --user --map-user={uid} --map-group={os.getgid() if uid else 0}" if uid else ""
        enter = [
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-ec",
            f'{prepare}\nexec {own} "$@"',
            "sh",
        ]
        done = run_group([*enter, *PYTHON, CONTAINER, json.dumps(description)])
        assert done.returncode == 0, done
        said = json.loads(done.stdout)
        self.status, self.stdout, self.stderr = said["inside"]
        self.plan = json.loads(said["plan"][1])["plan"]
        self.pids = [str(pid) for pid in said["pids"]]
        assert self.status == 0, self.stderr
        self.inside = json.loads(self.stdout)
        self.outside = json.loads(said["outside"][1])


@pytest.mark.parametrize("root", [False, True], ids=["user", "root of the container"])
def test_a_session_starts_with_the_hosts_proc_says_so_and_opens_nothing_of_the_hosts_processes(
    runtime: Path, project: Path, root: bool
) -> None:
    if not MASKED:
        pytest.skip("this kernel has no directory in /proc that containers mask")
    uid = 0 if root else os.getuid()
    ran = Contained(runtime, project, f"mount -t tmpfs tmpfs {MASKED}", uid)
    assert "refuses a fresh /proc" in ran.stderr
    assert [o["op"] for o in ran.plan if o["dest"] == "/proc"] == ["bind"]
    assert ran.inside["uid"] == uid
    assert ran.inside["caps"] == ["0" * 16] * 5
    nothing: dict[str, list[str]] = {"read": [], "write": [], "list": [], "follow": []}
    for pid in ran.pids:
        assert ran.inside["found"][pid] == nothing, pid
    # The control: the same script outside, on the process that is nobody's sandbox.
    control = ran.outside["found"][ran.pids[0]]
    assert {"environ", "maps", "auxv"} <= set(control["read"])
    assert {"mem", "oom_score_adj", "coredump_filter"} <= set(control["write"])
    assert {"map_files", "fdinfo"} <= set(control["list"])
    assert {"root", "cwd", "exe", "ns/mnt", "fd/0"} <= set(control["follow"])


def test_without_the_mask_the_same_host_gives_a_fresh_proc(runtime: Path, project: Path) -> None:
    """So it is the mask that makes the difference above; and the host's processes are not listed."""
    ran = Contained(runtime, project, "", os.getuid() or 1)
    assert "refuses a fresh /proc" not in ran.stderr
    assert [o["op"] for o in ran.plan if o["dest"] == "/proc"] == ["proc"]
