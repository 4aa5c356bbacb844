"""Interrupted locks are released by a safety net that runs no Python (F65, F29).

A signal handler runs between any two lines of Python in the main thread, and may raise there. Code that releases an
interrupted lock may therefore be interrupted itself. `Strikes` does more than any storm of signals. It raises at one
chosen event in the engine's Python, and at every event after it. Only the interpreter's own work is left.
"""

import asyncio
import contextlib
import gc
import linecache
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

import pytest
from pymongo.collection import Collection

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.protocol import procedures
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.rule.replies import Reply
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockError, LockNotAcquired
from django_mongolock.signals import signal_sender
from tests.engine.conftest import Document, Here, make_lock
from tests.engine.waiters import Waiter
from tests.support.grants import grant_of
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

#: Much longer than the tests wait, so that nothing is free again because its lease has ended.
CALM = Terms(lease=600, margin=1, waiter_lease=600)


class Struck(KeyboardInterrupt):
    """The exception of the signal handler. (An event loop logs other exceptions, except SystemExit, and goes on.)"""


class SoftLimit(Exception):
    """The exception of Celery's handler. `except Exception` would catch it."""


class Strikes:
    """A tracer that raises Struck in this thread at an event (a call or a line in the package), and at all events after
    it.

    - first: the number of the event, 0 for never.
    - single: whether to raise only at that event.
    - only: the names of the functions to strike, or None for all.
    - with_: the exception to raise instead of Struck, not caught at the end.
    """

    def __init__(
        self, first: int, *, single: bool = False, only: set[str] | None = None, with_: type[BaseException] = Struck
    ) -> None:
        self.first, self.single, self.only, self.with_ = first, single, only, with_
        self.events = self.strikes = 0
        self._blows = False

    def __enter__(self) -> Self:
        self._before = sys.gettrace(), sys.getprofile(), sys.unraisablehook
        sys.unraisablehook = lambda _: None
        self._blows = True
        if not self.single:
            sys.setprofile(self._resume)
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        self._blows = False
        trace, profile, sys.unraisablehook = self._before
        sys.settrace(trace)
        sys.setprofile(profile)
        return isinstance(error, (Struck, LockError))

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._blows or not frame.f_globals.get("__name__", "").startswith("django_mongolock"):
            return None
        if self._can_be_struck(frame, event):
            self.events += 1
            if self.first and (self.events == self.first or (self.events > self.first and not self.single)):
                self.strikes += 1
                raise self.with_
        return self._trace

    def _can_be_struck(self, frame: FrameType, event: str) -> bool:
        """Return whether a signal could strike at this event.

        The line of a `with` statement comes again at its end, before the release, and is left out. The interpreter
        looks for signals only after calls and at jumps back. At that line it has called nothing.
        """
        if event not in ("call", "line") or (self.only is not None and frame.f_code.co_name not in self.only):
            return False
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return event == "call" or not line.lstrip().startswith(("with ", "async with "))

    def _resume(self, *_: object) -> None:
        """Restart the tracing. The interpreter ends it when a trace function raises, but a profile function goes on."""
        if self._blows and sys.gettrace() is None:
            sys.settrace(self._trace)


def count_events(run: Callable[[], object], **options: Any) -> int:
    """Return the number of events in *run* when nothing strikes."""
    with Strikes(0, **options) as quiet:
        run()
    return quiet.events


def known(session: Session) -> str:
    """Describe the grants that the session still knows. The text is empty if there are none."""
    found = (session.registry.grants, session.queue.waiting, session.background.pending)
    return "; ".join([f"{session.known} known", *(repr(things) for things in found)]) if session.known else ""


def held(collection: Collection[Document]) -> list[str]:
    """Return the keys with a holder or a waiter."""
    return [document["_id"] for document in collection.find() if document["holders"] or document["waiters"]]


def nothing_is_left(session: Session, collection: Collection[Document], but: int = 0) -> bool:
    """Return whether the session knows no grant any more, and no key is held or waited for, except *but* keys."""

    def settled() -> bool:
        gc.collect()
        return not known(session) and len(held(collection)) == but

    return eventually(settled, 30)


# A lock that is dropped


async def take_in_task(lock: MongoLock) -> None:
    await lock.aacquire()


TAKE: dict[str, Callable[[MongoLock], object]] = {
    "blocking": MongoLock.acquire,
    "async": lambda lock: asyncio.run(take_in_task(lock)),
}


@pytest.mark.long
@pytest.mark.parametrize("way", TAKE)
def test_no_line_under_a_lock_that_is_dropped(here: Here, way: str) -> None:
    """F65, F29: No Python that a signal could strike runs where a lock object dies unreleased, because Python swallows
    errors raised there. The heartbeat releases the lock."""

    def drop(key: str, strikes: Strikes) -> None:
        mine = [here.lock(key, terms=CALM)]
        TAKE[way](mine[0])
        with strikes:
            mine.clear()

    quiet = Strikes(0)
    drop("k", quiet)
    assert quiet.events == 0
    assert nothing_is_left(here.session, here.collection), f"{held(here.collection)} are held: {known(here.session)}"


@pytest.mark.long
def test_a_lock_that_its_task_has_returned(session: Session, collection: Collection[Document]) -> None:
    """P6: A task that returns its lock and has ended leaves nothing, without any signal. No reference to the task or
    the lock is left, and the session must keep neither alive."""
    asyncio.run(make_lock(session, terms=CALM).aacquire())
    assert nothing_is_left(session, collection), f"{held(collection)} are held: {known(session)}"


# A lock whose caller is struck


@pytest.mark.long
def test_what_strikes_reaches_the_caller(new_session: Callable[..., Session], collection: Collection[Document]) -> None:
    """F29: A task that takes and releases locks in a loop ends at its soft time limit. The limit may strike anywhere,
    also in a receiver or where a lock object dies."""
    session = new_session(observer=signal_sender("default"))

    def block(key: str) -> None:
        with make_lock(session, key, terms=CALM):
            pass

    block("warm")
    swallowed = []
    events = count_events(lambda: block("none"))
    for first in range(1, events + 1):
        try:
            with Strikes(first, single=True, with_=SoftLimit) as strikes:
                block(f"k{first}")
        except SoftLimit:
            continue
        if strikes.strikes:
            swallowed.append(first)
    assert swallowed == []
    assert events > 100
    assert nothing_is_left(session, collection), f"{held(collection)} are held: {known(session)}"


def strike_everywhere(run: Callable[[str], object], events: int, step: int = 1, **options: Any) -> int:
    """Run *run* with a key of its own, struck from each event on, until the errors and their frames are gone. Return
    the number of runs."""
    times = 0
    for first in range(1, events + 1, step):
        with Strikes(first, **options) as strikes, contextlib.suppress(Struck, LockError):
            run(f"k{first}")
        times += strikes.strikes > 0
    return times


#: Every event is struck alone. From every third event on, each following event is struck, too.
WAYS = [pytest.param({"single": True}, 1, id="once"), pytest.param({}, 3, id="from there on")]


@pytest.mark.long
@pytest.mark.parametrize(("options", "step"), WAYS)
@pytest.mark.parametrize("waits", [False, True])
def test_every_line_of_a_block(here: Here, waits: bool, options: dict[str, Any], step: int) -> None:
    """F65, F29: A free lock is taken and released, or is waited for in vain. If a signal strikes at any line of it, no
    lock and no place in a queue is left."""
    theirs = here.other("theirs", terms=CALM).acquire()

    def block(key: str) -> None:
        mine = here.lock("theirs" if waits else key, terms=CALM, wait=0.01 if waits else 10)
        with contextlib.suppress(LockNotAcquired), mine:
            pass

    block("warm")
    times = strike_everywhere(block, count_events(lambda: block("none")), step, **options)
    assert times > 100
    assert nothing_is_left(here.session, here.collection, but=1), (
        f"of {times}, {held(here.collection)} are held: {known(here.session)}"
    )
    block("usable")
    theirs.release()
    assert nothing_is_left(here.session, here.collection)


@pytest.mark.long
@pytest.mark.parametrize(("options", "step"), WAYS)
def test_every_line_of_a_hand_over(here: Here, options: dict[str, Any], step: int) -> None:
    """F65, F29, F162: A lock is released while another thread waits for it. If a signal strikes at any line of it, the
    thread gets the lock."""

    def give(key: str, strikes: Strikes) -> Waiter:
        mine = [make_lock(here.session, key, terms=CALM).acquire()]
        waiter = here.waiter(make_lock(here.session, key, terms=CALM, wait=60))
        assert eventually(lambda: any(grant.key == key for grant in list(here.session.queue.waiting.values())))
        with strikes, contextlib.suppress(Struck):
            mine[0].release()
        mine.clear()
        return waiter

    quiet = Strikes(0)
    give("none", quiet).end().let_go()
    waiters = [give(f"k{first}", Strikes(first, **options)) for first in range(1, quiet.events + 1, 2 * step)]
    stuck = [waiter for waiter in waiters if not eventually(lambda w=waiter: w.done, 10)]  # type: ignore[misc]
    for waiter in waiters:
        waiter.let_go()
    assert stuck == [], f"{len(stuck)} of {len(waiters)} wait for what nobody holds: {known(here.session)}"
    assert nothing_is_left(here.session, here.collection), f"{held(here.collection)} are held: {known(here.session)}"


@pytest.mark.long
def test_a_hand_over_whose_giver_was_struck(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """F65, F101: A struck giver's command takes effect after the waiter was woken and has looked. Nothing passes the
    answer on, and the waiter looks again."""
    here.session.waits.ensure_listening()
    assert eventually(lambda: here.session.waits.listener.listening)
    mine = make_lock(here.session, terms=CALM).acquire()
    waiter = here.waiter(make_lock(here.session, terms=CALM, wait=60))
    assert eventually(lambda: any(grant.lease.until > 0 for grant in here.session.queue.waiting.values()))
    looked, read = threading.Event(), here.session.store.read

    def look(*arguments: Any) -> Reply:
        reply = read(*arguments)
        looked.set()
        return reply

    monkeypatch.setattr(here.session.store, "read", look)
    given = here.session.queue.reserve_handover(grant_of(mine))
    assert given is not None
    given.waiting.wake()
    assert looked.wait(20)
    assert here.session.run(procedures.release("k", grant_of(mine).id, given.acquisition))[0]
    assert eventually(lambda: waiter.done, 20)
    waiter.end().let_go()
    assert waiter.error is None
