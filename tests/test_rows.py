"""Rows that are locked by any primary key, in any database, and read after the lock was taken."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import connection, models
from pytest_django import DjangoAssertNumQueries

from django_mongolock import LockLost, mongo_lock
from django_mongolock.exceptions import LockMisused
from django_mongolock.fencing import fenced_update
from django_mongolock.models import Lock
from django_mongolock.rows import LockedQuerySet, locked
from testproject.shop.models import Ad, Order, Seller
from tests.support.looking import holders

pytestmark = pytest.mark.django_db(databases=["default", "mongo"], transaction=True)


class Parcel(models.Model):  # noqa: DJ008 - never shown
    """A row with a primary key that text stands for."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    weight = models.IntegerField(default=0)
    objects = LockedQuerySet.as_manager()

    class Meta:
        app_label = "rows"


class Line(models.Model):  # noqa: DJ008 - never shown
    """A row with a primary key of two."""

    pk = models.CompositePrimaryKey("order", "number")
    order = models.IntegerField()
    number = models.CharField(max_length=9)
    objects = LockedQuerySet.as_manager()

    class Meta:
        app_label = "rows"


class Code(models.Model):  # noqa: DJ008 - never shown
    """A row whose primary key the database finds in any spelling."""

    code = models.CharField(max_length=20, primary_key=True, db_collation="NOCASE")
    owner = models.ForeignKey(Parcel, null=True, on_delete=models.CASCADE)
    objects = LockedQuerySet.as_manager()

    class Meta:
        app_label = "rows"


class Special(Code):  # noqa: DJ008 - never shown
    rank = models.IntegerField(default=1)

    class Meta:
        app_label = "rows"


@pytest.fixture(autouse=True)
def tables(transactional_db: None) -> Iterator[None]:
    made = [Parcel, Line, Code, Special]
    with connection.schema_editor() as editor:
        for model in made:
            editor.create_model(model)
    yield
    with connection.schema_editor() as editor:
        for model in reversed(made):
            editor.delete_model(model)


@pytest.fixture
def parcel() -> Parcel:
    row: Parcel = Parcel.objects.create(weight=1)
    return row


def is_busy(instance: models.Model) -> bool:
    """Return whether another thread finds the instance locked."""
    with ThreadPoolExecutor(1) as pool:
        return not pool.submit(lambda: mongo_lock(instance).try_acquire()).result()


@contextmanager
def changed_meanwhile(parcel: Parcel, weight: int) -> Iterator[None]:
    """Another thread holds the lock, and changes the row soon after the block has begun."""
    taken, go_on = threading.Event(), threading.Event()

    def change() -> None:
        with mongo_lock(parcel), closing(connection):
            taken.set()
            go_on.wait(10)
            Parcel.objects.update(weight=weight)

    thread = threading.Thread(target=change)
    thread.start()
    taken.wait(10)
    threading.Timer(0.2, go_on.set).start()
    yield
    thread.join()


def test_reads_after_the_lock_was_taken(parcel: Parcel) -> None:
    """The row shows the last holder's writes, although the wait began before them."""
    with changed_meanwhile(parcel, weight=7), Parcel.objects.locked(pk=parcel.pk) as fresh:
        assert fresh.weight == 7
        assert fresh is not parcel


@pytest.mark.long
def test_the_lock_itself(parcel: Parcel) -> None:
    """The lock is available while the row is locked, with all attributes of a lock. Losing the lock is an error at the
    end of the block."""
    row = Parcel.objects.locked(pk=parcel.pk, lock_options={"label": "weighing", "lease": 44})
    with pytest.raises(LockMisused, match="not locked"):
        row.lock  # noqa: B018
    with row:
        (held,) = holders(row.lock.key)
        assert (held["token"], held["lease"], held["label"]) == (row.lock.fencing_token, 44_000, "weighing")
        row.lock.ensure_held()
    with pytest.raises(LockLost), Parcel.objects.locked(pk=parcel.pk):
        Lock.objects.held().force_release()


@pytest.mark.parametrize(("rows", "lookup"), [({"weight": 1}, {"weight__lt": 5}), ({}, {"weight": 1})])
def test_a_row_that_does_not_fit_any_more(parcel: Parcel, rows: dict[str, Any], lookup: dict[str, Any]) -> None:
    """The filter is checked again under the lock. The previous holder has changed the found row."""
    with changed_meanwhile(parcel, weight=2), pytest.raises(Parcel.DoesNotExist):
        Parcel.objects.filter(**rows).locked(**lookup).__enter__()
    assert holders(f"rows.parcel:{parcel.pk}") == []


@pytest.mark.long
def test_any_lookup_and_queryset(parcel: Parcel, django_assert_num_queries: DjangoAssertNumQueries) -> None:
    """A lookup by primary key is one query, and any other lookup is one more. Filters and select_related stay."""
    Code.objects.create(code="a:b", owner=parcel)
    with django_assert_num_queries(1), Code.objects.select_related("owner").locked(pk="a:b") as code:
        assert code.owner is not None
        assert code.owner.weight == 1
        assert holders("rows.code:a%3Ab")
    with django_assert_num_queries(2), Code.objects.select_related("owner").locked(owner=parcel) as code:
        assert code.pk == "a:b"
    with pytest.raises(Code.DoesNotExist):
        Code.objects.filter(owner=None).locked(pk="a:b").__enter__()
    assert holders("rows.code:a%3Ab") == []
    with pytest.raises(TypeError, match="whole instances"):
        Code.objects.values("code").locked(pk="a:b")  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.parametrize("text", [False, True])
def test_primary_keys(text: bool, parcel: Parcel) -> None:
    """The key of the lock is that of the instance, for integers, UUIDs, ObjectIds, odd text and composite keys, also as
    text."""
    user = User.objects.create(username="anna")
    order = Order.objects.create(buyer=user, item="x", price=1)
    rows: list[Any] = [
        parcel,
        user,
        order,
        Ad.objects.create(user_id="1", title="t", price=1),
        Seller.objects.create(user_id='a:b, "$c"/ü%'),
        Line.objects.create(order=3, number="a,b"),
    ]
    for instance in rows:
        pk = instance.pk
        if text:
            pk = tuple(map(str, pk)) if isinstance(pk, tuple) else str(pk)
        with locked(type(instance), pk=pk) as row:
            assert row == instance
            assert holders(mongo_lock(instance).key)
    with pytest.raises(ValidationError):
        Parcel.objects.locked(pk="no uuid").__enter__()


def test_inheritance() -> None:
    """A row of multi-table inheritance is one lock, as parent and as child."""
    special = Special.objects.create(code="s")
    with Special.objects.locked(pk="s") as row:
        assert row.rank == 1
        assert is_busy(Code(pk="s"))
    with locked(Code, code="s"):
        assert is_busy(special)


def test_a_fenced_row_is_in_one_table() -> None:
    """Django writes several tables by keys that it has read before. A newer token could come in between."""
    for rows, field in ((Special.objects.filter(pk="s"), "rank"), (Code.objects.filter(owner__weight=1), "code")):
        with pytest.raises(TypeError, match="in one table"):
            fenced_update(rows, 5, field=field)


@pytest.mark.long
def test_async(parcel: Parcel) -> None:
    async def check() -> None:
        async with Parcel.objects.locked(pk=parcel.pk) as fresh:
            assert fresh == parcel
            assert holders(f"rows.parcel:{parcel.pk}")
        with pytest.raises(Parcel.DoesNotExist):
            await Parcel.objects.locked(pk=uuid.uuid4()).__aenter__()
        assert await Code.objects.acreate(code="abc")
        async with locked(Code.objects, code="ABC"):
            assert holders("rows.code:abc")

    async_to_sync(check)()
    assert not Lock.objects.held().filter(key__startswith="rows.").exists()
