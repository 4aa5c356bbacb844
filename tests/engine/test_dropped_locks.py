"""A lock object that is dropped is collected at once, however it was acquired (F156).

No frame of a call that has ended, and no error that was overcome, leads to it. The garbage collector is off.
"""

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Terms
from django_mongolock.exceptions import LockBackendFailed, LockError, LockReentry
from tests.engine.conftest import Here, HoldUp
from tests.engine.twins import CALM
from tests.support.waiting import eventually
from verify.faults.documents import at_once

PERMITS = Terms(lease=60, margin=1, mode="semaphore", capacity=1)


class Taking:
    """A block that acquires locks in one of three ways, always awaited here.

    `refs` has weak references to the acquired locks.
    """

    def __init__(self, here: Here, fail: Callable[[], object], awaits: bool) -> None:
        self.here, self.fail, self.awaits = here, fail, awaits
        self.refs: list[weakref.ref[MongoLock]] = []

    async def call(self, lock: MongoLock, name: str) -> Any:
        return await getattr(lock, f"a{name}")() if self.awaits else getattr(lock, name)()

    async def acquire(self, *keys: str, **options: Any) -> MongoLock:
        lock: MongoLock = await self.call(self.here.lock(*keys, **{"terms": CALM, **options}), "acquire")
        self.refs.append(weakref.ref(lock))
        return lock

    def held_elsewhere(self, terms: Terms = CALM, seconds: float | None = 0.1) -> MongoLock:
        """Another session holds the key, for a moment."""
        theirs = self.here.other(terms=terms).acquire()
        if seconds is not None:
            threading.Timer(seconds, theirs.release).start()
        return theirs


async def free(mine: Taking) -> None:
    await mine.acquire()


async def waited(mine: Taking) -> None:
    mine.held_elsewhere()
    await mine.acquire()


async def short_form_missed(mine: Taking) -> None:
    await mine.call(await mine.acquire("another"), "release")
    mine.held_elsewhere()
    await mine.acquire()


async def short_form_missed_by_a_try(mine: Taking) -> None:
    await mine.call(await mine.acquire("another"), "release")
    theirs = mine.held_elsewhere(seconds=None)
    with contextlib.suppress(LockError):
        await mine.acquire(wait=0)
    theirs.release()
    await mine.acquire()


async def after_a_reentry(mine: Taking) -> None:
    lock = await mine.acquire()
    with pytest.raises(LockReentry):
        await mine.acquire()
    del lock


async def entered_again(mine: Taking) -> None:
    lock = await mine.acquire()
    await mine.acquire(reentrant=True)
    del lock


async def refused(mine: Taking) -> None:
    theirs = mine.held_elsewhere(seconds=None)
    for wait in (0, 0.05):
        with contextlib.suppress(LockError):
            await mine.acquire("a", "k", wait=wait)
    theirs.release()
    await mine.acquire("a", "k")


async def a_permit(mine: Taking) -> None:
    mine.held_elsewhere(PERMITS)
    await mine.acquire(terms=PERMITS)


async def downgraded(mine: Taking) -> None:
    await mine.call(await mine.acquire(), "downgrade")


async def extended(mine: Taking) -> None:
    await mine.call(await mine.acquire(), "extend")


async def the_connection_breaks(mine: Taking) -> None:
    mine.fail()
    await mine.acquire()


WAYS: list[Callable[[Taking], Coroutine[Any, Any, None]]] = [
    *(free, waited, short_form_missed, short_form_missed_by_a_try, after_a_reentry, entered_again, refused),
    *(a_permit, downgraded, extended, the_connection_breaks),
]


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every caller as having just come, however busy the machine is."""
    monkeypatch.setattr("django_mongolock.engine.session.commands.JUST_CAME", 60.0)


@pytest.fixture(autouse=True, scope="module")
def without_collector() -> Iterator[None]:
    """Turn the garbage collector off, so that objects in cycles stay."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def go(taking: Taking, way: Callable[[Taking], Coroutine[Any, Any, None]], where: str) -> None:
    """Acquire and drop locks."""
    if where == "event loop":
        asyncio.run(way(taking))
    elif where == "thread":
        taking.here.in_thread(lambda: at_once(way(taking))).join(20)
    else:
        at_once(way(taking))


@pytest.mark.parametrize("where", ["main thread", "thread", "event loop"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_dropped(here: Here, hold_up: HoldUp, way: Any, where: str) -> None:
    """F33, F156: A lock object is gone when its last reference is gone. The lock is released soon after."""

    def fail() -> None:
        hold_up(here.session.store, "apply").fail(LockBackendFailed("no answer"))

    taking = Taking(here, fail, where == "event loop")
    go(taking, way, where)
    refs = taking.refs
    assert refs
    assert eventually(lambda: all(ref() is None for ref in refs), 1), [gc.get_referrers(ref()) for ref in refs]
    assert eventually(lambda: not here.session.registry.grants)
