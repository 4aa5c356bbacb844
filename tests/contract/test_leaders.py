"""`leader`: of all processes one leads, until it cannot."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from django_mongolock import LockLost, LockMisused, LockNotAcquired, leader, lock_info, mongo_lock
from django_mongolock.backends.base import get_backend
from django_mongolock.conf import get_settings
from django_mongolock.engine.step import Step
from django_mongolock.leaders import Term
from django_mongolock.testing import override_locks
from tests.contract.conftest import Elsewhere, World
from tests.support.looking import new_key
from tests.support.waiting import eventually


@pytest.fixture
def key(world: World) -> str:
    return new_key("leader")


class Record:
    """What happened, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def note(self, event: str) -> Callable[[Term], None]:
        return lambda term: self.events.append(event)


def test_a_term(key: str, elsewhere: Elsewhere) -> None:
    """One leads; the other waits for its turn."""
    record = Record()
    with leader(key, on_start=record.note("start"), on_stop=record.note("stop")) as term:
        found = lock_info(key)
        assert (found.holders[0].label, found.since, found.tokens) == ("leader", term.since, [term.fencing_token])
        assert (term.held, term.sleep(0.01), record.events) == (True, True, ["start"])
        with pytest.raises(LockNotAcquired):
            elsewhere(key, wait=0).acquire()
    assert (term.held, term.sleep(5), record.events) == (False, False, ["start", "stop"])
    assert lock_info(key).state == "free"


async def test_a_term_in_a_coroutine(key: str) -> None:
    """The same."""
    record = Record()
    async with leader(key, on_start=record.note("start"), on_stop=record.note("stop")) as term:
        assert (await term.asleep(0.01), record.events) == (True, ["start"])
    assert (await term.asleep(5), record.events) == (False, ["start", "stop"])


def test_work_of_the_other_kind(key: str) -> None:
    """It is refused before anything is asked for."""

    async def work(term: Term) -> None: ...

    with pytest.raises(TypeError, match=r"there is arun\(\)"):
        leader(key).run(cast("Any", work))
    with pytest.raises(TypeError, match="coroutine function"):
        asyncio.run(leader(key).arun(None))  # type: ignore[arg-type]
    assert lock_info(key).acquisitions == 0


def test_a_request_to_release(key: str) -> None:
    """The leader steps down in order: the lock is still held when its work has to stop, and it stands again."""
    terms: list[tuple[bool, int]] = []

    def work(term: Term) -> str:
        if terms:
            return "done"
        apply(key, Step(request_release_of=grants(key), requested_by="a test"))
        assert not term.sleep(20)
        terms.append((term.lock.held, term.fencing_token))
        return "stopped"

    assert leader(key, lease=1).run(work) == "done"
    ((held, token),) = terms
    assert held
    assert token < (lock_info(key).token or 0)


def apply(key: str, step: Step) -> None:
    get_backend().session().store.apply(key, step, 10)


def grants(key: str) -> tuple[str, ...]:
    return tuple(str(holder.grant) for holder in lock_info(key).holders)


@pytest.mark.long
def test_a_lease_that_is_not_renewed() -> None:
    """The work stops while the lock is still held, before any other process may begin; then it stands again."""
    stopped: list[float] = []
    with override_locks() as locks:

        def work(term: Term) -> str:
            if stopped:
                return "again"
            with locks.unavailable():
                assert not term.sleep(20)
            return "stopped"

        key = new_key()
        assert leader(key, lease=3, on_stop=lambda term: stopped.append(term.lock.remaining)).run(work) == "again"
    assert 0.5 < stopped[0] <= 1


async def test_a_coroutine_is_cancelled() -> None:
    """Where it waits, in the same case."""
    began: list[int] = []
    with override_locks() as locks:

        async def work(term: Term) -> str:
            began.append(term.fencing_token)
            if len(began) == 2:
                return "again"
            with locks.unavailable():
                await asyncio.sleep(60)
            raise AssertionError

        assert await leader(new_key(), lease=1).arun(work) == "again"
    assert began[0] < began[1]


def test_a_forced_release(key: str) -> None:
    """The loss is reported by the block, and by `run` to nothing but the next election."""
    seen: list[bool] = []
    once = leader(key, lease=1)
    term = once.__enter__()
    apply(key, Step(remove=grants(key), force=True))
    assert not term.sleep(20)
    with pytest.raises(LockLost):
        once.__exit__(None, None, None)

    def work(term: Term) -> str:
        if seen:
            return "again"
        apply(key, Step(remove=grants(key), force=True))
        seen.append(term.sleep(20))
        return "stopped"

    assert leader(key, lease=1).run(work) == "again"
    assert seen == [False]


def test_elected_from_the_queue(key: str, elsewhere: Elsewhere) -> None:
    """F102: a term begins with a whole lease, not what was left of a place in the queue; it does not end at once."""
    record, remaining = Record(), []

    def work(term: Term) -> str:
        record.events.append("work")
        remaining.append(term.lock.remaining)
        assert term.sleep(0.3)
        return "done"

    def standing() -> None:
        assert leader(key, on_start=record.note("start"), on_stop=record.note("stop")).run(work) == "done"

    thread = threading.Thread(target=standing)
    with elsewhere(key, wait=0):
        thread.start()
        assert eventually(lambda: lock_info(key).waiting == 1)
        time.sleep(0.2)
    thread.join(30)
    assert record.events == ["start", "work", "stop"]
    assert remaining[0] > get_settings().LEASE * 0.8


@pytest.mark.long
def test_what_cannot_end_in_order_is_released(key: str) -> None:
    """F103: if on_stop fails, and if nobody has the leader any more."""

    def fail(term: Term) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), leader(key, on_stop=fail):
        pass
    assert lock_info(key).state == "free"

    async def in_a_coroutine() -> None:
        async with leader(key, on_stop=fail):
            pass

    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_a_coroutine())
    assert lock_info(key).state == "free"
    dropped = leader(key)
    dropped.__enter__()
    del dropped
    gc.collect()
    assert eventually(lambda: lock_info(key).state == "free")


async def test_cancelled_while_it_ends(key: str) -> None:
    """F103: on_stop goes on to its end; the lock is released after it, and never before the work has ended."""
    states: list[str] = []

    def slow(term: Term) -> None:
        time.sleep(0.3)
        states.append(lock_info(key).state)

    async def block() -> None:
        async with leader(key, on_stop=slow):
            pass

    async def work(term: Term) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.3)
            states.append(lock_info(key).state)

    for task in (asyncio.ensure_future(block()), asyncio.ensure_future(leader(key).arun(work))):
        await asyncio.sleep(0.15)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await task
    assert states == ["held", "held"]
    assert lock_info(key).state == "free"


async def test_waiting_for_the_end_ends_nothing(key: str) -> None:
    """Whoever gives up waiting for the end of a term has not ended it."""
    record = Record()
    async with leader(key, on_stop=record.note("stop")) as term:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(term.over(), 0.05)
        assert (await term.asleep(0.05), record.events) == (True, [])
        term.end()
        await asyncio.wait_for(term.over(), 10)
    assert record.events == ["stop"]


def test_over_before_it_began(key: str) -> None:
    """Neither on_start nor on_stop is called."""
    record = Record()
    standing = leader(key, on_start=record.note("start"), on_stop=record.note("stop"))
    new_term = standing._new_term

    def ended() -> Term:
        term = new_term()
        term.end()
        return term

    standing._new_term = ended  # type: ignore[method-assign]
    with standing as term:
        assert not term.held
    assert record.events == []


def test_errors(key: str) -> None:
    """What the work raises is raised, and so is the loss of another lock; no lock stays behind."""

    def work(term: Term) -> None:
        raise LockLost("another")

    with pytest.raises(LockLost, match="another"):
        leader(key).run(work)

    def fail(term: Term) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leader(key, on_start=fail).run(work)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(leader(key).arun(fail))  # type: ignore[arg-type]
    assert lock_info(key).state == "free"


def test_mistakes(key: str) -> None:
    """Each names its cure."""
    with pytest.raises(TypeError, match="mode"):
        leader(key, mode="shared")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes the term"):
        leader(key, on_stop="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="which nothing fills"):
        leader("a:{b}")
    again = leader(key)
    with again, pytest.raises(LockMisused, match="one for each thread"), again:
        pass
    with mongo_lock(key), pytest.raises(LockNotAcquired):
        in_thread(lambda: leader(key, wait=0).__enter__())


def in_thread(call: Callable[[], object]) -> None:
    """Raises its error."""
    errors: list[LockNotAcquired] = []

    def run() -> None:
        try:
            call()
        except LockNotAcquired as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise errors[0]
