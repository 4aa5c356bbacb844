"""The errors of each database that mean "try again", and retry_on_conflict with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import DatabaseError, OperationalError, connections
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from django_mongolock.exceptions import VersionConflict
from django_mongolock.signals import conflict_retried
from django_mongolock.versions import retry_on_conflict
from django_mongolock.versions.checking import all_or_nothing
from django_mongolock.versions.retry import is_overtaken, is_passing
from tests.support.failpoints import failpoint
from tests.versioned.databases import ALL_KINDS, db, home, mariadb, postgres
from tests.versioned.shapes import Thing

__all__ = ["db", "home", "mariadb", "postgres"]

every_kind = pytest.mark.parametrize("home", ALL_KINDS, indirect=True)


def on(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("home", kinds, indirect=True)


@pytest.fixture
def retried() -> Iterator[list[str]]:
    """Return the names of the errors that led to another attempt."""
    found: list[str] = []

    def note(error: str, **facts: Any) -> None:
        found.append(error)

    conflict_retried.connect(note)
    yield found
    conflict_retried.disconnect(note)


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Run each function in a thread with connections of its own, and return the results."""

    def run(work: Callable[[], Any]) -> Any:
        try:
            return work()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(30) for future in [pool.submit(run, work) for work in works]]


@contextmanager
def meanwhile(db: str, work: Callable[[], Any]) -> Iterator[threading.Event]:
    """Another connection that has done *work* in a transaction, and commits it once the event is set."""
    done, commit = threading.Event(), threading.Event()

    def run() -> None:
        with all_or_nothing(db):
            work()
            done.set()
            assert commit.wait(20)
        connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    assert done.wait(20)
    try:
        yield commit
    finally:
        commit.set()
        thread.join(20)


def execute(db: str, command: str) -> None:
    connections[db].cursor().execute(command)


@every_kind
class TestTwoWriters:
    """Both have read the row when they write it. The second reads again, whatever the database says."""

    def race(self, pk: Any, transaction: Callable[[], AbstractContextManager[Any]], *, coroutine: bool) -> None:
        both = threading.Barrier(2)
        first = threading.local()

        def add() -> None:
            with transaction():
                thing = Thing.objects.get(pk=pk)
                if not hasattr(first, "over"):
                    first.over = True
                    both.wait(10)
                thing.count += 1
                thing.save()

        async def aadd() -> None:
            await sync_to_async(add, thread_sensitive=False)()

        work = async_to_sync(retry_on_conflict(aadd)) if coroutine else retry_on_conflict(add)
        at_once(work, work)

    @pytest.mark.parametrize("coroutine", [False, True], ids=["sync", "async"])
    def test_with_a_transaction(self, db: str, coroutine: bool, retried: list[str]) -> None:
        """F71: With Django's defaults, SQLite fails at once ("database is locked"), MongoDB by its WriteConflict."""
        pk = Thing.objects.create(title="a").pk
        self.race(pk, lambda: all_or_nothing(db), coroutine=coroutine)
        assert Thing.objects.get().count == 2
        expected = {"sqlite": {"OperationalError", "VersionConflict"}}.get(connections[db].vendor, {"VersionConflict"})
        assert retried
        assert set(retried) <= expected

    @pytest.mark.parametrize("coroutine", [False, True], ids=["sync", "async"])
    def test_without_a_transaction(self, db: str, coroutine: bool, retried: list[str]) -> None:
        """The version alone decides."""
        pk = Thing.objects.create(title="a").pk
        self.race(pk, nullcontext, coroutine=coroutine)
        assert Thing.objects.get().count == 2
        assert "VersionConflict" in retried


@pytest.mark.long
@on("postgres", "mariadb", "mongo")
def test_a_deadlock(db: str, retried: list[str]) -> None:
    """F86: Two transactions lock two rows crosswise. The one that the database picks runs again (40P01, 1213,
    WriteConflict)."""
    keys = [Thing.objects.create(title=title).pk for title in "ab"]
    both = threading.Barrier(2)

    def move(source: Any, target: Any) -> None:
        first = True

        @retry_on_conflict
        def run() -> None:
            nonlocal first
            with all_or_nothing(db):
                Thing.objects.filter(pk=source).update(count=1)
                if first:
                    first = False
                    both.wait(10)
                Thing.objects.filter(pk=target).update(count=1)

        run()

    at_once(lambda: move(*keys), lambda: move(*reversed(keys)))
    assert retried
    assert set(retried) <= {"OperationalError", "DatabaseError"}
    assert {thing.version for thing in Thing.objects.all()} == {3}


@pytest.mark.long
@on("mariadb")
def test_a_lock_wait(db: str, retried: list[str]) -> None:
    """MariaDB and MySQL give up a wait for a row after innodb_lock_wait_timeout (1205)."""
    made = Thing.objects.create(title="a")
    with meanwhile(db, lambda: Thing.objects.filter(pk=made.pk).update(count=5)) as commit:

        @retry_on_conflict
        def add() -> None:
            with all_or_nothing(db):
                execute(db, "SET innodb_lock_wait_timeout=1")
                thing = Thing.objects.get(pk=made.pk)
                if retried:
                    commit.set()
                thing.title = "b"
                thing.save()

        add()
    assert retried[0] == "OperationalError"
    assert (Thing.objects.get().count, Thing.objects.get().title) == (5, "b")


@on("sqlite", "sqlite_journal")
def test_a_busy_file(db: str, retried: list[str]) -> None:
    """SQLite gives up after its timeout, also for a single command outside of a transaction."""
    made = Thing.objects.create(title="a")
    with meanwhile(db, lambda: Thing.objects.create(title="b")) as commit:

        @retry_on_conflict
        def rename() -> None:
            execute(db, "PRAGMA busy_timeout=50")
            if retried:
                commit.set()
                execute(db, "PRAGMA busy_timeout=5000")
            thing = Thing.objects.get(pk=made.pk)
            thing.title = "c"
            thing.save()

        rename()
    assert set(retried) == {"OperationalError"}
    assert {thing.title for thing in Thing.objects.all()} == {"b", "c"}


@on("mariadb")
def test_snapshot_isolation(db: str, retried: list[str]) -> None:
    """MariaDB may find by itself that the row has changed since it was read (1020)."""
    made = Thing.objects.create(title="a")

    def add(*, overtaken: bool) -> None:
        execute(db, "SET innodb_snapshot_isolation=ON, tx_isolation='REPEATABLE-READ'")
        with all_or_nothing(db):
            thing = Thing.objects.get(pk=made.pk)
            if overtaken:
                at_once(lambda: Thing.objects.get(pk=made.pk).save())
            thing.save()

    def run() -> None:
        with pytest.raises(VersionConflict, match="another transaction was faster"):
            add(overtaken=True)
        retry_on_conflict(lambda: add(overtaken=not retried))()

    at_once(run)
    assert retried == ["VersionConflict"]


@on("postgres")
def test_a_commit_that_fails(db: str, retried: list[str]) -> None:
    """F86: PostgreSQL may find only at the commit that two serializable transactions cannot both stand (40001)."""
    for title in "ab":
        Thing.objects.create(title=title)
    both = threading.Barrier(2)

    def count(title: str) -> None:
        first = True

        @retry_on_conflict
        def run() -> None:
            nonlocal first
            with all_or_nothing(db):
                execute(db, "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
                total = sum(thing.count for thing in Thing.objects.all())
                Thing.objects.filter(title=title).update(count=total + 1)
                if first:
                    first = False
                    both.wait(10)

        run()

    at_once(lambda: count("a"), lambda: count("b"))
    assert retried == ["OperationalError"]
    assert sorted(thing.count for thing in Thing.objects.all()) == [1, 2]


@on("mongo")
def test_a_commit_that_mongodb_refuses(db: str, retried: list[str], mongo: MongoClient[dict[str, Any]]) -> None:
    """F86: The transaction was aborted, by a failover for instance. The next attempt is a transaction, too."""
    pk = Thing.objects.create(title="a").pk
    refusal = {
        "failCommands": ["commitTransaction"],
        "appName": connections[db].settings_dict["NAME"],
        "errorCode": 251,
        "errorLabels": ["TransientTransactionError"],
    }
    seen_outside: list[int] = []

    @retry_on_conflict
    def add() -> None:
        with all_or_nothing(db):
            thing = Thing.objects.get(pk=pk)
            thing.count += 1
            thing.save()
            seen_outside.extend(at_once(lambda: Thing.objects.get(pk=pk).count))

    with failpoint(mongo, "failCommand", refusal, mode={"times": 1}):
        add()
    assert len(retried) == 1
    assert (seen_outside, Thing.objects.get().count) == ([0, 0], 1)


def from_driver(**facts: Any) -> DatabaseError:
    """Return an error of Django as it makes one from the driver's."""
    cause = type("Driver", (Exception,), facts)()
    error = OperationalError("no")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "overtaken"),
    [
        (from_driver(sqlstate="40001"), True),
        (from_driver(pgcode="40001"), True),  # psycopg2
        (from_driver(sqlstate="40P01"), False),
        (OperationalError(1213, "Deadlock found"), False),
        (OperationalError(1020, "Record has changed since last read"), True),
        (from_driver(sqlite_errorname="SQLITE_BUSY_SNAPSHOT"), True),
        (from_driver(sqlite_errorname="SQLITE_BUSY"), False),
        (PyMongoError("no", error_labels=["TransientTransactionError"]), False),
    ],
)
def test_what_means_try_again(error: Exception, overtaken: bool) -> None:
    """Errors are judged by the codes of the drivers, never by words, because words are translated."""
    assert is_passing(error)
    assert is_overtaken(error) is overtaken


@pytest.mark.parametrize(
    "error",
    [
        from_driver(sqlstate="23505"),
        from_driver(sqlite_errorname="SQLITE_FULL"),
        OperationalError(2006, "Server has gone away"),
        OperationalError("database is locked"),
        PyMongoError("no", error_labels=["UnknownTransactionCommitResult"]),
        ValueError(1213),
    ],
)
def test_what_does_not(error: Exception) -> None:
    """A violated constraint, a full disk or a lost connection is not retried, because the outcome of the command may be
    unknown."""
    assert not is_passing(error)
