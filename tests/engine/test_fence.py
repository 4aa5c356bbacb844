"""Transactions of `lock.atomic()` with PyMongo commit only if the lock is still held."""

# ruff: noqa: PT012, SIM117 - what happens inside of a block is what is tested here

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient, monitoring
from pymongo.collection import Collection

from django_mongolock.engine.lock import transaction
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.protocol import actions
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.session.session import Session
from django_mongolock.engine.store.mongo import MongoStore, StoreConfig
from django_mongolock.exceptions import LockBackendFailed, LockLost, LockMisused
from testproject.servers import Mongod, ReplicaSet
from tests.engine.conftest import Document, LockMaker
from tests.support.grants import grant_of
from tests.support.lock_fixtures import Commands

Client = MongoClient[Document]
Pieces = Collection[Document]

#: Long enough that no renewal gets in between.
TERMS = Terms(lease=30.0, margin=3.0, waiter_lease=10.0)


@pytest.fixture
def data(collection: Pieces) -> Iterator[Pieces]:
    """Return a collection beside the locks'."""
    data = collection.database[f"{collection.name}_data"]
    collection.database.create_collection(data.name)
    yield data
    data.drop()


@pytest.fixture
def hold(lock: LockMaker) -> LockMaker:
    """Return a function that makes locks of this test's session."""
    return lambda *keys, **options: lock(*keys, **{"terms": TERMS, **options})


@pytest.fixture
def take_over(other: LockMaker, take_away: Callable[..., None]) -> Callable[..., MongoLock]:
    """Return a function that takes a lock over, as another process, behind its holder's back."""

    def take_over(key: str = "k") -> MongoLock:
        take_away(key)
        return other(key, terms=TERMS).acquire()

    return take_over


@pytest.fixture
def join_queue(other: LockMaker) -> Callable[..., None]:
    """Return a function that changes a lock's document by a single try of another process."""

    def join_queue(key: str = "k") -> None:
        assert not other(key, terms=TERMS).try_acquire()

    return join_queue


def test_not_acquired(hold: LockMaker, mongo: Client) -> None:
    with pytest.raises(LockMisused, match="not acquired"):
        hold().atomic(mongo).__enter__()


class Striker(Commands):
    """Calls *strike* in another thread when a client is about to send its first update, and waits until it is done."""

    def __init__(self, strike: Callable[[], object]) -> None:
        super().__init__()
        self.thread = threading.Thread(target=strike)

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        if event.command_name == "update" and self.thread.ident is None:
            self.thread.start()
            self.thread.join()


@pytest.mark.parametrize("writes", [True, False])
def test_released_and_kept_for_its_minimum_hold(
    hold: LockMaker, stored: Callable[..., Document], data: Pieces, mongo_uri: str, *, writes: bool
) -> None:
    """P9: Another thread releases the lock after the transaction has checked that it is held, and before the
    transaction writes to it. Nothing is committed, although the entry stays. (Earlier reads and writes of the
    transaction conflict with the release. Without any, only the fence detects the release.)"""
    lock = hold(terms=replace(TERMS, min_hold=25.0)).acquire()
    released: list[bool] = []
    striker = Striker(lambda: released.append(lock.release()))
    with MongoClient[Document](mongo_uri, event_listeners=[striker]) as client:
        pieces = client[data.database.name][data.name]
        with pytest.raises((LockMisused, LockLost)), lock.atomic(client) as session:
            if writes:
                pieces.insert_one({"x": 1}, session=session)
    assert released == [True]
    assert ["released" in holder for holder in stored()["holders"]] == [True]
    assert data.count_documents({}) == 0


def test_a_signal_between_two_steps_of_its_end(hold: LockMaker, mongo: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """F66: A signal aborts a transaction that has written to the lock's document, and its own error is raised."""
    run = actions.run

    def struck(steps: Any, perform: Any) -> Any:
        if steps.__name__ != "_end":
            return run(steps, perform)
        perform(next(steps))
        steps.close()
        raise KeyboardInterrupt

    lock = hold().acquire()
    atomic = lock.atomic(mongo)
    session: Any = atomic.__enter__()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(actions, "run", struck)
        atomic.__exit__(None, None, None)
    assert not session.in_transaction
    lock.release()


def test_run_atomic_conflict_in_data(hold: LockMaker, data: Pieces, mongo: Client) -> None:
    """A conflict on the data itself is retried, too. Any other error is not."""
    data.insert_one({"_id": 1, "n": 0})
    attempts: list[int] = []

    def work(session: Any) -> None:
        attempts.append(1)
        data.find_one({"_id": 1}, session=session)
        if len(attempts) == 1:
            data.update_one({"_id": 1}, {"$inc": {"n": 10}})
        data.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)

    def fail(session: Any) -> None:
        attempts.append(1)
        raise ZeroDivisionError

    with hold() as lock:
        lock.run_atomic(work, mongo)
        assert data.find_one() == {"_id": 1, "n": 11}
        assert len(attempts) == 2
        with pytest.raises(ZeroDivisionError):
            lock.run_atomic(fail, mongo)
        assert len(attempts) == 3


def test_its_renewals_are_seen_to_afterwards(
    hold: LockMaker, session: Session, data: Pieces, mongo: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F177: Renewals deferred by a transaction are scheduled afterwards, because the heartbeat may sleep until then."""
    with hold() as lock:
        usual, seen_to = grant_of(lock).lease.renew_at, list[float]()
        with lock.atomic(mongo) as transaction:
            data.insert_one({"x": 1}, session=transaction)
            monkeypatch.setattr(session.heartbeat, "schedule", seen_to.append)
        assert seen_to == [usual]


def test_a_downgrade_inside(hold: LockMaker, data: Pieces, mongo: Client) -> None:
    """F177: A downgrade inside the block is refused. Readers would be let in before the commit, and the commit needs
    the grant of the block's start."""
    with hold() as lock:
        with lock.atomic(mongo) as session:
            with pytest.raises(LockMisused, match="atomic"):
                lock.downgrade()
            data.insert_one({"x": 1}, session=session)
        lock.downgrade()
    assert data.count_documents({}) == 1


def test_several_keys(hold: LockMaker, take_over: Callable[..., MongoLock], data: Pieces, mongo: Client) -> None:
    with hold("a", "b") as lock, lock.atomic(mongo) as session:
        data.insert_one({"x": 1}, session=session)
    with pytest.raises(LockLost) as caught, hold("a", "b") as lock:
        take_over("b")
        with lock.atomic(mongo) as session:
            data.insert_one({"x": 2}, session=session)
    assert caught.value.key == "b"
    assert data.count_documents({}) == 1


@pytest.mark.long
def test_another_mongodb(hold: LockMaker) -> None:
    """A client of another MongoDB cannot fence. Nothing is committed, and the error names the right client."""
    with ReplicaSet(1) as elsewhere, MongoClient[Document](elsewhere.uri) as stranger, hold() as lock:
        stranger["somewhere"].create_collection("data")
        with (
            pytest.raises(LockMisused, match="use a client of the MongoDB that keeps the locks"),
            lock.atomic(stranger) as session,
        ):
            stranger["somewhere"]["data"].insert_one({"x": 1}, session=session)
        assert stranger["somewhere"]["data"].count_documents({}) == 0
        lock.ensure_held()


@pytest.mark.long
def test_standalone() -> None:
    """A server without transactions is reported before any work. The error names the cure."""
    with Mongod() as server, server.client() as client:
        session = Session(MongoStore(StoreConfig({"host": server.uri}, "locks")))
        with MongoLock(lambda: session, ("k",), TERMS) as lock:
            with pytest.raises(LockMisused, match="run it as a replica set"):
                lock.atomic(client).__enter__()
        session.close()


@pytest.mark.long
def test_lost_reply_of_the_commit(
    hold: LockMaker, data: Pieces, config: StoreConfig, failpoint: Callable[..., None]
) -> None:
    """A commit with an unknown outcome is sent again, until MongoDB says that it is done."""
    with MongoClient[Document](**config.client) as client:
        pieces = client[data.database.name][data.name]
        with hold() as lock, lock.atomic(client) as session:
            pieces.insert_one({"x": 1}, session=session)
            failpoint(["commitTransaction"], times=3, closeConnection=True)
    assert data.count_documents({}) == 1


@pytest.mark.long
def test_unknown_commit(
    hold: LockMaker, data: Pieces, config: StoreConfig, failpoint: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If MongoDB never reports the outcome, the error says that it is unknown. The transaction is not retried."""
    monkeypatch.setattr(transaction, "COMMIT_LIMIT", 0.5)
    calls: list[int] = []
    with MongoClient[Document](**config.client) as client:
        pieces = client[data.database.name][data.name]

        def work(transaction: Any) -> None:
            calls.append(1)
            pieces.insert_one({"x": 1}, session=transaction)
            failpoint(["commitTransaction"], closeConnection=True)

        lock = hold().acquire()
        with pytest.raises(LockBackendFailed, match="it is unknown"):
            lock.run_atomic(work, client)
        failpoint([])
        assert calls == [1]
        # Nothing is left open on the server that would keep the lock's document from everybody.
        assert lock.release()


class TestAsync:
    """The same with ``async with``, for both kinds of clients."""

    @pytest.fixture(params=["AsyncMongoClient", "MongoClient"])
    async def client(self, request: pytest.FixtureRequest, mongo_uri: str, mongo: Client) -> Any:
        """Return a client of either kind."""
        if request.param == "MongoClient":
            yield mongo
            return
        async with AsyncMongoClient[Document](mongo_uri) as client:
            yield client

    @staticmethod
    async def insert(client: Any, data: Pieces, session: Any) -> None:
        made = client[data.database.name][data.name].insert_one({"x": 1}, session=session)
        if asyncio.iscoroutine(made):
            await made

    async def test_taken_over(
        self, hold: LockMaker, data: Pieces, client: Any, take_over: Callable[..., MongoLock]
    ) -> None:
        lock = await hold().aacquire()
        with pytest.raises(LockLost):
            async with lock.atomic(client) as session:
                await self.insert(client, data, session)
                await asyncio.to_thread(take_over)
        assert data.count_documents({}) == 0

    @pytest.mark.long
    async def test_run_atomic(self, hold: LockMaker, data: Pieces, client: Any, join_queue: Callable[[], None]) -> None:
        attempts: list[int] = []

        async def work(session: Any) -> int:
            await self.insert(client, data, session)
            attempts.append(1)
            if len(attempts) < 3:
                await asyncio.to_thread(join_queue)
            return len(attempts)

        async with hold() as lock:
            assert await lock.arun_atomic(work, client) == 3
        assert data.count_documents({}) == 1

    async def test_cancelled(self, hold: LockMaker, data: Pieces, client: Any) -> None:
        """A cancelled task commits nothing and leaves neither transaction nor lock."""
        inside = asyncio.Event()

        async def work() -> None:
            async with hold() as lock, lock.atomic(client) as session:
                await self.insert(client, data, session)
                inside.set()
                await asyncio.sleep(30)

        task = asyncio.create_task(work())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert data.count_documents({}) == 0
        async with hold(wait=5):
            pass

    async def test_wrong_face(self, hold: LockMaker, mongo_uri: str) -> None:
        """An AsyncMongoClient in a plain ``with`` is an error."""
        client: AsyncMongoClient[Document] = AsyncMongoClient(mongo_uri)
        async with hold() as lock:
            with pytest.raises(TypeError, match="`async with`"):
                lock.atomic(client).__enter__()
        await client.close()
