"""A lock object that is dropped is collected at once, however it was acquired (F156).

No frame of a call that has ended, and no error that was overcome, leads to it. The garbage collector is off.
"""

import asyncio
import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from django_mongolock.engine.document import Terms
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockError, LockReentry
from tests.engine.conftest import CALM, LockMaker
from tests.support.waiting import eventually

PERMITS = Terms(lease=60, margin=1, mode="semaphore", capacity=1)

Refs = list[weakref.ref[Any]]


class Taking:
    """What makes locks that are acquired in one of three ways, always awaited here."""

    def __init__(self, make: LockMaker, fail: Callable[[], object], awaits: bool) -> None:
        self.make, self.fail, self.awaits = make, fail, awaits

    async def acquire(self, *keys: str, **options: Any) -> MongoLock:
        lock = self.make(*keys, **{"terms": CALM, **options})
        return await lock.aacquire() if self.awaits else lock.acquire()

    async def release(self, lock: MongoLock) -> None:
        if self.awaits:
            await lock.arelease()
        else:
            lock.release()


#: Acquires locks, and drops them. Gets what makes locks of this session and of another one, and what has something done
#: a moment later. Returns references to the locks.
Way = Callable[[Taking, LockMaker, Callable[[Callable[[], object]], None]], Coroutine[Any, Any, Refs]]


async def free(mine: Taking, other: LockMaker, soon: Any) -> Refs:
    return [weakref.ref(await mine.acquire())]


async def waited(mine: Taking, other: LockMaker, soon: Any) -> Refs:
    soon(other(terms=CALM).acquire().release)
    return [weakref.ref(await mine.acquire())]


async def short_form_missed(mine: Taking, other: LockMaker, soon: Any) -> Refs:
    lock = await mine.acquire("another")
    await mine.release(lock)
    soon(other(terms=CALM).acquire().release)
    return [weakref.ref(lock), weakref.ref(await mine.acquire())]


async def short_form_missed_by_a_try(mine: Taking, other: LockMaker, soon: Any) -> Refs:
    await mine.release(await mine.acquire("another"))
    theirs = other(terms=CALM).acquire()
    with contextlib.suppress(LockError):
        await mine.acquire(wait=0)
    theirs.release()
    return [weakref.ref(await mine.acquire())]


async def after_a_reentry(mine: Taking, other: LockMaker, soon: Any) -> Refs:
    lock = await mine.acquire()
    with pytest.raises(LockReentry):
        await mine.acquire()
    return [weakref.ref(lock)]


async def entered_again(mine: Taking, other: LockMaker, soon: Any) -> Refs:
    return [weakref.ref(lock) for lock in (await mine.acquire(), await mine.acquire(reentrant=True))]


async def refused(mine: Taking, other: LockMaker, soon: Any) -> Refs:
    theirs = other(terms=CALM).acquire()
    with contextlib.suppress(LockError):
        await mine.acquire("a", "k", wait=0)
    with contextlib.suppress(LockError):
        await mine.acquire("a", "k", wait=0.2)
    theirs.release()
    return [weakref.ref(await mine.acquire("a", "k"))]


async def a_permit(mine: Taking, other: LockMaker, soon: Any) -> Refs:
    soon(other(terms=PERMITS).acquire().release)
    return [weakref.ref(await mine.acquire(terms=PERMITS))]


async def the_connection_breaks(mine: Taking, other: LockMaker, soon: Any) -> Refs:
    mine.fail()
    return [weakref.ref(await mine.acquire())]


async def downgraded(mine: Taking, other: LockMaker, soon: Any) -> Refs:
    lock = await mine.acquire()
    if mine.awaits:
        await lock.adowngrade()
    else:
        lock.downgrade()
    return [weakref.ref(lock)]


async def extended(mine: Taking, other: LockMaker, soon: Any) -> Refs:
    lock = await mine.acquire()
    if mine.awaits:
        await lock.aextend()
    else:
        lock.extend()
    return [weakref.ref(lock)]


WAYS = (
    free,
    waited,
    short_form_missed,
    short_form_missed_by_a_try,
    after_a_reentry,
    entered_again,
    refused,
    a_permit,
    downgraded,
    extended,
)


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """What only the garbage collector would find stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def at_once(steps: Coroutine[Any, Any, Refs]) -> Refs:
    """Run what never really waits, as no event loop is running."""
    try:
        steps.send(None)
    except StopIteration as end:
        found: Refs = end.value
        return found
    raise AssertionError("it waited")


@pytest.fixture
def take(
    lock: LockMaker,
    other: LockMaker,
    failpoint: Callable[..., None],
    in_thread: Callable[..., threading.Thread],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Way, str], Refs]:
    """Goes one of the ways, in the main thread, another thread, or an event loop."""
    monkeypatch.setattr("django_mongolock.engine.session.commands.JUST_CAME", 60.0)  # however busy the machine is
    fail = functools.partial(failpoint, ["findAndModify", "update"], times=2, closeConnection=True)
    timers: list[threading.Timer] = []
    found: list[Refs] = []

    def soon(call: Callable[[], object]) -> None:
        timers.append(threading.Timer(0.1, call))
        timers[-1].start()

    def take(way: Way, where: str) -> Refs:
        if where == "event loop":
            found.append(asyncio.run(way(Taking(lock, fail, True), other, soon)))
        elif where == "thread":
            in_thread(lambda: found.append(at_once(way(Taking(lock, fail, False), other, soon)))).join(20)
        else:
            found.append(at_once(way(Taking(lock, fail, False), other, soon)))
        for timer in timers:
            timer.join()
        return found.pop()

    return take


@pytest.mark.parametrize("where", ["main thread", "thread", "event loop"])
@pytest.mark.parametrize(
    "way", [*WAYS, pytest.param(the_connection_breaks, marks=pytest.mark.long)], ids=lambda way: way.__name__
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_dropped(session: Session, take: Callable[[Way, str], Refs], way: Way, where: str) -> None:
    """F33, F156: it is gone when its last reference is, and the lock is released soon after."""
    refs = take(way, where)
    assert eventually(lambda: all(ref() is None for ref in refs), 1), [gc.get_referrers(ref()) for ref in refs]
    assert eventually(lambda: not session.registry.grants)
