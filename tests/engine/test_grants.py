"""The decisions of a lock object in each step of its acquisition, release and extension, by a clock that stands
still."""

import _thread
import asyncio
import copy
import gc
import os
import pickle
import re
import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from django_mongolock.engine import clock
from django_mongolock.engine.lock.grants import LockGrants
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.protocol import procedures
from django_mongolock.engine.protocol.actions import Answer, Apply, Pause, ReleaseUncontended, Turn, WaitResult
from django_mongolock.engine.rule.document import Step, Terms
from django_mongolock.engine.rule.options import UNSET, LockOptions
from django_mongolock.engine.rule.replies import Reply
from django_mongolock.engine.session.ending import EndReason, Leftover
from django_mongolock.engine.session.grant import Grant
from django_mongolock.exceptions import LockBackendFailed, LockCancelled, LockLost, LockMisused, LockNotAcquired
from tests.engine.conftest import make_lock
from tests.engine.faces import ASYNC, BLOCKING, Face
from tests.engine.memory import LONG, Memory
from tests.engine.twins import CALM
from tests.support.grants import grant_of, new_grant, own
from tests.support.waiting import eventually

QUEUED = Reply(place=0, first_end=60.0, waiting=1)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stop the clock at 100.0. Call the result to set another time."""

    def stop(time: float) -> None:
        monkeypatch.setattr(clock, "now", lambda: time)

    stop(100.0)
    return stop


# Requests


def test_what_a_new_grant_says(memory: Memory) -> None:
    """F32: A new grant has an id that no clone has. A worker has one name while it holds anything. Only an owner's
    grant names its process."""
    session, lock = memory.session, memory.lock(max_hold=9.0, on_lost=print, templates={"k": "t"})
    grant = new_grant(session, lock, "me")
    asked = grant.acquisition
    assert re.fullmatch(rf"{session.id}\.\d+-[0-9a-f]{{8}}", asked.grant)
    assert re.fullmatch(rf"{session.id}/[0-9a-f]{{8}}", asked.worker)
    assert (asked.process, asked.whole, asked.nested, grant.worker) == ("", False, False, "me")
    assert (grant.lease.auto_renew, grant.lease.max_hold, grant.reporting.template) == (True, 9.0, "t")
    (user,) = grant.users
    assert (user.lock(), user.calls) == (lock, {"on_lost": print})
    assert new_grant(session, memory.lock(terms=replace(LONG, owner="o")), "me").acquisition.process == session.id
    for options, whole in (({"auto_renew": False}, True), ({"whole": True}, True), ({}, False)):
        assert new_grant(session, memory.lock(**options), "me").acquisition.whole == whole
    holds = memory.lock("outer").acquire()
    outer = grant_of(holds)
    for held, name in (({"outer": outer}, outer.acquisition.worker), ({"outer": grant}, "")):
        inner = own(lock).new_grant(session, "k", "me", held, LONG).acquisition
        assert (inner.nested, inner.worker == name) == (bool(name), bool(name))


def asking(memory: Memory, monkeypatch: pytest.MonkeyPatch, turn: Turn, **options: Any) -> Any:
    """Return the steps that ask for a key from 100.0 to 110.0, with *turn* as the grant's turn."""
    monkeypatch.setattr(memory.session.queue, "join", lambda grant, *, trial: turn)
    monkeypatch.setattr(procedures, "backoff", lambda failures: 99.0)
    grants = own(memory.lock())
    return grants._acquire_key(memory.session, "k", (100.0, 110.0), [], **{"trial": False, **options})


def test_how_long_one_of_a_line_asks(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: A waiter asks in its line until its turn, and then in the queue, for the rest of its wait. At the end it
    tries once."""
    steps = asking(memory, monkeypatch, "behind")
    assert next(steps).timer == 10
    action = steps.send(WaitResult(104.0, turn="now"))
    assert not action.step.trial
    (grant,) = memory.session.registry.grants.values()
    assert (grant.waiting.began, grant.waiting.back_by) == (100, 110 + memory.session.commands.timeout)
    assert steps.throw(LockBackendFailed("away", "k")).timer == 6
    assert isinstance(steps.send(WaitResult(105.0)), Apply)
    assert steps.send(Answer(QUEUED, 105.0, 105.0, whole=True)).timer == 5
    steps.close()

    steps = asking(memory, monkeypatch, "behind")
    next(steps)
    assert steps.send(WaitResult(110.0, turn="now")).step.trial
    with pytest.raises(LockNotAcquired) as refused:
        steps.send(Answer(Reply(first_end=60.0), 110.0, 110.5))
    assert refused.value.waited == 10

    steps = asking(memory, monkeypatch, "behind")
    next(steps)
    answered = steps.send(WaitResult(110.0, answer=Answer(QUEUED, 109.0, 110.0, whole=True)))
    assert isinstance(answered, Pause)
    assert answered.timer == 0
    steps.close()


def test_a_key_that_is_asked_for_at_once(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """P8: The first command of an acquisition is that of the grant. A lock that was cancelled before sends no command,
    and has not waited."""
    for trial in (False, True):
        steps = asking(memory, monkeypatch, "now", trial=trial)
        assert next(steps).step.trial == trial
        assert steps.throw(LockBackendFailed("away", "k")).timer == 10
        steps.close()
    steps = asking(memory, monkeypatch, "now")
    steps.gi_frame.f_locals["self"].is_cancelled = True
    with pytest.raises(LockCancelled) as cancelled:
        next(steps)
    assert cancelled.value.waited == 0


@pytest.mark.parametrize("seconds", [0.0, 10.0])
@pytest.mark.parametrize(("at", "given_back"), [(114.9, True), (115.0, False)])
def test_what_was_acquired_before_one_that_was_refused(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, now: Any, seconds: float, at: float, *, given_back: bool
) -> None:
    """P6: Keys acquired before a refused key are released with one command, if time is left. The wait is shared by all
    keys."""
    asked, given = list[Any](), list[int]()
    at += seconds - 10.0

    def ask(
        self: LockGrants, session: Any, key: str, times: Any, owner_tokens: Any, *, trial: bool
    ) -> Generator[Any, Any, Grant]:
        yield from ()
        asked.append((key, times, trial))
        if key == "b":
            now(at)
            raise LockNotAcquired("b")
        now(100.0 + seconds / 2)
        return new_grant(memory.session, lock, "me")

    def give_back(self: LockGrants, session: Any, grants: list[Grant]) -> Generator[Any, Any, None]:
        yield from ()
        given.append(len(grants))

    monkeypatch.setattr(LockGrants, "_acquire_key", ask)
    monkeypatch.setattr(LockGrants, "_give_back", give_back)
    lock = memory.lock("a", "b", wait=seconds)
    with pytest.raises(LockNotAcquired):
        lock.acquire()
    end = 100.0 + seconds
    assert asked == [("a", (100.0, end), not seconds), ("b", (100.0 + seconds / 2, end), not seconds)]
    assert given == [1] * given_back


def test_how_long_it_took_to_find_no_server(memory: Memory, monkeypatch: pytest.MonkeyPatch, now: Any) -> None:
    """F9: The error tells the time from the beginning, for all keys."""

    def fail(*_: Any, **__: Any) -> Generator[Any, Any, Grant]:
        yield from ()
        now(107.0)
        raise LockBackendFailed("away", "k")

    monkeypatch.setattr(LockGrants, "_acquire_key", fail)
    with pytest.raises(LockBackendFailed) as failed:
        memory.lock().acquire()
    assert failed.value.waited == 7.0


def test_which_of_several_keys_are_given_back_by_one_command(memory: Memory) -> None:
    """P6: One command releases the keys that only this object holds and that no late command can bring back. The other
    keys are dropped."""
    lock = memory.lock()
    users, ended = own(lock)._user, list[Any]()
    session: Any = SimpleNamespace(ending=SimpleNamespace(end=lambda grant, how: ended.append((grant.key, how))))
    grants = [new_grant(memory.session, memory.lock(key), "me") for key in ("mine", "left", "doubtful", "shared")]
    for grant in grants:
        grant.users = (users,)
        grant.lease.until = memory.session.now() + 60
        grant.state = type(grant.state).HELD
    grants[2].outcome_unknown = True
    other = memory.lock("shared")
    grants[3].users += (own(other)._user,)
    steps: Any = own(lock)._give_back(session, left := list(grants))
    command = next(steps)
    assert command == ReleaseUncontended(("mine", "left"), (grants[0].id, grants[1].id), after=True)
    with pytest.raises(StopIteration):
        steps.send({"left"})
    assert (ended, left) == ([("mine", EndReason.RELEASED)], grants[1:])
    assert [grant.held for grant in grants[2:]] == [True, True]
    assert list(own(lock)._give_back(session, [])) == []


@pytest.mark.parametrize(
    ("sent", "doubt", "error", "ends"),
    [
        (False, "", KeyboardInterrupt(), ["REFUSED KeyboardInterrupt"]),
        (True, "", KeyboardInterrupt(), ["ABANDONED ", "REFUSED KeyboardInterrupt"]),
        (True, "", LockNotAcquired("k"), ["REFUSED busy"]),
        (False, "cause", LockNotAcquired("k"), ["REFUSED busy"]),
        (True, "cause", LockNotAcquired("k"), ["ABANDONED ", "REFUSED busy"]),
        (False, "unknown", LockNotAcquired("k"), ["ABANDONED ", "REFUSED busy"]),
        (False, "answer", LockNotAcquired("k"), ["ABANDONED ", "REFUSED busy"]),
    ],
    ids=str,
)
def test_what_is_left_of_a_wait(memory: Memory, sent: bool, doubt: str, error: BaseException, ends: list[str]) -> None:
    """P6: An entry may be left, unless the server has refused it or nothing was sent. The wait is reported in any
    case."""
    grant, told, left = new_grant(memory.session, memory.lock(), "me"), list[str](), list[Grant]()
    grant.reporting.template = "t"
    grant.waiting.sent, grant.outcome_unknown = sent, doubt == "unknown"
    grant.waiting.answer = Answer(QUEUED, 0.0, 0.0) if doubt == "answer" else None
    error.__cause__ = OSError() if doubt == "cause" else None
    session: Any = SimpleNamespace(
        queue=SimpleNamespace(leave=left.append),
        ending=SimpleNamespace(end=lambda grant, how, reason="": told.append(f"{how.name} {reason}")),
    )
    own(memory.lock()).give_up(session, grant, error)
    assert (told, left) == (ends, [grant])
    assert getattr(error, "template", "t") == "t"


def test_a_lock_object_is_used_again(memory: Memory) -> None:
    """A lock object can be used again after a refusal because it is in use, and after a cancelled wait. `cancel`
    without a wait does nothing. Each loss is reported."""
    told: list[object] = []
    lock = memory.lock(on_lost=told.append)
    for number in (1, 2):
        lock.acquire()
        memory.session.lose("k")
        lock.release()
        assert len(told) == number
    lock.acquire()
    with pytest.raises(LockMisused, match="in use"):
        lock.acquire()
    lock.release()
    lock.cancel()
    with lock:
        assert own(lock).wanted is None
        assert (own(lock).last, own(lock).session) == (own(lock).grants, memory.session)


# In whose hands it is


def test_a_forked_child_has_nothing_of_its_parents(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F29: A forked child holds nothing of its parent, reports that, releases nothing, and can acquire with the same
    object."""
    sessions = [memory.session, memory.new_session()]
    lock = MongoLock(lambda: sessions[0], ("k",), CALM, LockOptions(), dict)
    assert (lock.held, lock.lost, lock._session()) == (False, False, memory.session)
    assert not memory.session.run(own(lock).release_all())
    lock.acquire()
    held, token = memory.holders(), lock.fencing_token
    monkeypatch.setattr(memory.session, "pid", -1)
    sessions.pop(0)
    assert (lock.held, lock.lost, lock.remaining, lock.in_danger) == (False, True, 0.0, False)
    assert lock._session() is sessions[0]
    with pytest.raises(LockLost, match="forked child") as lost:
        lock.ensure_held()
    assert (lost.value.key, lost.value.token) == ("k", token)
    assert repr(lock) == f"<MongoLock 'k' lost, token {token}>"
    assert not lock.release()
    lock.__exit__(None, None, None)
    assert memory.holders() == held
    memory.apply(remove=tuple(held), force=True)
    with lock:
        assert own(lock).session is sessions[0]
    assert lock._session() is sessions[0]


def test_what_another_thread_has_is_not_dropped(memory: Memory) -> None:
    """F64: A signal strikes one thread, and leaves the locks of other threads alone, also those of the same object."""
    lock = memory.lock().acquire()
    memory.in_thread(own(lock).abandon).join(10)
    assert lock.held
    assert lock.release()
    own(lock).abandon()


def test_a_grant_that_is_entered_again_lives_no_longer_than_its_objects(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P6: A re-entered grant is released although the error of an interrupted release is kept, with the frames of that
    release."""

    def struck(*_: object) -> None:
        raise KeyboardInterrupt

    outer = memory.lock("k", reentrant=True).acquire()
    inner = memory.lock("k", "l", reentrant=True).acquire()
    with monkeypatch.context() as patch:
        patch.setattr(memory.session, "_perform", struck)
        with pytest.raises(KeyboardInterrupt) as kept:
            inner.release()
    assert outer.held
    with pytest.warns(ResourceWarning):  # noqa: PT031
        del outer
        gc.collect()
        assert eventually(lambda: not memory.holders())
    assert kept.value.__traceback__


def test_the_line_that_called(memory: Memory) -> None:
    """The calling line is recorded, even if it is in the library, as in a greenlet that starts with `acquire`."""
    lock = memory.lock()
    _thread.start_new_thread(lock.acquire, ())
    assert eventually(lambda: lock._own.grants)
    assert re.search(r"lock\.py:\d+$", grant_of(lock).acquired_from)
    lock.release()


# Properties of a lock object


def test_what_a_lock_object_is_not(memory: Memory) -> None:
    """The errors name the attributes to use."""
    lock = memory.lock()
    for name, told in (("colour", "'colour'$"), ("locked", "'locked'; `held`.*lock_info")):
        with pytest.raises(AttributeError, match=told) as missing:
            getattr(lock, name)
        assert (missing.value.name, missing.value.obj) == (name, lock)
    for wrong, told in (
        (lambda: pickle.dumps(lock), r"mongo_lock\('k'\)"),
        (lambda: copy.copy(lock), r"mongo_lock\('k'\)"),
        (lambda: lock(print), "mongo_locked"),  # type: ignore[operator]
        (lambda: lock.try_acquire(timeout=1), "two things"),  # type: ignore[arg-type]
        (lambda: asyncio.run(lock.atry_acquire(timeout=1)), "two things"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=told):
            wrong()


async def test_who_blocks_an_event_loop_is_warned(memory: Memory, recwarn: pytest.WarningsRecorder) -> None:
    """The warning says how to acquire without blocking the loop, and the suggested form causes no warning."""
    lock = memory.lock()
    async with lock:
        assert not recwarn
    with pytest.warns(RuntimeWarning, match="Use `async with`"):
        lock.acquire()
    await lock.arelease()


def test_how_long_a_lock_is_waited_for(memory: Memory) -> None:
    """The wait is that of the call, or else that of the lock, or else without end."""
    for made, given, limit in (
        (UNSET, UNSET, None),
        (5.0, UNSET, 5.0),
        (None, UNSET, None),
        (5.0, 2, 2.0),
        (5, None, None),
    ):
        assert memory.lock(wait=made)._limit(given, {}) == limit


@pytest.mark.parametrize("face", [BLOCKING, ASYNC], ids=lambda face: face.name)
def test_a_lost_lock_goes_no_further(memory: Memory, face: Face) -> None:
    """P7: A lost lock cannot be extended or downgraded, and its block ends with an error. An error of the block itself
    is not hidden."""
    lock = memory.lock().acquire()
    memory.session.lose("k")
    for name in ("extend", "downgrade"):
        with pytest.raises(LockLost):
            face.call(lock, name)
    with pytest.raises(LockLost):
        face.call(lock, "__exit__", None, None, None)
    error = ValueError()
    face.acquire(lock)
    face.extend(lock)
    memory.session.lose("k")
    assert face.call(lock, "__exit__", ValueError, error, None) is False
    assert "'k'" in str(error.__notes__)
    face.acquire(lock)
    face.call(lock, "downgrade")
    for _ in ("held", "released in the block"):
        assert face.call(lock, "__exit__", None, None, None) is False
        assert not memory.holders()


# The state of several keys


def test_how_several_keys_stand(memory: Memory, now: Any) -> None:
    """P7: Danger, a request or a loss of one key counts for all keys. The nearest end and the last grant count."""
    both = memory.lock("a", "b", terms=CALM)
    with pytest.raises(LockMisused, match="not acquired"):
        both.ensure_held()
    both.acquire()
    first, second = own(both).grants
    assert (both.in_danger, both.release_requested, both.lost) == (False, None, False)
    second.lease.failures, second.reporting.release_requested_by = 1, "ann"
    assert both.in_danger
    assert both.release_requested == "ann"
    second.lease.failures = 0
    for grant, left in ((first, 3.0), (second, 2.0)):
        grant.lease.until, grant.reporting.waited = 100.0 + left, left
        grant.acquired_at = datetime(2030, 1, 1, tzinfo=UTC) - timedelta(seconds=left)
    assert (both.remaining, both.waited, both.acquired_at) == (2.0, 5.0, second.acquired_at)
    assert both.fencing_tokens == {"a": first.token, "b": second.token}
    now(102.5)
    assert (both.held, both.lost, both.remaining, first.held) == (False, True, 0.0, True)
    error = ValueError()
    both.__exit__(ValueError, error, None)
    assert "'b'" in str(error.__notes__)


# Release and extension


@pytest.mark.parametrize(
    ("hold", "early", "forces"), [(0.0, False, True), (0.5, False, False), (0.5, True, True), (9.0, True, True)]
)
def test_a_release_says_if_there_is_a_minimum_hold(memory: Memory, hold: float, early: bool, forces: bool) -> None:
    """P8: The release of a lock without a minimum hold sends a shorter command. Without a waiter, none is looked
    for."""
    lock, sent, apply = memory.lock(terms=replace(LONG, min_hold=hold)).acquire(), list[Step](), memory.server.apply

    def watched(key: str, step: Step, *others: Any) -> Any:
        sent.append(step)
        return apply(key, step, *others)

    memory.server.apply = watched  # type: ignore[method-assign,assignment]
    memory.session.queue._mutex = None  # type: ignore[assignment]
    grant_of(lock).lease.uncontended = False
    assert lock.release(early=early)
    assert [step.force for step in sent] == [forces]
    memory.session.queue._mutex = threading.Lock()


@pytest.mark.parametrize("lost", [None, "b", "c"])
@pytest.mark.parametrize("early", [False, True])
def test_a_release_of_several_keys_without_an_answer(memory: Memory, lost: str | None, early: bool) -> None:
    """P6: If the release of several keys gets no answer, the other keys are removed in the background, with their
    minimum holds. The result says whether all keys were held."""
    lock = memory.lock("a", "b", "c", terms=replace(LONG, min_hold=600.0)).acquire()
    grants = own(lock).grants
    for grant in grants:
        if grant.key == lost:
            grant.mark_lost("by a test")
    memory.server.away = threading.Thread()
    assert lock.release(early=early) == (lost is None)
    assert not memory.session.registry.grants
    memory.server.away = None
    for grant in grants:
        if grant.key != lost:
            pending = [each for each in memory.session.background.pending if isinstance(each, Leftover)]
            assert [each.stays for each in pending if each.grant == grant.id] == [not early]


@pytest.mark.parametrize(
    ("had", "wanted", "given"), [(0.5, None, 0.5), (60.0, 30.0, 60.0), (60.0, 90.0, 90.0), (60.0, timedelta(0, 70), 70)]
)
def test_how_far_an_extension_goes(memory: Memory, now: Any, had: float, wanted: Any, given: float) -> None:
    """P1: An extension extends the lease here, and a little more on the server. An extension never shortens the
    lease."""
    lock = memory.lock(terms=Terms(lease=had, margin=2.0, waiter_lease=had)).acquire()
    now(100.0 + had / 5)
    lock.extend(wanted)
    assert lock.remaining == pytest.approx(given)
    grant, (stored,) = grant_of(lock), memory.entries()
    assert (stored["until"] - memory.server.time).total_seconds() == grant.terms.server_lease_of(given) > given + 1
    assert grant.lease.length == given


@pytest.mark.parametrize("why", ["not acquired", "over", "a child's"])
def test_what_is_not_held_is_not_extended(memory: Memory, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """P1, F29: An extension of a lock that is not held sends nothing. In a forked child the lock is the parent's."""
    lock = memory.lock()
    if why != "not acquired":
        lock.acquire()
    if why == "over":
        grant_of(lock).lease.until = 0.0
    if why == "a child's":
        monkeypatch.setattr(os, "getpid", lambda: -1)
    steps = own(lock).extend_all(None)
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value is False


def test_what_has_been_released_is_not_replaced(memory: Memory) -> None:
    """F165: A grant that another thread released during its downgrade is not replaced. The reader is not kept."""
    lock = make_lock(memory.session).acquire()
    grant, reader = grant_of(lock), new_grant(memory.session, lock, "me")
    lock.release()
    own(lock).replace(grant, reader, reader.new_owner_token(print))
    assert own(lock).grants == ()
    assert reader.owner_ref is not None
    assert reader.owner_ref() is None
