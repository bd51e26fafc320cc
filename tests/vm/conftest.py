"""Tests of a whole system: a Debian with systemd as PID 1 and a kernel of its own, booted by tools/vm.sh.

They make accounts and change what the user manager knows, so nothing here is collected anywhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from support.login import User

collect_ignore_glob = [] if os.environ.get("RAL_VM") == "1" else ["test_*.py"]


@pytest.fixture(scope="session")
def _lingering() -> User:
    return User("ral-lingering", linger=True)


@pytest.fixture
def user(_lingering: User) -> Iterator[User]:
    """A user whose manager always runs. At the end nothing of ral's may run for it."""
    yield _lingering
    _lingering.clean()


@pytest.fixture(scope="session")
def _unmanaged() -> User:
    return User("ral-unmanaged", linger=False)


@pytest.fixture
def unmanaged(_unmanaged: User) -> Iterator[User]:
    """A user who is not logged in: no manager, and logind has made no runtime directory."""
    assert not _unmanaged.manager.exists()
    yield _unmanaged
    _unmanaged.clean()
