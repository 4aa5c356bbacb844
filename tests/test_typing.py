"""The types that our users see, checked by mypy, strict, on tests/typing."""

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
def test_a_mistyped_option_is_one_line(tmp_path: Path) -> None:
    """F154: A mistyped option is reported in one line instead of a wall of overloads."""
    calls = ("mongo_lock('a', leese=3)", "mongo_locked('a', leese=3)", "mongo_locked('a', on_contention='skp')")
    source = "from django_mongolock import mongo_lock, mongo_locked\n" + "\n".join(calls)
    with pytest.raises(AssertionError) as told:
        python("-m", "mypy", "--strict", "--config-file=", "-c", source, folder=ROOT)
    said = [line for line in str(told.value).splitlines() if "error:" in line or "variant" in line]
    assert [line.rpartition("[")[2] for line in said] == ["call-arg]", "call-arg]", "type-var]"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_pyright() -> None:
    """Check the same files with pyright."""
    python("-m", "pyright", "--pythonpath", sys.executable, "tests/typing", folder=ROOT)
