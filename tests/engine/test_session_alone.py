"""The promises of the parts of a session by themselves, without a server, and mostly without a thread."""

import _thread
import asyncio
import itertools
import logging
import os
import signal
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from django_mongolock.engine.protocol.actions import (
    FOREVER,
    Acquisition,
    Action,
    Answer,
    Apply,
    FindDeadlock,
    Granted,
    Pause,
    QueueNext,
    Read,
    ReleaseUncontended,
)
from django_mongolock.engine.rule.document import Limits, Step, Terms
from django_mongolock.engine.rule.replies import Bell, Former, News, Reply
from django_mongolock.engine.session import wakeups
from django_mongolock.engine.session.background import SHORTEST_COMMAND
from django_mongolock.engine.session.commands import (
    GIVE_BACK_LIMIT,
    JUST_CAME,
    Commands,
    _priority,
    _question,
)
from django_mongolock.engine.session.ending import EndReason
from django_mongolock.engine.session.grant import CLOSED, Grant, State, User
from django_mongolock.engine.session.lanes import RELEASE, REQUEST, SLOW, Lanes
from django_mongolock.engine.session.notifications import Notifications
from django_mongolock.engine.session.releases import NO_GUESS_FOR
from django_mongolock.engine.session.session import PerProcess, Sessions
from django_mongolock.engine.session.waits import (
    CANCELLED_WITHIN,
    LONGEST_HANDOVER,
    LONGEST_POLL,
    LOOK_FIRST,
    Listener,
    Waits,
)
from django_mongolock.engine.session.wakeups import Wakeup
from django_mongolock.engine.session.worker_threads import LEAST, OVERTIME, Awaited, Blocking, Call, WorkerThreads
from django_mongolock.exceptions import LockBackendFailed, LockMisused
from django_mongolock.testing.memory_server import MemoryServer, MemorySession, MemoryStore
from tests.engine.memory import LONG, Memory
from tests.support.grants import new_grant

TERMS = Terms(lease=60, margin=1, waiter_lease=6)
NOW = 100.0


def grant(name: str = "g", **how: Any) -> Grant:
    """Return a grant that is asked for at `NOW`, the current time."""
    return Grant(Acquisition("k", name, TERMS), worker=None, auto_renew=True, now=lambda: NOW, **how)


def held(name: str = "g", **how: Any) -> Grant:
    """Return a grant that is held, and was reported as held."""
    one = grant(name, **how)
    one.mark_held(Granted(7, None, NOW + 50, NOW))  # type: ignore[arg-type]
    one.reporting.reported = "acquired"
    return one


# In which order calls are made


def call(key: str | None = None, priority: int = 0, same: object = None, since: float = 0.0) -> Any:
    one = Call(lambda left: None, priority=priority, key=key, same=same)
    one.since = since
    return one


def enter(lanes: Lanes[Any], *calls: Any) -> None:
    for each in calls:
        each.lane = lanes.waiting[each.priority]
        each.lane[each] = None


@pytest.mark.parametrize(
    ("running", "first", "second"),
    [
        ((), "begun", "begun"),
        ((9.875, 9.9375), "begun", 0.375),
        ((9.5, 9.5), "begun", "begun"),  # just slow
        ((1.0, 1.0, 9.75, 9.875), "begun", 0.25),
        ((1.0,) * 4, "begun", None),
        ((9.75,) * 4, 0.25, 0.25),
        ((1.0,) * 8, None, None),
        ((1.0,) * 7 + (9.75,), 0.25, 0.25),
    ],
)
def test_whether_a_call_may_begin(running: tuple[float, ...], first: object, second: object) -> None:
    """F110: The numbers of quick calls and of slow calls are limited. Each lane has its share. If no call may begin,
    the answer says when the first running call becomes slow."""
    for priority, expected in enumerate((first, second)):
        lanes: Lanes[Any] = Lanes(4, 8, (1.0, 0.5))
        lanes.running = {call(): began for began in running}
        enter(lanes, one := call(priority=priority))
        entry, pause = lanes.begin_next(10.0)
        assert lanes.slow == sum(began <= 10.0 - SLOW for began in running)
        assert (entry, pause) == ((one, None) if expected == "begun" else (None, expected))
        assert (lanes.running.get(one) == 10.0) == (expected == "begun")
    assert [Lanes(1, 1, (0.1,))._limits, Lanes(8, 16, (0.5,))._limits] == [[(1, 1)], [(4, 8)]]


def test_two_calls_of_a_key_and_those_behind_them() -> None:
    """F110: Calls wait for their key, the more urgent ones first. Nothing is kept of a key without calls."""
    lanes: Lanes[Any] = Lanes(8, 8, (1, 1))
    calls = [call("k"), call("k"), call("k", 1), call("k"), call("k"), call("other"), call()]
    taken_back = calls[4]
    enter(lanes, *calls)
    taken_back.decided.acquire()
    begun = [lanes.begin_next(1.0)[0] for _ in range(5)]
    assert begun == [calls[0], calls[1], calls[5], calls[6], None]
    assert lanes.under_way == {"k": 2, "other": 1}
    assert [list(lane) for lane in lanes.waiting_for_key["k"]] == [[calls[3]], [calls[2]]]
    assert calls[3].lane is lanes.waiting_for_key["k"][0]
    assert (lanes.is_admitted("k"), lanes.under_way["k"], lanes.is_admitted(None)) == (False, 2, True)
    lanes.end(calls[5], None)
    lanes.end(calls[6], None)
    assert lanes.under_way == {"k": 2}
    enter(lanes, later := call("z"))
    assert lanes.end(calls[0], None) == []
    assert list(lanes.waiting[0]) == [calls[3], later]
    assert calls[3] not in calls[3].lane  # taken back it stays in its place, so that the next of its key follows
    assert lanes.begin_next(2.0)[0] is calls[3]
    assert lanes.free_place("k")
    assert (lanes.begin_next(2.0)[0], lanes.begin_next(2.0)[0]) == (later, calls[2])
    assert (lanes.free_place("k"), lanes.free_place("k")) == (False, False)
    assert (lanes.under_way, lanes.waiting_for_key, lanes.free_place(None)) == ({"z": 1}, {}, False)


@pytest.mark.parametrize(
    ("asks", "result", "shared"),
    [
        ("x", Answer(Reply(), 0.0, 0.0), ["now", "before"]),
        ("x", Answer(Reply(held=True), 0.0, 0.0), []),
        ("x", None, []),
        (None, Answer(Reply(), 0.0, 0.0), []),
    ],
)
def test_with_whom_a_result_is_shared(asks: object, result: object, shared: list[str]) -> None:
    """F110: A refusal is shared with callers that asked the same of the same key before the call began."""
    lanes: Lanes[Any] = Lanes(8, 8, (1, 1))
    two = [call("k", same=asks) for _ in range(2)]
    others = {
        "now": call("k", same="x", since=5.0),
        "late": call("k", same="x", since=5.1),
        "another": call("k", same="y", since=1.0),
        "none": call("k", since=1.0),
        "before": call("k", 1, same="x", since=1.0),
    }
    enter(lanes, *two, *others.values())
    assert [lanes.begin_next(5.0)[0] for _ in range(3)] == [*two, None]
    assert lanes.end(two[0], result) == [others[name] for name in shared]
    left = [each for lane in (*lanes.waiting_for_key["k"], lanes.waiting[0]) for each in lane]
    assert {name for name in others if others[name] not in left} == set(shared)


# One call


@pytest.mark.parametrize(
    ("timeout", "after", "left"),
    [
        (16.0, 0.0, 16.0),
        (16.0, 15.0, 1.0),
        (20.0, 19.0, None),
        (20.0, 25.0, None),
        (0.0, 0.0, None),
        (None, 9.0, FOREVER),
    ],
)
def test_when_a_call_comes_too_late(
    timeout: float | None, after: float, left: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F67: A call with too little of its timeout left is left to its owner to withdraw."""
    moment, given = [NOW], list[Any]()
    note: Any = given.append
    monkeypatch.setattr(time, "monotonic", lambda: moment[0])
    assert LEAST * 20 == 1.0
    for known in ({}, {"known": "x"}):
        moment[0] = NOW
        one = Call(lambda left, **known: note((left, known)) or "result", timeout, priority=0)
        moment[0] += after
        assert one.begin(**known) == (None if left is None else "result")
        assert one.decided.locked() == (left is not None)
        assert one.begin() is None
        assert given == ([] if left is None else [(left, known)])
        given.clear()


def test_a_call_is_taken_back_once() -> None:
    """F36: A call that has not begun is withdrawn, and its owner is told. A call that has begun is not."""
    told, lane = list[str](), OrderedDict[Any, None]()
    for begun in (False, True):
        one = Call(lambda left: None, priority=0, on_withdrawn=lambda: told.append("told"))
        one.lane, lane[one] = lane, None
        if begun:
            one.begin()
        assert (one.withdraw(), one.withdraw(), one.take_back()) == (not begun, False, False)
        assert (told, one in lane) == (["told"], begun)
        lane.clear()
    assert Call(lambda left: None, priority=0).withdraw()
    assert Call(lambda left: None, priority=0).take_back()


def test_what_a_blocking_call_brings() -> None:
    """F67: A call brings its result or its error. After its time, a call is not begun. A call that has begun gets a
    moment more."""
    one: Blocking[Any] = Blocking(lambda left: 5, 3.0, priority=0)
    one.begin()
    assert one.wait(0.0) == 5
    failing: Blocking[Any] = Blocking(lambda left: 1 / 0, 3.0, priority=0)
    failing.begin()
    with pytest.raises(ZeroDivisionError):
        failing.wait(None)
    for timeout, begun, times, told in (
        *((0.0, False, [0.0], "was not sent within"), (-1.0, False, [0.0], "was not sent within")),
        *((3.0, True, [3.0, OVERTIME], "was sent, but did not end"), (None, True, [-1, OVERTIME], "within inf")),
    ):
        stuck, waited = Blocking[Any](lambda left: 5, timeout, priority=0), list[float]()
        if begun:
            stuck.decided.acquire()
        stuck.ended = SimpleNamespace(acquire=lambda timeout, note=waited.append: note(timeout))  # type: ignore[assignment]
        with pytest.raises(LockBackendFailed, match=told):
            stuck.wait(timeout)
        assert waited == times


@pytest.mark.parametrize(("begun", "done"), [(False, False), (True, False), (True, True)])
async def test_what_an_awaited_call_brings(begun: bool, done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """F67: An awaited call that is late is not begun, or gets a moment more."""
    later, one = list[Any](), Awaited[Any](lambda left: 5, 3.0, priority=0)
    monkeypatch.setattr(one, "loop", SimpleNamespace(call_later=lambda *given: later.append(given)))
    if begun:
        one.decided.acquire()
    if done:
        one.future.set_result(5)
    one.expire(3.0)
    assert [given[0] for given in later] == [OVERTIME] * (begun and not done)
    for _, end, *given in later * 2:
        end(*given)
    if done:
        assert await one.future == 5
    else:
        with pytest.raises(LockBackendFailed, match="did not end within 3.0 s" if begun else "was not sent within 3.0"):
            await one.future


# The way of a call to a thread


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the work of the threads that were started. The threads do not run."""
    begun = list[Any]()
    monkeypatch.setattr(_thread, "start_new_thread", lambda work, arguments: begun.append(work))
    return begun


@pytest.mark.parametrize(
    ("idle", "waits", "there", "slow", "starts"),
    [
        (0, 0, 0, 0, False),
        (0, 1, 0, 0, True),
        (1, 1, 1, 0, False),
        (1, 2, 2, 0, True),
        (0, 1, 2, 0, True),  # one more than make calls
        (0, 1, 3, 0, False),
        (0, 1, 3, 1, True),
        (0, 1, 5, 4, False),
    ],
)
def test_when_a_thread_is_started(  # noqa: PLR0917
    idle: int, waits: int, there: int, slow: int, starts: bool, started: list[Any]
) -> None:
    """F110: A thread is started while fewer threads are idle than calls wait, up to the bounds."""
    threads = WorkerThreads(2, 5, shares=(1, 1))
    threads._idle, threads._unstarted, threads._lanes.slow = [None] * idle, [None] * (5 - there), slow
    enter(threads._lanes, *(call(priority=number % 2) for number in range(waits)))
    threads._start_if_needed()
    assert started == [threads._work] * starts
    assert len(threads) == there + starts


@pytest.mark.parametrize(("error", "passes"), [(RuntimeError, False), (KeyboardInterrupt, True)])
def test_a_thread_that_cannot_be_started(error: type[BaseException], passes: bool, monkeypatch: Any) -> None:
    """F144: A thread that cannot be started may be tried again. An error of a signal handler reaches the caller."""

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    threads = WorkerThreads(2)
    enter(threads._lanes, call())
    try:
        threads._start_if_needed()
    except KeyboardInterrupt:
        assert passes
    else:
        assert not passes
    assert len(threads) == 0


@pytest.mark.parametrize(("watched", "idle", "woken"), [(1, 0, True), (1, 1, False), (0, 0, False), (0, 1, False)])
def test_who_is_woken_for_a_call(watched: int, idle: int, woken: bool, started: list[Any]) -> None:
    """F159: A call wakes an idle thread. Without one, it wakes the thread that watches the running calls."""
    threads = WorkerThreads(2)
    threads._watched, threads._idle = bool(watched), [None] * idle
    for _ in range(2):  # woken twice is no error
        threads._wake_one()
    assert threads._alarm.locked() != woken
    assert [threads._tickets.get(block=False) for _ in range(2)] == [True, True]


@pytest.mark.parametrize(
    ("watched", "pause", "returned"), [(False, None, None), (False, 0.3, 0.3), (True, 0.3, None), (True, None, None)]
)
@pytest.mark.parametrize("waits", [(0, 0), (1, 0), (0, 1)])
def test_a_thread_that_serves(
    watched: bool, pause: float | None, returned: float | None, waits: tuple[int, ...], started: list[Any]
) -> None:
    """F159: A serving thread makes the calls there are. If calls wait and no thread watches, another thread is started
    to watch. If there are no calls and no thread watches, the serving thread watches."""
    threads, made = WorkerThreads(4, shares=(1, 1)), list[object]()
    one = Call(lambda left: made.append("made"), priority=0)
    follow: Any = iter([(one, None), (None, pause)])
    threads._watched = watched
    threads._lanes.begin_next = lambda now: next(follow)  # type: ignore[method-assign]
    threads._lanes.running[one] = 0.0
    enter(threads._lanes, *(call(priority=priority) for priority, count in enumerate(waits) for _ in range(count)))
    assert threads._serve() == returned
    assert made == ["made"]
    assert threads._lanes.running == {}
    assert [threads._tickets.get() for _ in range(threads._tickets.qsize())] == [True] * (any(waits) and not watched)
    assert len(started) == any(waits)
    assert threads._watched == (watched or returned is not None)


def test_a_result_is_passed_on(started: list[Any]) -> None:
    """F110: A result is passed on to calls that asked the same."""
    threads, known = WorkerThreads(4), list[Any]()
    other = Call(lambda left, **given: known.append(given), priority=0)
    follow: Any = iter([(Call(lambda left: "refused", priority=0), None), (None, None)])
    threads._lanes.begin_next = lambda now: next(follow)  # type: ignore[method-assign]
    threads._lanes.end = lambda entry, result: [other]  # type: ignore[method-assign]
    threads._serve()
    assert known == [{"known": "refused"}]


def test_a_thread_that_watches(started: list[Any]) -> None:
    """F159: A watching thread looks again when the first call becomes slow, or when it is woken. Another thread may
    watch afterwards."""
    threads, seen = WorkerThreads(4), list[object]()
    pauses: Any = iter([0.25, None, None])

    def serve() -> Any:
        seen.append(threads._watched)
        return next(pauses)

    threads._serve = serve  # type: ignore[method-assign]
    threads._alarm = SimpleNamespace(acquire=lambda timeout=None: seen.append(timeout))  # type: ignore[assignment]
    threads._watched = True
    threads.close()
    threads._work()
    assert seen == [True, 0.25, False, False]


def test_a_thread_ends_with_its_last_call(started: list[Any]) -> None:
    """F108: A call entered before the end is made, and the next thread is told to end."""
    threads, made, given = WorkerThreads(2), list[str](), list[bool]()

    class Tickets:
        """The last one comes, and at that moment another call."""

        def get(self) -> bool:
            assert made == ["a"]
            enter(threads._lanes, Call(lambda left: made.append("b"), priority=0))
            return False

        put, qsize = given.append, staticmethod(lambda: 0)

    threads._tickets = Tickets()  # type: ignore[assignment]
    threads.submit(lambda: made.append("a"), priority=0)
    threads._work()
    assert (made, threads._idle, given) == (["a", "b"], [], [True, False])


def test_a_caller_of_closed_threads_makes_its_call_itself(started: list[Any]) -> None:
    """F108: A caller makes its call itself, also if the threads are closed just then or have ended. No withdrawal is
    reported."""
    told, ends = list[str](), WorkerThreads(2)
    ends._unstarted.pop()

    def close() -> None:
        told.append("woken")
        ends.close()

    ends._wake_one = close  # type: ignore[method-assign]
    for _ in range(2):  # closed on the way, and before
        how: Any = {"priority": 0, "on_withdrawn": lambda: told.append("no")}
        assert ends.call(lambda left: (_thread.get_ident(), left), 0.5, **how) == (_thread.get_ident(), 0.5)
        assert not ends.submit(lambda: None, priority=0)
        assert not any(ends._lanes.waiting)
    assert told == ["woken"]


def test_calls_that_a_thread_makes_itself(started: list[Any]) -> None:
    """F110: A thread makes a call for a key itself if no other call waits for the key and fewer than two are under
    way."""
    threads = WorkerThreads(4)
    assert [threads.begin_own("k") for _ in range(3)] == [True, True, False]
    assert threads.begin_own(None)
    enter(threads._lanes, one := call("k"))
    assert threads._lanes.begin_next(0.0)[0] is None
    assert not threads.begin_own("k")
    threads.end_own("k")
    assert (list(threads._lanes.waiting[0]), threads._tickets.qsize()) == ([one], 1)
    assert not threads.begin_own("k")  # though only one is under way
    threads.end_own("k")
    threads.end_own(None)
    assert threads._tickets.qsize() == 1


async def test_a_coroutine_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is over is forgotten at once, not at its time limit. Without a limit there is no timer."""
    loop, threads, timers = asyncio.get_running_loop(), WorkerThreads(1), list[Any]()
    call_later = loop.call_later

    def later(*arguments: Any) -> Any:
        timers.append(call_later(*arguments))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", later)
    assert await threads.acall(lambda left: "done", 60.0, priority=0) == "done"
    assert [timer.cancelled() for timer in timers] == [True]
    assert await threads.acall(lambda left: left, priority=0) == FOREVER
    assert len(timers) == 1
    with pytest.raises(ZeroDivisionError):
        await threads.acall(lambda left: 1 / 0, priority=0)
    threads.close()


# Who waits


class Locks:
    """A substitute for `threading` with locks that are free as soon as a caller waits for them."""

    TIMEOUT_MAX = 1000.0

    def __init__(self) -> None:
        self.waited = list[float]()

    def Lock(self) -> Any:  # noqa: N802 - as it is called there
        return SimpleNamespace(acquire=lambda timeout=-1: self.waited.append(timeout), release=lambda: None)


@pytest.mark.parametrize(("seconds", "waited"), [(3.0, 3.0), (FOREVER, 1000.0)])
def test_how_long_a_thread_sleeps(seconds: float, waited: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: A thread sleeps as long as it wants, up to the longest wait of a lock. If it was woken before, it does not
    sleep."""
    locks, wakeup = Locks(), Wakeup()
    monkeypatch.setattr(wakeups, "threading", locks)
    wakeup.wait(seconds)
    wakeup.wake()
    wakeup.wait(seconds)
    wakeup.wait(seconds)
    assert locks.waited == [-1, waited, -1, -1, waited]


def test_a_thread_is_woken_twice() -> None:
    """P5: A thread may be woken twice, by anyone."""
    wakeup = Wakeup()

    def wake() -> None:
        while wakeup._lock is None:
            time.sleep(0.001)
        wakeup.wake()
        wakeup.wake()

    thread = threading.Thread(target=wake, daemon=True)
    thread.start()
    wakeup.wait(60)
    thread.join(5)
    assert (wakeup._lock, thread.is_alive()) == (None, False)


async def test_how_long_a_coroutine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: A coroutine sleeps like a thread, and may be woken twice. Neither sleeps longer than a day without a look."""
    loop, wakeup, seen = asyncio.get_running_loop(), Wakeup(), list[Any]()

    def twice(wake: Callable[[], None]) -> None:
        wake()
        wake()
        seen.append("woken")

    def later(seconds: float, wake: Callable[[], None]) -> Any:
        seen.append(seconds)
        loop.call_soon(twice, wake)
        return SimpleNamespace(cancel=lambda: seen.append("cancelled"))

    monkeypatch.setattr(loop, "call_later", later)
    await wakeup.await_(86_400)
    assert seen == [86_400, "woken", "cancelled"]
    wakeup.wake()
    await wakeup.await_(5)
    assert seen[3:] == [5, "cancelled"]
    await asyncio.sleep(0)
    loop.call_soon(twice, wakeup.wake)
    async with asyncio.timeout(5):
        await wakeup.await_(FOREVER)
    assert seen[5:] == ["woken", 86_400, "woken", "woken", "cancelled"]
    assert not wakeup._woken


def test_a_waiter_of_a_closed_loop_is_woken() -> None:
    """F116: A waiter of a closed loop is woken without an error."""
    wakeup, loop = Wakeup(), asyncio.new_event_loop()
    wakeup._future = loop.create_future()
    loop.close()
    wakeup.wake()
    assert wakeup._woken


# Reports


class Told(Notifications):
    """Notifications that record each report and its thread. The threads make their calls on demand."""

    def __init__(self, *, ended: bool = False) -> None:
        self.told, self.calls = list[tuple[str, bool]](), list[Callable[[], object]]()
        self.inside, self.ended = False, ended
        super().__init__(lambda event, _: self.told.append((event, self.inside)))
        self.threads = self  # type: ignore[assignment]

    def submit(self, one: Callable[[], object], *, priority: int) -> bool:
        self.calls.append(one)
        return not self.ended

    def make(self) -> list[tuple[str, bool]]:
        """Make the calls, and return each report with whether a call made it."""
        self.inside = True
        while self.calls:
            self.calls.pop(0)()
        return self.told


class Owner:
    """A lock object."""


@pytest.mark.parametrize(
    ("reason", "noticed", "told", "level"),
    [
        ("gone", False, ["lost", "on_lost"], logging.WARNING),
        ("gone", True, ["lost", "on_lost"], logging.WARNING),
        (CLOSED, False, ["lost"], logging.DEBUG),
        (CLOSED, True, ["lost"], logging.DEBUG),
        ("", False, ["released"], logging.DEBUG),
        ("", True, ["released"], logging.DEBUG),
    ],
)
def test_what_is_told_of_an_end(
    reason: str, noticed: bool, told: list[str], level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """P7: A loss is logged as a warning and calls its callback once. The end of a session is not a loss. A loss that
    the session noticed is reported by a thread."""
    caplog.set_level(logging.DEBUG, "django_mongolock")
    owner, notifications = Owner(), Told()
    one = held()
    one.users = (User(weakref.ref(owner), {"on_lost": lambda _: notifications.told.append(("on_lost", True))}),)
    if reason:
        one.mark_lost(reason)
    else:
        one.mark_released()
    for _ in range(2):
        notifications.report_end(one, noticed=noticed)
    assert notifications.told == ([] if noticed else [(told[0], False)])
    assert notifications.make() == [(told[0], noticed), *((each, True) for each in told[1:])]
    (record,) = caplog.records
    assert (record.levelno, record.getMessage().split()[:3]) == (level, ["lock", told[0], "key=k"])
    assert ("token=7" in record.getMessage(), "reason=" in record.getMessage()) == (True, bool(reason))
    assert ("on_lost" in one.users[0].calls) == (reason in ("", CLOSED))


@pytest.mark.parametrize(("in_threads", "ended", "at_once"), [(True, False, 0), (False, False, 1), (True, True, 1)])
def test_who_tells_that_a_release_is_requested(in_threads: bool, ended: bool, at_once: int) -> None:
    """P7: A release request is reported once, and only while the lock is held. A thread reports it if there is one, and
    calls each living lock object."""
    owner, gone, notifications = Owner(), Owner(), Told(ended=ended)
    notifications.in_threads = in_threads
    calls: Any = {"on_release_requested": lambda lock: notifications.told.append((type(lock).__name__, True))}
    one = held()
    one.users = tuple(User(weakref.ref(each), calls) for each in (owner, gone))
    one.users += (User(weakref.ref(owner), {}),)
    del gone
    for who in "ab":
        notifications.report_release_request(one, who)
    assert notifications.told == [("release_requested", False)] * at_once
    if ended:
        notifications.calls.pop(0)
    assert notifications.make() == [("release_requested", not at_once), ("Owner", True)]
    assert (one.reporting.release_requested_by, list(calls)) == ("a", ["on_release_requested"])
    for other in (grant("waits"), held("not told"), held("over")):
        if other.id != "over":
            other.reporting.reported = ""
        else:
            other.mark_released()
        notifications.report_release_request(other, "a")
        assert other.reporting.release_requested_by is None


def test_what_is_told_of_a_wait(caplog: pytest.LogCaptureFixture) -> None:
    """P7: Contention is reported once if another caller holds the lock. The end of the wait is reported once. The
    report names the holder, not a token."""
    caplog.set_level(logging.DEBUG, "django_mongolock")
    notifications, free, busy, first = Told(), grant("free"), grant("busy"), grant("first")
    busy.reporting.busy, busy.reporting.held_by = True, "ann"
    for one in (free, busy):
        for _ in range(2):
            notifications.report_contended(one)
            notifications.report_not_acquired(one, "late", 3.0)
        assert (one.reason, one.reporting.waited, one.reporting.reported) == ("late", 3.0, "end")
    first.reporting.busy = True
    notifications.report_not_acquired(first, "late", 3.0)
    assert [event for event, _ in notifications.told] == [
        "not_acquired", "contended", "not_acquired", "contended", "not_acquired",
    ]  # fmt: skip
    said = [record.getMessage() for record in caplog.records][:3]
    assert said == [
        "lock not acquired key=k holder=None reason=late",
        "lock contended key=k holder=ann",
        "lock not acquired key=k holder=ann reason=late",
    ]
    notifications.report_acquired(one := grant())
    assert one.reporting.reported == "acquired"
    assert notifications.told[-1] == ("acquired", False)
    silent = Notifications(None)
    silent.report_acquired(one)
    silent.close()
    assert not silent.threads.submit(print, priority=0)


# Waits


class Parts:
    """The part of a session that waits and commands use.

    - events: the calls made to it.
    """

    id = "s"

    def __init__(self, *grants: Grant) -> None:
        self.events, self.time = list[Any](), NOW
        self.store = self.heartbeat = self.registry = self.queue = self.notifications = self.threads = self
        self.hearers: dict[str, Any] = {}
        self.grants = {each.id: each for each in grants}
        self.waiting = {each.id: each for each in grants if each.state is State.WAITING}

    def now(self) -> float:
        return self.time

    def schedule(self, due: float) -> None:
        self.events.append(("see to", due))

    def off_main_thread(self, one: Callable[[], object], *, priority: int) -> None:
        self.events.append(("off main thread", one.__name__, priority))

    def report_contended(self, one: Grant) -> None:
        self.events.append(("contended", one.id))

    def sent_to(self) -> str:
        return "primary"

    def fate(self, process: str) -> str:
        return f"fate of {process}"

    def turn(self, one: Grant) -> tuple[str, Grant | None]:
        return "now", None


def waits(*grants: Grant) -> Any:
    return Waits(Parts(*grants))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("timer", "reserved", "hears", "seconds"),
    [
        (50.0, False, "bells", 50.0),
        (50.0, False, "looks", 50.0),
        (50.0, False, "", LONGEST_POLL),
        (0.5, False, "", 0.5),
        (50.0, True, "bells", LONGEST_HANDOVER),
        (0.5, True, "bells", 0.5),
        (50.0, True, "", LONGEST_POLL),
    ],
)
def test_how_long_a_pause_is(
    timer: float, reserved: bool, hears: str, seconds: float, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F44: A pause lasts until its timer. A hand-over is soon there. A waiter for whom nothing listens or looks asks by
    itself. A pause in line listens for no bells, because no bell would end it."""
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    one = grant()
    one.waiting.handover_reserved, one.waiting.began = reserved, NOW - 100
    each = waits(one)
    each.listener._heard_at = NOW if hears == "bells" else 0.0
    each.listener._looked_at = NOW if hears == "looks" else 0.0
    assert each._seconds(Pause("g", timer), one) == timer
    assert each._session.events == []
    assert each._seconds(Pause("g", timer, in_queue=True), one) == seconds
    assert each._session.events == [("off main thread", "start", REQUEST)]
    one.waiting.began = NOW
    assert hears or each._seconds(Pause("g", timer, in_queue=True), one) == LOOK_FIRST
    one.waiting.cancelled = True
    assert each._seconds(Pause("g", timer, in_queue=True), one) == 0.0


@pytest.mark.parametrize(("back_by", "then"), [(FOREVER, NOW + CANCELLED_WITHIN), (NOW + 0.5, NOW + 0.5)])
def test_a_cancelled_wait_is_back_soon(back_by: float, then: float) -> None:
    """F36: A cancelled wait ends at once. The command that removes it from the queue gets no longer time limit."""
    one = grant()
    one.waiting.back_by = back_by
    waits(one).cancel(one)
    assert (one.waiting.back_by, one.waiting.cancelled, one.waiting._woken) == (then, True, True)


def test_a_bell_that_requests_a_release() -> None:
    """P7: A release request makes the lock due at once, and again if it is being renewed. A bell for an unknown grant
    does nothing."""
    one = held()
    each = waits(one)
    one.lease.renew_at = NOW + 40
    each.on_bell(Bell("s", "another"))
    assert (one.lease.renew_at, each._session.events) == (NOW + 40, [])
    each.on_bell(Bell("s", "g"))
    assert (one.lease.once_more, one.lease.renew_at, each._session.events) == (True, NOW, [("see to", NOW)])
    assert each._session.hearers == {"s": each.on_bell}


def test_a_bell_that_tells_of_a_grant() -> None:
    """P8, F28: A bell wakes only the waiter of its grant. A late bell of an earlier grant is no news."""
    one = grant()
    each = waits(one)
    each.on_bell(Bell("s", "another", News(5, datetime.now(UTC))))
    assert (one.waiting.news, one.waiting._woken) == (None, False)
    first, earlier, later = (News(token, datetime.now(UTC)) for token in (5, 4, 7))
    for news, newest in ((first, first), (earlier, first), (later, later)):
        each.on_bell(Bell("s", "g", news))
        assert (one.waiting.news, one.waiting._woken) == (newest, True)


@pytest.mark.parametrize("state", ["nothing", "waits", "asks to be told", "not all ask to be told"])
def test_when_bells_concern_a_session(state: str) -> None:
    """P8: Bells concern a session while it waits for a grant, or while one of its holders is to be told of a
    request."""
    asks, silent = ((User(weakref.ref(Owner()), {name: print}),) for name in ("on_release_requested", "on_lost"))
    first, second = held("a"), held("b")
    second.users = silent
    if state != "nothing":
        first.users = asks + silent * (state != "asks to be told")
    each = waits(*([first, second][: 1 if state == "asks to be told" else 2] if state != "waits" else [grant()]))
    assert each.is_waited() == (state != "nothing")


@pytest.mark.parametrize("awaited", [False, True])
async def test_what_a_pause_does(awaited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: A pause reports contention, sleeps, and returns the known facts. In a closed session it returns nothing."""
    one: Any = grant()
    each, slept = waits(one), list[float]()

    async def await_(_: object, seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(Wakeup, "await_", await_)
    monkeypatch.setattr(Wakeup, "wait", lambda _, seconds: slept.append(seconds))
    one.waiting.answer = answer = Answer(Reply(), 1.0, 2.0)
    one.reporting.held_by, one.waiting.last_token, one.lease.until = "ann", 5, NOW + 3
    told = await each.apause(Pause("g", 9.0)) if awaited else each.pause(Pause("g", 9.0))
    assert (slept, each._session.events) == ([9.0], [("contended", "g")])
    assert (told.now, told.answer, told.holder, told.last_token) == (NOW, answer, "ann", 5)
    assert told.queued_until == NOW + 3
    assert one.waiting.answer is None
    first = grant("first")
    first.reporting.held_by = "ben"
    each._session.turn = lambda _: ("behind", first)
    assert (each.result(one).holder, each.result(one).turn) == ("ben", "behind")
    one.waiting._woken = False
    each.wake_all()
    assert one.waiting._woken
    each.close()
    assert each.listener._closed
    with pytest.raises(LockMisused, match="the session was closed"):
        each.result(one)


@pytest.mark.parametrize(
    ("thread", "closed", "there", "starts"),
    [(None, False, False, True), (True, False, True, False), (False, False, False, True), (None, True, True, False)],
)
def test_a_listener_has_one_thread(
    thread: bool | None, closed: bool, there: bool, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F44: While one listener thread lives, there is no other. A dead one is replaced. A closed listener has none."""
    session: Any = Parts()
    listener: Any = Listener(session, session)
    listener._thread = None if thread is None else SimpleNamespace(is_alive=lambda: thread)
    listener._closed = closed
    started = list[Any]()

    class Thread:
        def __init__(self, **how: Any) -> None:
            self.how = how

        def start(self) -> None:
            started.append(self)

    monkeypatch.setattr("django_mongolock.engine.session.waits.threading.Thread", Thread)
    assert listener.keep_listening() == there
    assert listener._lingers_until > NOW
    listener.start()
    assert len(started) == starts
    if starts:
        assert listener._thread is started[0]
        assert started[0].how == {"target": listener._run, "name": "mongolock-listener", "daemon": True}


def test_a_listener_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """F144, P7: The log says once that waiters poll, and the next pause tries to start the listener again."""
    session: Any = Parts()
    listener = Listener(session, session)
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    for _ in range(2):
        assert not listener.keep_listening()
        listener.start()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_listener_hears_for_as_long_as_somebody_waits() -> None:
    """P8: A listener passes on bells while a caller waits, and none afterwards. Signs of life of the server are not
    passed on."""
    session, heard = Parts(), list[object]()
    other: Any = SimpleNamespace(on_bell=heard.append, is_waited=lambda: not heard)
    session.listen = lambda name: (each for each in (name, None, "late"))  # type: ignore[attr-defined]
    listener: Any = Listener(session, other)  # type: ignore[arg-type]
    assert listener._listen() == "it ended"
    assert heard == ["s"]
    heard.clear()
    session.listen = lambda name: (each for each in (None, name))  # type: ignore[attr-defined]
    listener._listen()
    assert heard == ["s"]


@pytest.mark.parametrize("came", [False, True])
def test_a_listener_that_ends_while_somebody_comes(came: bool) -> None:
    """P5: A caller that comes while the listener ends gets another listener."""
    session, started = Parts(), list[object]()
    listener: Any = Listener(session, session)  # type: ignore[arg-type]
    goes_on: Any = iter([False, came])
    listener._goes_on, listener._thread = lambda: next(goes_on), "this one"
    listener.start = lambda: started.append(listener._thread)
    listener._run()
    assert (started, listener._thread) == ([None] * came, None)


def test_a_listener_that_is_closed_tries_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: A closed listener does not wait for the end of its pause. An open one waits for the pause, and no longer."""
    session: Any = Parts()
    session.is_waited = session.look_at_queues = lambda: True
    listener: Any = Listener(session, session)
    slept = list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        session.time += 1
        listener._closed = len(slept) == 5

    monkeypatch.setattr("django_mongolock.engine.session.waits.time", SimpleNamespace(sleep=sleep))
    listener._give_way(3)
    assert len(slept) == 3
    assert listener._looked_at == session.time - 1
    listener._give_way(30)
    assert len(slept) == 5
    assert max(slept) <= 0.1


# Commands


def commands(*grants: Grant, timeout: float = 8.0) -> Any:
    return Commands(Parts(*grants), None, timeout)  # type: ignore[arg-type]


ENTER = grant().acquisition.enter(trial=False)
TRY = grant().acquisition.enter(trial=True)
GIVE_UP = grant().acquisition.give_up()
RELEASE_ONE = ReleaseUncontended(("k",), ("g",))


@pytest.mark.parametrize(
    ("action", "back_by", "seconds"),
    [
        (ENTER, NOW + 3, 3.0),
        (ENTER, NOW + 30, 8.0),
        (ENTER, NOW - 1, SHORTEST_COMMAND),
        (replace(ENTER, step=replace(ENTER.step, given="holder")), NOW + 3, 8.0),
        (replace(ENTER, step=replace(ENTER.step, ask="unknown")), NOW + 3, 8.0),
        (RELEASE_ONE, NOW + 3, 8.0),
        (replace(RELEASE_ONE, after=True), NOW + 3, GIVE_BACK_LIMIT),
        (Read("k", "g"), NOW + 3, 3.0),
        (FindDeadlock("k", "g"), NOW + 3, 3.0),
        (QueueNext("k", "g"), NOW + 30, 2.0),
        (QueueNext("k", "g"), NOW + 1, 1.0),
    ],
    ids=str,
)
def test_how_long_a_command_may_take(action: Action, back_by: float, seconds: float) -> None:
    """F67: A command may take as long as its waiter may be away, up to the usual limit. A hint for another waiter gets
    a part of that."""
    one = grant()
    one.waiting.back_by = back_by
    assert commands(one)._seconds_for(action) == pytest.approx(seconds)
    assert commands(one, timeout=0.2)._seconds_for(replace(RELEASE_ONE, after=True)) == 0.2


@pytest.mark.parametrize(
    ("action", "is_release", "question"),
    [
        (RELEASE_ONE, True, None),
        (GIVE_UP, True, None),
        (ENTER, False, None),
        (Read("k", "g"), False, None),
        (TRY, False, ("exclusive", 1, False, None)),
        (replace(TRY, step=replace(TRY.step, remove=("h",))), True, None),
        (replace(TRY, step=replace(TRY.step, add=None)), False, None),
    ],
    ids=str,
)
def test_what_a_command_is_to_the_threads(action: Any, is_release: bool, question: object) -> None:
    """P6, F110: Releases go first, because they let others in. Only single tries of one kind may share an answer."""
    found = _question(action)
    assert _priority(action, None) == (RELEASE if is_release else REQUEST)
    assert (found is None) == (question is None)
    how = commands()._how_to_call(action)
    assert (how["priority"], how["key"], how["timeout"]) == (RELEASE if is_release else REQUEST, "k", 8.0)
    assert (how["same"], how["on_withdrawn"]) == (None, None)  # of a grant that is not known
    one = grant()
    how = commands(one)._how_to_call(action)
    first = isinstance(action, Apply) and action.step.add is not None
    assert one.waiting.sent == first == (how["on_withdrawn"] is not None)
    assert how["same"] == (found if first else None)
    if first:
        again = commands(one)._how_to_call(action)  # a command that was sent once stays sent
        assert (again["same"], again["on_withdrawn"]) == (None, None)
        how["on_withdrawn"]()
        assert not one.waiting.sent


@pytest.mark.parametrize(("waited", "said"), [(0.0, 0), (JUST_CAME / 2, 0), (0.25, 250), (JUST_CAME, 50)])
@pytest.mark.parametrize("behind", [0, 2])
def test_what_an_entry_says_of_its_arrival(waited: float, said: int, behind: int) -> None:
    """P5, F69: An entry tells how long it has waited, unless it just came, and the number of waiters behind it."""
    one = grant()
    for began in (2.0**-10, NOW)[: 1 if waited == JUST_CAME else 2]:
        one.waiting.began, one.waiting.behind = began, behind
        step = commands(one).with_arrival(ENTER.step, one, began + waited)
        assert step.waited == said
        assert step.add == {**(ENTER.step.add or {}), **({"behind": 2} if behind else {})}


def test_commands_that_are_closed() -> None:
    """F170: The last commands have a short time limit, no acquisition is sent, and a release goes on without its
    heir."""
    sent, each = list[Step](), commands(grant())
    note: Any = sent.append
    each._session.apply = lambda key, step, timeout: note(step) or Reply()
    each.close(9.0)
    assert each.timeout == 8.0
    each.close(2.0)
    assert each.timeout == 2.0
    assert not each.releases.made(SimpleNamespace(primary="p", at=0.0))
    resume = grant().acquisition.resume("former", False, 9)
    for refused in (ENTER, resume, Read("k", "g"), QueueNext("k", "g"), FindDeadlock("k", "g")):
        with pytest.raises(LockMisused, match="the session was closed before"):
            each.send(refused)
    each.send(replace(ENTER, step=replace(ENTER.step, remove=("holder",))))
    each.send(GIVE_UP)
    each.send(grant().acquisition.confirm())
    assert [(step.add, step.remove) for step in sent] == [(None, ("holder",)), (None, ("g",)), (None, ())]
    with pytest.raises(TypeError, match="not a command"):
        commands(grant()).send(Pause("g", 1.0))


def test_a_session_that_is_closed_between_two_commands_of_one_acquisition() -> None:
    """F195, F161: The key was not free, and the client was closed before the second command. This counts as misuse,
    too."""
    each = commands(grant())
    each.guesses.is_free = lambda _: True
    each._session.take_free = lambda *_: each.close(2.0)

    def apply(*_: Any) -> Reply:
        raise LockBackendFailed("the session was closed", passing=False)

    each._session.apply = apply
    with pytest.raises(LockMisused, match="the session was closed before"):
        each.send(ENTER)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("action", [ENTER, GIVE_UP])
def test_a_step_that_is_sent(action: Apply, fails: bool) -> None:
    """F17, F36: Each step has a number of its own. A step that adds an entry is noted as sent, and as unknown if there
    is no answer. Other releases of that primary are confirmed then."""
    one, sent = grant(), list[tuple[Step, float]]()
    each = commands(one)
    confirmed = list[Any]()
    each.releases.confirmed = lambda *given: confirmed.append(given)

    def apply(key: str, step: Step, timeout: float) -> Reply:
        sent.append((step, timeout))
        if fails:
            raise LockBackendFailed("away", key)
        return Reply(beat=step.beat)

    each._session.apply = apply
    for left, number in ((FOREVER, 1), (1.5, 2)):
        if fails:
            with pytest.raises(LockBackendFailed):
                each.send(action, left)
        else:
            assert each.send(action, left).whole
        assert (sent[-1][0].beat, sent[-1][1]) == (number, min(left, 8.0))
    adds = action is ENTER
    assert (one.waiting.sent, one.outcome_unknown) == (adds, adds and fails)
    assert confirmed == ([] if fails else [("primary", NOW)] * 2)
    each._session.grants.clear()
    with pytest.raises(LockBackendFailed) if fails else nullcontext():
        each.send(action)
    known = each.send(ENTER, known=Answer(Reply(beat=3), 5.0, 6.0))
    assert (known.sent, known.whole, len(sent)) == (5.0, False, 3)


def test_the_short_form_of_a_step() -> None:
    """P8, F118: The short form is used for a step that only adds, for a key that is probably free. A wrong guess costs
    only its time."""
    one = grant()
    each, sent = commands(one), list[Any]()
    took = {"free": Reply(held=True), "busy": None}

    def take_free(key: str, step: Step, timeout: float) -> Reply | None:
        sent.append(("short", timeout))
        each._session.time += 3.0
        return took[key]

    each._session.take_free = take_free
    note: Any = sent.append
    each._session.apply = lambda key, step, timeout: note((step.waited, round(timeout, 3))) or Reply()
    for key, step, timeout, expected, left in (
        ("free", ENTER.step, 8.0, [("short", 8.0)], 0),
        ("busy", ENTER.step, 8.0, [("short", 8.0), (3000, 5.0)], -NO_GUESS_FOR),
        ("busy", ENTER.step, 2.0, [("short", 2.0), (3000, SHORTEST_COMMAND)], -NO_GUESS_FOR),
        ("free", GIVE_UP.step, 8.0, [(0, 8.0)], 1),
        ("free", replace(ENTER.step, waited=5), 8.0, [(5, 8.0)], 1),
        ("unknown", ENTER.step, 8.0, [(0, 8.0)], None),
    ):
        each._session.time = NOW
        each.guesses = type(each.guesses)()
        if key != "unknown":
            each.guesses.released(key)
        each._send_step(key, step, timeout, one)
        assert (sent, each.guesses._left.get(key)) == (expected, left)
        sent.clear()
    each.guesses, each._session.time = type(each.guesses)(), NOW
    each.guesses.released("busy")
    each._send_step("busy", ENTER.step, 8.0, None)  # of a grant that is not known any more
    assert sent == [("short", 8.0), (0, 5.0)]


def test_what_is_remembered_of_a_release() -> None:
    """F7, P8: Each released key is probably free. An election may undo its release."""
    each = commands()
    each._session.release_uncontended = lambda keys, grants, timeout: {"b"}
    assert each.send(ReleaseUncontended(("a", "b", "c"), ("g", "h", "i"))) == {"b"}
    assert list(each.guesses._left) == ["a", "c"]
    assert len(each.releases) == 2
    assert each._session.events == [("see to", each.releases.look_at)]  # at the first
    with pytest.raises(ValueError, match="zip"):
        each.send(ReleaseUncontended(("a", "c"), ("g",)))


@pytest.mark.parametrize(
    ("reply", "state", "number", "expected"),
    [
        (Reply(place=0, last_token=9, beat=3, holder="ann"), State.WAITING, 3, (True, "ann", 9, 9, NOW + 1)),
        (Reply(place=0, last_token=4, beat=3), State.WAITING, 3, (True, "ben", 4, 5, NOW + 1)),
        (Reply(place=1, last_token=9, beat=3), State.WAITING, 3, (True, "ben", -1, 9, NOW + 1)),
        (Reply(place=0, last_token=9, beat=2), State.WAITING, 3, (True, "ben", 9, 5, 0.0)),
        (Reply(place=None, last_token=9, beat=3), State.WAITING, 3, (True, "ben", 8, 5, 0.0)),
        (Reply(held=True, beat=3, holder="ann"), State.WAITING, 3, (False, "ben", 8, 5, 0.0)),
        (Reply(place=0, last_token=9, beat=3, holder="ann"), State.RELEASED, 3, (False, "ben", 9, 5, 0.0)),
    ],
)
def test_what_an_answer_is_worth(reply: Reply, state: State, number: int, expected: tuple[Any, ...]) -> None:
    """F62: An answer proves a place in the queue, counted from the sending of its command. A read or another command's
    answer proves nothing."""
    one = grant()
    one.state, one.reporting.held_by = state, "ben"
    one.waiting.last_token, one.waiting.at_head = 5, 8
    answer = commands(one).answer("g", reply, NOW - 5, number)
    assert (answer.whole, answer.sent, answer.now, answer.former) == (reply.beat == number, NOW - 5, NOW, None)
    found = one.reporting.busy, one.reporting.held_by, one.waiting.at_head, one.waiting.last_token, one.lease.until
    assert found == expected
    other = commands().answer("unknown", replace(reply, former=Former("f", "host:1")), NOW, number)
    assert other.former == "fate of host:1"


def test_the_next_of_a_line_is_queued() -> None:
    """P5, F69: The next of a line is queued with the answer to its command, or with none after a failure. If there is
    no next one, or its wait is over, nobody is queued."""
    one, heir, finished = grant(), grant("heir"), list[Any]()
    each = commands(one, heir)
    each._session.reserve_handover = lambda _: heir
    each._session.finish_handover = lambda *given: finished.append(given)
    outcomes: Any = iter([Reply(place=1), LockBackendFailed("away", "k"), KeyboardInterrupt()])

    def apply(key: str, step: Step, timeout: float) -> Any:
        assert (step.ask, step.trial, timeout) == ("heir", False, 2.0)
        if isinstance(outcome := next(outcomes), BaseException):
            raise outcome
        return outcome

    each._session.apply = apply
    assert each.send(QueueNext("k", "unknown")) is None
    assert finished == []
    each.send(QueueNext("k", "g"))
    each.send(QueueNext("k", "g"))
    with pytest.raises(KeyboardInterrupt):
        each.send(QueueNext("k", "g"))
    assert [(who.id, answer is None) for who, answer in finished] == [("heir", False), ("heir", True), ("heir", True)]
    each._session.reserve_handover = lambda _: None
    each.send(QueueNext("k", "g"))
    assert len(finished) == 3


@pytest.mark.parametrize("own", [True, False])
async def test_who_sends_a_command(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """F110, F29: A thread sends its command itself, except the main thread, and while two commands of the key are under
    way. A pause is no command."""
    each, done = commands(), list[Any]()
    note: Any = done.append
    each._session.begin_own = lambda key: own and not note(("begin", key))
    each._session.end_own = lambda key: done.append(("end", key))
    each._session.call = lambda send, **how: note(how["key"]) or send()
    each._session.read = lambda *_: Reply(token=3)
    each._session.acall = lambda send, **how: asyncio.sleep(0, (how["key"], send()))
    each._waits = SimpleNamespace(pause=lambda _: "paused", apause=lambda _: asyncio.sleep(0, "paused"))
    assert each.perform(Read("k", "g")).reply.token == 3
    assert done == ["k"]
    done.clear()
    monkeypatch.setattr(threading, "main_thread", lambda: None)
    assert each.perform(Read("k", "g")).reply.token == 3
    assert done == ([("begin", "k"), ("end", "k")] if own else ["k"])
    assert each.perform(Pause("g", 1.0)) == "paused"
    assert len(done) == (2 if own else 1)
    key, answer = await each.aperform(Read("k", "g"))
    assert (key, answer.reply.token, await each.aperform(Pause("g", 1.0))) == ("k", 3, "paused")


# The session


@pytest.mark.parametrize(("seen_to", "sees"), [(1, True), (0, False), (-1, False)])
@pytest.mark.parametrize("asks", [False, True])
def test_a_grant_that_is_held_from_now_on(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, seen_to: float, sees: bool, asks: bool
) -> None:
    """P6, P7: A new grant makes the heartbeat due in time, listens for bells if a release request is to be reported,
    and ends the wait."""
    session, told, lock = memory.session, list[Any](), Owner()
    monkeypatch.setattr(session.heartbeat, "schedule", told.append)
    monkeypatch.setattr(session.waits, "ensure_listening", lambda: told.append("listen"))
    one = held_by_nobody(memory)
    one.users = (User(weakref.ref(lock), {"on_release_requested" if asks else "on_lost": print}),)
    session.registry.add(one)
    due = NOW + LONG.lease / 3
    one.lease.renew_at = due + seen_to
    session.register_grant(one, Granted(7, datetime.now(UTC), NOW + LONG.lease, NOW))
    assert told == [due] * sees + ["listen"] * asks
    assert session.registry.by_line == {one.line: one}
    assert (session.queue.waiting, memory.events) == ({}, [("acquired", "k")])
    session.ending.forget(one)


def held_by_nobody(memory: Memory) -> Grant:
    """Return a waiting grant."""
    one = new_grant(memory.session, memory.lock(), object())
    memory.session.queue.join(one, trial=False)
    return one


def test_how_much_a_session_knows() -> None:
    """P6: The number of held, waiting and removed grants shows a leak."""
    session: Any = MemorySession(MemoryStore(MemoryServer(), Limits()))
    assert session.known == 0
    parts = session.registry.grants, session.registry.by_line, session.queue.waiting, session.queue.lines
    for number, part in enumerate((*parts, session.background.pending)):
        part.update(dict.fromkeys(range(2**number)))
    assert session.known == 0b11111


def test_a_grant_that_has_ended_before_it_is_noted(memory: Memory) -> None:
    """F169: The grant is forgotten, and its end is reported after its beginning."""
    one = held_by_nobody(memory)
    memory.session.register_grant(one, Granted(7, datetime.now(UTC), NOW + 6_000, NOW))
    assert (memory.session.known, memory.session.registry._by_worker) == (0, {})
    assert memory.events == [("acquired", "k"), ("released", "k")]
    with pytest.raises(LockMisused, match="closed"):
        memory.session.register_grant(one, Granted(7, datetime.now(UTC), NOW + 6_000, NOW))


def test_what_the_end_of_a_session_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: The end of a session has a fixed order. A grant with a command that may still arrive is removed instead of
    released. If it was held, its minimum hold lasts. A second end does nothing."""
    session, done = MemorySession(MemoryStore(MemoryServer(), Limits())), list[Any]()
    for part, name in (
        *(
            (session.waits, "close"),
            (session.waits, "wake_all"),
            (session.heartbeat, "close"),
            (session.heartbeat, "wake"),
        ),
        *((session.cleanup, "repeat_releases"), (session.cleanup, "ensure_removed"), (session.cleanup, "finish")),
        (session.background, "begin_to_finish"),
        *((session.commands, "close"), (session.ending, "end")),
        *((session.threads, "close"), (session.notifications, "close"), (session.store, "close")),
    ):
        label = f"{type(part).__name__}.{name}"
        monkeypatch.setattr(part, name, lambda *given, label=label, **how: done.append((label, *given, *how.values())))
    monkeypatch.setattr(session, "now", lambda: NOW)
    session.wake()
    assert done == [("Heartbeat.wake",), ("Waits.wake_all",)]
    done.clear()
    grants: dict[str, Grant] = {}
    for name, terms in (
        *(("waits", replace(TERMS, min_hold=9.0)), ("held", TERMS), ("released", TERMS), ("lost", TERMS)),
        *(("doubt", TERMS), ("doubt kept", replace(TERMS, min_hold=0.5)), ("doubt released", TERMS)),
    ):
        one = Grant(Acquisition("k", name, terms), worker=None, auto_renew=True, now=lambda: NOW)
        if name != "waits":
            one.mark_held(Granted(1, datetime.now(UTC), NOW + 50, NOW))
        if "released" in name:
            one.mark_released()
        if name == "lost":
            one.mark_lost("gone")
        one.outcome_unknown = "doubt" in name
        session.registry.grants[name] = grants[name] = one
    session.close(3.0)
    assert done == [
        *(("Waits.close",), ("Heartbeat.close",), ("Cleanup.repeat_releases",), ("Commands.close", 3.0)),
        *(("Cleanup.ensure_removed", one, name != "waits", True) for name, one in grants.items()),
        *(("Background.begin_to_finish", 3.0), ("Cleanup.finish",)),
        *(("Ending.end", one, EndReason.RELEASED) for one in grants.values()),
        ("Waits.wake_all",),
        *(("WorkerThreads.close",), ("Notifications.close",), ("MemoryStore.close",)),
    ]
    assert {name: (one.state, one.reason) for name, one in grants.items()} == {
        **dict.fromkeys(("waits", "held", "doubt", "doubt kept"), (State.LOST, CLOSED)),
        **dict.fromkeys(("released", "doubt released"), (State.RELEASED, CLOSED)),
        "lost": (State.LOST, "gone"),
    }
    done.clear()
    session.close()
    assert done == []


# Processes


def test_what_is_made_once_in_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """F29: A mutex that was locked during a fork is free in the child. Objects of the parent are noted once, and the
    child neither uses nor closes them. This holds even if no hook was told of the fork."""
    monkeypatch.setattr(PerProcess, "_all", weakref.WeakSet())
    monkeypatch.setattr(PerProcess, "_inherited", [])
    monkeypatch.setattr(PerProcess, "_mutex", PerProcess._mutex)
    numbers, closed = itertools.count(), list[int]()

    def make() -> Any:
        number = next(numbers)

        def close() -> None:
            closed.append(number)

        return SimpleNamespace(number=number, close=close, begin_to_close=lambda: None, finish_closing=close)

    monkeypatch.setattr(Sessions, "_ended", None)

    made, never = Sessions[Any](make), Sessions[Any](lambda: None)
    first = made.current()
    assert made.current() is first
    PerProcess._before_fork()
    mutex = PerProcess._mutex
    PerProcess._after_fork_in_child()
    PerProcess._after_fork_in_child()
    assert (mutex.locked(), PerProcess._mutex.locked()) == (True, False)
    mutex.release()
    assert (PerProcess._inherited, made._made, never._made) == ([first], None, None)
    PerProcess._before_fork()
    PerProcess._after_fork_in_parent()
    assert not PerProcess._mutex.locked()
    assert made.current().number == 1
    never.close()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    third = made.current()
    assert (third.number, made.current(), made._made) == (2, third, (-1, third))
    Sessions.close_all()
    assert closed == [2]
    with pytest.raises(LockMisused, match="this process ends"):
        made.current()
    monkeypatch.setattr(os, "getpid", lambda: -2)
    made.close()
    assert (closed, made.current().number) == ([2], 3)


def test_all_sessions_send_first_and_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """F185, P6: A second Ctrl-C at exit, or an error of one session, costs no other session its release."""
    monkeypatch.setattr(PerProcess, "_all", set[Any]())
    monkeypatch.setattr(Sessions, "_ended", None)
    done = list[str]()

    class Ends:
        def begin_to_close(self) -> None:
            done.append("send")

        def finish_closing(self) -> None:
            done.append("wait")
            os.kill(os.getpid(), signal.SIGINT)
            if len(done) == 3:
                raise LockBackendFailed("no answer")

    for _ in range(2):
        each: Sessions[Any] = Sessions(Ends)
        each.current()
    before = signal.getsignal(signal.SIGINT)
    Sessions.close_all()
    assert (done, signal.getsignal(signal.SIGINT)) == (["send", "send", "wait", "wait"], before)
