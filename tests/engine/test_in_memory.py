"""The promises of a process about its locks, on the rule in Python, without a server, by a clock that the test
moves."""

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Limits, Step, entry
from django_mongolock.engine.rule.options import LockOptions
from django_mongolock.engine.rule.replies import Found, Reply, read_found
from django_mongolock.engine.session.background import Task
from django_mongolock.engine.session.ending import REMOVAL_PAUSES
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockBackendFailed, LockCancelled, LockError, LockNotAcquired
from django_mongolock.testing.memory_server import MemorySession, MemoryStore
from tests.engine.conftest import make_lock
from tests.engine.memory import LONG, TIMEOUT, Memory
from tests.engine.twins import CALM
from tests.engine.waiters import Waiter
from tests.support.grants import grant_of
from tests.support.waiting import eventually


class Silent(MemoryStore):
    """A store that answers no step while it is *down*.

    - tries: the number of steps that came then.
    """

    down = False
    tries = 0

    def apply(self, key: str, step: Step, timeout: float) -> Reply:
        if self.down:
            self.tries += 1
            raise LockBackendFailed("no answer", key)
        return super().apply(key, step, timeout)


@pytest.mark.parametrize("keys", ["a", "ab"])
def test_what_is_given_back_after_a_wait_has_a_moment(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    """P8: If the last key is refused, one command of at most half a second releases the first keys. Without an answer,
    they are released in the background."""
    theirs = memory.other("last").acquire()
    limits: list[float] = []

    def stuck(keys: Sequence[str], grants: Sequence[str], timeout: float) -> set[str]:
        limits.append(timeout)
        raise LockBackendFailed("no answer")

    monkeypatch.setattr(memory.session.store, "release_uncontended", stuck)
    with pytest.raises(LockNotAcquired):
        memory.lock(*keys, "last", wait=0).acquire()
    assert len(limits) == 1
    assert limits[0] <= 0.5
    assert eventually(lambda: not any(memory.holders(key) for key in keys))
    theirs.release()


# Leases


@pytest.mark.parametrize("ask_for", [MongoLock.extend, lambda lock: make_lock(lock._session()).acquire(wait=0)])
def test_a_grant_with_another_token_is_lost(memory: Memory, ask_for: Callable[[MongoLock], object]) -> None:
    """F120: A grant with another token is lost, whether an extension or another attempt to acquire the key finds it."""
    mine = memory.lock(terms=CALM).acquire()
    grant = grant_of(mine)
    grant.outcome_unknown = True
    memory.apply(remove=(grant.id,), force=True)
    memory.apply(ask=grant.id, add=entry(grant.id, "s", CALM, {}))
    with contextlib.suppress(LockError):
        ask_for(mine)
    assert mine.lost


def test_nothing_else_renews_while_the_clock_is_moved(memory: Memory) -> None:
    """A clock that is moved to the end of the heartbeat's own renewal would make that renewal late."""
    memory.lock(terms=CALM).acquire()
    heartbeat = threading.Thread(target=memory.session.heartbeat.do_due, daemon=True)
    with memory.server.clock_mutex:
        heartbeat.start()
        heartbeat.join(0.2)
        assert heartbeat.is_alive()
    heartbeat.join(5)
    assert not heartbeat.is_alive()


def renewed_keys(session: MemorySession, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the list of the keys of each renewal from now on."""
    renew, made = session.store.renew, []

    def watched(keys: Sequence[str], step: Step, timeout: float) -> dict[str, Found]:
        made.append(list(keys))
        return renew(keys, step, timeout)

    monkeypatch.setattr(session.store, "renew", watched)
    return made


def test_a_lease_is_renewed_three_times_in_its_time(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6, P8: A lease is renewed by three commands in its time, as long as it is held. Polls send none."""
    mine = memory.lock(terms=CALM).acquire()
    made = renewed_keys(memory.session, monkeypatch)
    for _ in range(10):
        memory.server.advance(CALM.lease / 2)
        assert mine.held
    assert 3 * 5 - 1 <= len(made) <= 3 * 5 + 1


def test_a_renewal_of_a_waiter_is_worth_a_place(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1, F62: A renewal that was sent for a waiter is no lease. The lock is granted after the renewal and before its
    answer."""
    theirs = memory.other().acquire()
    waiter = memory.waiter(terms=replace(LONG, waiter_lease=60.0))
    assert eventually(lambda: memory.server.documents["k"]["waiters"])
    (grant,), renew = memory.session.queue.waiting.values(), memory.session.store.renew

    def late(*arguments: Any) -> dict[str, Found]:
        renew(*arguments)
        theirs.release()
        assert waiter.end().has_it
        return {"k": read_found(memory.server.documents["k"])}

    monkeypatch.setattr(memory.session.store, "renew", late)
    memory.session.renewals.renew([grant])
    assert 0 < waiter.lock.remaining <= 60
    waiter.let_go()


def test_a_lock_that_is_entered_again_names_the_line_that_has_acquired_it(memory: Memory) -> None:
    """The warning about an unreleased lock names that line."""
    with memory.lock(reentrant=True, terms=CALM) as mine:
        where = grant_of(mine).acquired_from
        assert where.startswith(__file__)
        with memory.lock(reentrant=True, terms=CALM) as again:
            assert grant_of(again) is grant_of(mine)
        assert grant_of(mine).acquired_from == where


# Lines


def test_a_waiter_that_goes_leaves_its_place_to_the_next_of_its_line(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5, F69: The next waiter of the process is queued in the document before the first has left it. No later waiter
    of another process can be served between them."""
    theirs = memory.other().acquire()
    waiters = [memory.waiter() for _ in range(2)]
    assert eventually(lambda: len(memory.session.queue.waiting) == 2 and memory.server.documents["k"]["waiters"])
    first, second = memory.session.queue.waiting
    apply = memory.session.store.apply
    before: list[str] = []

    def watched(key: str, step: Step, timeout: float) -> Reply:
        if first in step.remove:
            before.extend(waiter["grant"] for waiter in memory.server.documents[key]["waiters"])
        return apply(key, step, timeout)

    monkeypatch.setattr(memory.session.store, "apply", watched)
    memory.session.waits.cancel(memory.session.queue.waiting[first])
    assert eventually(lambda: before)
    theirs.release()
    for waiter in waiters:
        waiter.end().let_go()
    assert before == [first, second]


def test_a_lock_that_was_handed_over_leaves_nothing(memory: Memory) -> None:
    """F77: No tombstone is left, because each command got its answer. A refused try leaves none, either."""
    mine = memory.lock().acquire()
    memory.in_thread(lambda: memory.lock().try_acquire()).join(10)
    waiters = [memory.waiter() for _ in range(2)]
    assert eventually(lambda: len(memory.session.queue.waiting) == 2)
    mine.release()
    for waiter in waiters:
        waiter.let_go()
    assert eventually(lambda: memory.session.known == 0)
    document = memory.server.documents["k"]
    assert (document["holders"], document["waiters"], document["tombstones"]) == ([], [], [])


@pytest.mark.parametrize("queued", [False, True], ids=["asks", "in the queue"])
def test_a_wait_that_is_cancelled_during_an_outage(memory: Memory, queued: bool) -> None:
    """F176, F36: A wait that is cancelled during an outage ends soon, as cancelled. The waiter's place is given up in
    the background, as soon as the server answers."""
    session = Session(Silent(memory.server, Limits()), now=memory.server.now)
    store: Any = session.store
    theirs = memory.other().acquire()
    store.down = not queued
    waiter = Waiter(memory.in_thread, make_lock(session, terms=LONG, wait=None))
    assert eventually(lambda: store.tries or memory.server.documents["k"]["waiters"])
    time.sleep(0.05)  # until it sleeps
    store.down = True
    waiter.lock.cancel()
    assert isinstance(waiter.end(2).error, LockCancelled)
    assert len(memory.server.documents["k"]["waiters"]) == queued
    assert session.known
    store.down = False
    memory.server._moved += REMOVAL_PAUSES[-1]
    session.wake()
    assert eventually(lambda: not (session.known or memory.server.documents["k"]["waiters"]))
    session.close()
    theirs.release()


@pytest.mark.parametrize("looks", [False, True], ids=["sleeps", "looks"])
def test_the_first_who_was_overtaken_is_told_that_it_is_the_first_again(memory: Memory, looks: bool) -> None:
    """F175, F27: An earlier entry is put back before the first waiter, and dies. The waiter learns that it is the first
    again. The entry is a holder with a shorter lease than the one known before, or a waiter that returns after the last
    read."""
    theirs = memory.other().acquire()
    session = Session(MemoryStore(memory.server, Limits()), now=memory.server.now)  # a session that moves no clock
    waiter = Waiter(memory.in_thread, make_lock(session, terms=LONG, wait=None))
    assert eventually(lambda: memory.server.documents.get("k", {}).get("waiters"))
    (grant,) = session.queue.waiting.values()
    session.renewals.renew([grant])
    time.sleep(0.05)
    read, looked = session.store.read, list[Reply]()

    def look(*arguments: Any) -> Reply:
        looked.append(read(*arguments))
        return looked[-1]

    session.store.read = look  # type: ignore[method-assign, assignment]
    dead = Step(ask="dead", add=entry("dead", "dead", LONG, {}), waited=60_000)
    session.store.apply("k", dead, TIMEOUT)
    if looks:
        session.waits.wake_all()
        assert eventually(lambda: looked)
        session.store.apply("k", Step(remove=("dead",)), TIMEOUT)
    else:
        theirs.release()
        assert memory.holders() == ["dead"]
    number = len(looked)
    session.renewals.renew([grant])
    assert eventually(lambda: len(looked) > number)
    session.renewals.renew([grant])
    assert not eventually(lambda: len(looked) > number + 1, 0.1)
    assert looked[-1].place == 0
    session.close()
    waiter.let_go().end()


# Clean-up


@pytest.mark.parametrize("what", ["acquire", "release", "arelease"])
def test_what_is_struck_before_its_caller_knows_leaves_no_lock(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """F29, F64, F65: A signal handler raises when the lock is granted, before the caller has it, or before the release
    has begun. The lock is released, even if the lock object lives on. A lock that was held keeps its minimum hold."""
    run = memory.session.run

    def struck(steps: Any) -> None:
        if what == "acquire":
            run(steps)
        raise KeyboardInterrupt

    async def in_a_task() -> None:
        await mine.aacquire()
        monkeypatch.setattr(memory.session, "arun", struck)
        await mine.arelease()

    mine = memory.lock(terms=replace(LONG, min_hold=600.0))
    if what == "release":
        mine.acquire()
    if what != "arelease":
        monkeypatch.setattr(memory.session, "run", struck)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(in_a_task()) if what == "arelease" else getattr(mine, what)()
    assert eventually(lambda: ["released" in each for each in memory.entries()] == [True] * (what != "acquire"))
    assert not mine.held


def test_a_signal_in_a_release_ends_no_minimum_hold(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F29: A signal in a release keeps the minimum holds of all keys. The keys are released all the same."""

    def struck(*_: object) -> None:
        raise KeyboardInterrupt

    mine = memory.lock("k", "l", terms=replace(LONG, min_hold=600.0)).acquire()
    monkeypatch.setattr(memory.session, "_perform", struck)
    with pytest.raises(KeyboardInterrupt):
        mine.release()
    assert eventually(lambda: ["released" in each for key in "kl" for each in memory.entries(key)] == [True, True])


def test_the_heartbeat_finds_what_was_not_reported_to_it(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F33, F65: The heartbeat finds a grant of a dead lock object, although a signal struck before its weak reference
    was reported."""
    monkeypatch.setattr(memory.session.heartbeat, "adopt", lambda _: None)
    mine = memory.lock().acquire()
    with pytest.warns(ResourceWarning, match="'k', acquired at"):  # noqa: PT031
        del mine
        gc.collect()
        memory.session.orphans.do_due(memory.session.now())
    assert eventually(lambda: memory.holders() == [])


def test_a_lock_stays_with_the_session_that_has_acquired_it(memory: Memory) -> None:
    """P3: A lock stays with its session when its backend has opened another session since."""
    sessions = [memory.session, memory.new_session(), memory.new_session()]
    mine = MongoLock(lambda: sessions.pop(0), ("k",), LONG, LockOptions(), dict)
    with mine:
        assert mine._session() is memory.session
        assert len(sessions) == 2
    assert mine._session() is not memory.session


# Threads


def test_removals_that_come_while_others_are_looked_at(memory: Memory) -> None:
    """F18: The garbage collector lets another thread in at any allocation. The heartbeat copes with tasks that come
    meanwhile."""

    def never() -> Task:
        return Task(attempt=Mock(), pauses=(0.0,), give_up=float("inf"), due=float("inf"))

    pending = memory.session.background.pending
    pending.update({never(): None for _ in range(1_000)})

    def come(*_: object) -> None:
        pending[never()] = None

    before = gc.get_threshold()
    gc.callbacks.append(come)
    gc.set_threshold(1)
    try:
        memory.session.background.do_due(0)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(come)
    assert len(pending) > 1_000
    pending.clear()
