"""From a decoded request to a running sandbox: plan, open, spawn, go.

Launches share no lock across an await: each has its own descriptors, and what the kernel gives is unique by
itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from typing import Self

import msgspec
import trio

import ral_broker
from ral_broker import admin, spawn, syscalls
from ral_broker.envelope import slots
from ral_broker.envelope.environment import filter_environment
from ral_broker.envelope.opened import Opened, identity_of, open_plan
from ral_broker.envelope.options import render_options
from ral_broker.envelope.plan import Bind, Identity, Plan
from ral_broker.envelope.warrant import encode
from ral_broker.equipment import Equipment
from ral_broker.errors import HostLacks, Refused
from ral_broker.log import shown
from ral_broker.pins import Pin
from ral_broker.runtime import RuntimeDir
from ral_broker.sessions import records
from ral_broker.sessions.caller import Habits, checked_path
from ral_broker.sessions.handshake import check_waiting, send_go, set_terminal, wait_ready
from ral_broker.sessions.many import attach_masks, split_masks
from ral_broker.sessions.placeholders import materialize, remove_placeholders
from ral_broker.sessions.preparation import Planner
from ral_broker.sessions.prepared import Prepared, warrant_of
from ral_broker.sessions.session import Session, now_text
from ral_protocol import exits
from ral_protocol.control import Payload, Run
from ral_protocol.records import ProcessMark, SessionRecord

READY_SECONDS = 20.0
"""Deadline for bwrap to build the sandbox and the trampoline to report."""

_KEPT_COMMAND = 4096


class Launched:
    """A sandbox whose program has got its go. A context manager: closes our lease and terminal, not the
    session."""

    def __init__(self, session: Session, lease: socket.socket, master_fd: int | None) -> None:
        self.session, self.lease, self.master_fd = session, lease, master_fd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.lease.close()
        if self.master_fd is not None:
            os.close(self.master_fd)


class Stages:
    """Where the time of one launch went."""

    def __init__(self) -> None:
        self._last = time.monotonic_ns()
        self.microseconds: list[tuple[str, int]] = []

    def mark(self, name: str) -> None:
        """End a stage."""
        now = time.monotonic_ns()
        self.microseconds.append((name, (now - self._last) // 1000))
        self._last = now


class Launcher:
    """Starts sandboxes with one broker's equipment."""

    def __init__(self, runtime: RuntimeDir, equipment: Equipment, installation: tuple[bytes, ...]) -> None:
        self._runtime, self._equipment = runtime, equipment
        self.planner = Planner(runtime, equipment, installation)
        self._boot_id, self._pid_namespace = records.boot_id(), records.own_pid_namespace()
        self.last_stages: list[tuple[str, int]] = []

    async def prepare(
        self, session: str, request: Run, payload: Payload, cwd_fd: int, project_fd: int
    ) -> Prepared:
        """Plan a session, and make the placeholders that its configuration asks for unless it is a dry run.

        Raises Refused; RequestError for a request that contradicts itself.
        """
        project = checked_path(request.project, project_fd, "project")
        cwd = checked_path(request.cwd, cwd_fd, "working directory")
        effective = await self.planner.effective(
            payload.environment, request.overrides, project, request.profile, payload.argv[0]
        )
        settings = effective.settings
        told = admin.check_root_session(settings.allow_root_session) if os.geteuid() == 0 else ()  # wall
        placeholders, made = ([], []) if request.dry_run else await materialize(effective.settings)
        try:
            planned = await self.planner.plan(
                session, effective, payload.environment, project, project_fd, cwd
            )
        except BaseException:
            remove_placeholders(placeholders)
            raise
        environment, blocked = filter_environment(
            payload.environment,
            home=self.planner.home,
            user=self.planner.user,
            project=project,
            session=session,
            cwd=planned.plan.cwd,
            policy=planned.environment,
        )
        identity = identity_of(cwd_fd if planned.plan.cwd == cwd else project_fd)
        return Prepared(
            session, planned.plan, payload, environment, blocked, identity,
            notices=() if settings.sandbox_quiet else (*planned.notices, *made),
            warnings=(*told, *planned.warnings), processes=settings.sandbox_nproc_limit,
            placeholders=tuple(placeholders),
            remove_placeholders=settings.cleanup_materialized_blocked_files, quiet=settings.sandbox_quiet,
        )  # fmt: skip

    def render(self, prepared: Prepared) -> tuple[list[bytes], list[bytes]]:
        """Return (argv, options) as they would be spawned if every source is found."""
        if self._equipment.bwrap is None:
            raise HostLacks("bwrap was not found")
        seccomp = self._equipment.seccomp_count
        operations, _ = split_masks(prepared.plan)
        return _argv(self._equipment.bwrap), render_options(prepared.plan, operations, seccomp=seccomp)

    async def launch(
        self, prepared: Prepared, request: Run, habits: Habits, client: ProcessMark | None, stdio: list[int],
        stages: Stages,
    ) -> Launched:  # fmt: skip
        """Start the sandbox and give its program the go.

        Resource handling: closes ``stdio`` in every case. Error handling: Refused or HostLacks, and then
        nothing of the launch is left; a failed exec is reported through the lease.
        """
        with contextlib.ExitStack() as stack:
            for fd in stdio:
                stack.callback(os.close, fd)
            bwrap, trampoline, _ = await self._equipment.require()
            operations, masks = split_masks(prepared.plan)
            opened = await open_plan(
                msgspec.structs.replace(prepared.plan, operations=operations),
                self._equipment.pin_descriptors(),
                self._runtime.empty_file_fd,
            )
            stack.callback(opened.close)
            stages.mark("open")
            scoped = self._equipment.ruleset_fd is not None  # wall
            warrant = encode(warrant_of(prepared, request, habits, scoped))
            status_w, status_r = self._create_status(prepared.session)
            stack.callback(os.close, status_w)
            undo = stack.enter_context(contextlib.ExitStack())
            undo.callback(records.remove, self._runtime.sessions_fd, prepared.session + records.STATUS)
            undo.callback(os.close, status_r)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(ours.close)
            stack.callback(theirs.close)
            ours.setblocking(False)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            errors_fd = os.memfd_create("bwrap-stderr", os.MFD_CLOEXEC)
            stack.callback(os.close, errors_fd)
            pid = self._spawn(
                stack, prepared, bwrap, trampoline, opened, warrant, status_w, theirs.fileno(), errors_fd
            )
            theirs.close()
            undo.callback(_end_monitor, pid)
            monitor = os.pidfd_open(pid)
            undo.callback(os.close, monitor)
            stages.mark("spawn")
            with trio.move_on_after(READY_SECONDS):
                ready = await wait_ready(ours)
                if ready is None:
                    raise await _bwrap_refusal(monitor, errors_fd, bwrap)
                stages.mark("bwrap")
                init_pid, master = ready
                if master is not None:
                    undo.callback(os.close, master)
                init = os.pidfd_open(init_pid)
                undo.callback(os.close, init)
                undo.callback(_kill, init)
                check_waiting(ours)
                _check_cwd(prepared, init_pid)
                if masks:
                    await attach_masks(self._equipment.zygote, ours, init_pid, masks)
                    stages.mark("masks")
                session = self._record(prepared, pid, init_pid, client, monitor, init, status_r)
                undo.callback(records.remove, self._runtime.sessions_fd, prepared.session + records.RECORD)
                set_terminal(master, request)
                send_go(ours, stdio)
                undo.pop_all()
                stages.mark("go")
                return Launched(session, ours, master)
            raise HostLacks(f"bwrap built no sandbox within {READY_SECONDS:.0f} seconds; it was ended")

    def _create_status(self, session: str) -> tuple[int, int]:
        try:
            return records.StatusFile.create(self._runtime.sessions_fd, session)
        except OSError as error:
            raise Refused(
                f"the session cannot be recorded in {shown(self._runtime.sessions_path)}: {error.strerror}; "
                "free some space there, or name another place with RAL_RUNTIME_DIR"
            ) from error

    def _spawn(
        self, stack: contextlib.ExitStack, prepared: Prepared, bwrap: Pin, trampoline: Pin, opened: Opened,
        warrant: bytes, status_fd: int, report_fd: int, errors_fd: int,
    ) -> int:  # fmt: skip
        nested = prepared.plan.nested_user_namespaces
        seccomp = self._equipment.seccomp_descriptors(nested_userns=nested)
        for fd in seccomp:
            stack.callback(os.close, fd)
        options = render_options(prepared.plan, opened.operations, seccomp=len(seccomp))
        args_fd = syscalls.sealed_memfd("ral-args", b"".join(option + b"\0" for option in options))
        stack.callback(os.close, args_fd)
        warrant_fd = syscalls.sealed_memfd("ral-warrant", warrant)
        stack.callback(os.close, warrant_fd)
        null = self._equipment.null_fd
        descriptors = {
            0: null, 1: null, 2: errors_fd, slots.ARGS: args_fd, slots.WARRANT: warrant_fd, slots.REPORT:
            report_fd, slots.TRAMPOLINE: trampoline.fd, slots.STATUS: status_fd,
        }  # fmt: skip
        if self._equipment.ruleset_fd is not None:
            descriptors[slots.RULESET] = self._equipment.ruleset_fd
        descriptors |= dict(zip(slots.SECCOMP, seccomp, strict=False))
        descriptors |= {slots.mount_slot(index): fd for index, fd in enumerate(opened.handles)}
        try:
            return spawn.spawn(bwrap.fd, _argv(bwrap), {}, descriptors)
        except OSError as error:
            raise HostLacks(f"cannot start bwrap ({shown(bwrap.argv0)}): {error.strerror}") from error

    def _record(
        self, prepared: Prepared, pid: int, init_pid: int, client: ProcessMark | None, monitor: int, init:
        int, status_fd: int,
    ) -> Session:  # fmt: skip
        try:
            record = SessionRecord(
                id=prepared.session, uid=os.geteuid(), host=records.host_name(), boot_id=self._boot_id,
                pid_namespace=self._pid_namespace, version=exits.VERSION, kind="session",
                project=_project_of(prepared.plan), command=_kept_command(prepared.payload.argv),
                started=now_text(), monitor=records.process_mark(pid), init=records.process_mark(init_pid),
                mount_namespace=os.stat(f"/proc/{init_pid}/ns/mnt").st_ino,
                user_namespace=os.stat(f"/proc/{init_pid}/ns/user").st_ino, client=client, holder=None,
                plan=msgspec.Raw(msgspec.json.encode(prepared.plan)),
                placeholders=list(prepared.placeholders) if prepared.remove_placeholders else [],
            )  # fmt: skip
            records.write_record(self._runtime.sessions_fd, record)
        except OSError as error:
            raise Refused(f"the session cannot be recorded: {error.strerror or error}") from error
        return Session(record, monitor, init, status_fd)


def installation_paths() -> tuple[bytes, ...]:
    """Return the directories that hold this broker's code and interpreter where the user may be able to
    write them."""
    paths = {os.path.realpath(os.path.dirname(os.path.dirname(os.fsencode(ral_broker.__file__))))}
    if sys.prefix != sys.base_prefix:
        paths.add(os.path.realpath(os.fsencode(sys.prefix)))
    paths.add(os.path.realpath(os.fsencode(sys.base_prefix)))
    return tuple(sorted(paths - {b"/usr", b"/"}))


def _argv(bwrap: Pin) -> list[bytes]:
    return [bwrap.argv0, b"--args", b"%d" % slots.ARGS, b"--", b"/proc/self/fd/%d" % slots.TRAMPOLINE]


def _check_cwd(prepared: Prepared, init_pid: int) -> None:
    """Make sure that the sandbox stands in the directory that the client holds open: bwrap goes there by
    name."""
    try:
        status = os.stat(f"/proc/{init_pid}/cwd")
    except OSError as error:
        raise HostLacks(f"the sandbox ended while it was prepared: {error.strerror}") from error
    if Identity(status.st_dev, status.st_ino) != prepared.cwd_identity:  # wall
        raise Refused(
            f"{shown(prepared.plan.cwd)} now reaches another directory, or is hidden inside; another "
            "process changed it while the sandbox was prepared; run the command again if that was you"
        )


def _project_of(plan: Plan) -> bytes:
    return next((o.dest for o in plan.operations if isinstance(o, Bind) and o.layer == "project"), plan.cwd)


def _kept_command(argv: list[bytes]) -> list[bytes]:
    kept: list[bytes] = []
    room = _KEPT_COMMAND
    for argument in argv:
        if room <= 0:
            break
        kept.append(argument[:room])
        room -= len(argument) + 1
    return kept


async def _bwrap_refusal(monitor: int, errors_fd: int, bwrap: Pin) -> HostLacks | Refused:
    """Say in bwrap's own words why it built nothing."""
    with trio.move_on_after(2):
        await trio.lowlevel.wait_readable(monitor)
    words = shown(os.pread(errors_fd, 4096, 0).strip()) or "it said nothing"
    if "Race condition binding" in words:
        return Refused(
            f"something that the sandbox shows was replaced while it was built ({words}); run ral again"
        )
    if "Can't chdir" in words:
        return Refused(f"the working directory cannot be entered inside: {words}")
    return HostLacks(f"no sandbox was built; {shown(bwrap.argv0)} says: {words} (see ral doctor)")


def _kill(pidfd: int) -> None:
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _end_monitor(pid: int) -> None:
    """KILL the bwrap of a launch that failed, with every child it may have left waiting, and reap it."""
    # Not reaped yet, so the group is still its own (spawn makes each child a session leader).
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
