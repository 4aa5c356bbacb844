"""Locks that no process keeps alive, and locks with a grant that another one replaces, in memory."""

import os
import re
import threading
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest
from bson.int64 import Int64

from django_mongolock.engine import clock
from django_mongolock.engine.lock.detached import Belief, Detached, Parked, park, park_held
from django_mongolock.engine.lock.downgrade import downgrade
from django_mongolock.engine.protocol import procedures
from django_mongolock.engine.protocol.actions import Answer, Apply, Pause
from django_mongolock.engine.protocol.processes import NO_PROCESS
from django_mongolock.engine.rule.document import UNLIMITED, Step, entry
from django_mongolock.engine.rule.replies import Reply
from django_mongolock.engine.session.ending import Leftover
from django_mongolock.exceptions import LockBackendFailed, LockLost, LockMisused
from tests.engine.memory import TIMEOUT, Memory
from tests.engine.twins import CALM
from tests.support.grants import grant_of, own
from tests.support.waiting import eventually

OWNED = replace(CALM, owner="o")


def new(name: str) -> dict[str, Any]:
    return entry(name, name, OWNED, {}, process=NO_PROCESS)


def tombstones(memory: Memory) -> list[str]:
    return [each["grant"] for each in memory.server.documents["k"]["tombstones"]]


def test_for_how_long_a_detached_lock_is_believed_in(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: A detached lock is believed in for one lease from before its own command that took or renewed it. A read does
    not extend that time. A forked child does not believe in the lock, and sends nothing."""
    run, find = memory.session.run, lambda: memory.session
    mine, theirs = Detached("k", find), Detached("k", find)
    assert (bool(mine._belief), mine._belief.remaining) == (False, 0)
    assert run(mine.taking(new("g"))).held
    assert CALM.lease - 1 < mine._belief.remaining <= CALM.lease
    memory.server._moved += 20
    assert run(mine.looking("g")).held
    assert CALM.lease - 21 < mine._belief.remaining <= CALM.lease - 20
    assert run(mine.keeping("g", OWNED)).held
    assert CALM.lease - 1 < mine._belief.remaining
    assert not run(theirs.taking(new("h"))).held
    assert not run(theirs.keeping("h", OWNED)).held
    keeping: Any = theirs.keeping("h", OWNED)
    next(keeping)
    with pytest.raises(StopIteration):  # a place in the queue is no lock
        keeping.send(Answer(Reply(place=0), memory.session.now(), memory.session.now(), whole=True))
    assert not theirs._belief
    assert not memory.server.documents["k"]["waiters"]
    memory.server.documents["k"]["holders"][0]["min_hold"] = Int64(60_000)
    memory.apply(ask="waits", add=new("waits"))
    assert run(theirs.taking(new("h"), "g", 1_000)).held
    assert theirs._belief
    assert (memory.holders(), tombstones(memory)) == (["h"], ["g"])
    assert not run(theirs.leaving("x", 1_000, given="x")).found
    assert (memory.holders(), tombstones(memory)) == (["h"], ["g"])
    memory.server.documents["k"]["holders"][0]["min_hold"] = Int64(60_000)
    run(theirs.leaving("h", 1_000))
    assert (memory.holders(), tombstones(memory)) == (["waits"], ["g", "h"])
    child = Belief(memory.session.now() + 10, memory.session.now, -1)
    assert (bool(child), child.remaining) == (False, 0)
    for left, believed in ((1.0, True), (0.0, False), (-1.0, False)):
        belief = Belief(10 + left, lambda: 10.0, os.getpid())
        assert (bool(belief), belief.remaining) == (believed, max(left, 0))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for lock in (mine, Detached("k")):
        with pytest.raises(LockBackendFailed, match="forked child") as failure:
            lock._session()
        assert not failure.value.passing


def test_a_parked_lock(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parked lock is held for its owner, by no session, for one lease. An interrupted call leaves no parked lock."""
    store = memory.session.store
    with pytest.raises(ValueError, match="needs an owner"):
        park(memory.session, "k", CALM, {})
    parked = park(memory.session, "k", OWNED, {"label": "x"})
    assert isinstance(parked, Parked)
    assert re.fullmatch(r"[0-9a-f]{12}\.1", parked.grant)
    assert [(e["process"], e["owner"], e["label"], e["beat"]) for e in memory.entries()] == [(NO_PROCESS, "o", "x", 0)]
    refused = park(memory.session, "k", replace(OWNED, owner="p"), {})
    assert isinstance(refused, Reply)
    assert refused.holder is not None
    assert parked.keep(200)
    assert [memory.entries()[0][name] for name in ("beat", "lease")] == [1, 200_000]
    memory.server._moved += 190
    assert isinstance(park(memory.session, "k", replace(OWNED, owner="p"), {}), Reply)
    assert memory.holders() == [parked.grant]
    parked.give_up()
    assert (memory.holders(), tombstones(memory)) == ([], [parked.grant])
    assert not parked.keep(1)
    apply = store.apply

    def struck(key: str, step: Step, timeout: float) -> Reply:
        if memory.server.away is None:
            apply(key, step, timeout)
        if step.add is not None:
            raise error
        raise LockBackendFailed("away", key)

    for error, left in ((KeyboardInterrupt(), 0), (LockBackendFailed("away", "k"), 1)):
        monkeypatch.setattr(store, "apply", struck)
        with pytest.raises(type(error)):
            park(memory.session, "k", OWNED, {})
        monkeypatch.setattr(store, "apply", apply)
        assert len(memory.holders()) == left


def test_the_main_thread_parks_nothing_itself(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F29: The main thread parks nothing itself. An error of a signal handler must not strike inside the driver,
    because its time limit would then stay set."""
    senders, apply = list[int](), memory.session.store.apply

    def watched(*arguments: Any) -> Reply:
        senders.append(threading.get_ident())
        return apply(*arguments)

    lock = memory.lock(terms=OWNED).acquire()
    monkeypatch.setattr(memory.session.store, "apply", watched)
    parked = park_held(lock, OWNED, {})
    assert parked
    assert parked.keep(60)
    parked.give_up()
    assert isinstance(park(memory.session, "other", OWNED, {}), Parked)
    assert (threading.get_ident() in senders, len(senders)) == (False, 4)


@pytest.mark.parametrize(
    "what", ["held", "in doubt", "taken away", "found lost", "away", "a parent's", "not acquired", "two keys"]
)
def test_a_held_lock_is_parked(memory: Memory, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A held lock is parked in one command, so that nobody gets it in between. The lock object holds nothing then,
    whatever the outcome."""
    lock = memory.lock(*(("a", "b") if what == "two keys" else ("k",)), terms=OWNED)
    if what != "not acquired":
        lock.acquire()
    if what in ("not acquired", "two keys"):
        with pytest.raises(LockMisused, match="one key"):
            park_held(lock, OWNED, {})
        return
    grant, events, limits = grant_of(lock), memory.events, list[Any]()
    memory.session.commands.timeout = 7.0
    watch(memory.session, "apply", limits)
    if what == "a parent's":
        monkeypatch.setattr(memory.session, "pid", -1)
        assert park_held(lock, OWNED, {}) is None
        assert memory.holders() == [grant.id]
        return
    grant.outcome_unknown = what == "in doubt"
    other = memory.other(terms=CALM)  # kept, because a dropped lock object is released
    if what in ("taken away", "found lost"):
        memory.apply(remove=(grant.id,), force=True)
        other.acquire()
    if what == "found lost":
        grant.mark_lost("by a test")
    if what == "away":
        monkeypatch.setattr(memory.session.store, "answer", lambda key=None: away(key))
        with pytest.raises(LockBackendFailed):
            park_held(lock, OWNED, {})
        (leftover,) = memory.session.background.pending
        assert isinstance(leftover, Leftover)
        assert leftover.stays == (lock.terms.min_hold > 0)
        monkeypatch.undo()
        memory.server.away = None
    else:
        parked = park_held(lock, OWNED, {})
        assert (parked is None) == (what in ("taken away", "found lost"))
        assert memory.holders() == [parked.grant if parked else grant_of(other).id]
        sent = [timeout for _, step, timeout in limits if step.resumes]
        assert sent == pytest.approx([7.0] * (what != "found lost"), abs=0.5)
        assert what == "found lost" or tombstones(memory) == [grant.id] * (what == "in doubt")
        assert eventually(lambda: not memory.session.known)
    assert (lock.held, own(lock).grants) == (False, ())
    end = "lost" if what in ("taken away", "found lost") else "released"
    assert eventually(lambda: (end, "k") in events)


def away(key: str | None) -> None:
    raise LockBackendFailed("away", key)


# Downgrades


def watch(session: Any, name: str, calls: list[Any]) -> None:
    """Record the arguments of a method of the session's store."""
    method = getattr(session.store, name)

    def watched(*arguments: Any) -> Any:
        calls.append(arguments)
        return method(*arguments)

    setattr(session.store, name, watched)


def steps(lock: Any) -> bool:
    return bool(lock._session().run(downgrade(own(lock))))


def test_what_cannot_be_downgraded(memory: Memory) -> None:
    """A lock that is not held, is being written in a transaction, or is already shared stays as it is."""
    lock = memory.lock(terms=CALM)
    assert not steps(lock)
    lock.acquire()
    grant_of(lock).defer_renewals()
    with pytest.raises(LockMisused, match="atomic"):
        lock.downgrade()
    grant_of(lock).resume_renewals()
    again = memory.lock(terms=CALM, reentrant=True).acquire()
    with pytest.raises(LockMisused, match="another lock object"):
        lock.downgrade()
    again.release()
    assert lock.held
    lock.release()


def test_a_downgraded_lock_goes_on(memory: Memory) -> None:
    """A downgraded lock keeps its longest hold, its length, its owner and the line that acquired it."""
    lock = memory.lock(terms=OWNED, max_hold=100.0).acquire()
    lock.extend(80)
    before = grant_of(lock)
    memory.server._moved += 40
    assert steps(lock)
    after = grant_of(lock)
    assert after.lease.last == pytest.approx(before.lease.last, abs=0.2)
    assert after.acquired_from == before.acquired_from
    assert (after.terms.mode, after.terms.lease, after.terms.owner) == ("shared", 80, "o")
    assert after.terms.capacity == UNLIMITED
    assert (memory.entries()[0]["mode"], memory.holders()) == ("shared", [after.id])
    assert after.waiting.back_by == pytest.approx(before.lease.until + memory.session.commands.timeout, abs=0.1)
    assert not tombstones(memory)
    assert [event for event, _ in memory.events] == ["acquired", "acquired", "released"]
    doubtful = memory.lock("d", terms=CALM).acquire()
    grant_of(doubtful).outcome_unknown = True
    assert steps(doubtful)
    assert len(memory.server.documents["d"]["tombstones"]) == 1
    endless = memory.lock("e", terms=CALM).acquire()
    assert steps(endless)
    assert grant_of(endless).lease.max_hold is None


@pytest.mark.parametrize("how", ["no answer", "taken away", "just lost"])
def test_a_downgrade_that_fails(memory: Memory, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6, F104: A downgrade that fails gives up all keys, because a part of them is of no use. No entry is left in the
    document or the session."""
    lock = memory.lock("a", "b", terms=CALM).acquire()
    grants, apply = own(lock).grants, memory.session.store.apply

    def fail(key: str, step: Step, timeout: float) -> Reply:
        if key == "b" and step.add is not None:
            raise LockBackendFailed("the connection broke", key, passing=False)
        return apply(key, step, timeout)

    if how == "no answer":
        monkeypatch.setattr(memory.session.store, "apply", fail)
        with pytest.raises(LockBackendFailed) as failed:  # which keeps the frames
            lock.downgrade()
        monkeypatch.undo()
        assert failed.value.key == "b"
    else:
        if how == "taken away":
            memory.session.store.apply("b", Step(remove=(grants[1].id,), force=True), TIMEOUT)
        else:

            def late(key: str, step: Step, timeout: float) -> Reply:
                grants[1].lease.until = 0.0
                return apply(key, step, timeout)

            monkeypatch.setattr(memory.session.store, "apply", late)
        with pytest.raises(LockLost):
            lock.downgrade()
        assert list(memory.session.registry.grants.values()) == list(own(lock).grants[:1])
        lock.release()
        monkeypatch.undo()
    assert not memory.session.registry.grants
    assert not memory.session.queue.waiting
    assert not lock.held
    memory.server.advance(2)
    assert eventually(lambda: (memory.holders("a"), memory.holders("b")) == ([], []))
    assert eventually(lambda: not memory.session.known)


def test_a_downgrade_is_tried_until_the_end_of_the_lease(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F104: A downgrade is retried until the end of the lease, and no longer."""
    monkeypatch.setattr(procedures, "backoff", lambda failures: 99.0)
    monkeypatch.setattr(clock, "now", lambda: 100.0)
    lock = memory.lock(terms=CALM).acquire()
    asked = downgrade(own(lock))
    assert isinstance(next(asked), Apply)
    assert asked.throw(LockBackendFailed("away", "k")) == Pause(ANY, CALM.lease)
    (reader,) = memory.session.queue.waiting.values()  # can be woken, but stands in no line
    assert (reader.terms.mode, memory.session.queue.lines) == ("shared", {})
    assert reader.id in memory.session.registry.grants
    asked.close()
