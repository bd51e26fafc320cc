"""What every launch is lent, made once when the broker starts: the pinned executables, filters and
rulesets."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ral_broker import syscalls
from ral_broker.envelope.landlock import session_ruleset
from ral_broker.envelope.plan import PinName
from ral_broker.envelope.seccomp import session_programs
from ral_broker.errors import HostLacks
from ral_broker.host import HostFacts, launch_refusal, probe_host
from ral_broker.pins import Pin, names, take_bwrap, take_helper
from ral_broker.zygote import Zygote


class Equipment:
    """Pins, filters and facts of this host. Everything stays open as long as the broker lives.

    Where something is missing the broker starts all the same and each launch says what it is.
    """

    def __init__(self) -> None:
        self.null_fd = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self.bwrap: Pin | None = None
        self.trampoline: Pin | None = None
        self.holder: Pin | None = None
        self.zygote: Zygote | None = None
        self.facts: HostFacts | None = None
        self.ruleset_fd: int | None = None
        self.notices: list[str] = []
        self._seccomp: list[int] = []
        self._nesting: list[int] = []
        self._missing: HostLacks | None = None
        try:
            self.trampoline = take_helper("trampoline")
            self.holder = take_helper("holder")
            self.zygote = Zygote(take_helper("zygote"), self.null_fd)
            self.bwrap = take_bwrap()
            self.ruleset_fd, notice = session_ruleset()
            self.notices += [notice] if notice else []
            self._seccomp = [syscalls.sealed_memfd("ral-seccomp", program) for program in session_programs()]
        except HostLacks as error:
            self._missing = error

    async def probe(self) -> None:
        """Learn what this host can do, by trying (about one launch)."""
        if self.bwrap is not None and self.trampoline is not None and self._missing is None:
            self.facts = await probe_host(self.bwrap, self.trampoline)

    async def require(self) -> tuple[Pin, Pin, HostFacts]:
        """Return bwrap, the trampoline and the host's facts. Raises HostLacks if no sandbox can be made
        here.

        A host that could not is tried again: its owner may have mended it.
        """
        if self._missing is not None:
            raise self._missing
        if self.facts is None or launch_refusal(self.facts) is not None:
            await self.probe()
        if self.bwrap is None or self.trampoline is None or self.facts is None:
            raise HostLacks("this host was not probed; run ral doctor")
        refusal = launch_refusal(self.facts)
        if refusal is not None:
            raise refusal
        return self.bwrap, self.trampoline, self.facts

    def pin_descriptors(self) -> Mapping[PinName, int]:
        """Return the descriptors of the pins that there are."""
        pins: dict[PinName, int] = {}
        for name, pin in self._pins():
            pins[name] = pin.fd
        return pins

    def pin_names(self) -> tuple[tuple[PinName, bytes], ...]:
        """Return the pins that have a name in the host now, with it; an unlinked one has none to protect."""
        return tuple((name, path) for name, pin in self._pins() if (path := names(pin)) is not None)

    def _pins(self) -> list[tuple[PinName, Pin]]:
        found: list[tuple[PinName, Pin]] = []
        if self.bwrap is not None:
            found.append(("bwrap", self.bwrap))
        if self.trampoline is not None:
            found.append(("trampoline", self.trampoline))
        if self.holder is not None:
            found.append(("holder", self.holder))
        if self.zygote is not None:
            found.append(("zygote", self.zygote.pin))
        return found

    @property
    def seccomp_count(self) -> int:
        """Number of filters that every launch gets."""
        return len(self._seccomp)

    def seccomp_descriptors(self, *, nested_userns: bool = False) -> list[int]:
        """Return fresh descriptors of the filters, for one launch: bwrap reads each from its offset to the
        end, and copies of one descriptor would share that offset. The caller closes them.

        ``nested_userns``: those that let a program make user namespaces.
        """
        filters = self._seccomp
        if nested_userns:
            if not self._nesting:
                programs = session_programs(nested_userns=True)
                self._nesting = [syscalls.sealed_memfd("ral-seccomp", program) for program in programs]
            filters = self._nesting
        fds: list[int] = []
        try:
            fds.extend(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC) for fd in filters)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fds
