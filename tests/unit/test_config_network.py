"""What becomes of a network mode that cannot be held: every cell of the table."""

from __future__ import annotations

import pytest

from ral_broker.config.network import choose_network
from ral_broker.config.settings import Fallback, Network
from ral_broker.errors import Refused

BWRAP: frozenset[Network] = frozenset({"open", "isolated"})
FILTERS: frozenset[Network] = frozenset({*BWRAP, "filtered", "proxied"})
PROXY_ONLY: frozenset[Network] = frozenset({*BWRAP, "proxied"})
NOTHING: frozenset[Network] = frozenset({"open"})

TABLE: list[tuple[Network, frozenset[Network], Fallback, str]] = [
    ("filtered", FILTERS, "strict", "filtered"),
    ("filtered", FILTERS, "stricter", "filtered"),
    ("filtered", FILTERS, "open", "filtered"),
    ("filtered", PROXY_ONLY, "strict", "refused"),
    ("filtered", PROXY_ONLY, "stricter", "proxied"),
    ("filtered", PROXY_ONLY, "open", "open"),
    ("filtered", BWRAP, "strict", "refused"),
    ("filtered", BWRAP, "stricter", "isolated"),
    ("filtered", BWRAP, "open", "open"),
    ("filtered", NOTHING, "strict", "refused"),
    ("filtered", NOTHING, "stricter", "refused"),
    ("filtered", NOTHING, "open", "open"),
    ("proxied", BWRAP, "strict", "refused"),
    ("proxied", BWRAP, "stricter", "isolated"),
    ("proxied", BWRAP, "open", "open"),
    ("isolated", NOTHING, "strict", "refused"),
    ("isolated", NOTHING, "stricter", "refused"),
    ("isolated", NOTHING, "open", "open"),
    ("open", BWRAP, "strict", "open"),
    ("isolated", BWRAP, "open", "isolated"),
]


@pytest.mark.parametrize(("wanted", "supported", "fallback", "held"), TABLE)
def test_the_table(wanted: Network, supported: frozenset[Network], fallback: Fallback, held: str) -> None:
    if held == "refused":
        with pytest.raises(Refused, match="cannot be held"):
            choose_network(wanted, fallback, supported)
        return
    choice = choose_network(wanted, fallback, supported)
    assert choice.mode == held
    assert (choice.warning is None) == (held == wanted)


@pytest.mark.parametrize("fallback", ["open", "stricter"])
def test_the_warning_says_what_holds_and_what_to_do(fallback: Fallback) -> None:
    warning = choose_network("filtered", fallback).warning
    assert warning is not None
    assert "network_filter_mode" in warning
    assert "network_filter_fallback" in warning
    assert ("SHARED" in warning) == (fallback == "open")
