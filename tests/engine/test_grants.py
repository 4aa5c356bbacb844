"""What a lock object, and the grants behind it, promise in themselves: by a clock that the test moves."""

import asyncio
import gc
import os
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from pymongo.errors import AutoReconnect

from django_mongolock.engine import clock
from django_mongolock.engine.lock.detached import Belief, park
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.protocol.actions import ReleaseUncontended
from django_mongolock.engine.rule.deadlock import cycles
from django_mongolock.engine.rule.document import Step
from django_mongolock.engine.rule.replies import Reply
from django_mongolock.engine.session.errands import Errands
from django_mongolock.engine.session.worker_threads import WorkerThreads
from django_mongolock.engine.store.errors import translate
from django_mongolock.exceptions import LockBackendFailed, LockLost, LockMisused, LockNotAcquired
from tests.engine.conftest import make_lock
from tests.engine.memory import LONG, Memory
from tests.engine.twins import CALM
from tests.support.grants import grant_of, new_grant
from tests.support.lock_documents import document, entry, waiter
from tests.support.waiting import eventually


@pytest.mark.parametrize("downgraded", [False, True])
def test_it_is_held_no_longer_than_max_hold(memory: Memory, downgraded: bool) -> None:
    """P7: counted from the grant, and a downgrade begins nothing anew."""
    mine = memory.lock(terms=CALM, max_hold=70).acquire()
    memory.server.advance(50)
    if downgraded:
        mine.downgrade()
    memory.server.advance(15)
    assert mine.held
    memory.server.advance(6)
    assert mine.lost
    with pytest.raises(LockLost, match="max_hold"):
        mine.extend()


def test_what_is_not_held_is_not_downgraded(memory: Memory) -> None:
    """P7: nothing is said to be held that is not, whether it was released or lost."""
    mine = memory.lock()
    with pytest.raises(LockMisused, match="not acquired"):
        mine.downgrade()
    memory.apply(remove=(grant_of(mine.acquire()).id,), force=True)
    with pytest.raises(LockLost):
        mine.downgrade()


def test_an_extension_without_a_length_is_for_the_lease(memory: Memory) -> None:
    """P7: from now on, however long the last one was."""
    mine = memory.lock(terms=CALM, auto_renew=False).acquire()
    for lease, expected in ((None, 60), (100, 100), (10, 100), (None, 100)):
        memory.server.advance(5)
        mine.extend(lease)
        assert mine.remaining == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(("min_hold", "seconds", "kept"), [(0, 0, False), (30, 0, True), (30, 31, False)])
def test_a_release_leaves_what_is_left_of_the_minimum_hold(
    memory: Memory, min_hold: float, seconds: float, kept: bool
) -> None:
    """F64: nothing where there is none, or where it is over."""
    mine = memory.lock(terms=replace(LONG, min_hold=min_hold)).acquire()
    memory.server.advance(seconds)
    mine.release()
    assert ["released" in each for each in memory.entries()] == [True] * kept


def test_a_dropped_lock_object_is_released_at_once(memory: Memory) -> None:
    """F33: its end is reported by itself; nothing waits for the next look of the heartbeat."""
    memory.session.orphans.do_due = lambda _: None  # type: ignore[method-assign,assignment]
    mine = memory.lock().acquire()
    with pytest.warns(ResourceWarning, match="was not released"):  # noqa: PT031
        del mine
        gc.collect()
        assert eventually(lambda: memory.holders() == [])


def test_who_is_cancelled_in_line_has_nothing_removed(memory: Memory) -> None:
    """P8: it has sent no command, so none is needed to take it back."""
    mine = memory.lock().acquire()

    async def cancelled() -> None:
        tasks = [asyncio.create_task(memory.lock(wait=None).aacquire()) for _ in range(2)]
        assert await asyncio.to_thread(eventually, lambda: len(memory.session.queue.waiting) == 2)
        for task in reversed(tasks):
            task.cancel()
            await asyncio.wait([task])
            pending.append(len(memory.session.cleanup.pending))

    pending: list[int] = []
    asyncio.run(cancelled())
    assert pending[0] == 0
    mine.release()


def test_a_close_releases_free_locks_in_one_command(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F108, P8: only those that it has left are released one by one."""
    session = memory.new_session()
    mine = [make_lock(session, key, terms=LONG).acquire() for key in "abc"]
    apply, alone = session.store.apply, list[str]()

    def watched(key: str, step: Step, timeout: float) -> Reply:
        alone.append(key)
        return apply(key, step, timeout)

    monkeypatch.setattr(session.store, "apply", watched)
    session.close()
    assert alone == []
    assert not any(memory.holders(lock.keys[0]) for lock in mine)


@pytest.mark.parametrize("keys", ["a", "ab"])
def test_what_is_given_back_after_a_wait_has_a_moment(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    """P8: the first keys are released because the last one is held; where that gets no answer, in the background."""
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


def test_places_that_cannot_be_renewed_are_renewed_less_and_less_often(memory: Memory) -> None:
    """F49: those who wait are many, and the server is overloaded."""
    grant = new_grant(memory.session, memory.lock(terms=CALM), object())
    pauses = []
    for _ in range(6):
        grant.postpone(100.0)
        pauses.append(grant.lease.renew_at - 100.0)
    assert pauses[0] <= 1.0
    assert pauses[-1] > CALM.waiter_lease / 8


@pytest.mark.parametrize(("pid", "left", "believes"), [(0, 5, True), (1, 5, False), (0, -5, False)])
def test_a_belief_is_of_one_process_and_of_some_time(pid: int, left: float, believes: bool) -> None:
    """P1: a forked child has what its parent believes in, but holds nothing."""
    belief = Belief(clock.now() + left, pid=os.getpid() + pid)
    assert bool(belief) is believes
    assert (belief.remaining > 0) is believes


def test_a_parked_lock_has_an_owner(memory: Memory) -> None:
    """Nobody else could take it up again."""
    with pytest.raises(ValueError, match="needs an owner"):
        park(memory.session.store, "k", CALM, {})
    assert "k" not in memory.server.documents


@pytest.mark.parametrize(("servers", "passing"), [(None, True), (["tls"], False), (["tls", "other"], True)])
def test_trying_again_helps_unless_every_server_refuses_tls(servers: list[str] | None, passing: bool) -> None:
    """F74: one server with an old certificate is no reason to give up."""
    wrong = ssl.SSLError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    errors = {"tls": AutoReconnect(str(wrong)), "other": None}
    described = {name: SimpleNamespace(error=errors[name]) for name in servers or ()}
    topology = SimpleNamespace(server_descriptions=lambda: described)
    client: Any = None if servers is None else SimpleNamespace(topology_description=topology)
    error = translate(AutoReconnect(str(wrong)), 1.0, "k", client=client)
    assert "CERTIFICATE_VERIFY_FAILED" in str(error)
    assert error.passing is passing


def test_who_waits_for_a_permit_of_one_that_goes_on_is_in_no_deadlock() -> None:
    """F45: of two holders of a semaphore one waits for it in a circle, and the other will release its permit."""
    permit: dict[str, Any] = {"mode": "semaphore", "capacity": 2}
    holders = [entry(1, worker="stuck", **permit), entry(2, worker="goes on", **permit)]
    wants, other = waiter(3, worker="mine", **permit), entry(4, worker="mine")
    documents = [document("permits", holders, [wants]), document("other", [other], [waiter(5, worker="stuck")])]
    assert cycles(documents, datetime.now(UTC)) == []
    holders[1]["worker"] = "stuck"
    (cycle,) = cycles([document("permits", holders, [wants]), documents[1]], datetime.now(UTC))
    assert sorted(cycle.keys) == ["other", "permits"]


def test_a_flush_waits_until_each_errand_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer."""
    errands, gate, tried = Errands(WorkerThreads(2)), threading.Event(), list[int]()

    def call(number: int) -> Callable[[], bool]:
        def tries() -> bool:
            tried.append(number)
            return True

        return lambda: gate.wait(10) and tries()

    for number in range(2):
        errands.in_background(call(number), (0.0, 60.0))
    errands.flush(0.05)
    assert tried == []
    gate.set()
    began = clock.now()
    errands.flush(20)
    assert sorted(tried) == [0, 1]
    assert clock.now() - began < 15


def test_a_release_of_one_key_is_a_command_of_that_key() -> None:
    """F110: so a stuck key does not take all threads; one of several keys is of none."""
    assert ReleaseUncontended(("a",), ("g",)).key == "a"
    assert ReleaseUncontended(("a", "b"), ("g", "h")).key is None


def test_a_grant_names_the_line_that_has_acquired_it(memory: Memory) -> None:
    """The line of the program that acquired it is told in warnings, and not one of the library."""
    mine: MongoLock = memory.lock().acquire()
    assert grant_of(mine).acquired_from.startswith(__file__)
    mine.release()
