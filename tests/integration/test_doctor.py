"""``ral doctor`` on hosts that lack something, each made for real in namespaces of the test's own."""

from __future__ import annotations

import glob
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from ral_broker import doctor
from ral_broker.doctor import Finding
from support.installed import python_path, session_environment

pytestmark = pytest.mark.needs("bubblewrap")

# Installs a filter and becomes the command: a container, or a service, whose filter refuses a call.
CONTAINED = """
import errno, os, sys
import pyseccomp as s
program = s.SyscallFilter(s.ALLOW)
for rule in sys.argv[1].split(","):
    name, _, error = rule.partition("=")
    action = s.ERRNO(getattr(errno, error))
    if name == "userns":
        for call in ("clone", "unshare"):
            program.add_rule(action, call, s.Arg(0, s.MASKED_EQ, 0x10000000, 0x10000000))
        program.add_rule(s.ERRNO(errno.ENOSYS), "clone3")
    else:
        program.add_rule(action, name)
program.load()
os.execv(sys.argv[2], sys.argv[2:])
"""


class Report:
    """One run of the doctor."""

    def __init__(self, done: subprocess.CompletedProcess[bytes]) -> None:
        self.status = done.returncode
        assert self.status in {0, 1}, done
        self.findings = {f.name: f for f in msgspec.json.decode(done.stdout, type=list[Finding])}

    @property
    def problems(self) -> set[str]:
        return {name for name, finding in self.findings.items() if finding.state == "problem"}

    def remedy(self, name: str) -> str:
        remedy = self.findings[name].remedy
        assert remedy is not None, self.findings[name]
        return remedy


COMMAND = shlex.join([str(python_path()), "-I", "-m", "ral_broker", "doctor", "--json"])


def examine(runtime: Path, prepare: str, *before: str, **variables: str) -> Report:
    """Run the doctor at the end of the shell script ``prepare``, itself run by ``before``."""
    return Report(
        subprocess.run(
            [*before, "sh", "-ec", f"{prepare}\nexec {COMMAND}"],
            env=session_environment(runtime) | variables,
            capture_output=True,
            timeout=60,
            check=False,
        )
    )


def contained(rules: str) -> list[str]:
    return [str(python_path()), "-I", "-c", CONTAINED, rules, "/usr/bin/env"]


OWN_HOST = ("unshare", "--user", "--map-root-user", "--mount")


def test_a_host_that_works_is_told_so(runtime: Path) -> None:
    report = examine(runtime, "")
    assert report.status == 0, report.findings
    assert report.problems == set()
    for name in ("kernel", "bwrap", "trampoline", "holder", "seccomp", "sandbox", "runtime directory"):
        assert report.findings[name].state == "ok", report.findings[name]
    assert report.findings["bwrap"].detail == "/usr/bin/bwrap"
    assert str(runtime.resolve()) in report.findings["runtime directory"].detail
    assert "0700" in report.findings["runtime directory"].detail


def test_no_user_namespaces_by_limit(runtime: Path) -> None:
    report = examine(runtime, "echo 0 > /proc/sys/user/max_user_namespaces", *OWN_HOST)
    assert (report.status, report.problems) == (1, {"sandbox"})
    sandbox = report.findings["sandbox"]
    assert "/usr/bin/bwrap says: " in sandbox.detail
    assert "ENOSPC" in sandbox.detail
    assert "user.max_user_namespaces is 0" in sandbox.detail
    assert "user.max_user_namespaces = 15000" in report.remedy("sandbox")


def test_no_user_namespaces_by_an_outer_filter(runtime: Path) -> None:
    report = examine(runtime, "", *contained("userns=EPERM"))
    assert (report.status, report.problems) == (1, {"sandbox"})
    assert "No permissions" in report.findings["sandbox"].detail
    assert "filter" in report.findings["sandbox"].detail
    assert "seccomp=unconfined" in report.remedy("sandbox")
    assert examine(runtime, "", *contained("swapon=EPERM")).status == 0, "the filter alone is not the cause"


def test_a_chroot_is_recognised(runtime: Path, tmp_path: Path) -> None:
    # A directory that is no mount point, as debootstrap and schroot make them.
    prepare = f"""
        cd {tmp_path}
        for name in /*; do
            if [ -L "$name" ]; then cp -P "$name" ".$name"
            elif [ -d "$name" ]; then mkdir ".$name"; mount --rbind "$name" ".$name"; fi
        done
        exec /usr/sbin/chroot . {COMMAND}
    """
    report = examine(runtime, prepare, *OWN_HOST)
    assert (report.status, report.problems) == (1, {"sandbox"})
    assert "chroot" in report.findings["sandbox"].detail


def test_a_masked_proc_is_a_note_with_the_option_that_unmasks_it(runtime: Path) -> None:
    masked = next(
        path for path in ("/proc/acpi", "/proc/scsi", "/proc/irq", "/proc/fs") if os.path.isdir(path)
    )
    report = examine(runtime, f"mount -t tmpfs tmpfs {masked}", *OWN_HOST)
    assert (report.status, report.problems) == (0, set())
    assert report.findings["proc"].state == "note"
    assert "lists the host's processes" in report.findings["proc"].detail
    assert "Can't mount proc" in report.findings["proc"].detail
    assert "unmask=ALL" in report.remedy("proc")
    assert examine(runtime, "", *OWN_HOST).findings["proc"].state == "ok"


def test_a_missing_bwrap_is_named_with_its_package(runtime: Path) -> None:
    report = examine(runtime, "mount --bind /dev/null /usr/bin/bwrap", *OWN_HOST)
    assert (report.status, report.problems) == (1, {"bwrap"})
    assert "PATH=/usr/local/bin:/usr/bin:/bin" in report.findings["bwrap"].detail
    assert report.remedy("bwrap") == "sudo apt install bubblewrap"
    assert "sandbox" not in report.findings


def test_a_bwrap_in_a_directory_of_the_users_is_named_and_not_used(runtime: Path, tmp_path: Path) -> None:
    shutil.copy("/usr/bin/bwrap", tmp_path / "bwrap")
    environment = {"PATH": f"{tmp_path}:/usr/local/bin:/usr/bin:/bin"}
    report = examine(runtime, "mount --bind /dev/null /usr/bin/bwrap", *OWN_HOST, **environment)
    assert f"{tmp_path}/bwrap is not used" in report.findings["bwrap"].detail
    assert examine(runtime, "", **environment).findings["bwrap"].detail == "/usr/bin/bwrap"


def test_a_library_that_cannot_be_loaded_is_named_with_its_package(runtime: Path) -> None:
    paths = {
        os.path.realpath(path)
        for path in glob.glob("/usr/lib/*/libseccomp.so.2") + glob.glob("/usr/lib64/libseccomp.so.2")
    }
    prepare = "\n".join(f"mount --bind /dev/null {path}" for path in paths)
    report = examine(runtime, prepare, *OWN_HOST)
    assert report.status == 1
    assert "seccomp" in report.problems
    assert "libseccomp.so.2 cannot be loaded" in report.findings["seccomp"].detail
    assert report.remedy("seccomp") == "sudo apt install libseccomp2"


@pytest.mark.parametrize(
    ("error", "state"), [("ENOSYS", "note"), ("EOPNOTSUPP", "note"), ("EPERM", "problem")]
)
def test_a_host_without_landlock(runtime: Path, error: str, state: str) -> None:
    report = examine(runtime, "", *contained(f"landlock_create_ruleset={error}"))
    assert report.findings["landlock"].state == state
    assert report.status == (1 if state == "problem" else 0)
    if state == "note":
        assert "abstract sockets" in report.findings["landlock"].detail
        assert "6.12" in report.remedy("landlock")


def test_a_low_limit_of_open_files(runtime: Path) -> None:
    report = examine(runtime, "ulimit -n 150")
    assert report.status == 1
    assert "open files" in report.problems
    assert "ulimit -Hn" in report.remedy("open files")
    report = examine(runtime, "ulimit -n 1024")
    assert (report.status, report.findings["open files"].state) == (0, "note")


def test_a_runtime_directory_open_to_others(runtime: Path) -> None:
    runtime.chmod(0o777)
    report = examine(runtime, "")
    assert (report.status, report.problems) == (1, {"runtime directory"})
    assert "0700" in report.findings["runtime directory"].detail


def test_root_is_told_what_that_means(runtime: Path) -> None:
    report = examine(runtime, "", *OWN_HOST)
    assert report.findings["user"].state == "note"
    assert ("user" in examine(runtime, "").findings) is (os.getuid() == 0)


@pytest.mark.root
def test_where_memory_files_cannot_be_executed_sessions_start_and_a_note_says_so(runtime: Path) -> None:
    prepare = "echo 2 > /proc/sys/vm/memfd_noexec"
    report = examine(runtime, prepare, "unshare", "--pid", "--fork", "--mount-proc")
    assert (report.status, report.problems) == (0, set())
    assert report.findings["trampoline"].state == "note"
    assert "memfd_noexec" in report.findings["trampoline"].detail


def test_the_text_has_a_line_a_finding_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    text = doctor._as_text([Finding("a", "ok", "fine"), Finding("bb", "problem", "broken", "mend it")])
    assert text.splitlines() == [
        "ok       a   fine",
        "problem  bb  broken",
        "             → mend it",
        "No session can start: 1 to mend first.",
    ]
    assert doctor._as_text([Finding("a", "note", "so so")]).splitlines()[-1] == "Sessions can start."
    assert doctor.main(["--yaml"]) == 2
    assert "usage" in capsys.readouterr().err
