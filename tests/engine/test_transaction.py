"""Transactions that commit only if the lock is held, and retries of the work in them, without a server."""

import asyncio
import contextlib
import inspect
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from bson.int64 import Int64
from pymongo import AsyncMongoClient, MongoClient, ReadPreference, WriteConcern
from pymongo.read_concern import ReadConcern

from django_mongolock.engine import clock
from django_mongolock.engine.lock import transaction
from django_mongolock.engine.lock.transaction import Atomic
from django_mongolock.engine.store.mongo import MongoStore
from django_mongolock.exceptions import LockMisused
from tests.engine.test_by_themselves import OVER, Held, client, in_transaction, labelled, play, server

# The commands


def kept_at(*kinds: str) -> Any:
    """Return a lock that is held on two keys, at servers of these *kinds*, or not in MongoDB without kinds."""
    lock: Any = Held()
    store: Any = object.__new__(MongoStore)
    store.client = client(*(server(kind=kind) for kind in kinds))
    store.config = SimpleNamespace(database="db", collection="locks")
    one = lock.grants[0]
    one.id, one.defer_renewals = "g", lambda: lock.calls.append("defer")
    lock.grants = (one, SimpleNamespace(**{**vars(one), "key": "l", "token": 8, "id": "h"}))
    lock._acquired = lambda: lock.grants
    lock._session = lambda: SimpleNamespace(
        store=store if kinds else None, registry=SimpleNamespace(schedule=print), commands=SimpleNamespace(timeout=5.0)
    )
    return lock


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        (("RSPrimary", "RSSecondary"), None),
        *(((), "not kept in MongoDB"), (("Standalone",), "run it as a"), (("Unknown", "Standalone"), "run it as a")),
    ],
)
def test_where_there_are_transactions(kinds: tuple[str, ...], told: str | None) -> None:
    """Without transactions, an error names the cure before anything is done."""
    lock = kept_at(*kinds)
    with pytest.raises(LockMisused, match=told) if told else contextlib.nullcontext():
        assert transaction._transactional_store(lock) is lock._session().store


@pytest.mark.parametrize(
    ("struck", "calls"), [("", ["defer"] * 2), ("at first", ["resume"] * 2), ("then", ["defer", "resume", "resume"])]
)
def test_how_a_transaction_begins(struck: str, calls: list[str]) -> None:
    """P9: A transaction uses the majority and one snapshot.

    The lock's renewals are deferred unless a signal strikes.
    """
    lock = kept_at("RSPrimary")
    if struck == "then":
        lock.grants[1].defer_renewals = Mock(side_effect=KeyboardInterrupt)
    atomic: Any = Atomic(lock, MongoClient(connect=False))
    session = SimpleNamespace(start_transaction=print)
    steps = atomic._begin()
    assert next(steps) == atomic._client.start_session
    begin = steps.send(session)
    assert (begin.func, begin.keywords) == (
        print,
        {
            "read_concern": ReadConcern("snapshot"),
            "write_concern": WriteConcern("majority"),
            "read_preference": ReadPreference.PRIMARY,
            "max_commit_time_ms": 5_000,
        },
    )
    with pytest.raises(KeyboardInterrupt if struck else StopIteration):
        steps.throw(KeyboardInterrupt) if struck == "at first" else steps.send(None)
    assert lock.calls == calls


@pytest.mark.parametrize(("matched", "whole"), [((1, 1), True), ((1, 0), False), ((0,), False)])
def test_what_a_transaction_writes_to_its_lock(matched: tuple[int, ...], whole: bool) -> None:
    """P9: A fence matches each key only while this very grant holds it, with this token."""
    lock = kept_at("RSPrimary")
    atomic: Any = Atomic(lock, MongoClient(connect=False))
    atomic._store, atomic._grants, atomic._client_session = lock._session().store, lock.grants, "session"
    atomic._client = {"db": {"locks": SimpleNamespace(update_one="update")}}
    sent = list[Any]()
    steps = atomic._match()
    with pytest.raises(StopIteration) as end, pytest.MonkeyPatch.context() as patch:  # noqa: PT012 - any of them ends it
        patch.setattr(transaction, "partial", lambda *arguments, **options: (arguments, options))
        for count in (None, *matched):
            outcome = None if count is None else SimpleNamespace(matched_count=count)
            sent.append(steps.send(outcome))
    assert end.value.value is whole
    assert len(sent) == len(matched)
    key, token, grant = {1: ("k", Int64(7), "g"), 2: ("l", Int64(8), "h")}[len(sent)]
    mine = {"grant": {"$eq": grant}, "token": token, "released": {"$exists": False}}
    where = {"_id": {"$eq": key}, "holders": {"$elemMatch": mine}}
    assert sent[-1] == (("update", where, {"$inc": {"changes": Int64(1)}}), {"session": "session"})


def test_how_a_transaction_is_aborted() -> None:
    """An open transaction is aborted. The client session ends in any case."""
    atomic = in_transaction(Held())
    assert play(atomic._abort()) == OVER
    assert play(atomic._abort(), **dict.fromkeys(OVER, labelled())) == OVER
    atomic._client_session.in_transaction = False
    assert play(atomic._abort()) == OVER[1:]


@pytest.mark.parametrize("kind", [MongoClient, AsyncMongoClient])
async def test_where_a_step_is_made(kind: Any) -> None:
    """Blocking calls run in a thread. Calls of an async client and the lock's extension run in the event loop."""

    async def extend() -> str:
        return threading.current_thread().name

    lock: Any = Held()
    lock.aextend = extend
    atomic: Any = Atomic(lock, kind(connect=False))
    here = threading.current_thread().name
    assert await atomic._acall(extend) == here
    called = await atomic._acall(lambda: threading.current_thread().name)
    assert (called == here) == (kind is AsyncMongoClient)


def test_the_pauses_before_work_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are short, since a conflict may last milliseconds, and there is none once the time is over."""
    monkeypatch.setattr(clock, "backoff", lambda *arguments: arguments)
    monkeypatch.setattr(clock, "now", iter([100.0, 104.0, 104.9, 105.0]).__next__)
    found: list[Any] = list(transaction.pauses(5))
    assert found == [(2, 0.005, 0.2), (3, 0.005, 0.2)]


# Unfinished work


async def unfinished() -> None:
    """Return work that only begins when it is awaited."""


async def items() -> Any:
    """Yield work that only begins when it is iterated."""
    yield 1


@pytest.mark.parametrize("result", [
    *(unfinished, items, lambda: (each for each in [1]), asyncio.Future),
    *(contextmanager(lambda: iter(())), contextlib.asynccontextmanager(items)),
])  # fmt: skip
async def test_work_that_would_begin_after_the_release(result: Any) -> None:
    """An error is raised, instead of a lock that guards nothing. A coroutine is closed without a warning."""
    assert [transaction.finished(done, "it", "") for done in (5, None, [1])] == [5, None, [1]]
    made = result()
    with pytest.raises(TypeError, match=r"the work returned a .* without the lock: await it"):
        transaction.finished(made, "the work", "await it")
    if inspect.iscoroutine(made):
        assert inspect.getcoroutinestate(made) == inspect.CORO_CLOSED
