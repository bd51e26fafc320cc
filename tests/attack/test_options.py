"""Every option that makes a wall is asked for, whatever the plan shows."""

from __future__ import annotations

import pytest

from ral_broker.envelope.options import render_options
from ral_broker.envelope.plan import Plan

pytestmark = pytest.mark.attack

ALWAYS = (
    b"--unshare-user", b"--unshare-pid", b"--unshare-uts", b"--unshare-ipc", b"--unshare-cgroup-try",
    b"--as-pid-1", b"--disable-userns", b"--cap-drop", b"--json-status-fd",
)  # fmt: skip


def test_every_namespace_and_filter_is_asked_for() -> None:
    options = render_options(Plan(operations=(), cwd=b"/"), (), seccomp=2)
    for option in ALWAYS:
        assert options.count(option) == 1, option
    assert options[options.index(b"--cap-drop") + 1] == b"ALL"
    assert options.count(b"--add-seccomp-fd") == 2
    assert b"--unshare-net" in render_options(
        Plan(operations=(), cwd=b"/", share_network=False), (), seccomp=0
    )


def test_nothing_that_would_tie_a_session_to_its_broker_is_asked_for() -> None:
    options = render_options(Plan(operations=(), cwd=b"/"), (), seccomp=2)
    for option in (
        b"--die-with-parent",
        b"--new-session",
        b"--info-fd",
        b"--setenv",
        b"--bind",
        b"--ro-bind",
    ):
        assert option not in options
