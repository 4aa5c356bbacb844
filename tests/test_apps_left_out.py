"""Each app that a project opts into can be left out. The core runs without its folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.packages import ROOT
from tests.support.programs import python
from tests.test_imports import OPT_IN

#: The project of the tests without its own apps, and with nothing of ours but the core.
SETTINGS = """\
from testproject.settings import *

INSTALLED_APPS = [
    app for app in INSTALLED_APPS if not app.startswith("testproject.") and not app.startswith("django_mongolock.")
]
DATABASE_ROUTERS = ["django_mongolock.router.MongoLockRouter"]
ROOT_URLCONF = "core_urls"
"""
URLS = """\
from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
"""
#: Tests for the core's pages and models without any app. Nothing in them may mention a history.
PAGES = """\
import pytest
from django.apps import apps
from django.contrib.auth.models import User
from django.test import Client

from tests.support.lock_fixtures import WITH_MONGO

pytestmark = WITH_MONGO


@pytest.mark.parametrize("page", ["/", "/k/change/", "dashboard/"])
def test_pages(locks, page):
    locks.held("k")
    client = Client()
    client.force_login(User.objects.create(username="a", is_staff=True, is_superuser=True))
    shown = client.get("/admin/django_mongolock/lock" + page)
    assert shown.status_code == 200
    assert "Latest events" not in shown.text and "lockevent" not in shown.text


def test_models():
    assert {model.__name__ for model in apps.get_models()} >= {"Lock"}
    assert "LockEvent" not in {model.__name__ for model in apps.get_models()}
"""
#: A handful of short tests of the core: locks, permits, periods.
TESTS = (
    "tests/contract/test_contract.py",
    "tests/contract/test_modes.py",
    "tests/test_once_per.py",
    "tests/test_core_pages.py",
)


def core_without(apps: set[str], folder: Path) -> str:
    """Return the output of a check and a handful of tests in a copy of the package without *apps*."""
    for part in ("django_mongolock", "tests", "testproject", "verify"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for app in apps:
        shutil.rmtree(folder / "django_mongolock" / app)
    (folder / "core_settings.py").write_text(SETTINGS)
    (folder / "core_urls.py").write_text(URLS)
    (folder / "tests/test_core_pages.py").write_text(PAGES)
    environment = {"DJANGO_SETTINGS_MODULE": "core_settings", "PYTHONPATH": str(folder), "PYTEST_ADDOPTS": ""}
    environment["MONGODB_NAME"] = f"core_{os.getpid()}"  # another worker may run this in the same server
    said = python("-m", "django", "check", folder=folder, **environment)
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--ds=core_settings")
    return said + python("-m", "pytest", *options, *TESTS, folder=folder, **environment)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("apps", [*({app} for app in sorted(OPT_IN)), OPT_IN], ids=[*sorted(OPT_IN), "all"])
def test_the_core_runs_without(apps: set[str], tmp_path: Path) -> None:
    """No module, check, page or command of the core needs an app that is not installed."""
    said = core_without(apps, tmp_path)
    assert "System check identified no issues" in said
    assert " passed" in said
    assert "failed" not in said


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_core_that_needs_an_app_is_found(tmp_path: Path) -> None:
    """The test above can fail, as a folder that the core needs shows."""
    with pytest.raises(AssertionError, match=r"No module named 'django_mongolock\.decorator'"):
        core_without({"decorator"}, tmp_path)
