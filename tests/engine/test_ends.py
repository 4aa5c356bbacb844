"""The ends of a grant when two parties come to it at once, on the rule in Python, with commands held up."""

import asyncio
import functools
import gc
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pymongo import _csot

from django_mongolock.engine import clock
from django_mongolock.engine.lock.detached import Parked, park_held
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.protocol import procedures
from django_mongolock.engine.session import worker_threads
from django_mongolock.engine.session.background import SHORTEST_COMMAND
from django_mongolock.engine.session.ending import EndReason
from django_mongolock.engine.session.grant import Grant
from django_mongolock.engine.store.mongo import MongoStore
from django_mongolock.exceptions import LockBackendFailed, LockLost, LockNotAcquired
from django_mongolock.testing.memory_server import MemorySession
from tests.engine.conftest import HoldUp, make_lock
from tests.engine.memory import LONG, TIMEOUT, Memory
from tests.engine.test_signal_nets import Strikes
from tests.engine.waiters import InThread
from tests.support.grants import grant_of, new_grant
from tests.support.waiting import eventually


class Call:
    """A function that another thread calls, and its result or error."""

    def __init__(self, in_thread: InThread, call: Callable[..., Any], *arguments: Any) -> None:
        self.result: Any = None
        self._thread = in_thread(functools.partial(self._run, call, arguments))

    def _run(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            self.result = call(*arguments)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.result = error

    def end(self) -> Any:
        self._thread.join(10)
        return self.result


@pytest.mark.parametrize("how", ["forced", "max_hold"])
def test_a_key_that_is_lost_while_the_next_is_waited_for(memory: Memory, how: str) -> None:
    """F164, P7: acquire() never returns a lock that is not held."""
    theirs = memory.other("b").acquire()
    options = {"max_hold": 60.0} if how == "max_hold" else {}
    mine = memory.lock("a", "b", wait=None, **options)
    acquiring = Call(memory.in_thread, mine.acquire)
    assert eventually(lambda: memory.server.documents.get("b", {}).get("waiters"))
    if how == "forced":
        memory.session.lose("a")
    else:
        memory.server.advance(61)
    theirs.release()
    assert isinstance(acquiring.end(), LockLost)
    assert eventually(lambda: not (memory.entries("a") or memory.entries("b") or memory.session.known))


# One lock object, and two threads


def test_what_was_acquired_since_another_thread_released_it(
    memory: Memory, hold_up: HoldUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F165: A release with a late answer ends its own grant. A grant that the object has acquired since stays held."""
    monkeypatch.setattr(procedures, "LOCAL_HANDOVER_GRACE", 0.05)
    lock = memory.lock().acquire()
    gate = hold_up(memory.session.store, "release_uncontended", late=True)
    first = Call(memory.in_thread, lock.release)
    assert gate.there.wait(TIMEOUT)
    assert not lock.release()
    with lock:
        gate.go.set()
        assert first.end() is True
        assert lock.held


@pytest.mark.parametrize("looks", ["end of the block", "release", "renewal"])
def test_what_another_thread_is_releasing_is_not_lost(memory: Memory, hold_up: HoldUp, looks: str) -> None:
    """F163, F165: A method called while the command of the release is on its way reports no loss."""
    lost: list[object] = []
    lock = memory.lock(on_lost=lost.append).acquire()
    gate = hold_up(memory.session.store, "release_uncontended")
    grant = grant_of(lock)
    first = Call(memory.in_thread, lock.release)
    assert gate.there.wait(TIMEOUT)
    assert not lock.lost
    if looks == "end of the block":
        lock.__exit__(None, None, None)
    elif looks == "release":
        assert not lock.release()
    else:
        memory.session.ending.end(grant, EndReason.LOST, noticed=True)
    gate.go.set()
    assert first.end() is True
    assert not eventually(lambda: lost, 0.1)
    assert (lock.lost, memory.session.known) == (False, 0)


def test_an_extension_and_a_downgrade(memory: Memory, hold_up: HoldUp) -> None:
    """F165: An extension keeps the terms of a downgrade by another thread."""
    lock = memory.lock().acquire()
    gate = hold_up(memory.session.store, "apply")
    extending = Call(memory.in_thread, lock.extend, 9_000)
    assert gate.there.wait(TIMEOUT)
    lock.downgrade()
    gate.go.set()
    assert extending.end() is None
    assert lock.remaining > 8_000


# A lock that is parked


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_lock_that_is_parked_is_not_lost(memory: Memory, hold_up: HoldUp, interrupted: bool) -> None:
    """F166: A lock is renewed while the command that parks it is on its way. If a signal strikes then, no lock is
    left."""
    lost: list[object] = []
    terms = replace(LONG, owner="me")
    lock = memory.lock(terms=terms, on_lost=lost.append).acquire()
    grant = grant_of(lock)
    gate = hold_up(memory.session.store, "apply", late=True, error=KeyboardInterrupt() if interrupted else None)
    parking = Call(memory.in_thread, park_held, lock, terms, {})
    assert gate.there.wait(TIMEOUT)
    memory.session.renewals.renew([grant])
    gate.go.set()
    parked = parking.end()
    assert isinstance(parked, KeyboardInterrupt if interrupted else Parked)
    assert (memory.events, lost) == ([("acquired", "k"), ("released", "k")], [])
    assert eventually(lambda: not memory.session.known)
    assert (memory.session.store.read("k", "", TIMEOUT).first_end is None) == interrupted


# A command that may still arrive


@pytest.mark.parametrize("coroutine", [False, True])
def test_a_command_that_outlasts_the_wait_queues_nobody(
    memory: Memory, hold_up: HoldUp, coroutine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P6: A late command queues nobody, because its caller has asked again and was refused."""
    monkeypatch.setattr(worker_threads, "OVERTIME", 0.02)
    memory.session.commands.timeout = 0.1
    theirs = memory.other().acquire()
    gate = hold_up(memory.session.store, "apply")
    lock = memory.lock(wait=0.4)
    with pytest.raises(LockNotAcquired):
        asyncio.run(lock.aacquire()) if coroutine else lock.acquire()
    assert gate.there.is_set()
    gate.go.set()
    assert gate.over.wait(TIMEOUT)
    assert eventually(lambda: not memory.session.known)
    assert memory.server.documents["k"]["waiters"] == []
    theirs.release()


# A command of a hand-over that may still arrive


def test_a_hand_over_that_ends_while_it_is_asked_for(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F167: A reader during the end of a hand-over without an answer sees one state or the other."""
    grant = new_grant(memory.session, memory.lock(), object())
    waiting, grant.waiting.handover_reserved = grant.waiting, True

    class Reserved:
        @property
        def handover_reserved(self) -> bool:
            grant.waiting = waiting
            memory.session.queue.finish_handover(grant, None)
            return waiting.handover_reserved

    grant.waiting = Reserved()  # type: ignore[assignment]
    assert grant.in_doubt


def test_what_is_lost_while_a_hand_over_to_it_is_under_way(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F167: A grant lost during a hand-over is removed, so that a copy of the command that queued it cannot bring it
    back."""
    grant = grant_of(memory.lock().acquire())
    grant.waiting.handover_reserved = True
    memory.apply(remove=(grant.id,), force=True)
    removed: list[Grant] = []
    monkeypatch.setattr(memory.session.cleanup, "ensure_removed", lambda grant, **_: removed.append(grant))
    memory.session.ending.not_found(grant)
    assert removed == [grant]


@pytest.mark.parametrize("doubt", ["none", "a hand-over is under way", "no answer"])
@pytest.mark.parametrize("how", ["release", "downgrade", "park"])
def test_a_copy_of_the_command_does_not_bring_back(memory: Memory, how: str, doubt: str) -> None:
    """F174, F17, P6: A grant that was released, downgraded or parked leaves a tombstone in its document. Without doubt
    about its commands no tombstone is left, because each command would have to look at it."""
    terms = replace(LONG, owner="me")
    lock = memory.lock(terms=terms).acquire()
    grant = grant_of(lock)
    grant.outcome_unknown = doubt == "no answer"
    grant.waiting.handover_reserved = doubt == "a hand-over is under way"
    if how == "park":
        assert isinstance(park_held(lock, terms, {}), Parked)
    else:
        assert getattr(lock, how)() in (True, None)
    document = memory.server.documents["k"]
    assert len(document["tombstones"]) == (doubt != "none")
    if document["tombstones"]:
        memory.session.queue.finish_handover(grant, None)
        memory.session.store.apply("k", grant.acquisition.enter(False).step, TIMEOUT)
        document = memory.server.documents["k"]
    assert document["waiters"] == []
    assert grant.id not in [each["grant"] for each in document["holders"]]


def test_a_copy_of_the_command_of_a_process_that_is_gone(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F174, P6: The owner has resumed and released the lock. A delayed command of the process that is gone does not
    lock it again."""
    owned = replace(LONG, owner="me")
    gone = memory.other("k", terms=owned).acquire()
    monkeypatch.setattr(memory.session, "fate", lambda process: "gone")
    with memory.lock(terms=owned):
        assert not memory.server.documents["k"]["waiters"]
    memory.session.store.apply("k", grant_of(gone).acquisition.enter(False).step, TIMEOUT)
    assert memory.holders() == []


def test_what_its_thread_has_lost_while_it_asks_for_another(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the heartbeat removes a lost grant of the thread meanwhile, acquiring another lock raises no error."""
    first, second, owner = memory.lock("a").acquire(), memory.lock("b").acquire(), Grant.owner_token

    def owner_of(grant: Grant) -> Any:
        memory.session.registry.remove(grant_of(second))
        return owner(grant)

    monkeypatch.setattr(Grant, "owner_token", owner_of)
    with memory.lock("c") as third:
        assert third.held
    assert first.held


async def test_a_wrong_argument_releases_nothing(memory: Memory) -> None:
    """F168: release() refuses a wrong argument, as acquire() does."""
    async with memory.lock() as lock:
        with pytest.raises(TypeError):
            await lock.aacquire("5")  # type: ignore[arg-type]
        assert lock.held


# Reports of ends


@pytest.mark.parametrize("how", ["pause", "close"])
def test_a_grant_that_ends_before_it_is_reported(memory: Memory, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """F169: A grant that ends before its report is reported as acquired and as lost, and then forgotten. The process
    was stopped for longer than the lease, or the session was closed."""
    hold = memory.session.registry.add_held

    def late(grant: Grant) -> None:
        if how == "close":
            memory.session.close()
        else:
            memory.server._moved += 7_000
            memory.session.heartbeat.do_due()
        hold(grant)

    monkeypatch.setattr(memory.session.registry, "add_held", late)
    with pytest.raises(LockLost):
        memory.lock().acquire()
    assert memory.events == [("acquired", "k"), ("lost", "k")]
    assert not memory.session.registry.by_line
    assert not memory.session.registry._by_worker


def test_two_ends_at_once_are_one(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F169: The caller releases the lock while the session is closed. Only one of the two reports the end."""
    lock = memory.lock().acquire()
    others: list[threading.Thread] = []
    reporting = grant_of(lock).reporting

    class Slow:
        """Lets another end come in between the look and the note."""

        def __getattr__(self, name: str) -> Any:
            return getattr(reporting, name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "reported" and not others:
                others.append(memory.in_thread(functools.partial(memory.session.notifications.report_end, grant)))
                others[0].join(0.2)
            setattr(reporting, name, value)

    grant = grant_of(lock)
    grant.reporting = Slow()  # type: ignore[assignment]
    lock.release()
    others[0].join(TIMEOUT)
    assert memory.events == [("acquired", "k"), ("released", "k")]


@pytest.mark.parametrize("found_by", ["heartbeat", "caller"])
def test_a_loss_is_told_once(memory: Memory, monkeypatch: pytest.MonkeyPatch, found_by: str) -> None:
    """F169: A loss is reported once for each acquisition, even of several keys, whatever finds it first."""
    told: list[object] = []
    lock = memory.lock("a", "b", auto_renew=False, on_lost=told.append).acquire()
    if found_by == "heartbeat":
        memory.server.advance(7_000)
    else:
        monkeypatch.setattr(memory.session.heartbeat, "do_due", lambda: None)
        memory.server._moved += 7_000
        lock._own.abandon()
    assert eventually(lambda: told)
    assert not eventually(lambda: len(told) > 1, 0.1)
    assert {("lost", "a"), ("lost", "b")} <= set(memory.events)


def test_a_request_that_is_found_after_the_release(memory: Memory, hold_up: HoldUp) -> None:
    """F169: A release request is not reported for a released grant. The lock object holds another grant by then."""
    asked: list[object] = []
    lock = memory.lock(on_release_requested=asked.append).acquire()
    grant = grant_of(lock)
    memory.apply(request_release_of=(grant.id,), requested_by="me")
    gate = hold_up(memory.session.store, "renew", late=True)
    renewing = Call(memory.in_thread, memory.session.renewals.renew, [grant])
    assert gate.there.wait(TIMEOUT)
    lock.release()
    lock.acquire()
    gate.go.set()
    renewing.end()
    assert not eventually(lambda: asked, 0.1)
    assert "release_requested" not in dict(memory.events)


# A session that is closed


def test_a_release_that_finds_its_session_has_released(
    memory: Memory, hold_up: HoldUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F170: A session that is closed while the caller's release is on its way causes no report of a loss."""
    lock = memory.lock().acquire()
    gate = hold_up(memory.session.store, "release_uncontended")
    releasing = Call(memory.in_thread, lock.release)
    assert gate.there.wait(TIMEOUT)
    end = memory.session.ending.end

    def late(grant: Grant, how: EndReason, **options: Any) -> None:
        gate.go.set()
        releasing.end()
        end(grant, how, **options)

    monkeypatch.setattr(memory.session.ending, "end", late)
    memory.session.close()
    assert releasing.end() is True
    assert memory.events == [("acquired", "k"), ("released", "k")]


def test_a_release_in_a_session_that_is_being_closed(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F170: A release in a session that is being closed goes on without an heir, and does not replace the error of its
    block."""
    lock = memory.lock().acquire()
    waiting = Call(memory.in_thread, memory.lock(wait=None).acquire)
    assert eventually(lambda: memory.session.queue.waiting)
    reserve = memory.session.queue.reserve_handover

    def late(grant: Grant) -> Grant | None:
        heir = reserve(grant)
        memory.session.commands.close(TIMEOUT)
        return heir

    monkeypatch.setattr(memory.session.queue, "reserve_handover", late)
    assert lock.release()
    assert memory.entries() == []
    memory.session.close()
    waiting.end()


@pytest.mark.parametrize("errand", ["stuck", "failed"])
def test_a_session_that_is_closed_while_an_errand_is(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, errand: str
) -> None:
    """F173, P6: The locks are released within a time limit. An errand that has failed is not waited for."""
    stuck, release, close = threading.Event(), memory.session.store.release_uncontended, memory.session.store.close
    limits: list[float] = []
    left: list[Any] = []

    def slowly(keys: Any, grants: Any, timeout: float) -> set[str]:
        limits.append(timeout)
        time.sleep(0.05)
        return release(keys, grants, timeout)

    def look_and_close() -> None:
        left.extend(memory.entries("a") + memory.entries("b"))
        close()

    monkeypatch.setattr(memory.session.store, "release_uncontended", slowly)
    monkeypatch.setattr(memory.session.store, "close", look_and_close)
    kept = [memory.lock(key).acquire() for key in "ab"]
    memory.session.background.repeat((lambda: stuck.wait(5)) if errand == "stuck" else (lambda: 1 / 0), (0.0,))
    began = clock.now()
    memory.session.close(0.3 if errand == "stuck" else 5.0)
    stuck.set()
    assert left == []
    assert [limit >= SHORTEST_COMMAND for limit in limits] == [True]
    assert clock.now() - began < 2
    assert not any(lock.held for lock in kept)


def test_a_session_that_is_closed_without_any_time(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F173: A command without time left has a short limit instead of none."""
    limits: list[float] = []
    kept = memory.lock().acquire()

    def release_uncontended(_keys: object, _grants: object, timeout: float) -> set[str]:
        limits.append(timeout)
        return set()

    monkeypatch.setattr(memory.session.store, "release_uncontended", release_uncontended)
    memory.session.close(0.0)
    assert eventually(lambda: limits == [SHORTEST_COMMAND])
    assert not kept.held


def test_no_time_is_a_limit_for_the_driver(store: MongoStore) -> None:
    """F173: The driver would take 0 as no limit."""
    with store.bounded(0.0):
        assert _csot.get_deadline() < time.monotonic() + 1


# A release that nobody ends


@pytest.mark.long
def test_a_minimum_hold_lasts_where_signals_strike_the_release(memory: Memory) -> None:
    """F171: A minimum hold lasts, wherever the first signal strikes in the release, and every line after it."""
    terms = replace(LONG, min_hold=3_000)

    def release(key: str, first: int) -> Strikes:
        locks = [memory.lock(key, terms=terms).acquire()]
        with Strikes(first) as strikes:
            locks[0].release()
        locks.clear()
        gc.collect()
        return strikes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        events = release("k", 0).events
        keys = [f"k{first}" for first in range(1, events, 5)]
        for number, key in enumerate(keys):
            release(key, 1 + number * 5)
        assert eventually(lambda: not memory.session.known)
    assert [key for key in keys if not any("released" in holder for holder in memory.entries(key))] == []


def test_a_loop_that_is_closed_while_it_releases(memory: Memory, hold_up: HoldUp) -> None:
    """F171: The command of a closed loop failed, and no task can send another. The lock object lives on."""
    loop = asyncio.new_event_loop()
    lock = memory.lock()
    loop.run_until_complete(loop.create_task(lock.aacquire()))
    gate = hold_up(memory.session.store, "release_uncontended", error=LockBackendFailed("no answer", "k"))
    task = loop.create_task(lock.arelease())

    async def until_it_is_sent() -> None:
        await asyncio.to_thread(gate.there.wait, TIMEOUT)

    loop.run_until_complete(until_it_is_sent())
    loop.close()
    gate.go.set()
    memory.session.heartbeat.do_due()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert eventually(lambda: not (memory.entries() or memory.session.known))
        del task


# One grant, and several lock objects


def both(session: MemorySession, told: list[object]) -> tuple[MongoLock, MongoLock]:
    """Return two acquired lock objects of one thread that share a grant."""

    def make() -> MongoLock:
        return make_lock(session, terms=LONG, reentrant=True, on_lost=told.append, on_release_requested=told.append)

    return make().acquire(), make().acquire()


@pytest.mark.parametrize("event", ["lost", "requested"])
@pytest.mark.parametrize("left", [False, True])
def test_each_object_that_shares_a_grant_is_told(memory: Memory, event: str, left: bool) -> None:
    """F172: Each object is told as long as it shares the grant. An object that has left is not told."""
    told: list[object] = []
    outer, inner = both(memory.session, told)
    if left:
        assert outer.release()
    if event == "lost":
        memory.session.lose("k")
    else:
        memory.session.notifications.report_release_request(grant_of(inner), "me")
    expected = {inner} if left else {outer, inner}
    assert eventually(lambda: set(told) == expected)
    assert not eventually(lambda: len(told) > len(expected), 0.1)


def test_one_that_enters_after_the_request(memory: Memory) -> None:
    """A lock object that enters after a release request is told as well, and hears bells from then on."""
    told: list[object] = []
    outer = make_lock(memory.session, terms=LONG, reentrant=True).acquire()
    memory.session.notifications.report_release_request(grant_of(outer), "me")
    assert not memory.session.waits.is_waited()
    inner = make_lock(memory.session, terms=LONG, reentrant=True, on_release_requested=told.append).acquire()
    assert eventually(lambda: told == [inner])
    assert memory.session.waits.is_waited()


def test_the_last_object_that_lives_releases(memory: Memory) -> None:
    """F172: The last living object releases the shared grant, although the other object was dropped."""
    outer, inner = both(memory.session, [])
    del outer
    gc.collect()
    assert inner.release()
    assert memory.entries() == []


def test_a_grant_that_is_entered_again_while_it_is_released(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F172: A grant that is re-entered before the release is shared and stays held. After the release, the object gets
    another grant."""
    outer = memory.lock(reentrant=True).acquire()
    inner = memory.lock(reentrant=True)
    owner = Grant.owner_token
    released: list[object] = []

    def look(grant: Grant) -> Any:
        token = owner(grant)
        if not released:
            released.append(Call(memory.in_thread, outer.release).end())
        return token

    monkeypatch.setattr(Grant, "owner_token", look)
    inner.acquire()
    assert released == [True]
    assert inner.held


def test_a_lock_object_that_fails_leaves_a_shared_grant_alone(memory: Memory) -> None:
    """F172: An inner lock re-enters a key and does not get the next one. The outer lock keeps its grant."""
    theirs = memory.other("b").acquire()
    outer = memory.lock("a", reentrant=True).acquire()
    with pytest.raises(LockNotAcquired):
        memory.lock("a", "b", reentrant=True, wait=0).acquire()
    assert outer.held
    assert memory.holders("a") == [grant_of(outer).id]
    theirs.release()
    outer.release()
