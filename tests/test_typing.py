"""The types that our users see: mypy, strict, on tests/typing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.long
@pytest.mark.timeout(300)
def test_typing() -> None:
    """Decorated callables keep their types, wrong calls are found, and `with` hides no unreachable code."""
    command = [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", "tests/typing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
def test_pyright() -> None:
    """The same files for those who check with pyright."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "tests/typing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
