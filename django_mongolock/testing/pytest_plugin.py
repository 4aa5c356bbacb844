"""The pytest plugin with its fixtures. Nothing is imported until a test uses a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from . import MemoryLocks


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the configuration file."""
    parser.addini("mongolock_strict", "a test fails that leaves a lock held", type="bool", default=False)


@pytest.fixture
def mongolock(pytestconfig: pytest.Config) -> Iterator[MemoryLocks]:
    """Keep the locks of this test in memory: see `django_mongolock.testing.MemoryLocks`. Needs no database."""
    from . import override_locks

    with override_locks(strict=_is_strict(pytestconfig)) as locks:
        yield locks


def _is_strict(config: pytest.Config) -> bool:
    try:
        return bool(config.getini("mongolock_strict"))
    except ValueError:  # a conftest has imported the fixture alone
        return False


@pytest.fixture(scope="session")
def mongolock_image() -> str:
    """Return the image that `mongolock_container` starts. Define a fixture of this name to use another one."""
    return "mongo:8.0"


@pytest.fixture(scope="session")
def mongolock_container(mongolock_image: str) -> Iterator[str]:
    """Keep the locks of this test run in a real MongoDB, a replica set in a container. Return its address.

    Needs Docker and testcontainers.
    """
    from .containers import keep_locks_in, replica_set

    with replica_set(mongolock_image) as address, keep_locks_in(address):
        yield address
