"""Packages of other people in the admin, with history, themes, import and export. Each test runs `admins`."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.platforms.programs import PLATFORMS, ROOT, environment

pytestmark = PLATFORMS


@pytest.mark.parametrize(
    "package", ["", "simple_history", "reversion", "auditlog", "import_export", "unfold", "jazzmin"]
)
def test_an_admin_with(package: str) -> None:
    """F204, F211: Change page, conflict, list, deletion, revert, and the panel of an edit lock work with the
    package."""
    assert not package or find_spec(package), f"the group platforms lacks {package}"
    command = [sys.executable, "-m", "tests.platforms.admins"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(PLATFORM_ADMIN=package), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
