"""Bells report grants that commands of other processes made. A waiter believes a bell only about its present place."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.collection import Collection

from django_mongolock.engine import clock
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Step, Terms, entry
from django_mongolock.engine.rule.replies import Bell, News
from django_mongolock.engine.session import waits
from django_mongolock.engine.session.session import Session
from django_mongolock.engine.store import bells
from django_mongolock.engine.store.layout import stays_open
from django_mongolock.engine.store.mongo import MongoStore, StoreConfig
from django_mongolock.exceptions import LockBackendFailed
from django_mongolock.inspection import operations
from testproject.servers import Mongod
from tests.engine.conftest import Document, Here, LockMaker, make_lock, store_of
from tests.engine.twins import CALM
from tests.engine.waiters import InThread, Waiter
from tests.support import DATABASE
from tests.support.lock_fixtures import Commands
from tests.support.waiting import eventually

#: Long before a place in the queue is renewed under CALM terms. Such a renewal would find a grant that the bell missed.
SOON = CALM.waiter_lease / 6


def listening(session: Session) -> bool:
    return eventually(lambda: session.waits.listener.listening)


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cursors return soon, so that they soon notice the actions of the test."""
    monkeypatch.setattr(bells, "AWAIT_MS", 100)


@pytest.fixture
def queued(
    lock: LockMaker, session: Session, other: LockMaker, in_thread: InThread, stored: Callable[..., Document]
) -> Iterator[tuple[MongoLock, Waiter]]:
    """Return a lock that another session holds, and a waiter that listens for it."""
    theirs = other(terms=CALM).acquire()
    waiter = Waiter(in_thread, lock(terms=CALM, wait=None))
    assert eventually(lambda: bool(stored()["waiters"]))
    assert listening(session)
    time.sleep(0.1)
    yield theirs, waiter
    theirs.release()
    waiter.end().let_go()


def thread_of(session: Session) -> threading.Thread | None:
    """Return the listening thread."""
    return session.waits.listener._thread


def mine(session: Session) -> Any:
    """Return the grant that the session waits for."""
    (grant,) = session.queue.waiting.values()
    return grant


def bell_of(session: Session, token: int) -> Bell:
    """Return a bell that reports a grant with *token* to the session's waiter."""
    return Bell(session.id, mine(session).id, News(token, datetime.now(UTC)))


def test_a_bell_is_rung_when_the_majority_has_the_grant(here: Here, queued: tuple[MongoLock, Waiter]) -> None:
    """P3, P8, F5, F121: A waiter sends nothing while it waits, and learns of its grant by the bell alone. The release
    that grants the lock waits for the majority. The bell follows the release and waits for nothing."""
    theirs, waiter = queued
    here.commands.clear()
    time.sleep(0.2)
    assert set(here.commands.names()) <= {"getMore"}
    released = clock.now()
    theirs.release()
    assert waiter.end().at - released < SOON
    sent = [command for command in here.commands.sent if not {"getMore", "find"} & command.keys()]
    # A holder that was alone when it got the lock tries the short release first.
    assert [next(iter(command)) for command in sent] == ["update", "findAndModify", "insert"]
    assert [command["writeConcern"]["w"] for command in sent[1:]] == ["majority", 0]


def test_a_renewal_rings_for_whom_it_grants(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """F179, P5: A renewal in another process may let in a waiter that has just become the first. The renewal rings for
    the waiter."""
    store, rung = store_of(session), list[Bell]()
    for name, lease in (("held", 0.25), ("first", 9.0), ("second", 9.0)):
        terms = Terms(lease=lease, margin=0.05, waiter_lease=9.0)
        store.apply("k", Step(ask=name, add=entry(name, f"session of {name}", terms, {})), 5)
    time.sleep(0.32)
    monkeypatch.setattr(MongoStore, "ring", lambda self, bells: rung.extend(bells))
    store.renew(["k"], Step(renew=("second",), beat=1), 5)
    store.renew(["k"], Step(renew=("second",), beat=2), 5)
    assert [(bell.session, bell.grant) for bell in rung] == [("session of first", "first")]


@pytest.mark.parametrize("kind", ["earlier", "twice", "nobody", "damaged"])
def test_what_is_no_news(queued: tuple[MongoLock, Waiter], session: Session, kind: str) -> None:
    """P1, F28, F107: A bell changes nothing if its grant is older than the present place, if it comes twice, if its
    session is gone, or if it is malformed. Another process still has the lock, and no waiter believes otherwise."""
    theirs, waiter = queued
    store = store_of(session)
    bell = bell_of(session, theirs.fencing_token)
    if kind == "nobody":
        bell = replace(bell, session="gone", grant="gone.1")
    for _ in range(2 if kind == "twice" else 1):
        store.ring([bell])
    if kind == "damaged":
        number = bells._number(session.id)
        store.bells.collections[number].insert_one({"to": session.id, "grant": bell.grant, "token": "9", "at": 5})
    assert not eventually(lambda: waiter.done, 0.15)
    token = theirs.fencing_token
    theirs.release()
    assert waiter.end().lock.fencing_token > token
    store.ring([bell])  # and once more, when it holds the lock
    time.sleep(0.1)
    assert waiter.lock.fencing_token > token


def test_a_bell_for_an_earlier_grant_that_comes_late(
    here: Here, queued: tuple[MongoLock, Waiter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1, F107: A late bell for a lost grant gives no lock. The waiter was granted the lock and lost it before it heard
    of the grant. A late copy of its command has queued the waiter again, and the waiter has renewed that place."""
    theirs, waiter = queued
    grant, ring = mine(here.session), MongoStore.ring
    held_back: list[Bell] = []
    monkeypatch.setattr(MongoStore, "ring", lambda self, bells: held_back.extend(bells))
    third = here.other(terms=CALM, wait=10)
    theirs.release()
    assert eventually(lambda: bool(held_back))
    store_of(here.session).apply("k", Step(remove=(grant.id,), force=True), 5)
    third.acquire()
    store_of(here.session).apply("k", Step(ask=grant.id, add=grant.acquisition.entry, beat=1), 5)
    until = grant.lease.until
    grant.lease.renew_at = clock.now()
    here.session.heartbeat.schedule(clock.now())
    assert eventually(lambda: grant.lease.until > until)
    ring(store_of(here.session), held_back[:1])
    time.sleep(0.2)
    assert not waiter.done
    monkeypatch.undo()
    third.release()
    assert waiter.end().lock.fencing_token > third.fencing_token


def test_a_bell_is_heard_that_was_rung_before_anybody_listened(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """F11: No bell between the queue and the cursor is missed. The cursor begins with the bells that are there."""
    late = threading.Event()
    listen = MongoStore.listen

    def listen_late(self: MongoStore, session_id: str) -> Any:
        bells.make(self.bells.collections[bells._number(session_id)])
        late.wait(10)
        return listen(self, session_id)

    monkeypatch.setattr(MongoStore, "listen", listen_late)

    def listens_only(*_: object) -> float:
        here.session.waits.ensure_listening()
        return 60.0

    monkeypatch.setattr(here.session.waits, "_seconds", listens_only)  # nobody finds it by looking
    theirs = here.other(terms=CALM).acquire()
    waiter = here.waiter(here.lock(terms=CALM, wait=None))
    assert eventually(lambda: bool(here.session.queue.waiting) and mine(here.session).lease.until > 0)
    assert eventually(lambda: stays_open(store_of(here.session).bells.collections[bells._number(here.session.id)]))
    theirs.release()
    assert not eventually(lambda: waiter.done, 0.3)
    late.set()
    monkeypatch.undo()
    assert waiter.end().has_it
    waiter.let_go()


def kill_cursor(mongo: MongoClient[Document], appname: str, collection: Collection[Document]) -> None:
    """Kill the cursors of this test's clients."""

    def find() -> list[Any]:
        stages: list[Document] = [{"$currentOp": {"idleCursors": True}}, {"$match": {"appName": appname}}]
        return [
            (op["ns"].partition(".")[2], op["cursor"]["cursorId"])
            for op in mongo.admin.aggregate(stages)
            if op.get("cursor")
        ]

    assert eventually(find)
    for name, cursor in find():
        collection.database.command("killCursors", name, cursors=[cursor])


@pytest.mark.long
@pytest.mark.parametrize("end", ["killed", "dropped", "emptied", 136, 13])
def test_listening_that_ends_comes_back_and_no_waiter_is_forgotten(
    here: Here,
    queued: tuple[MongoLock, Waiter],
    end: str | int,
    *,
    mongo: MongoClient[Document],
    appname: str,
    failpoint: Callable[..., None],
) -> None:
    """F11: A waiter gets its lock although its cursor is killed, overtaken in a full collection (136), loses its right
    (13), or finds the bells dropped or made anew without a limit. Bells soon work again."""
    theirs, waiter = queued
    bell = store_of(here.session).bells.collections[bells._number(here.session.id)]
    if end == "killed":
        kill_cursor(mongo, appname, here.collection)
    elif isinstance(end, str):
        bell.drop()
        if end == "emptied":
            bell.insert_one({"to": "a ringer made it"})
    else:
        failpoint(["getMore"], times=1, errorCode=end)
        assert eventually(lambda: not here.session.waits.listener.listening)
    released = clock.now()
    theirs.release()
    assert waiter.end().at - released < SOON
    waiter.let_go().thread.join(10)
    again = here.other(terms=CALM, wait=5).acquire()
    second = here.waiter(here.lock(terms=CALM, wait=None))
    assert eventually(lambda: stays_open(bell))
    assert listening(here.session)
    assert not eventually(lambda: second.done, 0.3)
    released = clock.now()
    again.release()
    assert second.end().at - released < SOON
    assert bell.options().get("capped") is True
    second.let_go()


def test_a_full_collection_takes_the_next_bell(queued: tuple[MongoLock, Waiter], session: Session) -> None:
    """F11: In a full collection the oldest bells are removed, and the listener stays."""
    theirs, waiter = queued
    bell = store_of(session).bells.collections[bells._number(session.id)]
    for _ in range(3):
        bell.insert_many([{"to": "somebody", "grant": "x" * 100} for _ in range(400)])
    assert bell.estimated_document_count() < 1_000
    released = clock.now()
    theirs.release()
    assert waiter.end().at - released < SOON


@pytest.mark.long
def test_without_the_right_to_listen_waiters_look_and_say_so_once(
    here: Here, failpoint: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F11, F60: Without the right to listen, one line is logged however often listening is retried. Bells work as soon
    as they are allowed. Nothing is written to a collection that does not exist, because such a collection would grow
    without limit."""
    monkeypatch.setattr(waits, "RETRY_FIRST", 0.02)
    monkeypatch.setattr(waits, "RETRY_LAST", 0.1)
    monkeypatch.setattr(bells, "LOOK_EVERY", 0.0)
    failpoint(["create", "convertToCapped"], errorCode=13)
    theirs = here.other(terms=CALM).acquire()
    waiter = here.waiter(here.lock(terms=CALM, wait=None))
    assert eventually(lambda: bool(here.stored()["waiters"]))
    assert eventually(lambda: here.commands.names().count("create") >= 3)
    released = clock.now()
    theirs.release()
    assert waiter.end().at - released < SOON
    assert "insert" not in here.commands.names()
    assert caplog.text.count("waiting by polling") == 1
    waiter.let_go().thread.join(10)
    with here.other(terms=CALM, wait=10):
        here.waiter(here.lock(terms=CALM, wait=None)).let_go()
        failpoint([])
        assert listening(here.session)
    assert caplog.text.count("waiting by polling") == 1


@pytest.mark.long
def test_a_server_without_a_replica_set_rings_too(in_thread: InThread) -> None:
    """F11: A standalone server has bells, although it has no change streams."""
    with Mongod() as server:
        config = StoreConfig({"host": server.uri}, DATABASE)
        sessions = [Session(MongoStore(config)) for _ in range(2)]
        theirs = make_lock(sessions[0], terms=CALM).acquire()
        waiter = Waiter(in_thread, make_lock(sessions[1], terms=CALM, wait=None))
        assert listening(sessions[1])
        time.sleep(0.2)
        released = clock.now()
        theirs.release()
        assert waiter.end().at - released < SOON
        waiter.let_go().thread.join(10)
        for session in sessions:
            session.close()


@pytest.mark.long
def test_one_listener_for_a_process_and_only_while_it_waits(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """P8: The first waiter starts one thread and one cursor for all keys. Both end a moment after the last waiter."""
    monkeypatch.setattr(waits, "LINGER", 0.2)
    with here.lock("free"), here.lock("free2"):
        assert thread_of(here.session) is None
    with here.other("a", terms=CALM), here.other("b", terms=CALM):
        waiters = [here.waiter(here.lock(key, terms=CALM, wait=None)) for key in ("a", "b", "a")]
        assert listening(here.session)
        time.sleep(1.0)  # longer than it lingers
        assert here.session.waits.listener.listening
        thread = thread_of(here.session)
        assert thread is not None
    for waiter in [waiter.let_go() for waiter in waiters]:
        waiter.end()
    thread.join(10)
    assert not thread.is_alive()
    assert len([command for command in here.commands.sent if command.get("awaitData")]) <= 3
    with here.other("a", terms=CALM, wait=5):
        here.waiter(here.lock("a", terms=CALM, wait=None)).let_go()
        assert listening(here.session)


def test_a_holder_that_wants_to_know_is_asked_at_once(session: Session, lock: LockMaker, new_session: Any) -> None:
    """A release request rings a bell, so that it does not have to wait for the next renewal."""
    asked = threading.Event()
    with lock(terms=CALM, on_release_requested=lambda _: asked.set()):
        assert listening(session)
        assert operations.ask_to_release(store_of(new_session()), "k", "somebody") == 1
        assert asked.wait(SOON)


def test_other_locks_have_other_bells(config: StoreConfig) -> None:
    """Two projects in one database, with locks in two collections, do not hear each other."""
    names = [Session(MongoStore(replace(config, collection=name))).store.bells.collections for name in ("one", "two")]  # type: ignore[attr-defined]
    assert not {each.name for each in names[0]} & {each.name for each in names[1]}


def test_all_bells_together_have_half_a_second(
    here: Here, failpoint: Callable[..., None], commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P8: A release that grants many waiters does not wait for each of their bells while the server does not answer."""
    monkeypatch.setattr(bells, "RING_TIMEOUT", 0.05)
    rung = bells.Bells(store_of(here.session).collection)
    failpoint(["find"], blockConnection=True, blockTimeMS=100)
    commands.clear()
    rung.ring(Bell(f"session {number}", "g", News(1, datetime.now(UTC))) for number in range(99))
    assert commands.names() == ["find"]


@pytest.mark.long
@pytest.mark.parametrize("option", ["socketTimeoutMS", "timeoutMS"])
def test_bells_with_a_short_timeout_in_the_address(
    config: StoreConfig,
    other: LockMaker,
    in_thread: InThread,
    caplog: pytest.LogCaptureFixture,
    *,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
) -> None:
    """F187: The reads of the bells are as short as the timeout, with one warning. The waiter hears of its grant."""
    monkeypatch.setattr(bells, "AWAIT_MS", 1_000)
    session = Session(MongoStore(replace(config, client={**config.client, option: 400})))
    theirs = other(terms=CALM).acquire()
    waiter = Waiter(in_thread, make_lock(session, terms=CALM, wait=None))
    assert listening(session)
    time.sleep(3)
    assert session.waits.listener.listening
    theirs.release()
    began = clock.now()
    waiter.end()
    assert clock.now() - began < 0.3
    waiter.let_go()
    session.close()
    assert [each.levelname for each in caplog.records].count("WARNING") == 1


@pytest.mark.long
def test_one_read_for_all_waiters_without_bells(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """F188: A process that hears no bells reads all its queues at once. Each waiter is soon granted its lock."""

    def listen(_: object) -> Any:
        raise LockBackendFailed("no rights")

    monkeypatch.setattr(here.session.store, "listen", listen)
    keys = [f"k{number}" for number in range(60)]
    held = [here.other(key, terms=CALM).acquire() for key in keys]
    waiters = [here.waiter(here.lock(key, terms=CALM, wait=None)) for key in keys]
    assert eventually(lambda: all(len(here.entries(key)) == 2 for key in keys))
    time.sleep(1)
    here.commands.clear()
    time.sleep(2)
    assert len(here.commands.sent) <= 2 / waits.LOOK_LAST + 15
    for number, lock in enumerate(held):
        began = clock.now()
        lock.release()
        waiters[number].end()
        assert clock.now() - began < 1
    for waiter in waiters:
        waiter.let_go()
