"""The pytest plugin, with the fixture `mongolock`. It imports nothing until a test uses the fixture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .testing import MemoryLocks


@pytest.fixture
def mongolock() -> Iterator[MemoryLocks]:
    """Keeps the locks of this test in memory: see `django_mongolock.testing.MemoryLocks`. Needs no database."""
    from .testing import override_locks

    with override_locks() as locks:
        yield locks
