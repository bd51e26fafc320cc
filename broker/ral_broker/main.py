"""The broker's life: directories, lock, socket, readiness, and an end that leaves its sessions running."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys

import trio

from ral_broker import activation, log
from ral_broker.control import Control
from ral_broker.equipment import Equipment
from ral_broker.errors import HostLacks, RalError
from ral_broker.listen import Listener
from ral_broker.runtime import RuntimeDir, find_runtime_dir
from ral_broker.sessions.adopt import adopt_sessions
from ral_broker.sessions.launch import Launcher, installation_paths
from ral_broker.sessions.registry import Registry
from ral_broker.spawn import raise_descriptor_limit
from ral_protocol import exits

_STOP_SECONDS = 15.0
_LOG_BYTES = 1 << 20


class _Options:
    """``run [--ready-fd N] [--inherit LISTENER,LOCK [--activated]]``."""

    def __init__(self, arguments: list[str]) -> None:
        self.ready_fd: int | None = None
        self.inherited: tuple[int, int] | None = None
        self.activated = False
        rest = list(arguments)
        while rest:
            option = rest.pop(0)
            if option == "--ready-fd" and rest and rest[0].isdigit():
                self.ready_fd = int(rest.pop(0))
            elif option == "--inherit" and rest:
                listener, _, lock = rest.pop(0).partition(",")
                self.inherited = (int(listener), int(lock))
            elif option == "--activated":
                self.activated = True
            else:
                raise ValueError(option)


def main(arguments: list[str]) -> int:
    """Run a verb of the broker room: ``run`` or ``doctor``. Returns the exit status."""
    if arguments[:1] == ["doctor"]:
        from ral_broker import doctor  # not needed by a broker, whose start a client waits for

        return doctor.main(arguments[1:])
    try:
        if arguments[:1] != ["run"]:
            raise ValueError(arguments[:1])
        options = _Options(arguments[1:])
    except ValueError as error:
        sys.stderr.write(f"ral-broker: unknown argument {error}; it takes run or doctor\n")
        return exits.USAGE
    try:
        return _run(options)
    except RalError as error:
        sys.stderr.write(f"ral-broker: {error}\n")
        return exits.FAILED


def _run(options: _Options) -> int:
    # Nothing of the caller's directory, mask or signals must live on in a process that outlives the caller.
    os.chdir("/")
    os.umask(0o077)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_descriptor_limit()
    listener = activation.inherited_socket()
    activated = options.activated or listener is not None
    if options.inherited is not None:
        listener = _own_socket(options.inherited[0])
    environment = dict(os.environb)
    if activated and listener is not None:
        environment[exits.RUNTIME_VARIABLE.encode()] = activation.socket_directory(listener)
    runtime = find_runtime_dir(environment)
    if options.ready_fd is not None:
        _log_to_file(runtime)
    log.configure(journal=activation.started_by_systemd())
    if options.inherited is not None:
        runtime.keep_lock(options.inherited[1])
    elif not runtime.lock():
        if not activated:
            log.logger.info("another broker serves %s", log.shown(runtime.path))
            return exits.OK
        activation.replace_broker(runtime)
    broker = _Broker(runtime, listener or runtime.listen(), activated=activated, ready_fd=options.ready_fd)
    trio.run(broker.run, strict_exception_groups=True)
    if broker.restart:
        broker.execute_anew()
    if not activated:
        runtime.remove_socket()
    return exits.OK


def _log_to_file(runtime: RuntimeDir) -> None:
    fd = runtime.open_own_file("broker.log", os.O_WRONLY | os.O_APPEND)
    if os.fstat(fd).st_size > _LOG_BYTES:
        os.ftruncate(fd, 0)
    os.dup2(fd, 2)
    os.close(fd)


def _own_socket(fd: int) -> socket.socket:
    """Return the socket that this very process listened at before it executed itself anew."""
    os.set_inheritable(fd, False)
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    return listener


def _reap_all() -> None:
    """Take the statuses of children that ended while this process executed itself anew."""
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None:
            pass


class _Broker:
    """One run of the broker."""

    def __init__(
        self, runtime: RuntimeDir, listener: socket.socket, *, activated: bool, ready_fd: int | None
    ) -> None:
        self._runtime, self._listener = runtime, listener
        self._activated, self._ready_fd = activated, ready_fd
        self._stopping = trio.Event()
        self.restart = False

    async def run(self) -> None:
        """Serve until asked to stop. Sessions are not touched by the end."""
        equipment = Equipment()
        await equipment.probe()
        launcher = Launcher(self._runtime, equipment, installation_paths())
        async with trio.open_nursery() as nursery:
            if equipment.zygote is not None:
                nursery.start_soon(equipment.zygote.supervise)
            registry = Registry(self._runtime, nursery)
            _reap_all()
            adopt_sessions(registry, nursery)
            control = Control(
                self._runtime, equipment, registry, launcher, self._stopping.set, activated=self._activated
            )
            listener = Listener(control.handle, self._ask_restart)
            accepting = trio.CancelScope()
            nursery.start_soon(self._accept, listener, accepting)
            await nursery.start(self._watch_signals)
            # What lives now lives as long as the broker: no collection during a launch needs to look at it.
            gc.collect()
            gc.freeze()
            self._say_ready()
            await self._stopping.wait()
            # After STOPPING=1 systemd would wait for the end of this process, and then bring it about.
            activation.notify("RELOADING=1" if self.restart else "STOPPING=1")
            with trio.move_on_after(_STOP_SECONDS):
                await control.wait_idle()
            accepting.cancel()
            nursery.cancel_scope.cancel()
        log.logger.info("stopped; %d sessions go on", len(list(registry.live())))

    async def _accept(self, listener: Listener, scope: trio.CancelScope) -> None:
        with scope:
            # A copy: trio closes what it serves, and the socket may have to outlive this process image.
            await listener.serve(self._listener.dup())

    async def _watch_signals(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                log.logger.info("%s: stopping", signal.Signals(number).name)
                self._stopping.set()

    def _ask_restart(self) -> None:
        self.restart = True
        self._stopping.set()

    def _say_ready(self) -> None:
        activation.notify("READY=1")
        log.logger.info("version %s serves %s", exits.VERSION, log.shown(self._runtime.path))
        if self._ready_fd is not None:
            with contextlib.suppress(OSError):
                os.write(self._ready_fd, b"R")
            os.close(self._ready_fd)

    def execute_anew(self) -> None:
        """Become a broker of the version that is installed now, with the same socket and lock. Does not
        return.

        Children stay children of this process, and the new broker finds its sessions by their records.
        """
        lock_fd = self._runtime.lock_fd
        if lock_fd is None:
            raise HostLacks("the lock is not held")
        for fd in (self._listener.fileno(), lock_fd):
            os.set_inheritable(fd, True)
        inherit = ["--inherit", f"{self._listener.fileno()},{lock_fd}"]
        if self._activated:
            inherit.append("--activated")
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")
        os.execv(sys.executable, [sys.executable, "-I", program, "run", *inherit])
