"""`lock.atomic()` on a DATABASES alias, and `fenced_update` for data elsewhere."""

# ruff: noqa: PT012, SIM117 - what happens inside of a block is what is tested here

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import FieldDoesNotExist, ImproperlyConfigured
from django.db import connections, router, transaction
from django.db.models import F
from django_mongodb_backend import transaction as mongo_transaction

from django_mongolock import LockLost, fencing, mongo_lock
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.lock.transaction import Atomic
from django_mongolock.exceptions import LockMisused, LockTransactionAborted, StaleToken
from django_mongolock.fencing import FencingTokenField, fenced_update
from testproject.shop.models import Ad, Order
from tests.support.grants import own
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.looking import new_key
from tests.support.waiting import eventually

pytestmark = [WITH_MONGO, pytest.mark.usefixtures("locks")]


@pytest.fixture(autouse=True)
def _empty(locks: Any) -> None:
    """Remove all ads, and make the collections, because not every server makes one in a transaction."""
    Ad.objects.all().delete()
    mongo_connection().database.drop_collection("pieces")
    mongo_connection().database.create_collection("pieces")


def mongo_connection() -> Any:
    """Return the connection of the alias, with the methods of the backend."""
    return connections["mongo"]


def make_ad(title: str) -> Ad:
    return Ad.objects.create(title=title, price=5)


def titles() -> list[str]:
    """Return the titles that are visible outside of the transaction."""
    collection = mongo_connection().database[Ad._meta.db_table]
    return sorted(document["title"] for document in collection.find())


def take_over(lock: MongoLock) -> None:
    """Change the document as after a forced release and another holder, without the first holder's knowledge."""
    change = {"$set": {"holders": []}, "$inc": {"token": 5, "changes": 1}}
    mongo_connection().database["mongolock_locks"].update_one({"_id": lock.key}, change)


class TestAtomic:
    """The ORM on the alias takes part in the transaction."""

    def test_aborts(self) -> None:
        """An error of the block leaves nothing, and the connection stays as it was."""
        make_ad("first")
        with mongo_lock(new_key()) as lock:
            with pytest.raises(ZeroDivisionError), lock.atomic():
                make_ad("second")
                raise ZeroDivisionError
            assert titles() == ["first"]
            make_ad("third")
        assert titles() == ["first", "third"]

    def test_taken_over(self) -> None:
        """Nothing is committed after a loss, and the connection goes on without a transaction."""
        make_ad("first")
        with pytest.raises(LockLost), mongo_lock(new_key()) as lock, lock.atomic():
            make_ad("second")
            take_over(lock)
        assert titles() == ["first"]
        assert mongo_connection().session is None
        assert not mongo_connection().in_atomic_block_mongo
        make_ad("third")
        assert titles() == ["first", "third"]

    def test_on_commit(self) -> None:
        """Functions given to `on_commit` run after the commit, and not after a loss."""
        make_ad("first")
        seen: list[Any] = []
        with mongo_lock(new_key()) as lock, lock.atomic():
            make_ad("second")
            mongo_transaction.on_commit(lambda: seen.append(titles()), using="mongo")
        assert seen == [["first", "second"]]
        with pytest.raises(LockLost), mongo_lock(new_key()) as lock, lock.atomic():
            make_ad("third")
            mongo_transaction.on_commit(lambda: seen.append("never"), using="mongo")
            take_over(lock)
        assert len(seen) == 1

    def test_nested(self) -> None:
        """Blocks of the backend inside `lock.atomic()` are part of it. `lock.atomic()` inside such a block is refused.
        Blocks of Django do nothing."""
        with transaction.atomic(using="mongo"), mongo_lock(new_key()) as lock, lock.atomic():
            make_ad("first")
        with mongo_lock(new_key()) as lock:
            with lock.atomic(), mongo_transaction.atomic(using="mongo"):
                make_ad("second")
                assert titles() == ["first"]
            assert titles() == ["first", "second"]
            with mongo_transaction.atomic(using="mongo"):
                with pytest.raises(LockMisused, match=r"open lock.atomic\(\) outside of it"):
                    lock.atomic().__enter__()

    @pytest.mark.parametrize("at_the_end", [False, True])
    def test_renewals_of_other_locks(self, at_the_end: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """F117: Renewals of other locks leave out the lock of the transaction until it has committed, because a renewal
        would abort the transaction."""
        with mongo_lock(new_key()) as lock, mongo_lock(new_key()) as other:
            session, (grant,) = own(other).session, own(other).grants
            assert session is not None
            first = grant.lease.renew_at

            def renew() -> None:
                assert session is not None
                session.renewals.do_due(first)  # as at a third of the lease
                assert eventually(lambda: grant.lease.renew_at > first)

            match = Atomic._match

            def match_late(transaction: Any) -> Any:
                renew()
                return (yield from match(transaction))

            if at_the_end:
                monkeypatch.setattr(Atomic, "_match", match_late)
            with lock.atomic():
                make_ad("one")
                if not at_the_end:
                    renew()
        assert titles() == ["one"]

    def test_a_grant_that_came_back(self) -> None:
        """F120: A grant with another token is not the grant of this transaction. Another process may have had the lock
        between."""
        with pytest.raises(LockLost), mongo_lock(new_key()) as lock, lock.atomic():
            locks = mongo_connection().database["mongolock_locks"]
            (holder,) = locks.find_one({"_id": lock.key})["holders"]
            locks.update_one({"_id": lock.key}, {"$set": {"holders.0.token": holder["token"] + 1}})
            make_ad("one")
        assert titles() == []

    def test_run_atomic(self) -> None:
        """The transaction is retried while another caller joins the queue."""
        make_ad("first")
        attempts: list[int] = []
        key = new_key()

        def work(session: Any) -> str:
            make_ad("second")
            attempts.append(1)
            if len(attempts) < 3:
                thread_try(key)
            return "done"

        with mongo_lock(key) as lock:
            assert lock.run_atomic(work) == "done"
            with pytest.raises(LockTransactionAborted), lock.atomic():
                make_ad("third")
                thread_try(key)
        assert titles() == ["first", "second"]

    def test_work_that_would_run_after_the_commit(self) -> None:
        """A coroutine function or a generator has done nothing before the commit. Nothing is committed, and an error
        says so."""

        async def work(session: Any) -> None:
            make_ad("late")

        lock: Any = mongo_lock(new_key())
        with lock, pytest.raises(TypeError, match="arun_atomic"):
            lock.run_atomic(work)
        assert titles() == []

    def test_an_error_after_the_commit(self) -> None:
        """F124: `run_atomic` does not repeat committed work after an error of an `on_commit` function."""

        def fail() -> None:
            raise LockTransactionAborted("another")

        def work(session: Any) -> None:
            make_ad("first")
            mongo_transaction.on_commit(fail, using="mongo")

        with pytest.raises(LockTransactionAborted), mongo_lock(new_key()) as lock:
            lock.run_atomic(work)
        assert titles() == ["first"]

    @pytest.mark.long
    def test_other_database(self) -> None:
        """An alias that is not MongoDB has no transaction with the lock. The error names the cures."""
        with mongo_lock(new_key()) as lock:
            with pytest.raises(ImproperlyConfigured, match=r"fenced_update.*on_commit"):
                lock.atomic(using="default")

    async def test_async(self) -> None:
        """With ``async with``, commands with the session are part of the transaction."""
        pieces = await sync_to_async(lambda: mongo_connection().database["pieces"])()
        lock = await mongo_lock(new_key()).aacquire()
        async with lock.atomic() as session:
            await asyncio.to_thread(pieces.insert_one, {"x": 1}, session=session)
            assert pieces.count_documents({}) == 0
        assert pieces.count_documents({}) == 1
        with pytest.raises(LockLost):
            async with lock.atomic() as session:
                await asyncio.to_thread(pieces.insert_one, {"x": 2}, session=session)
                await sync_to_async(take_over)(lock)
        assert pieces.count_documents({}) == 1


def thread_try(key: str) -> None:
    """Try the lock in another thread, and so change the document."""
    thread = threading.Thread(target=mongo_lock(key, wait=0).try_acquire)
    thread.start()
    thread.join()


class TestFencedUpdate:
    """A row of SQL or MongoDB remembers the newest token, and refuses older ones."""

    @pytest.fixture(params=["sql", "mongodb"])
    def rows(self, request: pytest.FixtureRequest, django_user_model: Any) -> Any:
        """Two rows, and the field that keeps their token."""
        if request.param == "sql":
            buyer = django_user_model.objects.create(username="b")
            for item in ("one", "two"):
                Order.objects.create(buyer=buyer, item=item, price=5)
            return Order.objects.order_by("item"), "charges", "item"
        for title in ("one", "two"):
            make_ad(title)
        return Ad.objects.order_by("title"), "exported_version", "title"

    def test_stale(self, rows: Any, do: Callable[..., Any]) -> None:
        """An older token is refused, and nothing of its values is written."""
        queryset, field, text = rows
        one = queryset.filter(pk=queryset[0].pk)
        assert do(fencing, "fenced_update", one, 7, {text: "newer"}, field=field) == 1
        with pytest.raises(StaleToken, match=f"the fencing token 5 is stale: {field} holds 7") as caught:
            do(fencing, "fenced_update", one, 5, {text: "older"}, field=field)
        assert (caught.value.token, caught.value.newest, caught.value.field) == (5, 7, field)
        assert getattr(one.get(), text) == "newer"

    def test_newer_on_a_replica(self, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """If reads go to a replica, newer tokens are read from the database of the write."""
        queryset, field, _ = rows
        one = queryset.model.objects.filter(pk=queryset[0].pk)
        fenced_update(one, 7, field=field)
        monkeypatch.setattr(router, "db_for_read", lambda *_, **hints: pytest.fail("a replica was asked"))
        with pytest.raises(StaleToken):
            fenced_update(one, 5, field=field)

    def test_several_rows(self, rows: Any) -> None:
        """Rows with an older token are written. Other rows make the update an error."""
        queryset, field, _ = rows
        fenced_update(queryset.filter(pk=queryset[0].pk), 7, field=field)
        with pytest.raises(StaleToken):
            fenced_update(queryset, 5, field=field)
        assert [getattr(row, field) for row in queryset] == [7, 5]
        assert fenced_update(queryset, 8, field=field) == 2

    def test_expressions(self, rows: Any) -> None:
        queryset, field, _ = rows
        fenced_update(queryset, 5, field=field, price=F("price") + 1)
        assert [row.price for row in queryset] == [6, 6]

    def test_misused(self, rows: Any) -> None:
        """Wrong calls are errors before anything is written."""
        queryset, field, _ = rows
        with pytest.raises(TypeError, match="pass the token as the second argument"):
            fenced_update(queryset, 5, {field: 6}, field=field)
        with pytest.raises(FieldDoesNotExist):
            fenced_update(queryset, 5)
        for option in ({"filter": {"pk": 1}}, {"using": "mongo"}):
            with pytest.raises(TypeError, match="has its own filter"):
                fenced_update(queryset, 5, {}, field=field, **option)
        with pytest.raises(TypeError, match="token is a lock or its fencing_token, not str"):
            fenced_update(queryset, "5", field=field)  # type: ignore[arg-type]

    def test_field(self) -> None:
        """The field is large enough for tokens, starts at 0, and is left out of forms."""
        field = FencingTokenField()
        _, path, _, options = field.deconstruct()
        assert path == "django_mongolock.fencing.FencingTokenField"
        assert (field.default, field.editable) == (0, False)
        assert FencingTokenField(**options).default == 0
        assert field.get_internal_type() == "BigIntegerField"
