"""The examples of the README run as they stand there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from celery import shared_task

import django_mongolock
from django_mongolock import DocumentLock, MongoLock, lock_key, mongo_lock, mongo_semaphore
from django_mongolock.models import Lock
from django_mongolock.versions import retry_on_conflict
from testproject.shop.models import Ad, Order
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
    assert len(EXAMPLES) == 5


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
def test_locks() -> None:
    """Each of them can be made and taken."""
    order = Order(pk=5)
    made: list[MongoLock] = []

    def noting(make: Any) -> Any:
        def note(*keys: Any, **options: Any) -> MongoLock:
            made.append(make(*keys, **options))
            return made[-1]

        return note

    run(
        2,
        mongo_lock=noting(mongo_lock),
        mongo_semaphore=noting(mongo_semaphore),
        lock_key=lock_key,
        order=order,
        task_id="5",
    )
    assert len(made) == 6
    for lock in made:
        with lock:
            assert lock.held


@WITH_MONGO
def test_documents_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock in the ad, and a function that is run again."""
    exported: list[Ad] = []
    ad = Ad.objects.create(user_id="u", title="A tent", price=7)
    names = run(3, DocumentLock=DocumentLock, Ad=Ad, ad=ad, export=exported.append, retry_on_conflict=retry_on_conflict)
    try:
        assert [one.pk for one in exported] == [ad.pk]
        ad.refresh_from_db()
        assert ad.export_status == "exported"
        assert names["set_rate"]("EUR", 1) is None
    finally:
        django_mongolock.documents.registry.forget(names["ad_exports"])


@WITH_MONGO
def test_who_holds_it() -> None:
    """The queries work, and force release takes the lock away."""
    lock = mongo_lock("order:5").acquire()
    run(4)
    assert not Lock.objects.held().filter(key="order:5").exists()
    lock.release()
