"""Transactions that commit only if the lock is held, and work in them that is done again: without a server."""

import asyncio
import contextlib
import gc
import inspect
import itertools
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from bson.int64 import Int64
from pymongo import AsyncMongoClient, MongoClient, ReadPreference, WriteConcern
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.read_concern import ReadConcern

from django_mongolock.engine import clock
from django_mongolock.engine.lock import transaction
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.lock.transaction import TRANSIENT, UNKNOWN, Atomic
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.store.mongo import MongoStore
from django_mongolock.exceptions import LockBackendFailed, LockLost, LockMisused, LockTransactionAborted
from tests.engine.test_by_themselves import client, failure, server

# How they end


class Held:
    """A lock that is held, for a transaction."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        grant = SimpleNamespace(key="k", token=7, resume_renewals=lambda: self.calls.append("resume"))
        self.grants, self.lost = (grant,), False

    def ensure_held(self) -> None:
        if self.lost:
            raise LockLost("k", 7)

    def extend(self) -> None:
        self.calls.append("extend")


def in_transaction(lock: Any, matches: bool = True) -> Any:
    """A transaction that has begun, with its calls named."""
    atomic: Any = Atomic(lock, MongoClient(connect=False))
    atomic._grants = lock.grants
    atomic._registry = SimpleNamespace(see_to=lambda grant: lock.calls.append("see to"))
    named = {name: (lambda name=name: name) for name in ("commit_transaction", "abort_transaction", "end_session")}
    atomic._client_session = SimpleNamespace(in_transaction=True, session_id="id", **named)

    def match() -> Generator[Any, Any, bool]:
        yield from ()
        return matches

    atomic._match = match
    return atomic


def play(calls: Generator[Any, Any, Any], **fails: BaseException | None) -> list[str]:
    """Make the calls of a transaction; those that are named fail. Return their names, and what was raised."""
    made, outcome = list[str](), None
    try:
        while True:
            call = calls.throw(outcome) if outcome is not None else next(calls)
            name = getattr(call, "__name__", "command")
            made.append(str(call()) if name == "<lambda>" else name)
            if made[-1] == "extend":
                call()
            outcome = fails.get(made[-1])
    except StopIteration:
        return made
    except Exception as error:  # noqa: BLE001 - it is what is looked at
        return [*made, type(error).__name__]


def labelled(*labels: str) -> PyMongoError:
    return failure(1, *labels)


OVER = ["abort_transaction", "end_session"]
ABORTED = ["commit_transaction", *OVER, "extend", "LockTransactionAborted"]
UNCLEAR = ["commit_transaction", "command", "LockBackendFailed"]


@pytest.mark.parametrize(
    ("given", "fails", "made"),
    [
        ({}, {}, ["commit_transaction"]),
        ({"error": ValueError()}, {}, []),
        ({"lost": True}, {}, ["LockLost"]),
        ({"matches": False}, {}, [*OVER, "extend", "LockMisused"]),
        ({"matches": False}, {"extend": LockLost("k", 7)}, [*OVER, "extend", "LockLost"]),
        ({}, {"commit_transaction": labelled(TRANSIENT)}, ABORTED),
        (
            {},
            {"commit_transaction": labelled(TRANSIENT), "extend": LockBackendFailed("away", "k")},
            ABORTED,
        ),
        (
            {},
            dict.fromkeys(("commit_transaction", *OVER), labelled(TRANSIENT)),
            ABORTED,
        ),
        ({}, {"commit_transaction": labelled()}, ["commit_transaction", "OperationFailure"]),
        (
            {"limit": 0.0},
            {"commit_transaction": labelled(UNKNOWN)},
            UNCLEAR,
        ),
        (
            {"limit": 0.0},
            dict.fromkeys(("commit_transaction", "command"), labelled(UNKNOWN)),
            UNCLEAR,
        ),
    ],
)
def test_how_a_transaction_ends(
    given: dict[str, Any], fails: dict[str, Any], made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P9: with which calls, and which error; the lock is renewed as usual then, in any case."""
    monkeypatch.setattr(transaction, "COMMIT_LIMIT", given.get("limit", 30.0))
    lock = Held()
    lock.lost = given.get("lost", False)
    atomic = in_transaction(lock, given.get("matches", True))
    assert play(atomic._end(given.get("error"), lock.extend), **fails) == made
    assert lock.calls[-2:] == ["resume", "see to"]


def test_a_commit_is_repeated_while_its_outcome_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """P9, F7: by a commit that is safe to repeat, until the limit; and no other error is repeated."""
    monkeypatch.setattr(clock, "now", itertools.count().__next__)
    made = play(in_transaction(Held())._commit(), commit_transaction=labelled(UNKNOWN))
    assert made == ["commit_transaction"] * 30 + ["OperationFailure"]
    assert not list(transaction.pauses(0))
    assert len(list(transaction.pauses(5))) == 4


def test_what_begins_no_transaction() -> None:
    """P9: another object than a client; a second entry; an error of the first command, after which nothing is left."""
    with pytest.raises(TypeError, match='using="locks"'):
        Atomic(Held(), "locks")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs a client"):
        MongoLock(lambda: None, ("k",), Terms()).atomic()  # type: ignore[arg-type,return-value]
    atomic = in_transaction(Held())
    assert play(atomic._begin()) == ["LockMisused"]


def test_which_errors_have_a_transaction_done_again() -> None:
    """P9: those by which MongoDB has aborted it, also below one of Django's; none of a hook that ran after a commit."""
    aborted = LockTransactionAborted("k", 1, "conflict")
    wrapped = ValueError("Django's")
    wrapped.__cause__ = labelled(TRANSIENT)
    for error, again in (
        *((labelled(TRANSIENT), True), (labelled(), False), (wrapped, True), (ValueError(), False)),
        *((aborted, True), (LockBackendFailed("x", "k"), False)),
    ):
        assert transaction.is_transient(error) == again
    source = "def on_commit(error): raise error\ndef else_where(error): raise error"
    for module, name, is_hook in (
        *(("django.db.models", "on_commit", True), ("django_mongodb_backend.base", "on_commit", True)),
        *(("django.db.models", "else_where", False), ("shop.models", "on_commit", False)),
    ):
        space: dict[str, Any] = {"__name__": module}
        exec(source, space)  # noqa: S102 - code of another module
        with pytest.raises(OperationFailure) as caught:
            space[name](labelled(TRANSIENT))
        assert transaction.is_transient(caught.value) != is_hook
        group = ExceptionGroup("", [ExceptionGroup("", [caught.value]), ValueError()])
        assert transaction.out_of_commit_hook(group) == is_hook
        assert transaction.leaves(group) == [caught.value, group.exceptions[1]]


@pytest.mark.parametrize("awaited", [False, True])
async def test_work_in_a_transaction_is_done_again(  # noqa: C901
    awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P9: while MongoDB aborts it, and not after its limit or another error."""

    class Aborting(MongoLock):
        @contextmanager
        def atomic(self, *fails: BaseException) -> Iterator[Any]:  # type: ignore[override]
            yield "session"
            if len(done) <= len(fails):
                raise fails[len(done) - 1]

    class Entered:
        def __init__(self, plain: Any) -> None:
            self.plain = plain

        async def __aenter__(self) -> Any:
            return self.plain.__enter__()

        async def __aexit__(self, *error: object) -> Any:
            return self.plain.__exit__(*error)

    lock = Aborting(lambda: None, ("k",), Terms())  # type: ignore[arg-type,return-value]
    plain, done = lock.atomic, list[Any]()

    def plain_work(session: Any) -> str:
        done.append(session)
        return "result"

    async def work(session: Any) -> str:
        return plain_work(session)

    async def run(*fails: BaseException, **options: Any) -> Any:
        done.clear()
        if not awaited:
            return lock.run_atomic(plain_work, *fails, **options)
        monkeypatch.setattr(lock, "atomic", lambda *fails: Entered(plain(*fails)))
        return await lock.arun_atomic(work, *fails, **options)

    again = LockTransactionAborted("k", 1, "conflict")
    assert await run(again, again) == "result"
    assert done == ["session"] * 3
    for fails, options, tries in (((again,) * 9, {"limit": 0}, 1), ((ValueError(),), {}, 1)):
        with pytest.raises((LockTransactionAborted, ValueError)):
            await run(*fails, **options)
        assert len(done) == tries
    assert await run(again, limit=timedelta(seconds=30)) == "result"
    with pytest.raises(TypeError, match="mongo_locked"):
        lock()  # type: ignore[operator]
    with pytest.raises(LockMisused, match="several keys"):
        MongoLock(lambda: None, ("a", "b"), Terms()).key  # type: ignore[arg-type,return-value]  # noqa: B018


# What is sent


def kept_at(*kinds: str) -> Any:
    """A lock that is held on two keys, at servers of these *kinds*; none: not in MongoDB."""
    lock: Any = Held()
    store: Any = object.__new__(MongoStore)
    store.client = client(*(server(kind=kind) for kind in kinds))
    store.config = SimpleNamespace(database="db", collection="locks")
    one = lock.grants[0]
    one.id, one.defer_renewals = "g", lambda: lock.calls.append("defer")
    lock.grants = (one, SimpleNamespace(**{**vars(one), "key": "l", "token": 8, "id": "h"}))
    lock._acquired = lambda: lock.grants
    lock._session = lambda: SimpleNamespace(
        store=store if kinds else None, registry=SimpleNamespace(see_to=print), commands=SimpleNamespace(timeout=5.0)
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
    """An error names the cure before anything is done where there are none."""
    lock = kept_at(*kinds)
    with pytest.raises(LockMisused, match=told) if told else contextlib.nullcontext():
        assert transaction._transactional_store(lock) is lock._session().store


@pytest.mark.parametrize("struck", [False, True])
def test_how_a_transaction_begins(struck: bool) -> None:
    """P9: for the majority, from one snapshot; the renewals of the lock are put off then, unless a signal strikes."""
    lock = kept_at("RSPrimary")
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
        steps.throw(KeyboardInterrupt) if struck else steps.send(None)
    assert lock.calls == ["resume" if struck else "defer"] * 2


@pytest.mark.parametrize(("matched", "whole"), [((1, 1), True), ((1, 0), False), ((0,), False)])
def test_what_a_transaction_writes_to_its_lock(matched: tuple[int, ...], whole: bool) -> None:
    """P9: it matches each key where this very grant holds it, with this token, and until it is released."""
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
    """If it is open; its session ends in any case."""
    atomic = in_transaction(Held())
    assert play(atomic._abort()) == OVER
    assert play(atomic._abort(), **dict.fromkeys(OVER, labelled())) == OVER
    atomic._client_session.in_transaction = False
    assert play(atomic._abort()) == OVER[1:]


@pytest.mark.parametrize("kind", [MongoClient, AsyncMongoClient])
async def test_where_a_step_is_made(kind: Any) -> None:
    """What blocks, in a thread; what a client for coroutines does, and the extension of the lock, in the event loop."""

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
    """Short, since it may be a matter of milliseconds, and none once the time is over."""
    monkeypatch.setattr(clock, "backoff", lambda *arguments: arguments)
    monkeypatch.setattr(clock, "now", iter([100.0, 104.0, 104.9, 105.0]).__next__)
    found: list[Any] = list(transaction.pauses(5))
    assert found == [(2, 0.005, 0.2), (3, 0.005, 0.2)]


# Work that is not over


async def test_a_step_that_is_cancelled_is_waited_for() -> None:
    """P6: until it is over; what it raised then is not reported as unseen."""
    loop, unseen = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    for outcome in ("result", "error", "cancelled"):
        step = loop.create_future()
        waiting = asyncio.ensure_future(transaction.outlast(step))
        await asyncio.sleep(0)
        for _ in range(2):
            waiting.cancel()
            await asyncio.wait([waiting], timeout=0.001)
        assert not waiting.done()
        if outcome == "result":
            step.set_result(None)
        elif outcome == "error":
            step.set_exception(OSError())
        else:
            step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await transaction.outlast(step)
        del step, waiting
    gc.collect()
    assert unseen == []


async def unfinished() -> None:
    """Work that only begins when it is awaited."""


async def items() -> Any:
    """Work that only begins when it is gone through."""
    yield 1


@pytest.mark.parametrize("result", [
    *(unfinished, items, lambda: (each for each in [1]), asyncio.Future),
    *(contextmanager(lambda: iter(())), contextlib.asynccontextmanager(items)),
])  # fmt: skip
async def test_work_that_would_begin_after_the_release(result: Any) -> None:
    """An error says so, instead of a lock that guards nothing; a coroutine is closed, and not warned of."""
    assert [transaction.finished(done, "it", "") for done in (5, None, [1])] == [5, None, [1]]
    made = result()
    with pytest.raises(TypeError, match=r"the work returned a .* without the lock: await it"):
        transaction.finished(made, "the work", "await it")
    if inspect.iscoroutine(made):
        assert inspect.getcoroutinestate(made) == inspect.CORO_CLOSED
