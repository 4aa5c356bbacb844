"""The examples of the README run as they stand there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from celery import shared_task

from django_mongolock import mongo_lock
from django_mongolock.models import Lock
from tests.lock_fixtures import WITH_MONGO
from tests.looking import document

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def run(number: int, **names: Any) -> dict[str, Any]:
    """Run the example of that number; return what it has defined."""
    exec(compile(EXAMPLES[number], f"README, example {number}", "exec"), names)  # noqa: S102 - our own page
    return names


def test_all_are_here() -> None:
    """An example that is added must be added here."""
    assert len(EXAMPLES) == 3


@WITH_MONGO
def test_the_first() -> None:
    """A block, a view, a task."""
    shipped: list[tuple[int, int]] = []
    ship = lambda order, fencing_token: shipped.append((order, fencing_token))  # noqa: E731
    names = run(0, order_id=5, ship=ship, shared_task=shared_task)
    assert shipped == [(5, document("order:5")["token"])]
    assert names["export_ad"](7) is None
    assert document("ad:7")["acquisitions"] == 1


def test_settings() -> None:
    """They are those of the project, but for the URI."""
    names: dict[str, Any] = {"DATABASES": {}, "INSTALLED_APPS": [], "MIDDLEWARE": [], "os": os}
    names = run(1, **names)
    assert names["MONGOLOCK"] == {"DATABASE": "locks"}
    assert names["DATABASES"]["locks"]["ENGINE"] == "django_mongodb_backend"
    assert names["MIDDLEWARE"] == ["django_mongolock.middleware.LockContextMiddleware"]


@WITH_MONGO
def test_who_holds_it() -> None:
    """The queries work, and force release takes the lock away."""
    lock = mongo_lock("order:5").acquire()
    run(2)
    assert not Lock.objects.held().filter(key="order:5").exists()
    lock.release()
