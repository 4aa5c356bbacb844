"""Tenants with a database each. A name says where each object is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.test import RequestFactory
from pytest_django import DjangoDbBlocker, Settings

from django_mongolock import LockNotAcquired, mongo_lock
from django_mongolock.editing import Editing, EditLock, Person, edit_key
from django_mongolock.rows import locked
from tests.editing.conftest import set_locks
from tests.support.lock_documents import Locks
from tests.versioned.databases import added
from tests.versioned.shapes import Named


@pytest.fixture
def db(tmp_path: Path, django_db_blocker: DjangoDbBlocker) -> Iterator[tuple[str, ...]]:
    """Return the aliases of two tenants."""
    with django_db_blocker.unblock(), ExitStack() as stack:
        yield tuple(stack.enter_context(added("sqlite", str(tmp_path / name), name)) for name in ("one", "two"))


class TestTenants:
    """Each tenant has a database. The same keys in each are different objects and people."""

    def test_rows(self, db: tuple[str, str], locks: Locks) -> None:
        """F210: Row 1 of one tenant is not row 1 of the other, for row locks and edit locks. A proxy is the same
        row."""
        first, second = (Named.objects.using(alias).create(name="a") for alias in db)
        with mongo_lock(first, wait=0), mongo_lock(second, wait=0) as lock:
            assert lock.key == "two_sqlite/versioned.named:a"
            with pytest.raises(LockNotAcquired), locked(Named.objects.using(db[0]), pk="a", wait=0):
                pass
        assert edit_key(first) == "edit:one_sqlite/versioned.named:a"
        assert edit_key(Named(name="x" * 600)).startswith("edit:versioned.named:")

    def test_people(self, db: tuple[str, str], locks: Locks) -> None:
        """F210: User 1 of one tenant is another person than user 1 of the other."""
        request = RequestFactory().get("/")
        states = []
        for alias in ("default", *db):
            request.user = User(pk=1, username=alias)
            request.user._state.db = alias
            states.append(Editing.open(request, "prices").status)
        assert [status.editor and status.editor.who for status in states] == ["mine", "other", "other"]

    def test_a_prefix_for_each(self, settings: Settings, locks: Locks) -> None:
        """F210: KEY_PREFIX may be a callable. The callable is called each time."""
        tenant = ["one:"]
        set_locks(settings, KEY_PREFIX=lambda: tenant[0])
        with mongo_lock("a") as first:
            tenant[0] = "two:"
            with mongo_lock("a", wait=0) as second:
                assert (first.key, second.key) == ("one:a", "two:a")
        assert EditLock("edit:x", Person("1")).take().held
        assert locks.collection.find_one({"_id": "two:edit:x"})
        tenant[0] = "wrong"
        with pytest.raises(ImproperlyConfigured, match="it must end with one of"):
            mongo_lock("a")
