"""The site and its users, with the stored locks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as project
from django.contrib.auth.models import User
from pytest_django import Settings

from testproject.shop.models import Order
from tests.support.lock_documents import Locks


@pytest.fixture(autouse=True)
def _site(settings: Settings) -> None:
    """The admin and the views of `site`."""
    settings.ROOT_URLCONF = "tests.editing.site"
    (engine,) = project.TEMPLATES
    folder = str(Path(__file__).parent / "templates")
    settings.TEMPLATES = [{**engine, "DIRS": [folder]}]


@pytest.fixture
def order(locks: Locks) -> Order:
    """An order, and no locks of another test."""
    return Order.objects.create(buyer=User.objects.create(username="buyer"), item="bike", price=100)


def set_locks(settings: Settings, **values: Any) -> None:
    """Other values in MONGOLOCK, for the rest of the test."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, **values}
