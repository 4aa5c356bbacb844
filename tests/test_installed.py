"""Test the wheel in a fresh environment without this checkout, as a stranger gets it. This test needs the network."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pymongo import MongoClient

from tests.support.packages import ROOT, Packages

pytestmark = [pytest.mark.program, pytest.mark.timeout(900)]

USERS_TEST = """
from django_mongolock import mongo_lock


def test_busy(mongolock):
    with mongolock.hold("order:5"):
        assert not mongo_lock("order:5").try_acquire()
"""


@dataclass(frozen=True)
class Outside:
    """A folder with a project, and an environment of its own."""

    folder: Path
    environment: dict[str, str]

    @property
    def python(self) -> str:
        return str(self.folder / ("venv/Scripts/python.exe" if os.name == "nt" else "venv/bin/python"))

    def install(self, *wanted: str) -> None:
        """With uv where that is on PATH, as dev.py does."""
        uv = shutil.which("uv")
        pip = [uv, "pip", "install", "--python", self.python] if uv else [self.python, "-m", "pip", "install"]
        self._checked([*pip, *wanted])

    def run(self, *arguments: str) -> str:
        """Run this environment's Python in the folder, and return its output. A failure of it fails the test."""
        return self._checked([self.python, *arguments])

    def _checked(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture
def outside(tmp_path: Path, mongo_uri: str) -> Iterator[Outside]:
    """Return the project with nothing installed yet, and with a database that does not exist yet."""
    name = f"outside_{uuid.uuid4().hex[:12]}"
    ours = {"PYTHONPATH", "VIRTUAL_ENV", "MYPYPATH", "PYTHONHOME"}
    environment = {key: value for key, value in os.environ.items() if key not in ours and "COVERAGE" not in key}
    environment |= {"MONGODB_URI": mongo_uri, "MONGODB_NAME": name, "DJANGO_SETTINGS_MODULE": "outside.settings"}
    shutil.copytree(ROOT / "tests/outside", tmp_path / "outside", ignore=shutil.ignore_patterns("__pycache__"))
    venv.create(tmp_path / "venv", with_pip=shutil.which("uv") is None, symlinks=os.name != "nt")
    yield Outside(tmp_path, environment)
    with MongoClient[dict[str, object]](mongo_uri) as client:
        client.drop_database(name)


def test_plain(packages: Packages, outside: Outside) -> None:
    """The README's settings are enough. Nothing optional is needed, and templates and styles are there."""
    outside.install(str(packages.wheel))
    outside.run("-m", "django", "migrate", "--verbosity", "0")
    outside.run("-m", "django", "migrate", "--database", "locks", "--verbosity", "0")
    assert "no issues" in outside.run("-m", "django", "check", "--database", "locks")
    assert "No changes" in outside.run("-m", "django", "makemigrations", "--check", "--dry-run")
    assert "django_mongolock" in outside.run("-m", "outside.use")
    assert "done" in outside.run("-m", "django", "run_locked", "nightly", "--", "echo", "done")
    assert outside.run("-m", "django", "clear_stale_locks", "--dry-run")


def test_sdist_with_extras(packages: Packages, outside: Outside) -> None:
    """The sdist works like the wheel. Each extra brings the imports of its module, and pytest finds the plugin by
    itself."""
    extras = {
        "celery": "celery",
        "opentelemetry": "opentelemetry",
        "prometheus": "prometheus",
        "rest-framework": "rest_framework",
    }
    outside.install(f"{packages.sdist}[{','.join(extras)}]")
    load = "import django, importlib; django.setup(); importlib.import_module('django_mongolock.contrib.{}')"
    for module in extras.values():
        outside.run("-c", load.format(module))
    outside.install("pytest")
    (outside.folder / "test_theirs.py").write_text(USERS_TEST)
    setup = "import django; django.setup(); import pytest; raise SystemExit(pytest.main(['-q', 'test_theirs.py']))"
    assert "1 passed" in outside.run("-c", setup)
