"""The site, its users, and what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as project
from pytest_django import Settings


@pytest.fixture(autouse=True)
def _site(settings: Settings) -> None:
    """The admin and the views of `site`."""
    settings.ROOT_URLCONF = "tests.editing.site"
    (engine,) = project.TEMPLATES
    folder = str(Path(__file__).parent / "templates")
    settings.TEMPLATES = [{**engine, "DIRS": [folder]}]


def set_locks(settings: Settings, **values: Any) -> None:
    """Other values in MONGOLOCK, for the rest of the test."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, **values}
