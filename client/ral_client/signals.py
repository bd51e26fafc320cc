"""Signals that the client forwards to the program it stands for."""

import _signal
import posix

from ral_client.call import Failure
from ral_protocol import exits

FORWARDED = (
    _signal.SIGHUP,
    _signal.SIGINT,
    _signal.SIGQUIT,
    _signal.SIGTERM,
    _signal.SIGUSR1,
    _signal.SIGUSR2,
)
OTHERS = (_signal.SIGTSTP, _signal.SIGCONT, _signal.SIGWINCH)
"""Forwarded too, but their default action ends nothing."""


class Signals:
    """Catches what is to be forwarded. The kernel's numbers queue up in a pipe; nothing is lost before the
    start."""

    def __init__(self, ignored: int) -> None:
        self.fd, self._write_fd = posix.pipe2(posix.O_CLOEXEC | posix.O_NONBLOCK)
        self.started = False
        self._early = 0
        _signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in (*FORWARDED, *OTHERS):
            if not ignored >> (number - 1) & 1:
                _signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: object) -> None:
        # One signal before the start waits for the program; who sends a second one does not want to wait.
        if not self.started and number in FORWARDED:
            self._early += 1
            if self._early > 1:
                raise Failure("", exits.SIGNALLED + number)

    def pending(self) -> bytes:
        """The numbers of the signals that came since the last call, one byte each."""
        try:
            return posix.read(self.fd, 4096)
        except BlockingIOError:
            return b""

    def suspend(self, pid: int, number: int) -> bool:
        """Stop (``pid`` as for kill(2)) by the default action of ``number``; returns once continued.

        False if we were not stopped: the signal is ignored, or the process group is orphaned (nobody would
        continue it).
        """
        if number == _signal.SIGSTOP:
            posix.kill(pid, number)
            return True
        handler = _signal.getsignal(number)
        if handler == _signal.SIG_IGN:
            return False
        before = self.pending()
        _signal.signal(number, _signal.SIG_DFL)
        posix.kill(pid, number)
        _signal.signal(number, handler)
        came = self.pending()
        if before + came:
            # Back into the queue: what woke us may have been a SIGHUP too.
            posix.write(self._write_fd, before + came)
        return _signal.SIGCONT in came
