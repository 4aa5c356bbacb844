"""The history of the locks, with its events, its cost for callers, and its limited size."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command
from pymongo import MongoClient
from pymongo.collection import Collection
from pytest_django import Settings

from django_mongolock import mongo_lock
from django_mongolock.backends import close_backends, mongo_store
from django_mongolock.engine.store import layout
from django_mongolock.exceptions import LockDeadlock
from django_mongolock.history import writer
from django_mongolock.history.models import Happened, LockEvent
from django_mongolock.history.writer import MAX_NOTES, WRITE_BATCH, History, check_history
from django_mongolock.models import Lock
from tests.support.lock_documents import Document, Locks
from tests.support.lock_fixtures import NOBODY, WITH_MONGO, Commands
from tests.support.waiting import eventually

pytestmark = WITH_MONGO
NAME = "mongolock_locks_history"


def told(key: str) -> list[LockEvent]:
    return list(reversed(LockEvent.objects.filter(key=key).recent()))


def words(key: str) -> list[str]:
    return [event.event for event in told(key)]


def written(key: str, *expected: str) -> bool:
    """Return whether the history has exactly these events in the end."""
    return eventually(lambda: words(key) == list(expected), 10)


class TestWhatIsWritten:
    @pytest.mark.long
    def test_a_grant_and_its_release(self, history: Any) -> None:
        """The history names the holder, the token, the times by the server's clock, the wait and the hold."""
        with mongo_lock("k", label="nightly", owner="job-1") as lock:
            stored, token = Lock.objects.get(key="k"), lock.fencing_token
        assert written("k", "granted", "released")
        granted, released = told("k")
        holder = stored.holders[0]
        assert granted.at == holder.acquired_at
        assert granted.at <= released.at <= granted.at + timedelta(seconds=5)
        assert abs(released.at - granted.at - timedelta(milliseconds=released.held_ms)) < timedelta(seconds=0.1)
        for event in (granted, released):
            assert event.token == token
            assert (event.label, event.owner, event.mode) == ("nightly", "job-1", "exclusive")
            assert (event.host, event.pid, event.thread) == (holder.host, holder.pid, holder.thread)
        assert (granted.waited_ms, granted.held_ms) == (0, None)  # that the server takes its time is no wait

    @pytest.mark.long
    def test_a_forced_release_and_its_loss(self, history: Any) -> None:
        """The history names the user and the reason of a forced release, and the loss at the holder."""
        lock = mongo_lock("k", lease=1).acquire()  # kept, because a dropped lock would be released
        Lock.objects.filter(key="k").force_release(by="anna", reason="it hangs")
        assert written("k", "granted", "forced", "lost")
        _, forced, lost = told("k")
        assert (forced.by, forced.reason, forced.token) == ("anna", "it hangs", lost.token)
        assert forced.pid == lost.pid
        assert "taken away" in (lost.reason or "")
        assert forced.at <= lost.at
        assert lock.lost

    @pytest.mark.long
    def test_a_request(self, history: Any) -> None:
        with mongo_lock("k"):
            Lock.objects.get(key="k").ask_to_release("anna: a deployment")
            call_command("release_lock", "k", "--ask", "--by", "ben", "--reason", "a test", stdout=io.StringIO())
        assert eventually(lambda: words("k").count("asked") == 2)
        asked = [(event.by, event.reason or "") for event in told("k") if event.event == "asked"]
        assert asked == [("anna: a deployment", ""), ("ben", "a test")]

    @pytest.mark.long
    def test_a_deadlock(self, history: Any) -> None:
        both = threading.Barrier(2)
        met: list[str] = []

        def take(first: str, second: str) -> None:
            with mongo_lock(first, wait=None):
                both.wait(10)
                try:
                    with mongo_lock(second, wait=None):
                        pass
                except LockDeadlock as error:
                    met.append(error.key)

        threads = [threading.Thread(target=take, args=pair) for pair in (("a", "b"), ("b", "a"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert eventually(lambda: [e.key for e in LockEvent.objects.filter(event="deadlock").recent()] == met)

    def test_the_last_second_of_a_process(self, history: Any) -> None:
        with mongo_lock("k"):
            pass
        close_backends()
        assert words("k") == ["granted", "released"]

    @pytest.mark.long
    def test_nothing_secret(self, history: Collection[Document]) -> None:
        """The history has no id of a grant or a session, because such an id lets a stranger release the lock."""
        with mongo_lock("k"):
            secrets = [Lock.objects.get(key="k").holders[0].grant, Lock.objects.get(key="k").holders[0].session]
        assert written("k", "granted", "released")
        assert not any(secret in str(document) for document in history.find() for secret in secrets)


class TestNoOneWaits:
    """The history costs the locks only some memory for a while."""

    def test_off(self, locks: Locks, commands: Commands) -> None:
        """By default there is no history, and no collection, thread or command for it."""
        assert mongo_store().history is None
        with mongo_lock("k"):
            pass
        assert NAME not in locks.collection.database.list_collection_names()

    @pytest.mark.long
    def test_a_writer_that_hangs_delays_no_lock(self, history: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """While a write hangs, locks are taken and given back."""
        entered, go_on = threading.Event(), threading.Event()

        def hang(*arguments: Any) -> None:
            entered.set()
            go_on.wait(30)

        monkeypatch.setattr(History, "_send", hang)
        try:
            with mongo_lock("k"):
                assert entered.wait(10)
                for _ in range(20):
                    with mongo_lock("other", wait=0):
                        pass
        finally:
            go_on.set()

    @pytest.mark.long
    def test_bounded_memory(self, history: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """While MongoDB is away, a limited number of events waits. Noting another one raises nothing."""
        store = mongo_store()
        assert isinstance(store.history, History)
        monkeypatch.setattr(store.history, "_started", True)  # nobody writes them
        for _ in range(MAX_NOTES + WRITE_BATCH):
            store.history.note("k", Happened.GRANTED, {})
        assert store.history._notes.qsize() == MAX_NOTES

    @pytest.mark.long
    def test_mongodb_away(
        self,
        history: Any,
        connect: Callable[..., None],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """The failure is logged once, without an error for any caller. The process ends without a long wait."""
        monkeypatch.setattr(writer, "GATHER_SECONDS", 0)
        connect(NOBODY)
        store = mongo_store()
        assert isinstance(store.history, History)
        store.history.note("k", Happened.GRANTED, {})
        assert eventually(lambda: "cannot be written" in caplog.text, 15)
        store.history.note("k", Happened.RELEASED, {})
        began = time.monotonic()
        close_backends()
        assert time.monotonic() - began < 10
        assert "hunter2" not in caplog.text

    def test_what_is_sent_twice_is_there_once(self, history: Collection[Document], commands: Commands) -> None:
        """If the reply to a write is lost, the write is repeated without a second event."""
        store = mongo_store()
        assert isinstance(store.history, History)
        with mongo_lock("k"):
            pass
        batch = store.history._gather()
        while not batch:
            batch = store.history._gather()
        store.history._send(batch)
        store.history._send(batch)
        assert history.count_documents({"_id": {"$in": list(batch)}}) == len(batch)


class TestBounds:
    @pytest.mark.long
    def test_new_events_push_out_the_oldest(self, history: Collection[Document]) -> None:
        """The collection is a capped one of the size that was set."""
        with mongo_lock("k"):
            pass
        assert written("k", "granted", "released")
        (stats,) = history.aggregate([{"$collStats": {"storageStats": {}}}])
        assert stats["storageStats"]["capped"]
        assert 1_000_000 <= stats["storageStats"]["maxSize"] < 1_001_000
        history.insert_many({"key": "x", "at": None, "filler": "x" * 1_000} for _ in range(2_000))
        assert words("k") == []
        (stats,) = history.aggregate([{"$collStats": {"storageStats": {}}}])
        assert stats["storageStats"]["size"] <= 1_001_000

    @pytest.mark.long
    def test_migrate_makes_it_and_changes_its_size(self, history: Collection[Document], settings: Settings) -> None:
        """Another size takes effect with the next migrate, and keeps the events."""
        call_command("migrate", database="mongo", verbosity=0)
        with mongo_lock("k"):
            pass
        assert written("k", "granted", "released")
        settings.MONGOLOCK = {**settings.MONGOLOCK, "HISTORY": 3}
        call_command("migrate", database="mongo", verbosity=0)
        (stats,) = history.aggregate([{"$collStats": {"storageStats": {}}}])
        assert stats["storageStats"]["maxSize"] >= 3_000_000
        assert words("k") == ["granted", "released"]
        assert {"mongolock_key", "mongolock_at"} <= set(history.index_information())

    @pytest.mark.long
    def test_one_without_bounds_is_not_written_to(
        self, history: Collection[Document], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A collection without a limit, for example made by hand, would grow for ever. The history does not write to
        it, and a check reports it."""
        history.insert_one({"_id": 1})
        with mongo_lock("k"):
            pass
        assert eventually(lambda: "cannot be written" in caplog.text)
        assert history.count_documents({}) == 1
        messages = check_history(app_configs=None, databases=["mongo"])
        assert [message.id for message in messages if message.id == "mongolock.W110"]

    def test_check(self, history: Collection[Document]) -> None:
        """`check --database` reports a missing history. Once it exists, nothing is reported."""

        def ids() -> list[str | None]:
            return [message.id for message in check_history(app_configs=None, databases=["mongo"])]

        assert "mongolock.W110" in ids()
        call_command("migrate", database="mongo", verbosity=0)
        assert "mongolock.W110" not in ids()

    def test_check_of_a_new_database(self, history: Collection[Document], monkeypatch: pytest.MonkeyPatch) -> None:
        """In a new database, the check of the locks reports the missing collection. `migrate` does not complain of the
        collections that it makes."""
        monkeypatch.setattr(layout, "exists", lambda _collection: False)
        assert check_history(app_configs=None, databases=["mongo"]) == []


class TestModel:
    """`LockEvent` is queried like any other model."""

    @pytest.mark.long
    def test_by_an_index(self, locks: Locks, history: Collection[Document], commands: Commands) -> None:
        """The latest, of all or of one key, are read without going through the others."""
        call_command("migrate", database="mongo", verbosity=0)
        history.insert_many({"key": f"k{n % 50}", "event": "granted", "at": None} for n in range(3_000))
        commands.sent.clear()
        LockEvent.objects.all().recent(20)
        LockEvent.objects.filter(key="k7").recent(20)
        assert commands.names() == ["aggregate", "aggregate"]
        for sent in commands.sent:
            assert locks.explain(sent)["totalDocsExamined"] == 20

    def test_damaged_events(self, history: Collection[Document]) -> None:
        """Damaged events are read as far as possible."""
        call_command("migrate", database="mongo", verbosity=0)
        history.insert_one({"key": 7, "at": "x", "event": ["y"], "token": 1.5})
        (event,) = LockEvent.objects.all().recent()
        assert (event.key, event.at, event.event, event.token) == (None, None, None, None)


def test_the_sent_document_has_no_empty_fields(mongo: MongoClient[Document]) -> None:
    note = writer.EventNote("k", Happened.GRANTED, 5.0, None, {"host": "h", "user": None}, {"by": "", "token": 3})
    moment = mongo.admin.command("hello")["localTime"]
    made = note.document(id_="x", now=7.0, server_time=moment)  # type: ignore[arg-type]
    assert made == {
        "_id": "x",
        "at": moment - timedelta(seconds=2),
        "key": "k",
        "event": "granted",
        "host": "h",
        "token": 3,
    }
