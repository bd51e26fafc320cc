#!/usr/bin/env python3
"""Take each security check out, one at a time, and see that a test notices.

A line of broker/ral_broker that holds a wall ends in ``# wall``. WALLS names for each the tests that fall
without it. The tool copies the installation to a scratch environment, so that broker, client and tests are
the changed ones; first every test named here has to pass unchanged.

    tools/walls.py [--as USER] [TEXT…]    only walls whose file or line contains one of TEXT

As root the tests marked root run as root and the others as USER (ral-test); as an ordinary user the former
are left out. Takes some minutes. Exit status 0: every wall that was tried is missed.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
from support.processes import become_subreaper, descendants, end, reap  # noqa: E402 - not installed

MARK = "  # wall"
ROOMS = ("ral_broker", "ral_client", "ral_helpers", "ral_protocol")


class Wall(NamedTuple):
    """One check. ``line`` is its source line, stripped and without the mark; ``without`` what replaces it
    (None: an ``if`` that is never true, else nothing); ``root``: its tests are root's."""

    file: str
    line: str
    tests: tuple[str, ...]
    without: str | None = None
    root: bool = False


def _wall(file: str, line: str, *tests: str, without: str | None = None, root: bool = False) -> Wall:
    return Wall(file, line, tests, without, root)


_CROOKED = "tests/attack/test_crooked_requests.py::"
_DOOR = "tests/integration/test_door.py::"
_PLAN = "tests/unit/test_session_plan.py::"
_PLANTED = "tests/attack/test_planted_records.py::"
_PROBES = "tests/attack/test_probes.py::"
_PARENTS = "tests/attack/test_renamed_parents.py::"
_ROOT = "tests/attack/test_root_session.py::"
_ADMIN = _ROOT + "test_an_admins_file_that_forbids_it_or_cannot_be_trusted_refuses_the_session"
_RUN = "tests/integration/test_run.py::"
_SWAP = "tests/attack/test_swapped_source.py::"

WALLS = (
    # Who may ask.
    _wall("peers.py", "if peer.uid != os.geteuid():",
          _CROOKED + "test_another_user_who_reaches_the_socket_is_not_served", root=True),
    _wall("peers.py", "if _namespace(peer, name, request) != own[name]:",
          _DOOR + "test_a_peer_in_a_user_namespace_of_its_own_is_refused",
          _DOOR + "test_a_peer_that_sees_other_mounts_is_refused_with_the_likely_cause"),
    _wall("frames.py", "wanted = socket.MSG_CMSG_CLOEXEC",
          _DOOR + "test_every_descriptor_of_the_broker_is_closed_on_exec", without="wanted = 0"),
    _wall("control.py", "if len(fds) and not isinstance(request, Run):",
          _CROOKED + "test_a_request_that_takes_no_descriptors_gets_none"),
    # What a request brings.
    _wall("sessions/caller.py", "syscalls.seal(untrusted_fd)",
          _CROOKED + "test_a_payload_that_cannot_be_sealed",
          _CROOKED + "test_a_payload_is_sealed_before_it_is_read"),
    _wall("sessions/caller.py", "if size > MAX_PAYLOAD:",
          _CROOKED + "test_a_payload_that_is_too_large_is_not_read"),
    _wall("sessions/caller.py", "if stat.S_ISDIR(mode):",
          _CROOKED + "test_descriptors_that_open_more_than_a_stream[directory]"),
    _wall("sessions/caller.py", "if stat.S_ISBLK(mode):",
          _CROOKED + "test_a_block_device_is_no_stream", root=True),
    _wall("sessions/caller.py", "if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH:",
          _CROOKED + "test_descriptors_that_open_more_than_a_stream[path]"),
    _wall("sessions/caller.py", "if syscalls.filesystem_type(fd) in _KERNEL_HANDLES:",
          _CROOKED + "test_descriptors_that_open_more_than_a_stream[namespace]"),
    _wall("sessions/caller.py", "if os.isatty(fd):", _CROOKED + "test_a_terminal_that_is_called_none"),
    _wall("sessions/launch.py", "if real != untrusted_path:",
          _CROOKED + "test_a_name_and_a_handle_that_are_not_the_same_directory"),
    _wall("sessions/launch.py", "if not stat.S_ISDIR(mode):", _CROOKED + "test_a_project_that_is_a_file"),
    # The object, not the name.
    _wall("envelope/opened.py", "if bind.identity is not None and identity_of(handle) != bind.identity:",
          _SWAP + "test_another_object_at_the_name_is_refused_and_named"),
    _wall("envelope/opened.py",
          "return syscalls.openat2(AT_FDCWD, path, flags, syscalls.RESOLVE_NO_SYMLINKS | cached)",
          _SWAP + "test_a_symbolic_link_on_the_way_is_refused_in_fixed_words",
          without="return syscalls.openat2(AT_FDCWD, path, flags, cached)"),
    _wall("envelope/opened.py",
          "fd = syscalls.openat2(AT_FDCWD, self._path, self._flags, syscalls.RESOLVE_NO_SYMLINKS)",
          _CROOKED + "test_the_slow_open_follows_no_link_either",
          without="fd = syscalls.openat2(AT_FDCWD, self._path, self._flags, 0)"),
    _wall("sessions/launch.py", "if Identity(status.st_dev, status.st_ino) != prepared.cwd_identity:",
          _SWAP + "test_the_working_directory_is_the_object_that_the_caller_stands_in_or_nothing"),
    _wall("syscalls.py", "if fcntl.fcntl(fd, F_GET_SEALS) & ALL_SEALS != ALL_SEALS:",
          _CROOKED + "test_seals_that_do_not_hold_are_noticed"),
    _wall("syscalls.py",
          "if os.fstat(fd).st_size != len(content) or os.pread(fd, len(content) + 1, 0) != content:",
          _CROOKED + "test_a_memory_file_that_is_written_to_before_its_seals_are_on_is_thrown_away"),
    # What a session shows and hides.
    _wall("sessions/launch.py", "if seen[name].identity != identity_of(fd):",
          _CROOKED + "test_a_directory_of_the_brokers_own_that_moves_during_the_plan_refuses"),
    _wall("envelope/session_plan.py", "if is_under(spelling, project):",
          _PLAN + "test_a_project_that_is_the_home_or_above_it_is_refused"),
    _wall("envelope/session_plan.py", "if is_under(place, project):",
          _PARENTS + "test_a_project_that_holds_what_other_programs_share_is_refused"),
    _wall("envelope/session_plan.py", "if is_under(project, place):",
          _PLAN + "test_a_project_in_a_file_system_of_the_kernel_is_refused"),
    _wall("envelope/session_plan.py",
          "if is_under(project, facts.get(secret, ABSENT).resolved or secret):",
          _PLAN + "test_a_project_inside_the_brokers_directory_is_refused"),
    _wall("envelope/session_plan.py",
          "wanted = [(path, \"the broker's own directory\") for path in policy.hidden]",
          _RUN + "test_the_brokers_directory_is_masked_even_inside_the_project", without="wanted = []"),
    _wall("envelope/session_plan.py",
          'wanted += [(policy.home_path + b"/" + name, "credentials") for name in CREDENTIAL_NAMES]',
          _PLAN + "test_credentials_inside_the_project_are_masked_and_the_shape_decides"),
    _wall("envelope/session_plan.py",
          'wanted += [(path, "readable by root only") for path in ROOT_HIDDEN]',
          _ROOT + "test_files_that_only_root_may_read_are_not_there_to_be_read", root=True),
    _wall("envelope/session_plan.py", 'wanted += [(path, "denied") for path in policy.denied]',
          _PLAN + "test_no_denied_object_stays_visible"),
    _wall("envelope/session_plan.py", "for path in ROOT_READ_ONLY:",
          _ROOT + "test_no_file_of_the_kernel_can_be_opened_for_writing", root=True,
          without="for path in ():"),
    _wall("envelope/session_plan.py", "for path in ROOT_MASKED:",
          _ROOT + "test_files_that_only_root_may_read_are_not_there_to_be_read", root=True,
          without="for path in ():"),
    _wall("envelope/session_plan.py", "operations += _anchors(tuple(operations), protected)",
          _PARENTS + "test_a_directory_above_the_brokers_own_cannot_be_renamed_for_a_decoy"),
    _wall("envelope/session_plan.py",
          'yield Pinned(dest=name, pin=pin, layer="protect", why="the broker executes this file")',
          _PLAN + "test_a_pin_is_laid_over_its_own_name_wherever_it_is_visible", without="yield from ()"),
    _wall("envelope/session_plan.py",
          'dest=b"/proc", source=b"/proc", writable=False, required=True, layer="kernel",',
          "tests/attack/test_masked_proc.py",
          without='dest=b"/proc", source=b"/proc", writable=True, required=True, layer="kernel",'),
    _wall("envelope/session_plan.py", 'operations.append(ReadOnly(dest=b"/", layer="final", why=why))',
          _RUN + "test_the_system_is_read_only_and_the_project_is_not"),
    # What bwrap and the trampoline are told.
    _wall("envelope/options.py", 'options.append(b"--disable-userns")',
          _PROBES + "test_p17_no_user_namespace_can_be_made_inside",
          "tests/attack/test_options.py::test_every_namespace_and_filter_is_asked_for"),
    _wall("envelope/options.py", 'b"--cap-drop", b"ALL",',
          _ROOT + "test_p15_no_capability_inside", root=True, without=""),
    _wall("envelope/options.py", 'options += [b"--add-seccomp-fd", b"%d" % slots.SECCOMP[number]]',
          _PROBES + "test_p14_nothing_can_be_typed_into_the_callers_terminal"),
    _wall("sessions/launch.py", "scoped = self._equipment.ruleset_fd is not None",
          _PROBES + "test_p18_sockets_of_the_host_are_out_of_reach", without="scoped = False"),
    # The directories of the broker's own.
    _wall("runtime.py",
          "flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC",
          _PLANTED + "test_a_runtime_directory_that_others_could_use_is_refused_with_a_sentence[link]",
          without="flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC"),
    _wall("runtime.py", "if status.st_uid != os.geteuid() or status.st_mode & 0o077:",
          _PLANTED + "test_a_runtime_directory_that_others_could_use_is_refused_with_a_sentence[group]"),
    _wall("runtime.py", "flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK",
          _PLANTED + "test_a_planted_file_of_the_brokers_own_is_refused_with_a_sentence_or_replaced",
          without="flags |= os.O_CREAT | os.O_CLOEXEC"),
    _wall("runtime.py", "if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():",
          _PLANTED + "test_a_planted_file_of_the_brokers_own_is_refused_with_a_sentence_or_replaced"),
    _wall("runtime.py",
          "if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != 0:",
          _PLANTED + "test_a_planted_file_of_the_brokers_own_is_refused_with_a_sentence_or_replaced"),
    # Records.
    _wall("sessions/records.py",
          "flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC",
          _PLANTED + "test_what_lies_in_the_way_of_an_end_does_not_stop_the_broker",
          without="flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC"),
    _wall("sessions/records.py", "if record.id + RECORD == name and record.uid == os.geteuid():",
          _PLANTED + "test_a_record_with_one_wrong_field_is_ignored", without="if True:"),
    _wall("sessions/records.py", "own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()",
          _PLANTED + "test_a_record_of_another_users_is_ignored", root=True, without="own = True"),
    _wall("sessions/records.py", "if not own or status.st_size > MAX_RECORD:",
          _PLANTED + "test_a_record_that_is_too_large_is_not_decoded"),
    _wall("sessions/records.py", "flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK",
          _PLANTED + "test_what_is_no_file_neither_stops_the_broker_nor_is_followed",
          without="flags = os.O_RDONLY | os.O_CLOEXEC"),
    _wall("sessions/records.py",
          "flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK",
          _PLANTED + "test_what_is_no_file_neither_stops_the_broker_nor_is_followed",
          without="flags = os.O_RDONLY | os.O_CLOEXEC"),
    _wall("sessions/records.py", "if not stat.S_ISREG(os.fstat(fd).st_mode):",
          _PLANTED + "test_a_session_whose_status_file_is_no_file_any_more_is_ended"),
    _wall("sessions/adopt.py", "if record.host != records.host_name():",
          _PLANTED + "test_a_record_of_another_host_is_neither_believed_nor_pruned"),
    _wall("sessions/adopt.py", "if not records.is_same_process(mark) or _has_ended(pidfd):",
          _PLANTED + "test_a_pid_that_was_given_to_another_process_is_not_the_sessions"),
    _wall("sessions/lineage.py", "if len(numbers) < 2 or numbers[-1] != 1:",
          _PLANTED + "test_each_word_of_a_lineage_counts[no init]"),
    _wall("sessions/lineage.py", 'if not os.readlink(b"/proc/%d/exe" % pid).endswith(_TRAMPOLINES):',
          _PLANTED + "test_a_record_that_names_the_sandbox_of_another_program_kills_nothing"),
    _wall("sessions/lineage.py", "if any(found[name] == own[name] for name in own):",
          _PLANTED + "test_each_word_of_a_lineage_counts[own namespaces]"),
    _wall("sessions/lineage.py",
          'if (found["mnt"], found["user"]) != (record.mount_namespace, record.user_namespace):',
          _PLANTED + "test_a_record_that_lies_about_a_real_session_does_not_end_it[mount_namespace]",
          _PLANTED + "test_a_record_that_lies_about_a_real_session_does_not_end_it[user_namespace]"),
    _wall("sessions/lineage.py", "if parent != record.monitor.pid:",
          _PLANTED + "test_a_record_that_lies_about_a_real_session_does_not_end_it[monitor]"),
    _wall("sessions/lineage.py", "elif _runs_bwrap(parent):",
          _PLANTED + "test_a_record_that_lies_about_a_real_session_does_not_end_it[gone]"),
    _wall("sessions/lineage.py", 'if struct.unpack("=I", owner)[0] != os.geteuid():',
          _PLANTED + "test_a_sandbox_of_another_users_is_not_believed"),
    # The administrator's file.
    _wall("admin.py", "if above.st_uid != 0 or above.st_mode & 0o022:",
          _ADMIN + "[a directory that others may write]", root=True),
    _wall("admin.py", "if not stat.S_ISREG(status.st_mode) or status.st_uid != 0 or status.st_mode & 0o022:",
          _ADMIN + "[foreign]", _ADMIN + "[writable by others]", root=True),
)  # fmt: skip


def marked(package: Path) -> list[tuple[str, str]]:
    """Return (file, line) of every marked line below ``package``, as WALLS names them."""
    found: list[tuple[str, str]] = []
    for path in sorted(package.rglob("*.py")):
        for line in path.read_text().splitlines():
            if line.rstrip().endswith(MARK):
                name = path.relative_to(package).as_posix()
                found.append((name, line.strip().removesuffix(MARK.strip()).rstrip()))
    return found


def taken_down(source: str, wall: Wall) -> str:
    """Return ``source`` without the wall. ValueError if its line is not there exactly once."""
    lines = source.splitlines()
    at = [n for n, line in enumerate(lines) if line.strip() == wall.line + MARK]
    if len(at) != 1:
        raise ValueError(f"{wall.file}: {wall.line!r} is there {len(at)} times")
    indent = lines[at[0]][: len(lines[at[0]]) - len(lines[at[0]].lstrip())]
    replacement = wall.without
    if replacement is None:
        keyword = wall.line.split(" ", 1)[0]
        replacement = f"{keyword} False:" if keyword in ("if", "elif") else "pass"
    lines[at[0]] = indent + replacement
    return "\n".join(lines) + "\n"


class Scratch:
    """An environment with copies of the packages, of the tests and of the launcher."""

    def __init__(self, directory: Path, account: str) -> None:
        self.directory, self.account = directory, account
        directory.chmod(0o755)
        subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", directory / "venv"], check=True)
        self.bin = directory / "venv" / "bin"
        (self.site,) = (directory / "venv" / "lib").glob("python3*/site-packages")
        installed = Path(sysconfig.get_path("purelib"))
        (self.site / "others.pth").write_text(f"{installed}\n")
        for room in ROOMS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree((installed / room).resolve(), self.site / room, ignore=ignored)
        launcher = Path(os.environ.get("RAL_TEST_BIN") or sysconfig.get_path("scripts"), "ral").resolve()
        shutil.copy(launcher, self.bin / "ral")
        self.source = directory / "src"
        shutil.copytree(ROOT / "tests", self.source / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", self.source)

    def run(self, tests: tuple[str, ...], *, root: bool, stop: bool = True) -> tuple[int, str]:
        """Run tests; status of pytest and its last line."""
        entry = pwd.getpwuid(0) if root else pwd.getpwnam(self.account)
        command = [str(self.bin / "python"), "-m", "pytest", "-p", "no:cacheprovider", "-q", *tests]
        command += ["-x"] if stop else []
        if entry.pw_uid != os.geteuid():
            become = ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--init-groups"]
            command = [*become, *command]
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": entry.pw_dir,
            "USER": entry.pw_name, "LOGNAME": entry.pw_name, "PYTHONDONTWRITEBYTECODE": "1",
            "RAL_TEST_BIN": str(self.bin),
        }  # fmt: skip
        done = subprocess.run(
            command, cwd=self.source, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        # A test that fell may have left its broker or a sandbox.
        end(descendants())
        reap(set())
        lines = done.stdout.strip().splitlines()
        return done.returncode, done.stdout if not stop else (lines[-1] if lines else "")


def main() -> int:
    """Try the walls and print a line for each."""
    parser = argparse.ArgumentParser(description="Take each security check out and see that a test notices.")
    parser.add_argument(
        "--as", dest="account", default="ral-test" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())[0]
    )
    parser.add_argument("text", nargs="*")
    options = parser.parse_args()
    walls = [w for w in WALLS if not options.text or any(t in w.file or t in w.line for t in options.text)]
    if os.geteuid() != 0:
        print(f"not tried, needs root: {sum(w.root for w in walls)}")
        walls = [w for w in walls if not w.root]
    missed = 0
    become_subreaper()
    with tempfile.TemporaryDirectory(prefix="ral-walls-", dir="/var/tmp") as name:
        scratch = Scratch(Path(name), options.account)
        for root in (False, True):
            tests = tuple(dict.fromkeys(t for w in walls if w.root == root for t in w.tests))
            status, said = scratch.run(tests, root=root, stop=False) if tests else (0, "")
            if status != 0:
                print(f"{said}\nunchanged, these tests must pass", file=sys.stderr)
                return 2
        for wall in walls:
            path = scratch.site / "ral_broker" / wall.file
            whole = path.read_text()
            before = time.monotonic()
            path.write_text(taken_down(whole, wall))
            try:
                fell = [scratch.run((test,), root=wall.root)[0] == 1 for test in wall.tests]
            finally:
                path.write_text(whole)
            verdict = "missed" if any(fell) else "NOT MISSED"
            missed += any(fell)
            seconds = time.monotonic() - before
            print(f"{verdict:10}  {seconds:5.1f} s  {wall.file:26}  {wall.line}", flush=True)
    print(f"{missed} of {len(walls)} walls are missed by a test when they are gone")
    return 0 if missed == len(walls) else 1


if __name__ == "__main__":
    sys.exit(main())
