"""The promises of a lock object to its user, by its blocking and its async methods."""

import logging
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.session.grant import Grant
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import (
    LockBackendFailed,
    LockDocumentDamaged,
    LockError,
    LockLost,
    LockMisused,
    LockNotAcquired,
    LockQueueFull,
    LockReentry,
)
from tests.engine.conftest import QUICK, Entries, Here, LockMaker, Timer, make_lock
from tests.engine.faces import Face
from tests.support.grants import grant_of, own
from tests.support.waiting import eventually


@pytest.fixture
def lose(take_away: Callable[..., None], timer: Timer) -> Callable[..., None]:
    """Return a function that takes a key away, and lets time go by until a lock with short terms is due for renewal."""

    def lose(key: str = "k") -> None:
        take_away(key)
        timer.move(QUICK.lease / 3)

    return lose


# Release


def test_a_release_gives_back_once_and_never_what_another_holds(here: Here, face: Face) -> None:
    """F38: A release returns False when it is repeated, without an acquisition, after a loss, or when another caller
    holds the lock. The other caller keeps it. An object without an acquisition gets a warning, too."""
    with pytest.warns(RuntimeWarning, match="not acquired by this object"):
        assert not face.release(here.lock())
    mine = face.acquire(here.lock(terms=Terms(lease=30)))
    assert face.release(mine)
    assert not face.release(mine)
    face.acquire(mine)
    here.take_away()
    theirs = here.other().acquire()
    assert not face.release(mine)
    assert theirs.held
    assert [e["token"] for e in here.entries()] == [theirs.fencing_token]
    assert theirs.release()


def test_an_object_in_use_is_refused(here: Here, face: Face) -> None:
    mine = face.acquire(here.lock())
    with pytest.raises(LockMisused, match="in use"):
        face.acquire(mine)
    assert mine.held
    assert face.release(mine)
    with here.other():
        waiting = here.lock()
        thread = here.in_thread(lambda: waiting.acquire(3).release())
        assert eventually(lambda: own(waiting).wanted)
        with pytest.raises(LockMisused, match="being acquired"):
            face.acquire(waiting)
    thread.join()


# Several keys


def test_one_key_lost_is_all_lost(lock: LockMaker, face: Face, lose: Callable[..., None], entries: Entries) -> None:
    """P7: The loss of one key is reported, and the other keys are released."""
    both = lock("a", "b")
    with pytest.raises(LockLost) as loss, face.block(both):  # noqa: PT012
        lose("b")
        assert eventually(lambda: both.lost)
    assert loss.value.key == "b"
    assert entries("a") == []


@pytest.mark.parametrize("moment", range(1, 8))
def test_interrupted_while_giving_back_what_it_had(here: Here, moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """F29, F36: KeyboardInterrupt at any command of an acquisition of several keys leaves none of them."""
    send, count = here.session.commands.call, 0

    def interrupted(action: Any) -> Any:
        nonlocal count
        count += 1
        if count == moment:
            raise KeyboardInterrupt
        return send(action)

    with here.other("c"):
        monkeypatch.setattr(here.session.commands, "call", interrupted)
        with pytest.raises((KeyboardInterrupt, LockNotAcquired)):
            make_lock(here.session, "a", "b", "c", wait=0.05).acquire()
        assert eventually(lambda: not here.session.background.pending)
        assert not here.session.registry.grants
        assert here.entries("a") == here.entries("b") == []
        assert len(here.entries("c")) == 1


# Callbacks and observers


def test_a_loss_is_reported_where_the_grant_was_in_doubt(
    here: Here, face: Face, failpoint: Callable[..., None]
) -> None:
    """P7, F8: A loss is reported to `on_lost` and to the observers even if the first answer to the acquisition was an
    error and the loss shows only at the release. A late copy of the command is refused."""
    told, events = threading.Event(), []
    session = here.new_session(observer=lambda event, grant: events.append(event))
    error = {"code": 64, "errmsg": "waiting for replication timed out"}
    failpoint(["findAndModify"], times=1, writeConcernError=error)
    terms = Terms(lease=60, margin=1)
    mine = face.acquire(make_lock(session, terms=terms, on_lost=lambda _: told.set()))
    grant = grant_of(mine)
    assert grant.outcome_unknown
    here.take_away()
    assert not face.release(mine)
    assert told.wait(5)
    assert "lost" in events
    assert "released" not in events
    assert eventually(lambda: grant.id in [tombstone["grant"] for tombstone in here.stored()["tombstones"]])


def test_a_callback_that_fails_does_no_harm(
    session: Session, face: Face, lose: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:

    def on_lost(lock: MongoLock) -> None:
        raise RuntimeError("callback")

    lost = face.acquire(make_lock(session, on_lost=on_lost))
    lose()
    assert eventually(lambda: "callback failed" in caplog.text)
    assert lost.lost


def test_what_an_observer_raises_reaches_the_caller_and_leaves_no_lock(here: Here, face: Face) -> None:
    """F29: An error of an observer, which may come from a signal handler, reaches the caller and leaves no lock.
    (Django logs the errors of its receivers.)"""

    def observer(event: str, grant: Grant) -> None:
        if event in failing:
            raise ZeroDivisionError(event)

    session = here.new_session(observer=observer)
    failing = ["acquired"]
    with pytest.raises(ZeroDivisionError, match="acquired"):
        face.acquire(make_lock(session))
    assert eventually(lambda: here.entries() == [])
    failing = ["released"]
    mine = face.acquire(make_lock(session))
    with pytest.raises(ZeroDivisionError, match="released"):
        face.release(mine)
    assert eventually(lambda: here.entries() == [] and not session.known)


def test_facts_that_cannot_be_had_leave_nothing_behind(session: Session, face: Face) -> None:
    """An error of the provider is raised before any command, and no waiter is renewed for ever."""

    def facts() -> dict[str, str | int]:
        raise RuntimeError("facts")

    broken = MongoLock(lambda: session, ("k",), QUICK, facts=facts)
    with pytest.raises(RuntimeError, match="facts"):
        face.acquire(broken)
    assert not session.registry.grants
    assert not session.background.pending


# Errors


@pytest.mark.parametrize(
    "error",
    [
        LockNotAcquired("k", 1.5, "somebody", 2.0),
        LockQueueFull("k", 1.5),
        LockReentry("k"),
        LockLost("k", 5, "why"),
        LockMisused("x"),
        LockBackendFailed("p", "k", False),
        LockDocumentDamaged("k", "p"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling_with_their_facts(error: LockError) -> None:
    """Celery pickles errors to pass them between processes."""
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))
    assert isinstance(again, LockError)


def test_nothing_secret_is_logged(here: Here, caplog: pytest.LogCaptureFixture, lose: Callable[..., None]) -> None:
    """F57: The log has the key and the token, but no id of a grant and no URI."""
    caplog.set_level(logging.DEBUG, "django_mongolock")
    mine = here.lock().acquire()
    lose()
    assert eventually(lambda: "lock lost" in caplog.text)
    assert grant_of(mine).id not in caplog.text + repr(mine) + repr(here.session) + repr(grant_of(mine))
    assert "mongodb://" not in caplog.text
