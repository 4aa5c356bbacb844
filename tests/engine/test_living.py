"""Living with a lock: dead threads, stopped processes, forks, limits, requests to release, ten thousand at a time."""

import _thread
import contextlib
import gc
import itertools
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from django_mongolock import mongo_lock
from django_mongolock.engine.lock.detached import Parked, park_held
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.session.grant import State
from django_mongolock.engine.session.notifications import MOST_CALLBACKS
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockLost, LockNotAcquired
from tests.engine.conftest import Here, HoldUp, LockMaker, Timer, make_lock
from tests.engine.processes import processes
from tests.engine.twins import CALM
from tests.engine.worker import PAUSE_WAITING
from tests.support.grants import grant_of
from tests.support.looking import holder, new_key
from tests.support.waiting import eventually

Entries = Callable[..., list[Any]]
#: What a beat is, by a clock that is moved.
BEAT = CALM.lease / 3


# Threads that end


@pytest.mark.parametrize("how", ["returns", "dies", "was not started by threading"])
def test_a_thread_that_ends_with_a_lock_loses_it(
    here: Here, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """F32: released at the next beat, with a warning that says where it was acquired; also if the object lives on."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    kept: list[MongoLock] = []

    def work() -> None:
        kept.append(here.lock(terms=CALM).acquire())
        if how == "dies":
            raise RuntimeError

    if how == "was not started by threading":
        _thread.start_new_thread(work, ())
        assert eventually(lambda: bool(kept) and kept[0].held)
        time.sleep(0.2)  # until it has ended
    else:
        here.in_thread(work).join()
    here.timer.move(BEAT)
    assert eventually(lambda: here.entries() == [])
    assert not kept[0].held
    assert not kept[0].release()
    assert "its thread or event loop has ended" in caplog.text
    assert "test_living.py" in caplog.text
    assert eventually(lambda: not here.session.registry.grants)


def test_a_thread_is_not_taken_for_one_that_has_ended(lock: LockMaker) -> None:
    """P1: nor is one that `threading` has not started, and that has the number of an earlier one: it enters no lock of
    that one."""
    kept: list[MongoLock] = []
    numbers: list[int] = []

    def take() -> None:
        with contextlib.suppress(LockNotAcquired):
            kept.append(lock(terms=CALM, reentrant=True, wait=0).acquire())
        numbers.append(threading.get_ident())

    for number in range(1, 101):
        _thread.start_new_thread(take, ())
        assert eventually(lambda number=number: len(numbers) == number)  # type: ignore[misc]
        if len(set(numbers)) < len(numbers):
            break
        time.sleep(0.05)  # until it has ended
    assert len(set(numbers)) < len(numbers), "no thread got a number again"
    tokens = [mine.fencing_token for mine in kept]
    assert len(set(tokens)) == len(tokens)


# Danger, limits


def test_extend_does_not_go_beyond_the_longest_hold(lock: LockMaker, timer: Timer) -> None:
    mine = lock(terms=CALM, max_hold=40).acquire()
    assert mine.remaining <= 40
    mine.extend(300)
    assert mine.remaining <= 40
    timer.move(40)
    with pytest.raises(LockLost, match="max_hold"):
        mine.ensure_held()


# The heartbeat


def test_the_grant_before_is_not_renewed_for_the_one_after(lock: LockMaker, session: Session, entries: Entries) -> None:
    """F39: a renewal that was on its way when the lock was given back does nothing to the next grant of the same
    object, and brings the old one not back."""
    mine = lock(terms=CALM).acquire()
    before = grant_of(mine)
    mine.release()
    mine.acquire()
    until = entries()[0]["until"]
    time.sleep(0.02)
    session.renewals.renew([before])
    assert entries()[0]["until"] == until
    assert len(entries()) == 1
    assert not before.held
    assert mine.held


# Stopped processes


@pytest.mark.long
@pytest.mark.parametrize("granted", [False, True], ids=["still waiting", "granted meanwhile"])
def test_a_waiter_that_is_stopped_does_not_believe_in_an_old_grant(here: Here, granted: bool) -> None:
    """F26, F28: stopped past its waiter's lease, it was granted the lock by news that it reads only now: by then it
    had ended, and somebody else has it. It waits on, and when it has the lock, it really has it."""
    theirs = here.other(terms=CALM).acquire()
    with processes(1, "pause_waiting", here.collection.name) as (process,):
        process.hear()
        assert eventually(lambda: len(here.entries()) == 2)
        time.sleep(0.7)
        process.send(signal.SIGSTOP)
        if granted:
            theirs.release()
        time.sleep(PAUSE_WAITING.waiter_lease + PAUSE_WAITING.margin + 0.5)
        second = theirs if not granted else here.other(terms=CALM, wait=10).acquire()
        resumed = time.monotonic()
        process.send(signal.SIGCONT)
        time.sleep(0.5)
        assert second.held
        token, released = second.fencing_token, time.monotonic()
        second.release()
        told = process.hear()
        assert told["at"] >= released > resumed
        assert told["held"]
        assert told["token"] > token
        assert [holder["token"] for holder in here.entries()] == [told["token"]]
        process.say().end()


# What other threads see


def at_line(number: int, look: Callable[[], Any], meanwhile: Callable[[], object]) -> tuple[Any, bool]:
    """What *look* returns if at its line or call of that *number* something happens *meanwhile*; and whether it did."""
    events = itertools.count(1)
    happened = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if event in ("call", "line") and next(events) == number:
            happened.append(meanwhile())
        return trace

    sys.settrace(trace)
    try:
        return look(), bool(happened)
    finally:
        sys.settrace(None)


@pytest.mark.long
@pytest.mark.parametrize(("name", "expected"), [("held", False), ("remaining", 0.0), ("in_danger", False)])
def test_a_released_lock_never_looks_held(here: Here, hold_up: HoldUp, name: str, expected: object) -> None:
    """P1: another thread releases a lock and somebody else has got it; at whatever line the end of the release meets
    one who looks, to him the lock is not held."""
    for number in itertools.count(1):
        session = here.new_session()
        gate = hold_up(session.store, "release_uncontended", late=True)
        mine = make_lock(session).acquire()
        releasing = threading.Thread(target=mine.release)
        releasing.start()
        assert gate.there.wait(10)
        next_one = here.other().acquire()

        def end_the_release(answer: threading.Event = gate.go, releasing: threading.Thread = releasing) -> None:
            answer.set()
            releasing.join(10)

        seen, happened = at_line(number, lambda lock=mine: getattr(lock, name), end_the_release)  # type: ignore[misc]
        end_the_release()
        assert next_one.held
        assert seen == expected, f"at line {number}"
        next_one.release()
        session.close()
        if not happened:
            break
    assert number > 3


# Fork and exit


@pytest.mark.long
def test_the_end_of_the_interpreter_releases_once_and_says_nothing(
    here: Here, capfd: pytest.CaptureFixture[str]
) -> None:
    """F34, P6: held, waited for and not yet collected objects: all given back at exit, without a traceback."""
    with here.other(terms=CALM), processes(1, "exit_with_everything", here.collection.name, "held") as (process,):
        process.hear()
        assert eventually(lambda: len(here.entries()) == 2)
        assert process.say().end() == 0
        assert here.entries("held") == here.entries("also") == []
        assert len(here.entries()) == 1
    assert capfd.readouterr().err == ""


def test_a_signal_while_cleaning_up_leaves_nothing(
    here: Here, hold_up: HoldUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F29: a second signal strikes in the cleaning up after the first: the grant is taken back all the same, when
    nobody can reach it any more, and the line of the process moves on."""

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    with here.other(terms=CALM):
        for part, method in (
            (here.session.queue, "leave"),
            (here.session.ending, "end"),
            (here.session.ending, "forget"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(here.session.waits, "pause", strike)
                hold_up(part, method).fail(KeyboardInterrupt())
                with pytest.raises(KeyboardInterrupt):
                    here.lock(terms=CALM, wait=None).acquire()
            assert eventually(
                lambda: not (here.session.registry.grants or here.session.queue.waiting or here.session.queue.lines)
            ), method
        assert eventually(lambda: not here.session.cleanup.pending)
        assert len(here.entries()) == 1


@pytest.mark.long
def test_a_loss_in_the_last_moment_is_reported(here: Here) -> None:
    """P7: the block ends, its lock turns out to have been taken away, and nobody has the lock object any more: by an
    error and by `on_lost`, which has its lock even so."""
    told: list[str] = []
    busy = threading.Event()
    for _ in range(MOST_CALLBACKS):  # so that the call can only be made when everything else is over
        here.session.notifications.threads.submit(busy.wait)
    with pytest.raises(LockLost), here.lock(terms=CALM, on_lost=lambda lost: told.append(lost.key)):
        here.collection.update_one({"_id": "k"}, {"$set": {"holders": []}})
    gc.collect()
    busy.set()
    assert eventually(lambda: told == ["k"])


# Detached


def test_a_lock_that_is_detached_was_not_forgotten() -> None:
    """F96: its owner token lives until the grant is released here; the heartbeat, which sees a token die, would take a
    held grant for one that its code has dropped, and warn."""
    key = new_key()
    lock = mongo_lock(key).acquire()
    (grant,), (token,) = lock._own.grants, lock._own._owner_tokens
    states: list[State] = []
    weakref.finalize(token, lambda: states.append(grant.state))
    del token
    assert isinstance(park_held(lock, Terms(owner="a task"), {}), Parked)
    assert states == [State.RELEASED]
    assert holder(key)["process"] == "none"
