"""A sandbox from a policy, by the broker's own steps and without a broker: look, plan, open, bwrap."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import trio

from ral_broker import spawn, syscalls
from ral_broker.envelope import facts as host
from ral_broker.envelope import slots
from ral_broker.envelope.facts import canonical_name
from ral_broker.envelope.opened import open_plan
from ral_broker.envelope.options import render_options
from ral_broker.envelope.policy import SessionPolicy
from ral_broker.envelope.project import look_at_project
from ral_broker.envelope.protection import project_protection
from ral_broker.envelope.session_plan import SessionPlan, paths_of_interest, session_plan
from support.installed import home_dir


class Ended(NamedTuple):
    """How a program in a sandbox ended."""

    status: int
    stdout: bytes
    stderr: bytes
    notices: tuple[str, ...]


async def run_protected(
    project: Path,
    *command: str,
    env: Mapping[str, str],
    names: tuple[str, ...] = (),
    protect: bool = True,
    **changes: object,
) -> Ended:
    """Run a command in a session of ``project`` with what the look at it gives. ``changes``: of the
    policy."""
    project_fd = os.open(project, os.O_PATH | os.O_DIRECTORY)
    try:
        path, home = canonical_name(project_fd), os.fsencode(home_dir())
        look = await look_at_project(project_fd, path, home=home)
    finally:
        os.close(project_fd)
    found = project_protection(look, names=names, protect=protect, homes=(home,))
    policy = SessionPolicy(
        uid=os.geteuid(), home=home, home_path=home, project=path, cwd=path, session="0123abcd",
        protected=found.protected, writable=found.writable, blocked=found.blocked,
    )  # fmt: skip
    policy = msgspec.structs.replace(policy, **changes)
    facts = await host.observe(paths_of_interest(policy))
    for held, identity in found.identities if policy.writable == found.writable else ():
        facts[held] = msgspec.structs.replace(facts[held], identity=identity)
    ended = await run_plan(session_plan(policy, facts), *command, env=env)
    return ended._replace(notices=(*found.notices, *ended.notices))


async def run_plan(planned: SessionPlan, *command: str, env: Mapping[str, str]) -> Ended:
    """Run a command in the sandbox of a plan."""
    # What masks a file is bound by its name, which a memfd has not got.
    with tempfile.NamedTemporaryFile(prefix="empty-") as blank:
        return await _run_plan(planned, blank.name, *command, env=env)


async def _run_plan(planned: SessionPlan, blank: str, *command: str, env: Mapping[str, str]) -> Ended:
    empty = os.open(blank, os.O_PATH | os.O_CLOEXEC)
    opened = await open_plan(planned.plan, {}, empty)
    options = render_options(planned.plan, opened.operations, seccomp=0)
    owned = [empty, syscalls.sealed_memfd("args", b"".join(option + b"\0" for option in options))]
    owned += [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("status", "out", "err")]
    owned.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    bwrap = shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")
    assert bwrap is not None
    owned.append(os.open(bwrap, os.O_PATH | os.O_CLOEXEC))
    try:
        _, args, status, out, err, null, executable = owned
        descriptors = {0: null, 1: out, 2: err, slots.ARGS: args, slots.STATUS: status}
        descriptors |= {slots.mount_slot(index): fd for index, fd in enumerate(opened.handles)}
        argv = [b"bwrap", b"--args", b"%d" % slots.ARGS, b"--", *map(os.fsencode, command)]
        environment = {os.fsencode(key): os.fsencode(value) for key, value in env.items()}
        pid = spawn.spawn(executable, argv, environment, descriptors)
        ended = await trio.to_thread.run_sync(os.waitpid, pid, 0)
        code = os.waitstatus_to_exitcode(ended[1])
        texts = [os.pread(fd, 1 << 20, 0) for fd in (out, err)]
        return Ended(code, texts[0], texts[1], planned.notices)
    finally:
        opened.close()
        for fd in owned:
            os.close(fd)
