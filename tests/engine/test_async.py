"""Coroutines that are cancelled at any moment, in one event loop after another, many at a time."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockNotAcquired
from tests.engine.conftest import Entries, Here, HoldUp, LockMaker, make_lock, nothing_left
from tests.support.waiting import eventually


async def cancelled(task: asyncio.Task[Any]) -> bool:
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


async def test_cancelled_in_flight(here: Here, hold_up: HoldUp, door: str) -> None:
    """F36: If a command is applied after the cancellation, the lock is taken back, and the next one gets it."""
    gate = hold_up(here.session.store, door)
    task = asyncio.create_task(make_lock(here.session).aacquire())
    assert await asyncio.to_thread(gate.there.wait, 10)
    assert await cancelled(task)
    gate.go.set()
    assert await asyncio.to_thread(gate.over.wait, 10)
    assert await asyncio.to_thread(nothing_left, here.session)
    assert here.entries() == []
    async with make_lock(here.session, wait=0):
        pass


async def test_cancelled_on_release(session: Session, entries: Entries, hold_up: HoldUp) -> None:
    """F36: A release goes on in the background when its task is cancelled."""
    lock = await make_lock(session).aacquire()
    gate = hold_up(session.store, "release_uncontended")
    task = asyncio.create_task(lock.arelease())
    assert await asyncio.to_thread(gate.there.wait, 10)
    assert await cancelled(task)
    gate.go.set()
    assert not lock.held
    assert await asyncio.to_thread(nothing_left, session)
    assert entries() == []


async def test_a_cancelled_acquisition_of_several_keys_leaves_none(here: Here) -> None:
    """F36: This is so even while earlier keys are being released."""
    async with here.other("c"):
        for delay in (0, 0.002, 0.004, 0.006, 0.03, 0.05, 0.051, 0.052, 0.053):
            task = asyncio.create_task(make_lock(here.session, "a", "b", "c", wait=0.05).aacquire())
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises((asyncio.CancelledError, LockNotAcquired)):
                await task
        assert await asyncio.to_thread(nothing_left, here.session)
        assert here.entries("a") == here.entries("b") == []


def test_two_event_loops_at_once(session: Session, in_thread: Callable[..., threading.Thread]) -> None:
    """F37: Two loops in two threads exclude one another by the same session."""
    inside, overlaps = [0], []

    async def work() -> None:
        for _ in range(5):
            async with make_lock(session):
                inside[0] += 1
                overlaps.append(inside[0])
                await asyncio.sleep(0.001)
                inside[0] -= 1

    threads = [in_thread(lambda: asyncio.run(work())) for _ in range(2)]
    for thread in threads:
        thread.join(20)
    assert overlaps == [1] * 10


def test_a_loop_that_ends_while_a_task_waits(session: Session, other: LockMaker, entries: Entries) -> None:
    """F37: asyncio.run cancels the remaining task, and its place in the queue is given up."""

    async def leave() -> asyncio.Task[Any]:
        task = asyncio.create_task(make_lock(session).aacquire())
        assert await asyncio.to_thread(eventually, lambda: len(entries()) == 2)
        return task

    with other():
        assert asyncio.run(leave()).cancelled()
        assert nothing_left(session)
        assert len(entries()) == 1


async def test_waiting_coroutines_hold_no_thread(session: Session, other: LockMaker) -> None:
    async with other():
        tasks = [asyncio.create_task(make_lock(session, wait=30).aacquire()) for _ in range(100)]
        await asyncio.sleep(0.3)
        assert len(session.threads) <= 16
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert await asyncio.to_thread(nothing_left, session)
