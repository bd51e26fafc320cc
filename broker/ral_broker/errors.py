"""What can go wrong, by whose fault it is. Pure.

Three fates (see listen.py): a RequestError is told to the peer and logged as a warning; a Refused or
HostLacks is told to the peer and logged quietly; anything else is a fault of ours, logged with its
traceback, and the peer hears only that there was one.
"""

from __future__ import annotations

from ral_protocol import exits


class RalError(Exception):
    """Base of everything that may be shown to a user: a sentence that says what was refused, why, what to
    do."""

    kind = "refused"

    def __init__(self, message: str, *, status: int = exits.REFUSED) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class Refused(RalError):
    """A valid request that is forbidden or cannot be carried out."""


class HostLacks(RalError):
    """This host cannot do what was asked: no launch of this kind will work until it is mended."""

    kind = "host"


class StartFailed(RalError):
    """The sandbox stood but the program could not be executed in it (126, 127)."""

    kind = "start"


class RequestError(RalError):
    """The client is at fault: it should have known better."""

    kind = "request"
