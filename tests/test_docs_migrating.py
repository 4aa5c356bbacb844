"""docs/howto/migrating.md: each recipe has the hole that the page says it has, and its replacement has not."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from django.core.cache import caches
from django.db import connection, models
from django.db.models.signals import pre_save
from django.test.utils import isolate_apps
from redis import Redis as Client
from redis.exceptions import LockNotOwnedError

from django_mongolock import (
    SKIPPED,
    DocumentHeld,
    LockNotAcquired,
    LockReentry,
    VersionConflict,
    mongo_lock,
)
from django_mongolock.documents import DocumentLock
from django_mongolock.documents.document_lock import undeclare
from testproject.mongo import database
from testproject.rates.models import Rate
from testproject.servers import Redis
from testproject.shop.models import Ad
from tests import parts
from tests.support.looking import document, held_elsewhere, new_key
from tests.support.waiting import eventually
from tests.test_docs_topics import app, run

__all__ = ["app"]
pytestmark = pytest.mark.django_db(databases=["default", "mongo"], transaction=True)

Recipe = Callable[..., AbstractContextManager[Any]]


@pytest.fixture
def recipes(app: Celery) -> SimpleNamespace:
    """What the page has defined."""
    return SimpleNamespace(**run("howto/migrating.md"))


@pytest.fixture(scope="module")
def redis() -> Iterator[Client]:
    """A client of a real Redis."""
    parts.require("Redis")
    with Redis() as server, Client.from_url(server.uri) as client:
        yield client


@pytest.fixture
def collection() -> Any:
    """An empty collection of the test's MongoDB."""
    found = database()["mine"]
    found.delete_many({})
    return found


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., Any]]:
    """Call something as somebody else: in another thread."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda call, *args, **options: pool.submit(call, *args, **options).result(30)


def outlived(make: Callable[[], AbstractContextManager[Any]], expired: Callable[[], bool]) -> int:
    """Let somebody work longer than the lock lives, let a second one come, and the first one end.

    Return how many are inside then, when a third has tried.
    """
    with ExitStack() as second, ExitStack() as third:
        with make():
            assert eventually(expired)
            second.enter_context(make())
        third.enter_context(make())
        return 2


class TestRedis:
    @pytest.mark.long
    def test_a_late_del_frees_the_next_one(self, recipes: SimpleNamespace, redis: Client) -> None:
        """SET NX and DEL: after one late end, two are inside."""
        key = new_key()
        assert outlived(lambda: recipes.set_nx_lock(redis, key, 1), lambda: not redis.exists(key)) == 2

    def test_a_lock_is_busy_without_that(self, recipes: SimpleNamespace, redis: Client) -> None:
        """The recipe does work as long as nobody is late: the test before can tell."""
        key = new_key()
        with recipes.set_nx_lock(redis, key, 10), pytest.raises(recipes.Busy):
            outlived(lambda: recipes.set_nx_lock(redis, key, 10), lambda: True)

    def test_nobody_renews_it_and_nobody_is_told(self, recipes: SimpleNamespace, redis: Client) -> None:
        """redis-py's Lock: two are inside, and the first one learns of it at its end."""
        key = new_key()
        first, second = (recipes.redis_py_lock(redis, key, 1) for _ in range(2))
        assert first.acquire()
        assert eventually(second.acquire)
        with pytest.raises(LockNotOwnedError):
            first.release()

    @pytest.mark.long
    def test_the_replacements(self, recipes: SimpleNamespace, elsewhere: Callable[..., Any]) -> None:
        """Work that takes longer than its lease keeps its lock, and what ends late frees nobody else's."""
        assert recipes.import_books("a") == "imported"
        assert recipes.export("a") == document("export:a")["token"]
        key = new_key()
        with mongo_lock(key, lease=1) as lock:
            # Longer than the lease and its margin: no condition shows that something does *not* end.
            time.sleep(3)
            assert lock.held
            with pytest.raises(LockNotAcquired):
                elsewhere(mongo_lock(key, wait=0).acquire)
        with held_elsewhere(key) as other:
            assert not lock.release()
            assert other.held

    def test_timeout_is_refused_in_words(self) -> None:
        """The word of redis-py names the two that are meant."""
        with pytest.raises(TypeError, match=r"lease.*wait"):
            mongo_lock("a", timeout=5)  # type: ignore[call-arg]


class TestCache:
    @pytest.fixture
    def cache(self, settings: Any) -> Any:
        """Django's default: the memory of this process."""
        settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
        caches["default"].clear()
        return caches["default"]

    def test_the_block_runs_without_the_lock(self, recipes: SimpleNamespace, cache: Any) -> None:
        """Both are inside, and no error shows it."""
        inside = 0
        with recipes.cache_lock(cache, "a", 10):
            inside += 1
            with recipes.cache_lock(cache, "a", 10):
                inside += 1
        assert inside == 2

    def test_a_late_end_frees_the_next_one(self, recipes: SimpleNamespace, cache: Any) -> None:
        """Also for those who look at what they got."""
        with recipes.cache_lock(cache, "a", 0.2) as first:
            assert eventually(lambda: cache.get("a") is None)
            second = recipes.cache_lock(cache, "a", 10)
            assert (first, second.__enter__()) == (True, True)
        with recipes.cache_lock(cache, "a", 10) as third:
            assert third

    def test_the_replacement(self, recipes: SimpleNamespace) -> None:
        """Whoever has no lock does not run."""
        assert recipes.read_feed("u") == "read"
        with held_elsewhere("feed:u"):
            assert recipes.read_feed("u") is SKIPPED


class TestSelectForUpdate:
    @pytest.fixture
    def rows(self) -> Any:
        """One ad, in MongoDB."""
        return Ad.objects.filter(pk=Ad.objects.create(user_id="u", title="a", price=1).pk)

    def test_it_does_nothing_on_mongodb(
        self, recipes: SimpleNamespace, rows: Any, elsewhere: Callable[..., Any]
    ) -> None:
        """While one is inside, another one is let in."""
        inside: list[str] = []

        def work(row: Ad) -> None:
            inside.append("first")
            elsewhere(recipes.withdraw_slowly, rows, lambda row: inside.append("second"))
            inside.append("first goes on")

        recipes.withdraw_slowly(rows, work)
        assert inside == ["first", "second", "first goes on"]

    def test_the_replacement(self, recipes: SimpleNamespace, rows: Any, elsewhere: Callable[..., Any]) -> None:
        """The second one is refused."""

        def work(row: Ad) -> None:
            with pytest.raises(LockNotAcquired):
                elsewhere(recipes.withdraw, rows, lambda row: None)

        recipes.withdraw(rows, work)


class TestCeleryOnce:
    def test_a_late_task_frees_the_key_of_the_next(self, recipes: SimpleNamespace, redis: Client) -> None:
        """Three are on their way, where one should be; and a killed worker leaves the key for an hour."""
        task = SimpleNamespace(name=new_key("task"), delay=lambda *args: args)
        recipes.send_once(redis, task, 5)
        with pytest.raises(recipes.Busy):
            recipes.send_once(redis, task, 5)
        (key,) = redis.scan_iter(f"qo_{task.name}*")
        assert redis.ttl(key) > 3500  # where the worker is killed now, that is how long nothing is sent
        redis.delete(key)  # the hour is over, and the task still in its queue
        recipes.send_once(redis, task, 5)
        recipes.after_return(redis, task, 5)  # the first one has run
        recipes.send_once(redis, task, 5)  # the second one is still on its way

    @pytest.mark.long
    def test_the_replacement(self, recipes: SimpleNamespace) -> None:
        """The second is not sent, and is told which one is on its way."""
        tenant = uuid.uuid4().hex
        result, sent = recipes.send_report(tenant)
        again, sent_again = recipes.send_report(tenant)
        assert (sent, sent_again) == (True, False)
        assert again.id == result.id
        assert recipes.report(tenant) == tenant
        with held_elsewhere(f"report:{tenant}"), pytest.raises(LockNotAcquired):
            recipes.report(tenant)


class TestOneCollection:
    def test_a_dead_holder_keeps_it_until_the_monitor_comes(self, recipes: SimpleNamespace, collection: Any) -> None:
        """The document says that the time is over, and the key is busy all the same."""

        def refused() -> bool:
            collection.delete_many({})
            recipes.insert_lock(collection, "a", -1)
            try:
                recipes.insert_lock(collection, "a", 10)
            except recipes.Busy:
                return True
            return False  # the monitor came just now, once in a minute

        assert eventually(refused)

    def test_a_late_end_removes_what_is_there(self, recipes: SimpleNamespace, collection: Any) -> None:
        """The monitor was there, the next one has the key, and the first one ends."""
        recipes.insert_lock(collection, "a", 10)
        collection.delete_one({"_id": "a"})  # the monitor
        recipes.insert_lock(collection, "a", 10)  # the second
        recipes.remove_lock(collection, "a")  # the first
        recipes.insert_lock(collection, "a", 10)  # a third, beside the second

    def test_a_clock_that_is_ahead_takes_every_lock(self, recipes: SimpleNamespace, collection: Any) -> None:
        """The holder is alive and a second old; a host that is two minutes ahead finds it stale."""
        now = datetime.now(UTC)
        recipes.stamp_lock(collection, "a", "first", now)
        with pytest.raises(recipes.Busy):
            recipes.stamp_lock(collection, "a", "second", now + timedelta(seconds=1))
        recipes.stamp_lock(collection, "a", "second", now + timedelta(minutes=2))
        assert collection.find_one()["aid"] == "second"

    @pytest.mark.long
    def test_newcomers_overtake(self, recipes: SimpleNamespace, collection: Any) -> None:
        """While the one who waits sleeps, the key gets free, and who comes just then has it; as often as you like."""
        newcomers: list[int] = []

        def meanwhile(pause: float) -> None:
            recipes.remove_lock(collection, "a")
            if len(newcomers) < 100:
                recipes.insert_lock(collection, "a", 60)
                newcomers.append(len(newcomers))

        recipes.insert_lock(collection, "a", 60)
        recipes.polling_lock.__globals__["time"] = SimpleNamespace(sleep=meanwhile)
        recipes.polling_lock(collection, "a", 60, 0.5)
        assert len(newcomers) == 100

    def test_the_replacement_of_all_these(self) -> None:
        """Who waits has it before who comes later; who would wait for itself is told at once."""
        key, order, done = new_key(), list[str](), threading.Event()

        def wait() -> None:
            with mongo_lock(key, wait=30):
                order.append("who waited")
                done.wait(30)

        waiter = threading.Thread(target=wait)
        with mongo_lock(key) as lock:
            with pytest.raises(LockReentry):
                mongo_lock(key).acquire()
            waiter.start()
            assert eventually(lambda: document(key)["waiters"])
            lock.release()
            assert not mongo_lock(key).try_acquire()
        done.set()
        waiter.join(30)
        assert order == ["who waited"]


class TestDocuments:
    def test_a_dead_flow_is_never_replaced(self, recipes: SimpleNamespace, collection: Any) -> None:
        """However long ago it was."""
        collection.insert_one({"_id": 1, "lockedBy": None, "since": datetime(2020, 1, 1, tzinfo=UTC)})
        recipes.claim(collection, 1, "a flow that dies")
        with pytest.raises(recipes.Busy):
            recipes.claim(collection, 1, "the next one")

    def test_its_replacement(self, collection: Any) -> None:
        """The sweep frees it, with the fields that are there already."""
        lock = DocumentLock(
            collection, state="exportStatus", pending={"exporting": "failed"}, final=["exported"], stale_after=0.2
        )
        try:
            collection.insert_one({"_id": 1, "lockedBy": None, "exportStatus": "failed", "documentVersion": 1})
            lock.acquire((1, 1))
            with pytest.raises(DocumentHeld):
                lock.acquire((1, 2))
            assert eventually(lambda: lock.clear_stale().cleared)
            lock.acquire((1, collection.find_one()["documentVersion"])).finish()
        finally:
            undeclare(lock)

    @isolate_apps("testproject.rates")
    def test_somebody_comes_between_looking_and_saving(self, recipes: SimpleNamespace) -> None:
        """Both are told that all is well, and one of the values is gone."""

        class Told(models.Model):
            objects: models.Manager[Any] = models.Manager()

            name = models.CharField(primary_key=True, max_length=20)
            value = models.IntegerField()
            version = models.IntegerField()

            class Meta:
                app_label = "rates"

            def __str__(self) -> str:
                return self.name

        def somebody_else(**_: Any) -> None:
            pre_save.disconnect(somebody_else, sender=Told)
            recipes.set_rate(Told, "EUR", 3, 1)
            came.append(Told.objects.get().value)

        came: list[int] = []
        with connection.schema_editor() as editor:
            editor.create_model(Told)
        try:
            Told.objects.create(name="EUR", value=1, version=1)
            pre_save.connect(somebody_else, sender=Told)
            recipes.set_rate(Told, "EUR", 2, 1)
            assert came == [3]  # it was told that all is well
            assert (Told.objects.get().value, Told.objects.get().version) == (2, 2)
            with pytest.raises(recipes.Busy):
                recipes.set_rate(Told, "EUR", 4, 1)
        finally:
            with connection.schema_editor() as editor:
                editor.delete_model(Told)

    def test_its_replacement_compares_in_the_update(self, recipes: SimpleNamespace) -> None:
        """Whoever is late is told."""
        Rate.objects.create(name="EUR", value=1)

        def somebody_else(instance: Rate, **_: Any) -> None:
            pre_save.disconnect(somebody_else, sender=Rate)
            Rate.objects.filter(pk="EUR").update(value=2)

        rate = Rate.objects.get(pk="EUR")
        rate.value = 3
        pre_save.connect(somebody_else, sender=Rate)
        with pytest.raises(VersionConflict):
            rate.save()
        assert Rate.objects.get(pk="EUR").value == 2
