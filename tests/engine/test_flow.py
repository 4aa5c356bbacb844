"""F194: A helper in `sync_to_async` or `async_to_sync` shares the locks of its caller."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from django_mongolock import LockNotAcquired, mongo_lock
from django_mongolock.engine.session import flow
from django_mongolock.exceptions import LockReentry


def take(key: str, **options: Any) -> bool:
    """Take the lock in a block."""
    with mongo_lock(key, wait=0.2, **options) as lock:
        return lock.held


async def atake(key: str, **options: Any) -> bool:
    """Take the lock in a block of a coroutine."""
    async with mongo_lock(key, wait=0.2, **options) as lock:
        return lock.held


Hop = Callable[..., Awaitable[bool]]
#: The ways from a coroutine to a helper, all of which it waits for.
FROM_TASK: dict[str, Hop] = {
    "a thread": sync_to_async(take),
    "another thread": sync_to_async(take, thread_sensitive=False),
    "a thread and back": sync_to_async(async_to_sync(atake)),
    "a thread, back, and a thread": sync_to_async(async_to_sync(sync_to_async(take))),
}


@pytest.mark.parametrize("hop", FROM_TASK.values(), ids=FROM_TASK)
def test_from_a_coroutine(key: str, hop: Hop) -> None:
    """A helper of a coroutine gets LockReentry at once, and enters the lock if it is reentrant."""

    async def run() -> None:
        async with mongo_lock(key):
            with pytest.raises(LockReentry, match="sync_to_async"):
                await hop(key)
            assert await hop(key, reentrant=True)

    asyncio.run(run())


@pytest.mark.parametrize("helper", [atake, sync_to_async(take), sync_to_async(async_to_sync(atake))])
def test_from_a_thread(key: str, helper: Any) -> None:
    """A helper of a thread gets LockReentry in the same way."""
    with mongo_lock(key):
        with pytest.raises(LockReentry):
            async_to_sync(helper)(key)
        assert async_to_sync(helper)(key, reentrant=True)


def test_a_task_that_nobody_waits_for(key: str) -> None:
    """A task that inherits the context is another flow, and never enters the lock of its parent.

    The same holds in a thread of its own, and while its parent waits for a thread.
    """

    async def run() -> None:
        ended = threading.Event()
        async with mongo_lock(key):
            others = [
                asyncio.create_task(each(key, reentrant=True))
                for each in (atake, sync_to_async(take, thread_sensitive=False))
            ]
            waits = sync_to_async(ended.wait, thread_sensitive=False)
            parent = asyncio.create_task(waits(10))
            results = await asyncio.gather(*others, return_exceptions=True)
            ended.set()
            await parent
        assert [type(each) for each in results] == [LockNotAcquired] * 2

    asyncio.run(run())


def test_beside_a_call_of_its_parent(key: str) -> None:
    """The thread of a child task does not enter while the parent itself waits in sync_to_async."""

    async def run() -> None:
        async with mongo_lock(key):
            child = asyncio.create_task(sync_to_async(take, thread_sensitive=False)(key, reentrant=True))
            await sync_to_async(threading.Event().wait, thread_sensitive=False)(0.4)
            with pytest.raises(LockNotAcquired) as caught:
                await child
            assert not isinstance(caught.value, LockReentry)

    asyncio.run(run())


def test_a_helper_releases_for_its_caller(key: str) -> None:
    """A lock object that the helper acquires belongs to the flow, and the caller can release it."""

    async def run() -> None:
        lock = mongo_lock(key)
        await sync_to_async(lock.acquire)()
        assert lock.held
        with pytest.raises(LockNotAcquired):
            await asyncio.create_task(atake(key))
        assert await lock.arelease()

    asyncio.run(run())


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_frames_are_read(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """F239: A collection during that call deadlocks Python 3.11. Afterwards the collector is as it was."""
    seen = list[bool]()

    def frames() -> dict[int, FrameType]:
        seen.append(gc.isenabled())
        return {}

    monkeypatch.setattr(sys, "_current_frames", frames)
    monkeypatch.setattr(sys, "version_info", (3, 11))
    (gc.enable if enabled else gc.disable)()
    try:
        assert flow._frames() == {}
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        gc.enable()
