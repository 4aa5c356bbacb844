"""Calls that threads make for others, with their order, their time limits, and calls that nobody awaits."""

import _thread
import asyncio
import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from django_mongolock.engine.session import lanes, worker_threads
from django_mongolock.engine.session.core import thread_limits
from django_mongolock.exceptions import LockBackendFailed
from tests.support.waiting import eventually


class WorkerThreads(worker_threads.WorkerThreads):
    """Threads whose calls have the highest priority unless a test says otherwise."""

    def submit(self, call: Callable[[], object], *, priority: int = 0, key: str | None = None) -> bool:
        return super().submit(call, priority=priority, key=key)

    def call(self, call: Callable[..., Any], timeout: float | None = None, *, priority: int = 0, **how: Any) -> Any:
        return super().call(call, timeout, priority=priority, **how)

    async def acall(self, *given: Any, priority: int = 0, **how: Any) -> Any:
        return await super().acall(*given, priority=priority, **how)


#: More than any of these calls needs, on a loaded machine as well.
LONG = 60.0


class Hold:
    """Keeps threads busy until it is let go."""

    def __init__(self, threads: WorkerThreads, count: int, **how: Any) -> None:
        self._go = threading.Event()
        begun = threading.Semaphore(0)

        def work() -> None:
            begun.release()
            self._go.wait(LONG)

        for _ in range(count):
            assert threads.submit(work, **how)
        for _ in range(count):
            assert begun.acquire(timeout=LONG)

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
def new_threads() -> Iterator[Callable[..., WorkerThreads]]:
    """Return a function that makes worker threads, and end them with the test."""
    made: list[WorkerThreads] = []

    def new_threads(*sizes: int, **how: Any) -> WorkerThreads:
        made.append(WorkerThreads(*sizes, **how))
        return made[-1]

    yield new_threads
    for threads in made:
        threads.close()


@pytest.fixture
def threads(new_threads: Callable[..., WorkerThreads]) -> WorkerThreads:
    """Return threads of one thread."""
    return new_threads(1)


def waiting(threads: WorkerThreads) -> int:
    """Return the number of calls that wait for a thread."""
    return sum(map(len, threads._lanes.waiting))


# Results


def test_a_call_without_a_caller_may_fail(threads: WorkerThreads, caplog: pytest.LogCaptureFixture) -> None:

    def leave() -> None:
        raise SystemExit

    threads.submit(leave)
    assert threads.call(lambda left: "still there", LONG) == "still there"
    assert "a call in the background failed" in caplog.text


# The number of threads


def test_without_threads_the_caller_does_it(threads: WorkerThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the interpreter shuts down, no thread can be started, and the caller makes its own calls."""

    def refuse(*args: object) -> int:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    assert threads.call(lambda left: (_thread.get_ident(), left), 3.0) == (_thread.get_ident(), 3.0)
    assert asyncio.run(threads.acall(lambda left: _thread.get_ident())) == _thread.get_ident()
    assert not threads.submit(lambda: None)
    assert waiting(threads) == 0


def test_closing_ends_the_threads_after_their_work(new_threads: Callable[..., WorkerThreads]) -> None:
    """Calls handed over before closing are made. Later calls are made by their callers."""
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


def test_what_is_slow_counts_no_more(
    new_threads: Callable[..., WorkerThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F110: After a while another thread replaces a stuck one, up to a limit. Later calls then wait until one ends. The
    replacement needs no other event."""
    monkeypatch.setattr(lanes, "SLOW", 0.1)
    threads = new_threads(2, 5)
    first, done = Hold(threads, 2), []
    began = time.monotonic()
    assert threads.call(lambda left: "soon", LONG) == "soon"
    assert time.monotonic() - began > lanes.SLOW / 2
    rest = Hold(threads, 3)
    assert len(threads) == 5
    threads.submit(lambda: done.append("late"))
    time.sleep(lanes.SLOW * 1.5)
    assert (done, len(threads)) == ([], 5)
    first.let_go()
    assert eventually(lambda: done == ["late"])
    rest.let_go()


def test_calls_that_find_all_threads_busy_leave_no_tickets(new_threads: Callable[..., WorkerThreads]) -> None:
    """However many calls come meanwhile, each thread looks once more. All calls are made."""
    threads, made = new_threads(2, 4), list[int]()
    hold = Hold(threads, 2)
    for number in range(100):
        threads.submit(lambda number=number: made.append(number))  # type: ignore[misc]
    assert threads._tickets.qsize() <= 4
    hold.let_go()
    assert eventually(lambda: len(made) == 100)


# Keys


def test_all_calls_are_begun_while_those_before_are_slow(
    new_threads: Callable[..., WorkerThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F159: Calls of a lane without free threads are begun one by one, as earlier calls become slow."""
    monkeypatch.setattr(lanes, "SLOW", 0.02)
    for _ in range(5):
        threads = new_threads(24, 80, shares=(1.0, 0.75))
        hold, begun = Hold(threads, 24, priority=1), threading.Event()
        assert threads.submit(begun.set, priority=1)
        assert begun.wait(5)
        hold.let_go()


async def test_what_waits_for_a_key_and_is_given_up_is_not_made(new_threads: Callable[..., WorkerThreads]) -> None:
    """F67, F110: A call that waits for a key is given up by a time limit or by a cancellation. Nothing of it is left,
    and the next call is made."""
    threads = new_threads(8)
    hold, begun = Hold(threads, 2, key="k"), list[float]()
    with pytest.raises(LockBackendFailed, match="not sent"):
        await threads.acall(begun.append, 0.1, key="k")
    task = asyncio.create_task(threads.acall(begun.append, LONG, key="k"))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait([task])
    assert not any(threads._lanes.waiting_for_key["k"])
    hold.let_go()
    assert await threads.acall(lambda left: "next", LONG, key="k") == "next"
    assert eventually(lambda: not threads._lanes.under_way)
    assert begun == []


# Deadlines


def test_a_call_that_comes_too_late_is_never_begun(threads: WorkerThreads) -> None:
    """F67: The caller gets the error when its time is over, and not when a thread is free."""
    hold, begun, told = Hold(threads, 1), list[float](), list[bool]()
    started = time.monotonic()
    with pytest.raises(LockBackendFailed, match=r"not sent within 0\.2 s"):
        threads.call(begun.append, 0.2, on_withdrawn=lambda: told.append(True))
    assert time.monotonic() - started < LONG / 2
    assert told == [True]
    assert waiting(threads) == 0
    hold.let_go()
    threads.call(lambda left: None, LONG)
    assert begun == []


@pytest.mark.parametrize("coroutine", [False, True])
def test_a_call_that_does_not_end_is_given_up(
    threads: WorkerThreads, coroutine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F67: A call that exceeds its time limit delays its caller only for a bounded time."""
    monkeypatch.setattr(worker_threads, "OVERTIME", 0.2)
    go, told = threading.Event(), list[str]()
    how: Any = {name: functools.partial(told.append, name) for name in ("on_withdrawn", "on_overdue")}

    def stuck(left: float) -> None:
        go.wait(LONG)

    started = time.monotonic()

    def ask() -> Any:
        if coroutine:
            return asyncio.run(threads.acall(stuck, 0.2, **how))
        return threads.call(stuck, 0.2, **how)

    with pytest.raises(LockBackendFailed, match=r"was sent, but did not end within 0\.2 s"):
        ask()
    assert time.monotonic() - started < LONG / 2
    assert told == ["on_overdue"]
    go.set()


# Signals


class Struck(Exception):
    """Raised by a signal handler."""


@pytest.fixture
def struck() -> Iterator[Callable[[float], object]]:
    """Return a function that lets a signal raise `Struck` in the main thread after *after* seconds. 0 turns the signal
    off."""

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
    """F67: A blocking caller that is interrupted by a signal handler withdraws a call that has not begun."""
    hold, begun, told = Hold(threads, 1), list[float](), list[bool]()
    struck(0.2)
    with pytest.raises(Struck):
        threads.call(begun.append, LONG, on_withdrawn=lambda: told.append(True))
    assert (told, waiting(threads)) == ([True], 0)
    hold.let_go()
    threads.call(lambda left: None, LONG)
    assert begun == []


@pytest.mark.parametrize(
    ("connections", "most", "own"), [(0, 80, math.inf), (160, 80, 76), (100, 80, 16), (20, 16, 0), (3, 1, 0)]
)
def test_renewals_have_connections_that_no_other_thread_takes(connections: int, most: int, own: float) -> None:
    """F20, F183: The threads of the session and of the program need no more connections than there are. A quarter of
    the session's threads is for renewals."""
    assert thread_limits(connections) == (most, own)


def test_the_threads_of_a_program_send_only_so_many_commands_themselves() -> None:
    """F183: Further calls wait for a thread of the session, whatever their key."""
    threads = WorkerThreads(2, own=2)
    assert [threads.begin_own(key) for key in "abc"] == [True, True, False]
    threads.end_own("a")
    assert threads.begin_own("c")
    threads.close()


def test_a_call_apart_from_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """F29: A signal must not strike in the call. The context comes along. Any other thread makes its call itself."""
    threads, colour = WorkerThreads(1), ContextVar("colour", default="")
    colour.set("red")

    def look(left: float) -> tuple[float, str, object]:
        return round(left), colour.get(), threading.current_thread()

    left, seen, thread = threads.off_main_thread(look, 3.0, priority=0)
    assert (left, seen) == (3, "red")
    assert thread is not threading.main_thread()
    monkeypatch.setattr(threading, "main_thread", lambda: None)
    assert threads.off_main_thread(look, 3.0, priority=0) == (3, "red", threading.current_thread())
    threads.close()


def test_a_call_has_a_priority() -> None:
    """F184: A caller that names none would take the threads of the renewals."""
    with pytest.raises(TypeError, match="priority"):
        worker_threads.WorkerThreads(1).submit(lambda: None)  # type: ignore[call-arg]
