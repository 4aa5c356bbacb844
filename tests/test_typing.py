"""The types that our users see: mypy, strict, on tests/typing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.programs import python

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.long
@pytest.mark.timeout(300)
def test_typing() -> None:
    """Decorated callables keep their types, wrong calls are found, and `with` hides no unreachable code."""
    python("-m", "mypy", "--strict", "--warn-unused-ignores", "tests/typing", folder=ROOT)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_pyright() -> None:
    """The same files for those who check with pyright."""
    python("-m", "pyright", "--pythonpath", sys.executable, "tests/typing", folder=ROOT)
