"""`release="on_commit"` releases the lock after the outermost end of every transaction, however it ends (F47)."""

# ruff: noqa: PT012, PT031, SIM117 - blocks inside of blocks are what is tested here

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import IntegrityError, connections, transaction
from django.test import TestCase
from django_mongodb_backend import transaction as mongo_transaction
from pytest_django import DjangoDbBlocker

from django_mongolock import LockLost, locks, mongo_lock, mongo_locked
from django_mongolock import transactions as module
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.exceptions import LockReentry
from django_mongolock.models import Lock
from django_mongolock.signals import lock_released
from tests.engine.faces import Face
from tests.support.grants import own
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.looking import holders, new_key
from tests.support.row_files import Rows, row_file


@pytest.fixture
def rows(tmp_path: Path, django_db_blocker: DjangoDbBlocker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rows]:
    with django_db_blocker.unblock(), row_file("file", tmp_path / "one.sqlite3", monkeypatch) as made:
        yield made


@pytest.fixture
def others(rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rows]:
    with row_file("other", tmp_path / "two.sqlite3", monkeypatch) as made:
        yield made


@pytest.fixture
def manual(rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rows]:
    """Return an alias with transactions that the program ends itself."""
    with row_file("manual", tmp_path / "three.sqlite3", monkeypatch, AUTOCOMMIT=False) as made:
        yield made


@pytest.fixture
def story(rows: Rows) -> Iterator[list[str]]:
    """Return the list of events in order. A release records the rows that others see."""
    told: list[str] = []

    def look(**event: Any) -> None:
        told.append(f"release, {len(rows())} rows")

    lock_released.connect(look)
    yield told
    lock_released.disconnect(look)


@pytest.fixture(autouse=True)
def _untold() -> None:
    """Let each test be warned of its places again."""
    module._reported.clear()


def work(rows: Rows, story: list[str], **options: Any) -> None:
    """Write a row under a lock, inside any open transaction."""
    with mongo_lock(new_key(), **options):
        story.append("acquire")
        rows.write("a")


class TestOnCommit:
    @pytest.mark.filterwarnings("ignore:.*was released inside the transaction")
    def test_naive(self, rows: Rows, story: list[str]) -> None:
        """A plain lock inside a transaction releases early, and the next holder does not see the row. These tests would
        find that."""
        with transaction.atomic(using="file"):
            work(rows, story)
        story.append(f"{len(rows())} rows")
        assert story == ["acquire", "release, 0 rows", "1 rows"]

    @pytest.mark.parametrize("inner", [None, True, False])
    @pytest.mark.parametrize(("end", "written"), [("commit", 1), ("an error", 0), ("set_rollback", 0)])
    def test_the_outermost_end(self, rows: Rows, story: list[str], end: str, written: int, inner: bool | None) -> None:
        """The lock is released after the commit or rollback of the outermost block, with any inner blocks, with a
        savepoint or without. The connection works as before."""
        with contextlib.suppress(ZeroDivisionError), transaction.atomic(using="file"):
            within = contextlib.nullcontext() if inner is None else transaction.atomic(using="file", savepoint=inner)
            with within, transaction.atomic(using="file"):
                work(rows, story, release="on_commit")
            story.append("inner")
            if end == "an error":
                raise ZeroDivisionError
            transaction.set_rollback(end == "set_rollback", using="file")
        assert story == ["acquire", "inner", f"release, {written} rows"]
        rows.write("after")
        assert rows() == ["a"] * written + ["after"]

    def test_savepoint_rollback(self, rows: Rows, story: list[str]) -> None:
        """A lock that was taken inside a savepoint outlasts the savepoint's rollback, until the outermost end."""
        with transaction.atomic(using="file"):
            rows.write("first")
            with pytest.raises(ZeroDivisionError), transaction.atomic(using="file"):
                work(rows, story, release="on_commit")
                raise ZeroDivisionError
            story.append("after the savepoint")
        assert story == ["acquire", "after the savepoint", "release, 1 rows"]

    def test_nothing_to_wait_for(self, rows: Rows, story: list[str]) -> None:
        """Without a transaction, or with one inside the lock, it is released at the end of its block."""
        work(rows, story, release="on_commit")
        with mongo_lock(new_key(), release="on_commit"), transaction.atomic(using="file"):
            rows.write("a")
        assert story == ["acquire", "release, 1 rows", "release, 2 rows"]

    def test_several_databases(self, rows: Rows, others: Rows, story: list[str]) -> None:
        """With transactions on two databases, the lock is released after the end of the last."""
        with transaction.atomic(using="other"):
            with transaction.atomic(using="file"):
                work(rows, story, release="on_commit")
                others.write("b")
            story.append(f"one committed, {len(others())} of the other")
        assert story == ["acquire", "one committed, 0 of the other", "release, 1 rows"]
        assert others() == ["b"]

    def test_decorator(self, rows: Rows, story: list[str]) -> None:
        locked = mongo_locked("row:{name}", release="on_commit")(rows.write)
        with transaction.atomic(using="file"):
            locked(new_key())
        assert story == ["release, 1 rows"]

    def test_released_by_hand(self, rows: Rows, story: list[str]) -> None:
        """`release()` waits for the end as well. The lock is held until then."""
        with transaction.atomic(using="file"):
            lock = mongo_lock(new_key(), release="on_commit").acquire()
            assert lock.release()
            assert lock.held
            assert len(holders(lock.key)) == 1
            assert lock.release()
        assert story == ["release, 0 rows"]
        assert not lock.held

    def test_failing_hook(self, rows: Rows, story: list[str]) -> None:
        """A function given to `on_commit` that raises keeps no lock."""

        def fail() -> None:
            story.append("hook")
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), transaction.atomic(using="file"):
            transaction.on_commit(fail, using="file")
            work(rows, story, release="on_commit")
        assert story == ["acquire", "release, 1 rows", "hook"]

    def test_failing_commit(self, rows: Rows, story: list[str]) -> None:
        """A commit that the database refuses is rolled back, and only then is the lock free."""
        connection = connections["file"]
        with connection.cursor() as cursor:
            cursor.execute("CREATE TABLE parent (id INTEGER PRIMARY KEY)")
            cursor.execute("CREATE TABLE child (id INTEGER REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
        states: list[bool] = []

        def look(**event: Any) -> None:
            assert connection.connection is not None
            states.append(connection.connection.in_transaction)

        lock_released.connect(look)
        try:
            with pytest.raises(IntegrityError), transaction.atomic(using="file"):
                work(rows, story, release="on_commit")
                with connection.cursor() as cursor:
                    cursor.execute("INSERT INTO child VALUES (5)")
        finally:
            lock_released.disconnect(look)
        assert story == ["acquire", "release, 0 rows"]
        assert states == [False]

    def test_connection_closed_inside(self, rows: Rows, story: list[str]) -> None:
        """A connection that is closed in the middle has ended its transaction."""
        with transaction.atomic(using="file"):
            work(rows, story, release="on_commit")
            connections["file"].close()
            story.append("closed")
            with mongo_lock(new_key(), release="on_commit"):
                pass
        assert story == ["acquire", "release, 0 rows", "closed", "release, 0 rows"]

    def test_autocommit_off(self, manual: Rows, story: list[str]) -> None:
        """If the program ends its transactions itself, its commit or rollback counts, not the end of a block."""
        for end in (transaction.commit, transaction.rollback):
            manual.write("a")
            with transaction.atomic(using="manual"), mongo_lock(new_key(), release="on_commit"):
                manual.write("b")
            with mongo_lock(new_key(), release="on_commit"):
                manual.write("c")
            story.append("end of block")
            end(using="manual")
        assert manual() == ["a", "b", "c"]
        assert story == ["end of block", "release, 0 rows", "release, 0 rows"] * 2


class TestLoss:
    """A lock that is known to be lost does not commit."""

    @pytest.mark.parametrize("inside", [True, False])
    def test_refused(self, rows: Rows, inside: bool) -> None:
        """The lock is lost before the end of its block, or between that and the commit. The commit is refused, and the
        connection goes on."""
        with pytest.raises(LockLost), transaction.atomic(using="file"):
            with mongo_lock(new_key(), release="on_commit") as lock:
                rows.write("a")
                if inside:
                    lose(lock)
            lose(lock)
        assert rows() == []
        rows.write("b")
        assert rows() == ["b"]

    def test_error_of_the_block(self, rows: Rows) -> None:
        with pytest.raises(ZeroDivisionError), transaction.atomic(using="file"):
            with mongo_lock(new_key(), release="on_commit") as lock:
                pass
            lose(lock)
            raise ZeroDivisionError


def lose(lock: MongoLock) -> None:
    """Let the lock be lost, with the knowledge of its holder."""
    for grant in own(lock).grants:
        grant.mark_lost("a test wants it so")


@WITH_MONGO
@pytest.mark.usefixtures("locks")
class TestMongo:
    """A transaction of django_mongodb_backend counts. Django's own atomic() on MongoDB does not."""

    @pytest.mark.parametrize("error", [None, ZeroDivisionError])
    def test_released_at_its_end(self, error: type[Exception] | None) -> None:
        key = new_key()
        with contextlib.suppress(ZeroDivisionError), mongo_transaction.atomic(using="mongo"):
            with mongo_transaction.atomic(using="mongo"), transaction.atomic(using="mongo"):
                with mongo_lock(key, release="on_commit"):
                    list(Lock.objects.all())  # count() of the backend 6.1 is not for transactions
            assert len(holders(key)) == 1
            if error:
                raise error
        assert holders(key) == []

    def test_no_transaction(self) -> None:
        key = new_key()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with transaction.atomic(using="mongo"):
                with mongo_lock(key, release="on_commit"), mongo_lock(new_key()):
                    pass
                assert holders(key) == []

    def test_lost(self) -> None:
        """A lock that is known to be lost does not commit."""
        connection: Any = connections["mongo"]
        data = connection.database["pieces"]
        data.insert_one({"before": True})
        with pytest.raises(LockLost), mongo_transaction.atomic(using="mongo"):
            with mongo_lock(new_key(), release="on_commit") as lock:
                data.insert_one({"inside": True}, session=connection.session)
            lose(lock)
        assert connection.session is None
        assert data.count_documents({"inside": True}) == 0


class TestWarning:
    """A lock that is given back inside an open transaction says so, once for each place."""

    def test_warned_once(self, rows: Rows) -> None:
        """The warning names the database, the place and the cures."""
        with pytest.warns(RuntimeWarning, match="released inside the transaction that is open on 'file'") as caught:
            for _ in range(3):
                with transaction.atomic(using="file"):
                    with mongo_lock(new_key()):
                        rows.write("a")
        (warning,) = caught
        assert warning.filename == __file__
        for cure in ('release="on_commit"', "open the transaction inside the lock", 'release="now"'):
            assert cure in str(warning.message)

    @pytest.mark.parametrize("error", [None, KeyError])
    def test_warnings_that_are_errors(
        self, rows: Rows, face: Face, monkeypatch: pytest.MonkeyPatch, error: type[KeyError] | None
    ) -> None:
        """The lock is released all the same, and the error of the block is raised."""
        monkeypatch.setattr(locks, "open_transactions", lambda: [connections["file"]])  # a coroutine has others
        lock = mongo_lock(new_key())
        with warnings.catch_warnings(), pytest.raises(error or RuntimeWarning):
            warnings.simplefilter("error")
            with face.block(lock):
                if error:
                    raise error
        assert (lock.held, holders(lock.key)) == (False, [])

    @pytest.mark.parametrize("release", ["now", "on_commit"])
    def test_not_warned(self, rows: Rows, release: Any) -> None:
        """A caller that has chosen a release is not warned."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with transaction.atomic(using="file"), mongo_lock(new_key(), release=release):
                pass


class TestTestCase(TestCase):
    """The transaction of a test case does not count. Otherwise every lock of a test would stay."""

    databases = {"default"}  # noqa: RUF012

    def release(self, error: type[Exception] | None, savepoint: bool) -> None:
        key = new_key()
        with transaction.atomic(savepoint=savepoint):
            with mongo_lock(key, release="on_commit"):
                pass
            assert len(holders(key)) == savepoint
            if savepoint:
                with pytest.raises(LockReentry):
                    mongo_lock(key).acquire()
            if error is not None:
                raise error

    def test_outermost_block_of_the_code(self) -> None:
        """The outermost block of the code under test counts, and locks are free for the next call."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with mongo_lock(new_key()):
                pass
        key = new_key()
        for _ in range(2):
            with transaction.atomic(), transaction.atomic(), mongo_lock(key, release="on_commit"):
                pass
            assert holders(key) == []

    def test_ends(self) -> None:
        """The block ends with the commit or rollback of its savepoint. A block without one has no visible end."""
        self.release(None, True)
        with pytest.raises(ZeroDivisionError):
            self.release(ZeroDivisionError, True)
        self.release(None, False)
