"""`leader` lets one of all processes lead until it cannot."""

# ruff: noqa: PT012 - what happens inside of a block is what is tested here

import asyncio
import concurrent.futures
import contextlib
import gc
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from django_mongolock import LockLost, LockNotAcquired, lock_info, mongo_lock
from django_mongolock.backends import get_backend
from django_mongolock.conf import get_settings
from django_mongolock.engine.rule.document import Step
from django_mongolock.engine.rule.replies import Bell
from django_mongolock.exceptions import LockMisused
from django_mongolock.leaders import AsyncTerm, BaseTerm, Term, leader
from django_mongolock.testing import override_locks
from tests.contract.conftest import Elsewhere, World
from tests.support.looking import new_key
from tests.support.waiting import eventually


@pytest.fixture
def key(world: World) -> str:
    return new_key("leader")


def ask(key: str) -> None:
    session, asked = get_backend().session(), grants(key)
    session.store.apply(key, Step(request_release_of=asked, requested_by="a test"), 10)
    session.store.ring([Bell(session.id, grant) for grant in asked])


def force(key: str) -> None:
    get_backend().session().store.apply(key, Step(remove=grants(key), force=True), 10)


def grants(key: str) -> tuple[str, ...]:
    return tuple(str(holder.grant) for holder in lock_info(key).holders)


def test_a_term(key: str, elsewhere: Elsewhere) -> None:
    """One process leads, and the other waits for its turn. The term is over when the block has been left."""
    with leader(key) as term:
        found = lock_info(key)
        assert (found.holders[0].label, found.since, found.tokens) == (
            "leader",
            term.lock.acquired_at,
            [term.fencing_token],
        )
        assert (term.held, term.ended.is_set()) == (True, False)
        with pytest.raises(LockNotAcquired):
            elsewhere(key, wait=0).acquire()
    assert (term.held, term.ended.is_set(), lock_info(key).state) == (False, True, "free")


def test_a_term_ends_while_its_lock_is_held() -> None:
    """The lease is not renewed. The work is told to stop when a third of the lease is left, so that no two are at
    work."""
    with override_locks() as locks, leader("late", lease=30) as term:
        assert term.left == pytest.approx(20, abs=1)
        with locks.unavailable():
            locks.advance(18)
            assert term.held
            locks.advance(4)
            assert eventually(term.ended.is_set, 2)
            assert term.lock.held


async def test_a_term_in_a_coroutine(key: str) -> None:
    """The event of the term belongs to asyncio. Other threads can set it, too."""
    async with leader(key) as term:
        assert (term.held, term.ended.is_set()) == (True, False)
        with pytest.raises(TimeoutError):  # which ends nothing
            await asyncio.wait_for(term.ended.wait(), 0.05)
        assert term.held
        threading.Thread(target=term.end).start()
        await asyncio.wait_for(term.ended.wait(), 10)
        assert (term.held, term.lock.held) == (False, True)
    async with leader(key) as term:
        pass
    assert (term.held, term.ended.is_set(), lock_info(key).state) == (False, True, "free")


#: Events that end a term at once. These are a request, a forced release found by the next renewal, and the end of the
#: work.
ENDS: dict[str, Callable[[str, BaseTerm], object]] = {
    "asked": lambda key, term: ask(key),
    "forced": lambda key, term: force(key),
    "ended": lambda key, term: term.end(),
}


@pytest.mark.parametrize("how", ENDS)
def test_an_end_in_order(key: str, how: str) -> None:
    """The work learns of the end while the lock is still held, unless it was taken away. `run` stands again. A request
    is heard at once, because the process listens. The next renewal would come ten seconds later."""
    terms: list[tuple[bool, int]] = []

    def work(term: Term) -> str:
        if terms:
            return "again"
        assert how != "asked" or eventually(lambda: get_backend().session().waits.listener.listening)
        ENDS[how](key, term)
        assert term.ended.wait(5)
        terms.append((term.lock.held, term.fencing_token))
        return "stopped"

    assert leader(key, lease=1 if how == "forced" else 30).run(work) == "again"
    ((held, token),) = terms
    assert held is (how != "forced")
    assert token < (lock_info(key).token or 0)


@pytest.mark.parametrize("how", ENDS)
async def test_a_coroutine_is_cancelled(key: str, how: str) -> None:
    """The coroutine is cancelled where it waits, in the same cases. The term has ended by then."""
    seen: list[bool] = []

    async def work(term: AsyncTerm) -> str:
        if seen:
            return "again"
        await asyncio.to_thread(ENDS[how], key, term)
        try:
            await asyncio.sleep(60)
        finally:
            seen.append(term.ended.is_set() and not term.held)
        raise AssertionError

    assert await leader(key, lease=1).arun(work) == "again"
    assert seen == [True]


def test_a_loss_is_reported_by_the_block(key: str) -> None:
    with pytest.raises(LockLost), leader(key, lease=1) as term:
        force(key)
        assert term.ended.wait(20)


def test_slow_callbacks_of_other_locks(key: str) -> None:
    """F112: The terms of others end soon, however many callbacks are at work."""
    done = threading.Event()
    others = [mongo_lock(new_key("other"), on_lost=lambda _: done.wait(20)).acquire() for _ in range(8)]
    try:
        with pytest.raises(LockLost), leader(key) as term:
            for lock in (*others, term.lock):
                force(lock.key)
                with contextlib.suppress(LockLost):
                    lock.extend()
            assert term.ended.wait(4)
    finally:
        done.set()


async def test_no_thread_of_the_executor(key: str) -> None:
    """F115: A term ends, and its lock goes, although the work has filled the default executor."""
    loop, done = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
    try:
        async with leader(key, lease=1) as term:
            filling = [loop.run_in_executor(None, done.wait, 20) for _ in range(3)]
            ask(key)
            await asyncio.wait_for(term.ended.wait(), 10)
        assert lock_info(key).state == "free"
        assert not any(each.done() for each in filling)
    finally:
        done.set()
    await asyncio.wait(filling)


def test_elected_from_the_queue(key: str, elsewhere: Elsewhere) -> None:
    """F102: A term begins with a whole lease, not with the rest of a place in the queue, and does not end at once."""
    remaining: list[float] = []

    def work(term: Term) -> str:
        remaining.append(term.lock.remaining)
        assert not term.ended.wait(0.2)
        return "done"

    thread = threading.Thread(target=partial(leader(key).run, work))
    with elsewhere(key, wait=0):
        thread.start()
        assert eventually(lambda: lock_info(key).waiting == 1)
        time.sleep(0.1)
    thread.join(30)
    assert len(remaining) == 1
    assert remaining[0] > get_settings().LEASE * 0.8


@pytest.mark.long
def test_what_cannot_end_in_order_is_released(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F103: The lock is released if the leader object is dropped, and if its term cannot be watched."""
    dropped = leader(key)
    dropped.__enter__()
    del dropped
    gc.collect()
    assert eventually(lambda: lock_info(key).state == "free")
    monkeypatch.setattr(BaseTerm, "watch", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        leader(key).__enter__()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(leader(key).__aenter__())
    assert lock_info(key).state == "free"


async def test_cancelled_while_it_ends(key: str) -> None:
    """F103, F114: The lock is released when the work has ended, however often it is cancelled, and never before."""
    states: list[str] = []
    began = asyncio.Event()

    async def work(term: AsyncTerm) -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.3)
            states.append(lock_info(key).state)

    task = asyncio.ensure_future(leader(key).arun(work))
    await began.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (states, lock_info(key).state) == (["held"], "free")


def test_errors(key: str) -> None:

    def work(term: BaseTerm) -> Any:
        raise LockLost("another")

    with pytest.raises(LockLost, match="another"):
        leader(key).run(work)
    with pytest.raises(LockLost, match="another"):
        asyncio.run(leader(key).arun(work))
    assert lock_info(key).state == "free"


@pytest.mark.parametrize("more", [[], [KeyError()]], ids=["nothing else", "another error"])
async def test_a_loss_in_a_group_of_tasks(key: str, more: list[Exception]) -> None:
    """A loss in a group of tasks counts as the loss itself, and the leader stands again. Another error in the group is
    raised."""
    terms: list[AsyncTerm] = []

    async def lose(error: Exception) -> None:
        raise error

    async def work(term: AsyncTerm) -> str:
        terms.append(term)
        if len(terms) == 1:
            async with asyncio.TaskGroup() as group:
                for error in (LockLost(term.key), *more):
                    group.create_task(lose(error))
        return "done"

    with pytest.raises(ExceptionGroup) if more else contextlib.nullcontext():
        assert await leader(key).arun(work) == "done"
    assert len(terms) == (1 if more else 2)


def test_mistakes(key: str) -> None:
    """Each error names its cure, and no command is sent."""

    async def work(term: Term) -> None: ...

    with pytest.raises(TypeError, match=r"there is arun\(\)"):
        leader(key).run(cast("Any", work))
    with pytest.raises(TypeError, match="coroutine function"):
        asyncio.run(leader(key).arun(None))  # type: ignore[arg-type]
    for unfinished in (lambda term: work(term), lambda term: (step for step in "12")):  # noqa: PLW0108
        with pytest.raises(TypeError, match="would run without the lock"):
            leader(new_key()).run(cast("Any", unfinished))

        async def awork(term: AsyncTerm, unfinished: Any = unfinished) -> Any:
            return unfinished(term)

        with pytest.raises(TypeError, match="would run without the lock"):
            asyncio.run(leader(new_key()).arun(awork))
    with pytest.raises(TypeError, match="mode"):
        leader(key, mode="shared")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="which nothing fills"):
        leader("a:{b}")
    assert lock_info(key).acquisitions == 0
    again = leader(key)
    with again, pytest.raises(LockMisused, match="one for each thread"), again:
        pass
    with pytest.raises(LockMisused, match="not in a term"):
        again.__exit__(None, None, None)


def test_a_bounded_wait(key: str, elsewhere: Elsewhere) -> None:
    with elsewhere(key), pytest.raises(LockNotAcquired), leader(key, wait=0):
        pass
