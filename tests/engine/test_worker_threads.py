"""Calls that threads make for others: in which order, until when, and what becomes of those that nobody awaits."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from django_mongolock.engine.session import worker_calls, worker_threads
from django_mongolock.engine.session.worker_threads import WorkerThreads
from django_mongolock.exceptions import LockBackendFailed
from tests.support.waiting import eventually

#: More than any of these calls needs, on a loaded machine as well.
LONG = 60.0


class Hold:
    """Keeps threads busy until it is let go."""

    def __init__(self, threads: WorkerThreads, count: int, *, urgent: bool = False) -> None:
        self._go = threading.Event()
        begun = threading.Semaphore(0)

        def work() -> None:
            begun.release()
            self._go.wait(LONG)

        for _ in range(count):
            assert threads.submit(work, urgent=urgent)
        for _ in range(count):
            assert begun.acquire(timeout=LONG)

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
def new_threads() -> Iterator[Callable[..., WorkerThreads]]:
    """Makes worker threads, which end with the test."""
    made: list[WorkerThreads] = []

    def new_threads(most: int, reserved: int = 0) -> WorkerThreads:
        made.append(WorkerThreads(most, reserved))
        return made[-1]

    yield new_threads
    for threads in made:
        threads.close()


@pytest.fixture
def threads(new_threads: Callable[..., WorkerThreads]) -> WorkerThreads:
    """A single thread."""
    return new_threads(1)


def waiting(threads: WorkerThreads) -> int:
    """How many calls wait for a thread."""
    return len(threads._urgent) + len(threads._others)


def fail(left: float) -> None:
    raise ValueError("no")


# What comes back


def test_a_call_returns_and_raises_what_it_does(threads: WorkerThreads) -> None:
    """The call is made in another thread, and its caller gets its outcome."""
    assert threads.call(lambda left: _thread.get_ident()) != _thread.get_ident()
    with pytest.raises(ValueError, match="no"):
        threads.call(fail)


async def test_a_coroutine_gets_what_its_call_does(threads: WorkerThreads) -> None:
    """The same for coroutines."""
    assert await threads.acall(lambda left: _thread.get_ident()) != _thread.get_ident()
    with pytest.raises(ValueError, match="no"):
        await threads.acall(fail)


def test_a_call_that_nobody_awaits_may_fail(threads: WorkerThreads, caplog: pytest.LogCaptureFixture) -> None:
    """Its error is logged, and the thread serves the next one."""

    def leave() -> None:
        raise SystemExit

    threads.submit(leave)
    assert threads.call(lambda left: "still there", LONG) == "still there"
    assert "a call in the background failed" in caplog.text


# How many threads there are


def test_idle_threads_serve_again(new_threads: Callable[..., WorkerThreads]) -> None:
    """There are no more threads than there were calls at once."""
    threads = new_threads(16)
    for _ in range(50):
        threads.call(lambda left: None)
        assert eventually(lambda: len(threads._idle) == len(threads))
    assert len(threads) == 1


def test_there_are_never_more_threads_than_allowed(new_threads: Callable[..., WorkerThreads]) -> None:
    """As many as are needed, up to the limit."""
    threads = new_threads(3)
    assert len(threads) == 0
    hold = Hold(threads, 3)
    done = [threads.submit(lambda: None) for _ in range(10)]
    assert len(threads) == 3
    hold.let_go()
    assert all(done)
    assert eventually(lambda: not waiting(threads))


def test_without_threads_the_caller_does_it(threads: WorkerThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the interpreter shuts down no thread can be started: then calls are made where they are asked for."""

    def refuse(*args: object) -> int:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    assert threads.call(lambda left: (_thread.get_ident(), left), 3.0) == (_thread.get_ident(), 3.0)
    assert asyncio.run(threads.acall(lambda left: _thread.get_ident())) == _thread.get_ident()
    assert not threads.submit(lambda: None)
    assert waiting(threads) == 0


def test_closing_ends_the_threads_after_their_work(new_threads: Callable[..., WorkerThreads]) -> None:
    """What was handed over before is done; later calls are made where they are asked for."""
    threads = new_threads(3)
    hold, done = Hold(threads, 3), []
    for number in range(10):
        threads.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    threads.close()
    assert not threads.submit(lambda: None)
    assert threads.call(lambda left: _thread.get_ident()) == _thread.get_ident()
    running = threading.active_count
    assert done == []
    hold.let_go()
    assert eventually(lambda: len(done) == 10)
    assert eventually(lambda: threads._tickets.qsize() == 1 and not threads._idle), running()


# Lanes


@pytest.mark.parametrize("reserved", [0, 1])
def test_urgent_calls_are_begun_first(new_threads: Callable[..., WorkerThreads], reserved: int) -> None:
    """Rule 3: renewals and releases are begun before what was asked for earlier; each lane keeps its order."""
    threads = new_threads(1 + reserved, reserved)
    hold = Hold(threads, 1)
    also = Hold(threads, reserved, urgent=True)
    order: list[str] = []
    for number in range(3):
        threads.submit(lambda number=number: order.append(f"other {number}"))  # type: ignore[misc]
    for number in range(3):
        threads.submit(lambda number=number: order.append(f"urgent {number}"), urgent=True)  # type: ignore[misc]
    hold.let_go()
    assert eventually(lambda: len(order) == 6)
    assert order == ["urgent 0", "urgent 1", "urgent 2", "other 0", "other 1", "other 2"]
    also.let_go()


def test_reserved_threads_make_urgent_calls_only(new_threads: Callable[..., WorkerThreads]) -> None:
    """F67: however many others are stuck, a release is begun at once; and the others get no reserved thread."""
    threads = new_threads(4, reserved=1)
    hold, done = Hold(threads, 3), []
    threads.submit(lambda: done.append("other"))
    for _ in range(20):
        assert threads.call(lambda left: "released", LONG, urgent=True) == "released"
    assert done == []
    hold.let_go()
    assert eventually(lambda: done == ["other"])


def test_no_call_is_left_lying(new_threads: Callable[..., WorkerThreads]) -> None:
    """Under contention for threads and slots, every call is made once, and at the end no thread has anything to do."""
    threads = new_threads(4, reserved=2)
    rounds = 2_000
    made: list[None] = []

    def ask() -> None:
        for number in range(rounds):
            if number % 3:
                threads.submit(lambda: made.append(None), urgent=number % 2 == 0)
            else:
                threads.call(lambda left: made.append(None), LONG, urgent=number % 2 == 0)

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(LONG)
    assert eventually(lambda: waiting(threads) == 0 and len(made) == 4 * rounds, LONG)
    assert eventually(lambda: len(threads._idle) == len(threads), LONG)
    assert threads._tickets.qsize() == 0
    assert len(threads._slots) == 2


def test_closing_does_what_reserved_threads_left(new_threads: Callable[..., WorkerThreads]) -> None:
    """A reserved thread that came first has left the call to the others, which make it before they end."""
    threads = new_threads(2, reserved=1)
    hold, done = Hold(threads, 1), list[str]()
    threads.call(lambda left: None, LONG, urgent=True)
    threads.submit(lambda: done.append("left"))
    assert eventually(lambda: threads._tickets.qsize() == 0 and threads._idle)
    threads.close()
    assert eventually(lambda: threads._tickets.qsize() == 1 and not threads._idle)
    hold.let_go()
    assert eventually(lambda: done == ["left"])


def test_a_call_that_comes_while_a_slot_is_held_in_vain(
    new_threads: Callable[..., WorkerThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread has the only slot for a call that is withdrawn under its hands; another thread finds no slot for the
    next one, and goes: the first one has to look again."""
    threads = new_threads(2, reserved=1)
    assert threads.call(lambda left: True, LONG)
    hold = Hold(threads, 1)
    threads.call(lambda left: None, LONG, urgent=True)  # both threads have started
    hold.let_go()
    assert eventually(lambda: len(threads._idle) == 2)
    first, done = worker_calls.first, list[str]()
    withdrawn = worker_calls.Submitted(lambda left: None, threads._others)

    def in_vain(lane: worker_calls.Lane) -> worker_calls.Call | None:
        monkeypatch.setattr(worker_threads, "first", first)
        withdrawn.withdraw()
        found = first(lane)
        threads.submit(lambda: done.append("next"))
        assert eventually(lambda: threads._tickets.qsize() == 0 and len(threads._idle) == 1)
        return found

    monkeypatch.setattr(worker_threads, "first", in_vain)
    assert threads._enter(withdrawn)
    assert eventually(lambda: done == ["next"])


# Deadlines


def test_a_call_gets_the_seconds_that_are_left(threads: WorkerThreads) -> None:
    """F67: the time in the queue is part of the timeout."""
    hold = Hold(threads, 1)

    def let_go() -> None:
        assert eventually(lambda: waiting(threads))
        time.sleep(0.3)
        hold.let_go()

    threading.Thread(target=let_go).start()
    left = threads.call(lambda left: left, LONG)
    assert 0 < left <= LONG - 0.3
    assert threads.call(lambda left: left) == float("inf")


def test_a_call_that_comes_too_late_is_never_begun(threads: WorkerThreads) -> None:
    """F67: its caller is told so when its time is over, and not when a thread is free."""
    hold, begun, told = Hold(threads, 1), list[float](), list[bool]()
    started = time.monotonic()
    with pytest.raises(LockBackendFailed, match=r"not sent: no thread was free for it within 0\.2 s"):
        threads.call(begun.append, 0.2, on_withdrawn=lambda: told.append(True))
    assert time.monotonic() - started < LONG / 2
    assert told == [True]
    assert waiting(threads) == 0
    hold.let_go()
    threads.call(lambda left: None, LONG)
    assert begun == []


async def test_a_coroutine_whose_call_comes_too_late_is_told(threads: WorkerThreads) -> None:
    """F67: the same for coroutines, all of them at once."""
    hold, begun, told = Hold(threads, 1), list[float](), list[bool]()
    calls = (threads.acall(begun.append, 0.2, on_withdrawn=lambda: told.append(True)) for _ in range(200))
    started = time.monotonic()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert time.monotonic() - started < LONG / 2
    assert all(isinstance(outcome, LockBackendFailed) for outcome in outcomes)
    assert len(told) == 200
    assert waiting(threads) == 0
    hold.let_go()
    await threads.acall(lambda left: None, LONG)
    assert begun == []


def test_a_call_without_a_chance_is_not_begun(threads: WorkerThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    """F67: a command that is sent with hardly any time left only fails, and then has to be cleaned up."""
    monkeypatch.setattr(worker_calls, "LEAST", 1.0)
    begun, told = list[float](), list[bool]()
    with pytest.raises(LockBackendFailed, match="not sent"):
        threads.call(begun.append, 0.2, on_withdrawn=lambda: told.append(True))
    assert (begun, told) == ([], [True])


def test_a_late_call_is_left_to_its_owner(threads: WorkerThreads) -> None:
    """A thread that comes to a call whose time is over leaves it alone, even if its owner sleeps on."""
    begun: list[float] = []
    entry = worker_calls.Submitted(begun.append, threads._others, -1.0)
    assert threads._enter(entry)
    threads.call(lambda left: None, LONG)
    assert begun == []
    assert entry.withdraw()


@pytest.mark.parametrize("coroutine", [False, True])
def test_a_call_that_does_not_end_is_given_up(
    threads: WorkerThreads, coroutine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F67: a call that does not keep to the seconds it was given holds its caller up for a bounded time only."""
    monkeypatch.setattr(worker_calls, "OVERTIME", 0.2)
    go, told = threading.Event(), list[bool]()

    def stuck(left: float) -> None:
        go.wait(LONG)

    started = time.monotonic()

    def ask() -> None:
        if coroutine:
            return asyncio.run(threads.acall(stuck, 0.2, on_withdrawn=lambda: told.append(True)))
        return threads.call(stuck, 0.2, on_withdrawn=lambda: told.append(True))

    with pytest.raises(LockBackendFailed, match=r"was sent, but did not end within 0\.2 s"):
        ask()
    assert time.monotonic() - started < LONG / 2
    assert told == []
    go.set()


def test_a_call_may_take_a_little_longer(threads: WorkerThreads) -> None:
    """A call that has begun is not given up the moment its time is over: its own error says more."""

    def slow(left: float) -> str:
        time.sleep(left + 0.2)
        return "done"

    assert threads.call(slow, 0.2) == "done"
    assert asyncio.run(threads.acall(slow, 0.2)) == "done"


# What nobody awaits any more


async def test_a_cancelled_call_is_not_begun(threads: WorkerThreads) -> None:
    """F67: what nobody awaits any more is not sent, and its owner knows that it was not."""
    hold, begun, told = Hold(threads, 1), list[float](), list[bool]()
    task = asyncio.create_task(threads.acall(begun.append, LONG, on_withdrawn=lambda: told.append(True)))
    await asyncio.sleep(0)
    assert waiting(threads) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (told, waiting(threads)) == ([True], 0)
    hold.let_go()
    await threads.acall(lambda left: None, LONG)
    assert begun == []


async def test_a_call_that_has_begun_goes_on(threads: WorkerThreads) -> None:
    """A cancelled coroutine whose call was begun is not told that it was withdrawn."""
    begun, go, ended, told = threading.Event(), threading.Event(), threading.Event(), []

    def work(left: float) -> None:
        begun.set()
        go.wait(LONG)
        ended.set()

    task = asyncio.create_task(threads.acall(work, LONG, on_withdrawn=lambda: told.append(True)))
    assert await asyncio.to_thread(begun.wait, LONG)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await asyncio.to_thread(ended.wait, LONG)
    assert told == []


@pytest.mark.long
async def test_a_call_is_either_begun_or_withdrawn(new_threads: Callable[..., WorkerThreads]) -> None:
    """Cancelled at any moment, it was begun or its owner was told that it was not: never both, never neither."""
    threads = new_threads(2)
    for attempt in range(1_000):
        begun, told = list[float](), list[bool]()

        async def ask(begun: list[float] = begun, told: list[bool] = told) -> None:
            await threads.acall(begun.append, LONG, on_withdrawn=lambda: told.append(True))

        tasks = [asyncio.create_task(ask()) for _ in range(4)]
        for _ in range(attempt % 3 + 1):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await threads.acall(lambda left: None, LONG)
        await threads.acall(lambda left: None, LONG)
        assert await asyncio.to_thread(eventually, lambda: len(begun) + len(told) == 4)  # noqa: B023


@pytest.mark.long
async def test_ten_thousand_cancelled_calls_leave_nothing_behind(threads: WorkerThreads) -> None:
    """F67: they are dropped at once, although every thread is stuck, and the next call is not held up by them."""
    hold = Hold(threads, 1)

    class Call:
        def __call__(self, left: float) -> None:
            raise AssertionError("begun, although nobody awaits it")

    calls = [Call() for _ in range(10_000)]
    alive = weakref.WeakSet(calls)
    tasks = [asyncio.create_task(threads.acall(call, LONG)) for call in calls]
    await asyncio.sleep(0)
    assert waiting(threads) == 10_000
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert waiting(threads) == 0
    del calls, tasks, task
    await asyncio.sleep(0)
    gc.collect()
    assert len(alive) <= 1  # the loop's variable
    hold.let_go()
    assert await threads.acall(lambda left: "next", LONG) == "next"
    assert eventually(lambda: threads._tickets.qsize() == 0)


async def test_the_call_after_a_storm_of_cancellations(new_threads: Callable[..., WorkerThreads]) -> None:
    """F67: after a storm of cancellations the next call has its whole time."""
    threads = new_threads(4)
    hold = Hold(threads, 4)
    for _ in range(20):
        tasks = [asyncio.create_task(threads.acall(lambda left: time.sleep(0.1), LONG)) for _ in range(300)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    hold.let_go()
    assert await threads.acall(lambda left: left, LONG) > LONG - 20  # 6,000 times 0.1 s in 4 threads are 150 s


# Signals


class Struck(Exception):
    """Raised by a signal handler."""


@pytest.fixture
def struck() -> Iterator[Callable[[float], object]]:
    """Has the main thread struck by a signal, which raises `Struck`, after so many seconds; 0: never."""

    def strike(*args: object) -> None:
        raise Struck

    former = signal.signal(signal.SIGALRM, strike)
    yield lambda after: signal.setitimer(signal.ITIMER_REAL, after)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, former)


needs_signals = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signal.setitimer")


@needs_signals
def test_a_signal_handler_withdraws_what_it_interrupts(
    threads: WorkerThreads, struck: Callable[[float], object]
) -> None:
    """F67: a blocking caller in which a signal handler raises takes back what has not begun."""
    hold, begun, told = Hold(threads, 1), list[float](), list[bool]()
    struck(0.2)
    with pytest.raises(Struck):
        threads.call(begun.append, LONG, on_withdrawn=lambda: told.append(True))
    assert (told, waiting(threads)) == ([True], 0)
    hold.let_go()
    threads.call(lambda left: None, LONG)
    assert begun == []


@needs_signals
def test_signals_at_any_line_leave_the_threads_whole(
    new_threads: Callable[..., WorkerThreads], struck: Callable[[float], object]
) -> None:
    """Struck anywhere, a call was begun, or withdrawn, or its owner was not told: never begun after it was told; and
    the threads serve the next one."""
    threads = new_threads(3, reserved=1)
    rng = random.Random(1)
    begun: set[int] = set()
    told: set[int] = set()
    hits = 0
    for number in range(3_000):
        with contextlib.suppress(Struck):
            try:
                struck(rng.uniform(0.000_005, 0.000_150))
                threads.call(
                    lambda left, number=number: begun.add(number),  # type: ignore[misc]
                    LONG,
                    urgent=number % 2 == 0,
                    on_withdrawn=lambda number=number: told.add(number),  # type: ignore[misc]
                )
            except Struck:
                hits += 1
            finally:
                struck(0)
    assert hits > 100
    for urgent in itertools.chain([True, False] * 20):
        assert threads.call(lambda left: "whole", LONG, urgent=urgent) == "whole"
    assert eventually(lambda: waiting(threads) == 0)
    assert not begun & told
    assert len(threads._slots) == 2


@pytest.mark.skipif(not hasattr(sys, "settrace"), reason="needs sys.settrace")
def test_struck_at_each_line_in_turn(new_threads: Callable[..., WorkerThreads]) -> None:
    """The same, not by chance: an exception at every line of the main thread's side, one after the other."""
    threads = new_threads(2)
    threads.call(lambda left: None)
    lines = 0
    for line in itertools.count(1):
        begun: list[float] = []
        told: list[bool] = []
        if not _struck_at(line, lambda: threads.call(begun.append, LONG, on_withdrawn=lambda: told.append(True))):  # noqa: B023
            break
        lines += 1
        assert threads.call(lambda left: "whole", LONG) == "whole"
        assert eventually(lambda: waiting(threads) == 0)
        assert len(begun) + len(told) <= 1
    assert lines > 20


def _struck_at(line: int, call: Callable[[], object]) -> bool:
    """Raise `Struck` at so many lines of the modules. Return whether there were as many."""
    left, modules = line, (worker_threads.__file__, worker_calls.__file__)

    def trace(frame: object, event: str, arg: object) -> object:
        nonlocal left
        if getattr(frame, "f_code").co_filename not in modules:  # noqa: B009
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Struck
        return trace

    former = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        call()
    except Struck:
        pass
    finally:
        sys.settrace(former)
    return left <= 0


# Forks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_the_module_starts_no_thread_of_its_own() -> None:
    """A process that only imports it, or makes the object, has no thread that a fork would lose."""
    before = threading.active_count()
    assert len(WorkerThreads(16)) == 0
    assert threading.active_count() == before
