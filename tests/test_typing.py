"""The types that our users see: mypy, strict, on tests/typing."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is in the dependency group lint")
@pytest.mark.timeout(300)
def test_typing() -> None:
    """Decorated callables keep their types, wrong calls are found, and `with` hides no unreachable code."""
    command = [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", "tests/typing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
@pytest.mark.timeout(300)
def test_pyright() -> None:
    """The same files for those who check with pyright."""
    try:
        version = subprocess.run(["pyright", "--version"], capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("pyright does not get its program")
    if version.returncode != 0:
        pytest.skip(f"pyright does not get its program: {version.stderr[-200:]}")
    command = ["pyright", "--pythonpath", sys.executable, "tests/typing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
