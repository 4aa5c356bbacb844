"""Waits in a line inside the process, and in a queue between processes. `test_bells` has the ways to wake a waiter."""

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import pytest

from django_mongolock.engine import clock
from django_mongolock.engine.rule.document import Step
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockCancelled, LockError
from tests.engine.conftest import Entries, Here, HoldUp, make_lock, nothing_left
from tests.engine.twins import CALM
from tests.engine.waiters import InThread
from tests.support.grants import new_grant
from tests.support.waiting import eventually

#: Long before a place in the queue is renewed under CALM terms. Such a renewal would find missed news.
SOON = CALM.waiter_lease / 6


def in_line(session: Session, number: int) -> bool:
    """Wait until so many of the session's threads and tasks stand in line, or wait in the queue."""
    return eventually(lambda: len(session.queue.waiting) == number)


# Costs


@pytest.mark.long
@pytest.mark.parametrize(("sessions", "threads"), [(2, 1), (8, 1), (1, 8), (1, 64), (4, 8)])
def test_a_contended_lock_costs_three_commands(here: Here, sessions: int, threads: int) -> None:
    """P8, F44: A contended lock costs one command to queue, one to release, and one (getMore) to hear of the grant,
    however many callers wait. Ringing the bell is not awaited. A hand-over within a process costs one command in
    all."""
    all_sessions = [here.new_session() for _ in range(sessions)]
    workers, rounds = sessions * threads, max(3, 120 // (sessions * threads))
    warm, counted = threading.Barrier(workers + 1), threading.Barrier(workers + 1)

    def work(session: Session) -> None:
        warm.wait(30)
        make_lock(session, terms=CALM, wait=None).acquire().release()
        counted.wait(30)
        counted.wait(30)
        for _ in range(rounds):
            make_lock(session, terms=CALM, wait=None).acquire().release()

    threads_ = [here.in_thread(lambda session=session: work(session)) for session in all_sessions * threads]
    holder = make_lock(all_sessions[0], terms=CALM).acquire()
    warm.wait()
    time.sleep(0.6)
    holder.release()
    counted.wait(30)
    here.commands.clear()
    began = time.monotonic()
    counted.wait(30)
    for thread in threads_:
        thread.join(60)
    idle = (time.monotonic() - began) * sessions  # who listens asks once a second, busy machine or not
    names, grants = here.commands.names(), workers * rounds
    # A bell is rung and heard again if the next command is of the same millisecond. On a busy machine this is common.
    again = 2 * max(0, names.count("insert") - grants)
    assert (len(names) - idle - again) / grants <= (4.3 if sessions > 1 else 1.3), Counter(names)
    assert again <= grants


# The line of the process


def hands_over(key: str, step: Step, timeout: float) -> bool:
    return bool(step.given and step.add)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("how", ["cancel", pytest.param("deadline", marks=pytest.mark.long), "task"])
def test_a_next_waiter_that_goes_while_the_lock_is_handed_to_it(
    here: Here, hold_up: HoldUp, where: str, how: str
) -> None:
    """F43, F36: The lock is handed on, and nothing is left, whether or not the command has reached the server."""
    gate = hold_up(here.session.store, "apply", hands_over, late=where == "after")
    first = here.lock(terms=CALM).acquire()
    next_waiter = here.lock(terms=CALM, wait=2.0 if how == "deadline" else None)
    errors: list[BaseException] = []

    async def task() -> None:
        waiting = asyncio.create_task(next_waiter.aacquire())
        assert await asyncio.to_thread(gate.there.wait, 20)
        waiting.cancel()
        await asyncio.wait([waiting])
        errors.append(asyncio.CancelledError())

    def thread() -> None:
        try:
            if how == "task":
                asyncio.run(task())
            else:
                next_waiter.acquire().release()
        except LockError as error:
            errors.append(error)

    waiting = here.in_thread(thread)
    assert in_line(here.session, 1)
    giving = here.in_thread(first.release)
    assert gate.there.wait(10)
    if how == "cancel":
        next_waiter.cancel()
    if (where, how) != ("after", "deadline"):
        waiting.join(10)
        assert len(errors) == 1
    gate.go.set()
    for thread_ in (waiting, giving):
        thread_.join(10)
    assert nothing_left(here.session)
    assert here.entries() == []
    assert here.other(terms=CALM).try_acquire()


@pytest.mark.parametrize("moment", ["before the answer", "with the answer", "after the answer"])
def test_a_next_waiter_that_is_cancelled_in_the_moment_of_the_answer(
    here: Here, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """F43: A cancelled waiter has the lock, or nobody has it. No entry is left that no session knows."""
    finish = here.session.queue.finish_handover
    first = here.lock(terms=CALM).acquire()
    waiter = here.waiter(here.lock(terms=CALM, wait=None))
    assert in_line(here.session, 1)

    def cancelled(next_waiter: Any, answer: Any) -> None:
        if moment == "before the answer":
            here.session.waits.cancel(next_waiter)
            assert eventually(lambda: waiter.done)
        next_waiter.waiting.cancelled |= moment == "with the answer"
        finish(next_waiter, answer)
        if moment == "after the answer":
            here.session.waits.cancel(next_waiter)

    monkeypatch.setattr(here.session.queue, "finish_handover", cancelled)
    first.release()
    waiter.end().let_go()
    assert isinstance(waiter.error, LockCancelled if moment == "before the answer" else type(None))
    assert nothing_left(here.session)
    assert here.entries() == []


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_giver_that_is_struck_while_handing_over(here: Here, hold_up: HoldUp, where: str) -> None:
    """F36, F29: The giver's lock is removed in the background, and the next waiter goes on by itself."""
    hold_up(here.session.store, "apply", hands_over, late=where == "after").fail(KeyboardInterrupt())
    first = here.lock(terms=CALM).acquire()
    next_waiter = here.waiter(here.lock(terms=CALM, wait=None))
    assert in_line(here.session, 1)
    with pytest.raises(KeyboardInterrupt):
        first.release()
    assert next_waiter.end().has_it
    next_waiter.let_go()
    assert nothing_left(here.session)
    assert here.entries() == []


async def test_a_giver_that_is_cancelled_while_handing_over(
    session: Session, entries: Entries, hold_up: HoldUp
) -> None:
    """F36: The command is on its way, and no task awaits its answer. The next waiter gets the lock once."""
    gate = hold_up(session.store, "apply", hands_over)
    first = await make_lock(session, terms=CALM).aacquire()
    next_waiter = asyncio.create_task(make_lock(session, terms=CALM, wait=None).aacquire())
    assert await asyncio.to_thread(in_line, session, 1)
    giving = asyncio.create_task(first.arelease())
    assert await asyncio.to_thread(gate.there.wait, 20)
    giving.cancel()
    await asyncio.wait([giving])
    lock = await asyncio.wait_for(next_waiter, 10)
    gate.go.set()
    await asyncio.sleep(0.1)
    assert lock.held
    assert len(entries()) == 1
    await lock.arelease()
    assert await asyncio.to_thread(nothing_left, session)
    assert entries() == []


def test_a_giver_that_had_lost_the_lock(here: Here) -> None:
    """P7, F38: The giver learns of its loss. The next in line goes on and waits for the present holder."""
    mine = here.lock(terms=CALM).acquire()
    next_waiter = here.waiter(here.lock(terms=CALM, wait=None))
    assert in_line(here.session, 1)
    here.take_away()
    theirs = here.other(terms=CALM, wait=0).acquire()
    assert not mine.release()
    assert mine.lost or not mine.held
    assert not eventually(lambda: next_waiter.done, 0.3)
    theirs.release()
    assert next_waiter.end().has_it
    next_waiter.let_go()


# Cancel


@pytest.mark.parametrize("phase", ["in line", "next", "in the queue"])
def test_another_thread_ends_the_wait(here: Here, phase: str) -> None:
    """F36: cancel() at any moment ends the wait soon with LockCancelled. Nothing is left, and the next in line goes
    on."""
    holder = (here.lock if phase in ("in line", "next") else here.other)(terms=CALM).acquire()
    ahead = here.waiter(here.lock(terms=CALM, wait=None)) if phase == "in line" else None
    assert in_line(here.session, 0 if ahead is None else 1)
    waiter = here.waiter(here.lock(terms=CALM, wait=None))
    assert in_line(here.session, 1 if ahead is None else 2)
    if phase == "in the queue":
        assert eventually(lambda: len(here.entries()) == 2)
    time.sleep(0.1)
    behind = here.waiter(here.lock(terms=CALM, wait=None))
    time.sleep(0.05)
    cancelled = clock.now()
    waiter.lock.cancel()
    assert isinstance(waiter.end().error, LockCancelled)
    assert waiter.at - cancelled < SOON
    waiter.lock.cancel()
    holder.release()
    for party in (ahead, behind):
        if party is not None:
            assert party.end().let_go().has_it
    assert nothing_left(here.session)
    assert here.entries() == []


def test_a_line_may_change_while_another_thread_reads_it(session: Session, in_thread: InThread) -> None:
    """Threads come and go while another thread asks for its turn. The caller gets an answer, not a RuntimeError."""
    first = new_grant(session, make_lock(session), object())
    session.queue.join(first, trial=False)
    end = clock.now() + 0.3

    def come_and_go() -> None:
        while clock.now() < end:
            passing = new_grant(session, make_lock(session), object())
            session.queue.join(passing, trial=False)
            session.queue.leave(passing)

    threads = [in_thread(come_and_go) for _ in range(4)]
    while clock.now() < end:
        assert session.queue.turn(first) == ("now", None)
    for thread in threads:
        thread.join(5)
    session.queue.leave(first)
