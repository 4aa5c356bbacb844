"""The locks of one process are kept alive, reported when lost, never the child's, and free when the process is gone."""

import gc
import os
import random
import secrets
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pymongo
import pytest
from pymongo import _csot
from pymongo.collection import Collection

from django_mongolock.engine import clock
from django_mongolock.engine.protocol.actions import Acquisition, Granted
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.session import heartbeat as keeping
from django_mongolock.engine.session.grant import Grant, State
from django_mongolock.engine.session.session import Session, Sessions
from django_mongolock.engine.store.layout import INDEXES, missing_indexes
from django_mongolock.engine.store.mongo import MongoStore, StoreConfig
from django_mongolock.exceptions import LockMisused
from django_mongolock.history.models import read_events
from django_mongolock.inspection import operations, queries
from django_mongolock.inspection.overview import overview
from django_mongolock.other_collections.places import Source
from tests.engine.conftest import Document, Entries, Here, HoldUp, LockMaker, make_lock, renewed
from tests.engine.faces import Face
from tests.engine.processes import processes
from tests.engine.twins import CALM
from tests.support.grants import grant_of
from tests.support.waiting import eventually

NOW = datetime.now(UTC)


# Renewal


def test_documents_that_are_gone_are_a_loss_at_the_next_beat(here: Here) -> None:
    """F144, F6: A dropped or restored collection holds no lock. A primary that was left behind may lack the document,
    and cannot make it again. The session therefore makes the document before a missing grant counts."""
    mine = here.lock(terms=CALM).acquire()
    here.collection.delete_many({})
    assert mine.held
    here.session.renewals.renew([grant_of(mine)])
    assert mine.lost
    assert here.entries() == []
    assert here.other(terms=CALM).acquire().fencing_token > mine.fencing_token


def test_indexes_that_are_gone_come_back(here: Here) -> None:
    """F144: Missing indexes are made at the next use of a new key, if the user has the right. The check comes once in a
    minute."""
    assert isinstance(here.session.store, MongoStore)
    here.collection.drop_indexes()
    here.lock("new").acquire().release()
    assert missing_indexes(here.collection) == sorted(INDEXES)
    here.session.store.indexes.looked -= 61
    here.lock("newer").acquire().release()
    assert eventually(lambda: missing_indexes(here.collection) == [])


def test_a_lock_where_no_thread_can_be_started(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """F144: A lock is granted although no thread can be started. A container limits its threads, and an ending
    interpreter starts none."""
    assert isinstance(here.session.store, MongoStore)
    here.lock("known").acquire().release()
    here.session.store.indexes.looked -= 61

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with here.lock("new") as lock:
        assert lock.held


# The heartbeat


@pytest.mark.parametrize(
    ("error", "is_told"),
    [("can't start new thread", True), ("can't create new thread at interpreter shutdown", False)],
)
def test_a_heartbeat_that_cannot_be_started(
    here: Here, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: str, is_told: bool
) -> None:
    """F144, P7: The log says that no lease is renewed, unless the interpreter ends. The next lock tries again."""
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "mongolock-heartbeat":
            raise RuntimeError(error)
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        first = here.lock("first", terms=CALM).acquire()
        with here.lock("second", terms=CALM):
            pass
    assert first.held
    told = [record.levelname for record in caplog.records if "heartbeat" in record.message]
    assert told == ["WARNING"] * is_told
    with here.lock(terms=CALM):
        here.timer.move(CALM.lease / 2)
        assert eventually(lambda: renewed(first))


@pytest.mark.parametrize("what", ["a renewal", "looking what is due"])
def test_the_heartbeat_survives_an_exception(
    here: Here, hold_up: HoldUp, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """F35: The exception is logged, and the renewals go on."""
    part, name = (here.session.store, "renew") if what == "a renewal" else (here.session.heartbeat, "next_due")
    gate = hold_up(part, name).fail(RuntimeError("once"))
    with here.lock(terms=CALM) as mine:
        here.timer.move(CALM.lease / 2)
        assert eventually(lambda: renewed(mine))
    assert gate.there.is_set()
    assert "failed" in caplog.text


def test_a_dead_heartbeat_is_replaced(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """F35: The next grant finds the heartbeat dead and starts another."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def die(*_: object, **__: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(here.session.heartbeat, "next_due", die)
        patch.setattr(keeping, "log_exception", die)
        first = here.lock("first", terms=CALM).acquire()
        heartbeat = here.session.heartbeat.thread
        assert heartbeat is not None
        heartbeat.join(10)
        assert not heartbeat.is_alive()
    with here.lock(terms=CALM) as mine:
        here.timer.move(CALM.lease / 2)
        assert eventually(lambda: renewed(mine) and renewed(first))


@pytest.mark.long
def test_a_lock_that_was_forgotten_is_not_entered_again(here: Here, hold_up: HoldUp) -> None:
    """F33: The same thread takes a forgotten reentrant lock again before the heartbeat has released it. The thread gets
    a grant of its own, and the heartbeat does not take that away with the forgotten one."""
    gate = hold_up(here.session.heartbeat, "adopt")
    forgotten = here.lock(reentrant=True).acquire()
    token = forgotten.fencing_token
    with pytest.warns(ResourceWarning):  # noqa: PT031
        del forgotten
        gc.collect()
        threading.Timer(0.1, gate.go.set).start()
        with here.lock(reentrant=True) as again:
            assert gate.over.wait(5)
            assert again.held
            assert again.fencing_token > token


def test_a_grant_is_never_seen_held_without_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: The heartbeat may look at any moment. A new grant never looks lost."""
    seen: list[tuple[State, float]] = []

    class Watched(Grant):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if getattr(self, "state", None) is State.HELD:
                seen.append((self.state, self.remaining))

    grant = Watched(Acquisition("k", "id", Terms()), auto_renew=True, worker=None)
    grant.mark_held(Granted(5, NOW, clock.now() + 30, clock.now()))
    assert seen
    assert all(remaining > 0 for _, remaining in seen)
    assert grant.held


def test_a_session_that_is_closed_while_a_lock_is_granted(
    lock: LockMaker, session: Session, other: LockMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1, F161: Closing removes a requested grant. An answer that grants it later does not make it held."""
    acquired = session.register_grant

    def late(grant: Grant, granted: Granted) -> None:
        session.close()
        acquired(grant, granted)

    monkeypatch.setattr(session, "register_grant", late)
    mine = lock()
    with pytest.raises(LockMisused, match="the session was closed while a waiter was in it"):
        mine.acquire()
    assert other().try_acquire()
    assert not mine.held


# Signals


def test_the_main_thread_sends_nothing_itself(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """F29: An exception of a signal handler must not strike inside the driver, and handlers run in the main thread.
    Other threads send their commands themselves."""
    senders: list[int] = []
    send = here.session.commands.send

    def watched(*arguments: Any, **how: Any) -> Any:
        senders.append(threading.get_ident())
        return send(*arguments, **how)

    monkeypatch.setattr(here.session.commands, "send", watched)
    with here.lock():
        pass
    assert threading.get_ident() not in senders
    assert len(senders) == 2


@pytest.mark.parametrize(
    "do",
    [
        lambda store: operations.clear_stale(store, ["k"]),
        lambda store: operations.force_release(store, "k", ["g"]),
        lambda store: operations.ask_to_release(store, "k", "somebody"),
        lambda store: operations.release_owner(store, "o"),
        lambda store: list(queries.snapshots(store, {})),
        lambda store: queries.count(store, {}, 5, 5.0),
        queries.find_deadlocks,
        overview,
        lambda store: read_events(store, 5.0, lambda events: store.bounded(5.0)),
    ],
)
def test_the_main_thread_sends_nothing_for_what_has_no_session(
    store: MongoStore, do: Callable[[MongoStore], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F29: Commands for all locks and reads of locks run outside the main thread. Context variables of monitors come
    along."""
    senders, bounded, request = set[tuple[int, str]](), store.bounded, ContextVar("request", default="none")

    def watched(timeout: float) -> Any:
        senders.add((threading.get_ident(), request.get()))
        return bounded(timeout)

    monkeypatch.setattr(store, "bounded", watched)
    before = request.set("this one")
    do(store)
    request.reset(before)
    assert {known for _, known in senders} == {"this one"}
    assert threading.get_ident() not in {sender for sender, _ in senders}


def test_what_is_done_to_many_is_interrupted(store: MongoStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """F29: Only the commands are sent by another thread. A signal that ends the loop leaves the other locks alone."""
    stops = Mock(side_effect=lambda *_, **__: threading.current_thread() is threading.main_thread())
    monkeypatch.setattr(operations, "force_release", stops)
    holder = {"grant": "g", "owner": "o", "until": datetime(2999, 1, 1, tzinfo=UTC)}
    found = [{"_id": key, "holders": [holder]} for key in "ab"]
    monkeypatch.setattr(operations, "sent_bounded", lambda *_: found)
    assert operations.release_owner(store, "o") == (["a", "b"], 0)


def test_the_main_thread_closes_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """F29: The main thread closes no cursor, even if the cursor is not read to its end."""
    closers = list[bool]()

    class Cursor(list[Document]):
        def close(self) -> None:
            closers.append(threading.current_thread() is threading.main_thread())

    monkeypatch.setattr(queries, "read_snapshot", lambda document: document)
    monkeypatch.setattr(queries, "READ_BATCH", 1)
    latest = Mock(aggregate=lambda *_, **__: Cursor([{}] * 3))
    read = queries.snapshots(Mock(bounded=lambda _: nullcontext(), latest=latest), {})
    next(read)
    read.close()  # type: ignore[attr-defined]
    assert closers == [False]


def test_a_signal_leaves_no_time_limit(collection: Collection[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    """F29: The main thread asks for the collection of a document lock, and a signal strikes. Later commands have their
    own time limit."""

    def struck(seconds: float) -> None:
        _csot.DEADLINE.set(0.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(pymongo, "timeout", struck)
    with pytest.raises(KeyboardInterrupt):
        Source(collection).courier()
    assert _csot.get_deadline() == float("inf")


@pytest.mark.witness
def test_the_key_of_a_killed_holder_is_free_within_its_lease(here: Here) -> None:
    """F27: A waiter gets the key at the end of the lease, not at the renewal of its place in the queue."""
    with processes(1, "hold", here.collection.name, 2) as (holder,):
        token = holder.hear()["token"]
        holder.send(signal.SIGKILL)
        holder.popen.wait(10)
        end = here.stored()["holders"][0]["until"]
        with here.lock(terms=CALM, wait=20) as mine:
            assert 0 <= (here.stored()["holders"][0]["acquired_at"] - end).total_seconds() < CALM.waiter_lease / 6
            assert mine.fencing_token > token


@pytest.mark.long
def test_a_stopped_holder_wakes_up_without_the_lock(lock: LockMaker, collection: Collection[Document]) -> None:
    """F26, F28: `held` is false at once, the block ends in LockLost, and its token is smaller than the next one."""
    with processes(1, "paused", collection.name) as (holder,):
        token = holder.hear()["token"]
        holder.send(signal.SIGSTOP)
        with lock(wait=20) as mine:
            holder.send(signal.SIGCONT)
            told = holder.say().hear()
            assert told["held"] is False
            assert "was lost" in told["lost"]
            assert mine.held
            assert mine.fencing_token > token


def test_a_session_may_fork_while_it_is_made(config: StoreConfig) -> None:
    """The driver may start a program to find a library, and starting one is a fork of Python under gevent."""

    def make() -> Session:
        Sessions._before_fork()
        Sessions._after_fork_in_parent()
        return Session(MongoStore(config))

    sessions = Sessions(make)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(sessions.current).result(5).pid == os.getpid()
    sessions.close()


def test_threads_that_come_first_together_get_one_session(config: StoreConfig) -> None:
    barrier = threading.Barrier(2)

    def make() -> Session:
        barrier.wait(5)
        return Session(MongoStore(config))

    sessions = Sessions(make)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: sessions.current(), range(2))
    assert first is second
    sessions.close()


def test_clones_have_grants_of_their_own(
    new_session: Callable[..., Session], face: Face, entries: Entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F79, F17, P1: A virtual machine was paused, copied, and goes on twice. Both have the same memory, the same
    session id and the same state of `random`. Only values of the system (`os.urandom`) differ. No grant is taken for
    that of the clone, or refused by its tombstone. (A clone believes in the locks that it held before. This is the
    limit of P9.)"""
    with monkeypatch.context() as patch:
        patch.setattr(secrets, "token_hex", lambda length=32: "5a" * length)
        clones = new_session(), new_session()
    assert clones[0].id == clones[1].id
    ids: list[set[str]] = []
    for session in clones:
        ids.append(set())
        for _ in range(5):
            random.seed(79)  # the state that `random` has in both
            with face.block(make_lock(session, terms=CALM)):
                ids[-1] |= {e["grant"] for e in entries()}
    assert [len(found) for found in ids] == [5, 5]
    assert ids[0] & ids[1] == set()
