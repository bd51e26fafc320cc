"""Which network a session gets, of those that this host and this version can hold. Pure."""

from __future__ import annotations

from typing import cast

import msgspec

from ral_broker.config.settings import SETTINGS, Fallback, Network
from ral_broker.errors import Refused

_ORDER = cast("tuple[Network, ...]", SETTINGS["network_filter_mode"].order)
_REASON = "filtering a session's network is not built in this version"


class NetworkChoice(msgspec.Struct, frozen=True):
    """``mode`` is what holds; ``warning`` says so where that is not what was asked for."""

    mode: Network
    warning: str | None = None


def choose_network(
    wanted: Network, fallback: Fallback, supported: frozenset[Network] = frozenset({"open", "isolated"})
) -> NetworkChoice:
    """Return the mode to use where ``wanted`` may not be supported.

    ``strict`` refuses; ``stricter`` takes the next mode up that is supported, or refuses; ``open`` takes the
    next one down, never a stricter one. Raises Refused.
    """
    if wanted in supported:
        return NetworkChoice(wanted)
    rank = _ORDER.index(wanted)
    match fallback:
        case "stricter":
            candidates = _ORDER[rank + 1 :]
        case "open":
            candidates = _ORDER[:rank][::-1]
        case _:
            candidates = ()
    for mode in candidates:
        if mode in supported:
            held = "the host's network is SHARED, nothing is filtered" if mode == "open" else f"it is {mode}"
            return NetworkChoice(
                mode,
                f'network_filter_mode = "{wanted}" cannot be held (bwrap: {_REASON}): {held}, because '
                f'network_filter_fallback = "{fallback}"; set network_filter_mode = "isolated" for no '
                'network, network_filter_fallback = "strict" to refuse instead, or network_filter_mode = '
                '"open" to say that this is meant',
            )
    raise Refused(
        f'network_filter_mode = "{wanted}" cannot be held (bwrap: {_REASON}), and '
        f'network_filter_fallback = "{fallback}" allows nothing else; set network_filter_mode = "isolated" '
        "for no network at all"
    )
