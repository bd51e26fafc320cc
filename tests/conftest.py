"""Fixtures of every test: a runtime directory, a project, a broker and a client of its own."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from support.broker import Broker, OnTerminal, Ral, assert_nothing_left
from support.facilities import require
from support.installed import home_dir, ral_path
from support.processes import become_subreaper, descendants

# Deterministic: the same examples in every run, none kept in the tree, no time limit on a busy machine.
hypothesis.settings.register_profile("ral", database=None, deadline=None, derandomize=True)
hypothesis.settings.load_profile("ral")


# A shell without job control starts a suite in the background with these ignored; children inherit that.
for _number in (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """``needs`` names facilities of the host; ``root`` is one that only uid 0 has."""
    for mark in item.iter_markers("needs"):
        require(*mark.args)
    if item.get_closest_marker("root") and os.getuid() != 0:
        if os.environ.get("RAL_SANDBOX_MUST_WORK") == "1":
            pytest.fail("needs uid 0; deselect it with -m 'not root' and run it as root", pytrace=False)
        pytest.skip("needs uid 0")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where everything has to work, a test that skips itself has failed, whatever it used to do so."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("RAL_SANDBOX_MUST_WORK") == "1":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} did not run: {reason}"
    return report


@pytest.fixture(scope="session", autouse=True)
def _subreaper() -> None:
    become_subreaper()


def _scratch(prefix: str, parent: Path) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A runtime directory, 0700, with a path short enough for sockets in it (unix(7): 107 bytes)."""
    parent = Path(f"/run/user/{os.getuid()}")
    yield from _scratch("ral-t-", parent if os.access(parent, os.W_OK) else home_dir())


@pytest.fixture
def project() -> Iterator[Path]:
    """An empty project directory in the home directory, the usual place of one."""
    yield from _scratch("project-", home_dir())


@pytest.fixture
def stopped_broker(runtime: Path, tmp_path: Path) -> Iterator[Broker]:
    """A broker that the test starts, crashes and stops itself. What the test leaves of it is a failure."""
    known = {process.pid for process in descendants()}
    broker = Broker(runtime, tmp_path / "broker.log")
    yield broker
    try:
        if broker.process is not None:
            ral = Ral(runtime, home_dir())
            for session in ral.live():
                ended = ral("kill", session)
                assert ended.status == 0, f"ral kill {session}: {ended}"
            broker.stop()
    finally:
        if broker.process is not None:
            broker.crash()
        assert_nothing_left(runtime, known)


@pytest.fixture
def broker(stopped_broker: Broker) -> Broker:
    """A broker that is ready. At the end its sessions are ended; it has to stop with 0 and leave nothing."""
    require("bubblewrap")
    stopped_broker.start()
    return stopped_broker


@pytest.fixture
def ral(runtime: Path, project: Path) -> Iterator[Ral]:
    """The installed client, in the project, with the runtime directory of this test."""
    assert ral_path().exists(), (
        f"{ral_path()} is not there: run make test or make develop, or set RAL_TEST_BIN"
    )
    client = Ral(runtime, project)
    yield client
    client.end()


@pytest.fixture
def on_terminal(ral: Ral) -> Iterator[OnTerminal]:
    """Call with the arguments of ``ral`` to run it on a terminal of its own."""
    starter = OnTerminal(ral)
    with starter.opened:
        yield starter
