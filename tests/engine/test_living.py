"""Threads and processes that end with a lock, the views of other threads, and owners that come back."""

import _thread
import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo.collection import Collection

from django_mongolock import mongo_lock
from django_mongolock.engine.lock.detached import Parked, park_held
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.protocol.processes import NO_PROCESS, fate, this_process
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.session.grant import State
from django_mongolock.engine.session.notifications import MOST_CALLBACKS
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockLost, LockNotAcquired
from tests.engine.conftest import Document, Entries, Here, HoldUp, LockMaker, make_lock
from tests.engine.faces import Face
from tests.engine.processes import Process, processes
from tests.engine.twins import CALM
from tests.support.grants import grant_of
from tests.support.looking import holder, new_key
from tests.support.waiting import eventually

#: The interval of renewals, by a clock that is moved.
BEAT = CALM.lease / 3


# Threads that end


@pytest.mark.parametrize("how", ["returns", "dies", "was not started by threading"])
def test_a_thread_that_ends_with_a_lock_loses_it(
    here: Here, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """F32: The lock is released at the next beat, even if its object lives on. A warning says where it was acquired."""
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
    """P1: A thread that `threading` did not start is told apart from an ended thread with the same number. The new
    thread does not enter the locks of the ended one."""
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


# The heartbeat


def test_the_grant_before_is_not_renewed_for_the_one_after(lock: LockMaker, session: Session, entries: Entries) -> None:
    """F39: A late renewal of a released grant does nothing to the next grant of the same object, and does not bring
    back the old one."""
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


# Views from other threads


def at_line(number: int, look: Callable[[], Any], meanwhile: Callable[[], object]) -> tuple[Any, bool]:
    """Call *look*, and call *meanwhile* at its line or call of that *number*.

    Return the result of *look*, and whether *meanwhile* was called.
    """
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
    """P1: One thread releases a lock, and another caller has got it. At any line of the end of the release, the lock
    does not look held to a reader."""
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
    """F34, P6: Held, waiting and uncollected locks are all released at exit, without a traceback."""
    with here.other(terms=CALM), processes(1, "exit_with_everything", here.collection.name, "held") as (process,):
        process.hear()
        assert eventually(lambda: len(here.entries()) == 2)
        assert process.say().end() == 0
        assert here.entries("held") == here.entries("also") == []
        assert len(here.entries()) == 1
    assert capfd.readouterr().err == ""


@pytest.mark.long
def test_a_daemon_thread_takes_no_lock_after_the_exit_hooks(here: Here) -> None:
    """F189, P6: A daemon thread that acquires and releases a lock in a loop does not acquire it again after the exit
    hooks."""
    for _ in range(3):
        with processes(1, "loop_in_a_daemon_thread", here.collection.name) as (process,):
            assert process.end() == 0
            assert here.entries() == []


@pytest.mark.long
def test_a_child_of_multiprocessing_releases_its_locks(here: Here) -> None:
    """F186, P6: A forked child of multiprocessing that ends normally releases its locks, although `atexit` hooks do not
    run."""
    with processes(1, "fork_by_multiprocessing", here.collection.name) as (process,):
        assert (process.hear(), process.end()) == ({"code": 0}, 0)
        assert here.entries() == []


@pytest.mark.long
def test_a_loss_in_the_last_moment_is_reported(here: Here) -> None:
    """P7: A lock that was taken away is found at the end of its block, when no reference to the lock object is left.
    The loss is reported by an error and by `on_lost`, and the callback still gets its lock."""
    told: list[str] = []
    busy = threading.Event()
    for _ in range(MOST_CALLBACKS):  # so that the call can only be made when everything else is over
        here.session.notifications.threads.submit(busy.wait, priority=0)
    with pytest.raises(LockLost), here.lock(terms=CALM, on_lost=lambda lost: told.append(lost.key)):
        here.collection.update_one({"_id": "k"}, {"$set": {"holders": []}})
    gc.collect()
    busy.set()
    assert eventually(lambda: told == ["k"])


# Detached


def test_a_lock_that_is_detached_was_not_forgotten() -> None:
    """F96: The owner token of a detached lock lives until the grant is released in this process. Otherwise the
    heartbeat would take the grant for a dropped one, and warn."""
    key = new_key()
    lock = mongo_lock(key).acquire()
    (grant,), (token,) = lock._own.grants, lock._own._owner_tokens
    states: list[State] = []
    weakref.finalize(token, lambda: states.append(grant.state))
    del token
    assert isinstance(park_held(lock, Terms(owner="a task"), {}), Parked)
    assert states == [State.RELEASED]
    assert holder(key)["process"] == "none"


# Owners: a caller with the owner of a held lock waits while the holding process lives, and resumes the lock when that
# is gone

OWNED = Terms(lease=60, margin=1, owner="task 5")
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux names processes so that others can judge")


@pytest.fixture
def former(collection: Collection[Document]) -> Iterator[Process]:
    """A process that holds the lock "k" for the owner."""
    with processes(1, "hold", collection.name, 60, OWNED.owner) as (process,):
        yield process


def take(lock: Any) -> Callable[[], int]:
    """Take the lock once in a thread. The returned function gives the token, or 0 while the thread waits."""
    tokens: list[int] = []

    def run() -> None:
        with lock:
            tokens.append(lock.fencing_token)

    threading.Thread(target=run, daemon=True).start()
    return lambda: sum(tokens)


@pytest.mark.long
@linux
def test_an_owner_resumes_at_once_when_its_process_was_killed(here: Here, face: Face, former: Process) -> None:
    """F49: The owner resumes before all waiters, with a new fencing token, and a single try is enough."""
    token = former.hear()["token"]
    waiting = take(here.other(wait=30))
    assert eventually(lambda: here.collection.find_one({"waiters.0": {"$exists": True}}))
    assert not face.try_acquire(here.lock(terms=OWNED))
    former.send(signal.SIGKILL)
    former.popen.wait()
    again = face.acquire(here.lock(terms=OWNED, wait=0))
    assert again.fencing_token > token
    assert again.held
    assert not waiting()
    resumed = again.fencing_token
    face.release(again)
    assert eventually(waiting)
    assert waiting() > resumed


@pytest.mark.long
def test_a_process_of_unknown_fate_is_waited_for(here: Here, face: Face, former: Process) -> None:
    """F49: On another machine or in another container a pid proves nothing. Only the end of the lease counts then."""
    former.hear()
    former.send(signal.SIGKILL)
    former.popen.wait()
    for name in ("", "another-boot pid:[1] time:[1] 1 1"):
        here.collection.update_one({"_id": "k"}, {"$set": {"holders.0.process": name}})
        with pytest.raises(LockNotAcquired):
            face.acquire(here.lock(terms=OWNED, wait=0.7))


def test_a_minimum_hold_is_no_former_run(lock: LockMaker, other: LockMaker, face: Face) -> None:
    terms = Terms(lease=60, margin=1, min_hold=30, owner="task 5")
    face.release(face.acquire(lock(terms=terms)))
    assert not face.try_acquire(other(terms=terms))


@linux
def test_the_name_of_a_process() -> None:
    """F49: The name of a process is constant, is different for each process, and tells whether that process runs."""
    assert this_process() == this_process()
    assert fate(this_process()) == "alive"
    assert fate(_with(4, "1")) == "gone"  # the pid was given again
    assert fate(_with(3, str(2**22 + 1))) == "gone"  # no such pid
    assert fate(_with(3, "1", 4, "x")) in ("alive", "gone")  # another user's process, which we may see but not signal
    assert fate(NO_PROCESS) == "gone"
    others = (_with(0, "another boot"), _with(1, "pid:[1]"), _with(2, "time:[1]"), _with(3, "x"), _with(3, "²"))
    for unknown in ("", "x", *others):
        assert fate(unknown) == "unknown"


@pytest.mark.long
@linux
def test_a_process_whose_parent_has_not_asked_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed child of a container's first process may stay in the list for ever, although it does not run."""
    code = "from django_mongolock.engine.protocol.processes import *; print(this_process(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        name = child.stdout.readline().decode().strip()
        assert fate(name) == "alive"
        os.kill(child.pid, signal.SIGKILL)
        assert eventually(lambda: fate(name) == "gone")
        assert Path(f"/proc/{child.pid}").exists()
        child.wait()
        assert fate(name) == "gone"


def _with(*changes: Any) -> str:
    """Return the name of this process with other parts."""
    parts = this_process().split(" ")
    for index, part in zip(changes[::2], changes[1::2], strict=True):
        parts[index] = part
    return " ".join(parts)


@linux
def test_a_child_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: A child with the parent's name would count as gone when the parent is gone, and its lock would be taken
    over."""
    before = this_process()
    monkeypatch.setattr(os, "getpid", os.getppid)
    assert this_process() != before
