"""What a process promises of its locks, by a clock that the test moves: on the rule in Python, without a server."""

import asyncio
import contextlib
import copy
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.protocol.actions import FOREVER, Apply, Pause, QueueNext
from django_mongolock.engine.protocol.procedures import LOCAL_HANDOVER_GRACE
from django_mongolock.engine.rule import in_python
from django_mongolock.engine.rule.document import Limits, Step, Terms, entry
from django_mongolock.engine.rule.options import LockOptions
from django_mongolock.engine.rule.replies import Bell, Found, News, Reply, read_found
from django_mongolock.engine.session.core import COMMAND_THREADS, REQUEST, SHARES
from django_mongolock.engine.session.ending import TRY_AGAIN_AFTER, How, Removal
from django_mongolock.engine.session.grant import Grant
from django_mongolock.engine.session.heartbeat import Heartbeat
from django_mongolock.engine.session.releases import FAILOVER_LOOK_EVERY
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockBackendFailed, LockCancelled, LockError, LockMisused, LockNotAcquired
from django_mongolock.testing.memory_server import MemorySession, MemoryStore
from tests.engine.conftest import make_lock
from tests.engine.memory import LONG, TIMEOUT, Memory
from tests.engine.twins import CALM
from tests.engine.waiters import InThread, Waiter
from tests.support.grants import grant_of, new_grant
from tests.support.waiting import eventually


class Elected(MemoryStore):
    """A store whose primary has a name, which an election changes. down: it answers no release. tries: of these."""

    name = "one"
    down = False
    tries = 0

    def sent_to(self) -> str:
        return self.name

    def primary(self) -> str:
        return self.name

    def apply(self, key: str, step: Step, timeout: float) -> Reply:
        if self.down:
            self.tries += 1
            raise LockBackendFailed("no answer", key)
        return super().apply(key, step, timeout)


@pytest.fixture
def session(memory: Memory) -> MemorySession:
    """For the fixtures that are for MongoDB as well."""
    return memory.session


# What is reported


def test_a_free_lock_that_cannot_be_asked_for_is_not_reported_as_contended(memory: Memory) -> None:
    events: list[str] = []
    session = memory.new_session(observer=lambda event, _: events.append(event))
    memory.server.away = threading.Thread()
    with pytest.raises(LockBackendFailed):
        make_lock(session, wait=0).acquire()
    memory.server.away = None
    assert events == ["not_acquired"]


def test_a_last_try_takes_its_entry_out_of_the_queue(memory: Memory) -> None:
    """P6, F110: it is a command of its own, and shares no answer with others that try the same key."""

    def asks_the_same(grant: Grant) -> bool:
        return memory.session.commands._how_to_call(grant.acquisition.enter(trial=True))["same"] is not None

    with memory.other(terms=CALM):
        waiter = memory.waiter(terms=CALM)
        assert eventually(lambda: memory.server.documents["k"]["waiters"])
        (queued,) = memory.session.registry.grants.values()
        assert not asks_the_same(queued)
        first = new_grant(memory.session, memory.lock(terms=CALM), None)
        memory.session.registry.add(first)
        assert asks_the_same(first)
        del memory.session.registry.grants[first.id]
    waiter.end().let_go()


@pytest.mark.parametrize("keys", ["a", "ab"])
def test_what_is_given_back_after_a_wait_has_a_moment(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    """P8: the first keys are released because the last one is held; where that gets no answer, in the background."""
    theirs = memory.other("last").acquire()
    limits: list[float] = []

    def stuck(keys: Sequence[str], grants: Sequence[str], timeout: float) -> set[str]:
        limits.append(timeout)
        raise LockBackendFailed("no answer")

    monkeypatch.setattr(memory.session.store, "release_uncontended", stuck)
    with pytest.raises(LockNotAcquired):
        memory.lock(*keys, "last", wait=0).acquire()
    assert len(limits) == 1
    assert limits[0] <= 0.5
    assert eventually(lambda: not any(memory.holders(key) for key in keys))
    theirs.release()


# Leases


@pytest.mark.parametrize("granted", [False, True])
def test_a_grant_that_was_taken_and_queued_again_is_lost(memory: Memory, granted: bool) -> None:
    """P7, F99: the command that queued it was held up, and comes a second time when its grant was taken away. It waits
    then, or holds the lock with another token: neither is the grant that its holder believes in."""
    mine = memory.lock(terms=CALM).acquire()
    grant = grant_of(mine)
    memory.apply(remove=(grant.id,), given=grant.id, force=True)
    theirs = memory.other(terms=CALM).acquire()
    memory.apply(ask=grant.id, add=entry(grant.id, "s", CALM, {}))
    if granted:
        theirs.release()
    memory.server.advance(CALM.lease / 3 + 1)
    assert mine.lost


@pytest.mark.parametrize("ask_for", [MongoLock.extend, lambda lock: make_lock(lock._session()).acquire(wait=0)])
def test_a_grant_with_another_token_is_lost(memory: Memory, ask_for: Callable[[MongoLock], object]) -> None:
    """F120: an extension finds the grant with another token, or an attempt to acquire the key again does."""
    mine = memory.lock(terms=CALM).acquire()
    grant = grant_of(mine)
    grant.outcome_unknown = True
    memory.apply(remove=(grant.id,), force=True)
    memory.apply(ask=grant.id, add=entry(grant.id, "s", CALM, {}))
    with contextlib.suppress(LockError):
        ask_for(mine)
    assert mine.lost


def test_nothing_else_renews_while_the_clock_is_moved(memory: Memory) -> None:
    """A renewal that the heartbeat's thread has begun would be found late by a clock that is moved to its end."""
    memory.lock(terms=CALM).acquire()
    heartbeat = threading.Thread(target=memory.session.heartbeat.do_due, daemon=True)
    with memory.server.clock_mutex:
        heartbeat.start()
        heartbeat.join(0.2)
        assert heartbeat.is_alive()
    heartbeat.join(5)
    assert not heartbeat.is_alive()


def renewed_keys(session: MemorySession, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Of which keys each renewal from now on is."""
    renew, made = session.store.renew, []

    def watched(keys: Sequence[str], step: Step, timeout: float) -> dict[str, Found]:
        made.append(list(keys))
        return renew(keys, step, timeout)

    monkeypatch.setattr(session.store, "renew", watched)
    return made


def test_a_lease_is_renewed_three_times_in_its_time(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6, P8: for as long as it is held; three commands a lease, not one a poll."""
    mine = memory.lock(terms=CALM).acquire()
    made = renewed_keys(memory.session, monkeypatch)
    for _ in range(10):
        memory.server.advance(CALM.lease / 2)
        assert mine.held
    assert 3 * 5 - 1 <= len(made) <= 3 * 5 + 1


def test_danger_comes_before_the_loss_and_goes_again(memory: Memory) -> None:
    """P7: while renewals fail the lock says so before it is lost; when they succeed again, no more."""
    mine = memory.lock(terms=CALM).acquire()
    for away, seconds, stands in (
        (None, 0, (False, False)),
        (threading.Thread(), CALM.lease / 3 + 1, (True, False)),
        (None, 2, (False, False)),
        (threading.Thread(), CALM.lease / 3 + 1, (True, False)),
        (threading.Thread(), CALM.lease, (False, True)),
    ):
        memory.server.away = away
        memory.server.advance(seconds)
        assert eventually(lambda stands=stands: (mine.in_danger, mine.lost) == stands)  # type: ignore[misc]
    memory.server.away = None


def test_a_renewal_takes_along_only_what_would_soon_be_due(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """P8: a lock with a short lease does not have all others renewed at its pace."""
    locks = [memory.lock(key, terms=terms).acquire() for key, terms in (("short", CALM), ("long", LONG))]
    made = renewed_keys(memory.session, monkeypatch)
    memory.server.advance(CALM.lease)
    assert made == [["short"]] * len(made) != []
    assert all(lock.held for lock in locks)


def test_what_could_not_be_renewed_together_is_tried_at_once_and_one_by_one(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F66: one document that cannot be written costs the others no more than the time of one command; and those that
    were taken along are no worse off than those that were due."""
    locks = [memory.lock(key, terms=CALM).acquire() for key in ("a", "b")]
    grants = [grant_of(lock) for lock in locks]
    grants[1].lease.renew_at += 1
    made = renewed_keys(memory.session, monkeypatch)
    memory.server.away = threading.Thread()
    memory.server.advance(grants[0].lease.renew_at - memory.server.now())
    assert eventually(lambda: len(made) >= 3)
    assert made[0] == ["a", "b"]
    assert sorted(made[1:3]) == [["a"], ["b"]]
    memory.server.away = None
    memory.server.advance(2)
    assert all(lock.remaining > CALM.lease - 3 for lock in locks)


def test_a_renewal_of_a_waiter_is_worth_a_place(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1, F62: the renewal is carried out, then the lock is granted, then the renewal is answered: that is no lease."""
    theirs = memory.other().acquire()
    waiter = memory.waiter(terms=replace(LONG, waiter_lease=60.0))
    assert eventually(lambda: memory.server.documents["k"]["waiters"])
    (grant,), renew = memory.session.queue.waiting.values(), memory.session.store.renew

    def late(*arguments: Any) -> dict[str, Found]:
        renew(*arguments)
        theirs.release()
        assert waiter.end().has_it
        return {"k": read_found(memory.server.documents["k"])}

    monkeypatch.setattr(memory.session.store, "renew", late)
    memory.session.renewals.renew([grant])
    assert 0 < waiter.lock.remaining <= 60
    waiter.let_go()


def test_a_grant_that_is_answered_after_the_wait_is_given_back(memory: Memory) -> None:
    """P6: a hand-over is answered between the last look of who waits for it, and the end of that wait."""
    session, documents = memory.session, memory.server.documents
    lock = memory.lock(terms=CALM)
    grant = new_grant(session, lock, object())
    session.queue.join(grant, trial=False)
    session.registry.expect(grant)
    session.queue.finish_handover(grant, session.commands.send(grant.acquisition.enter(False)))
    assert documents[grant.key]["holders"]
    lock._own.give_up(session, grant, LockNotAcquired(grant.key, 0.0))
    assert eventually(lambda: not documents[grant.key]["holders"])


def test_a_lock_that_is_entered_again_names_the_line_that_has_acquired_it(memory: Memory) -> None:
    """The warning of a lock that was not released leads there."""
    with memory.lock(reentrant=True, terms=CALM) as mine:
        where = grant_of(mine).acquired_from
        assert where.startswith(__file__)
        with memory.lock(reentrant=True, terms=CALM) as again:
            assert grant_of(again) is grant_of(mine)
        assert grant_of(mine).acquired_from == where


def test_a_command_may_take_as_long_as_the_session_says(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    """F67: no less, unless its wait is over before."""
    apply = getattr(memory.session.store, door)
    given: list[float] = []

    def watched(key: str, step: Step, timeout: float) -> Any:
        given.append(timeout)
        return apply(key, step, timeout)

    monkeypatch.setattr(memory.session.store, door, watched)
    memory.lock(terms=CALM, wait=None).acquire().release()
    assert given == [pytest.approx(memory.session.commands.timeout, abs=1)]


# Minimum holds, limits, statistics, clocks


def test_a_queue_is_as_long_as_it_may_be(memory: Memory) -> None:
    """F13: those who stand behind a waiter in its process count as well."""
    store = MemoryStore(memory.server, Limits(waiters=3))
    entries = [entry(f"g{number}", "s", CALM, {}) for number in range(4)]
    entries[1]["behind"] = 1
    places = [store.apply("k", Step(ask=e["grant"], add=e), TIMEOUT).place for e in entries]
    assert places == [None, 0, 1, None]


def test_a_document_has_no_more_holders_than_it_may(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F13: however many permits there are: the others wait."""
    monkeypatch.setattr(in_python, "MAX_HOLDERS", 2)
    store = MemoryStore(memory.server, Limits())
    shared = Terms("shared", 2**31 - 1, lease=60, margin=1, waiter_lease=60)
    for number in range(4):
        store.apply("k", Step(ask=f"g{number}", add=entry(f"g{number}", "s", shared, {})), TIMEOUT)
    assert memory.holders() == ["g0", "g1"]


# Lines


def test_a_waiter_that_goes_leaves_its_place_to_the_next_of_its_line(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5, F69: the next one of the process stands in the document before the first has left it: at no moment could a
    later waiter of another process be served before it."""
    theirs = memory.other().acquire()
    waiters = [memory.waiter() for _ in range(2)]
    assert eventually(lambda: len(memory.session.queue.waiting) == 2 and memory.server.documents["k"]["waiters"])
    first, second = memory.session.queue.waiting
    apply = memory.session.store.apply
    before: list[str] = []

    def watched(key: str, step: Step, timeout: float) -> Reply:
        if first in step.remove:
            before.extend(waiter["grant"] for waiter in memory.server.documents[key]["waiters"])
        return apply(key, step, timeout)

    monkeypatch.setattr(memory.session.store, "apply", watched)
    memory.session.waits.cancel(memory.session.queue.waiting[first])
    assert eventually(lambda: before)
    theirs.release()
    for waiter in waiters:
        waiter.end().let_go()
    assert before == [first, second]


def test_all_who_stand_in_line_are_counted(memory: Memory) -> None:
    """By the entry of the first, for the limit of the queue; and by the session, so that a leak shows."""
    with memory.lock("shared", terms=Terms("shared", 2)):
        assert memory.session.known
    mine = memory.lock().acquire()
    known = [memory.session.known]
    waiters = []
    for number in range(3):
        waiters.append(memory.waiter())
        assert eventually(lambda number=number: len(memory.session.queue.waiting) == number + 1)  # type: ignore[misc]
        known.append(memory.session.known)
    assert known == sorted(set(known))
    memory.server.advance(LOCAL_HANDOVER_GRACE)
    assert eventually(lambda: memory.server.documents["k"]["waiters"])
    assert [waiter["behind"] for waiter in memory.server.documents["k"]["waiters"]] == [2]
    mine.release()
    for waiter in waiters:
        waiter.let_go().end().thread.join(10)
    assert eventually(lambda: memory.session.known == 0)


def test_a_lock_that_was_handed_over_leaves_nothing(memory: Memory) -> None:
    """F77: no tombstone either, since each command got its answer; nor does a refused try."""
    mine = memory.lock().acquire()
    memory.in_thread(lambda: memory.lock().try_acquire()).join(10)
    waiters = [memory.waiter() for _ in range(2)]
    assert eventually(lambda: len(memory.session.queue.waiting) == 2)
    mine.release()
    for waiter in waiters:
        waiter.let_go()
    assert eventually(lambda: memory.session.known == 0)
    document = memory.server.documents["k"]
    assert (document["holders"], document["waiters"], document["tombstones"]) == ([], [], [])


def test_a_refusal_in_line_names_the_holder(memory: Memory) -> None:
    """P8: a waiter behind another of its process knows it from that one; a single try asks the server, which
    knows the end of the lease as well."""
    theirs = memory.other().acquire()
    first = memory.waiter()
    assert eventually(lambda: any(grant.reporting.held_by for grant in list(memory.session.queue.waiting.values())))
    with pytest.raises(LockNotAcquired) as refusal:
        memory.lock(wait=0.05).acquire()
    with pytest.raises(LockNotAcquired) as of_a_try:
        memory.lock(wait=0).acquire()
    theirs.release()
    first.end().let_go()
    assert ["host" in str(refused.value.holder) for refused in (refusal, of_a_try)] == [True, True]
    assert of_a_try.value.retry_after > LONG.lease / 2


@pytest.mark.parametrize("queued", [False, True], ids=["asks", "in the queue"])
def test_a_wait_that_is_cancelled_during_an_outage(memory: Memory, queued: bool) -> None:
    """F176, F36: it ends soon, as cancelled; its place is given up in the background, as soon as there is an answer."""
    session = Session(Elected(memory.server, Limits()), now=memory.server.now)
    store: Any = session.store
    theirs = memory.other().acquire()
    store.down = not queued
    waiter = Waiter(memory.in_thread, make_lock(session, terms=LONG, wait=None))
    assert eventually(lambda: store.tries or memory.server.documents["k"]["waiters"])
    time.sleep(0.05)  # until it sleeps
    store.down = True
    waiter.lock.cancel()
    assert isinstance(waiter.end(2).error, LockCancelled)
    assert len(memory.server.documents["k"]["waiters"]) == queued
    assert session.known
    store.down = False
    memory.server._moved += TRY_AGAIN_AFTER
    session.wake()
    assert eventually(lambda: not (session.known or memory.server.documents["k"]["waiters"]))
    session.close()
    theirs.release()


def test_a_cancelled_wait_asks_for_no_further_key(memory: Memory) -> None:
    """F36: it is cancelled while its first key is asked for, and ends before it waits for the second."""
    lock = memory.lock("a", "b", wait=None)
    theirs = memory.other("b").acquire()
    apply = memory.session.store.apply

    def cancelled(key: str, step: Step, timeout: float) -> Reply:
        if key == "a":
            lock.cancel()
        return apply(key, step, timeout)

    memory.session.store.apply = memory.session.store.take_free = cancelled  # type: ignore[method-assign]
    with pytest.raises(LockCancelled):
        lock.acquire()
    assert not memory.entries("a")
    theirs.release()


def test_a_cancelled_wait_sleeps_no_more(memory: Memory) -> None:
    """F36: its wake-up was taken for something else that happened at the same time."""
    theirs = memory.other().acquire()
    waiter = memory.waiter()
    assert eventually(lambda: memory.server.documents["k"]["waiters"])
    (grant,) = memory.session.queue.waiting.values()
    grant.waiting.cancelled = True
    assert memory.session.waits._seconds(Pause(grant.id, LONG.lease, LONG.lease), grant) == 0.0
    memory.session.waits.cancel(grant)
    assert grant.waiting.back_by <= memory.session.now() + 1  # what takes it out of the queue gets no more time
    waiter.lock.cancel()
    assert isinstance(waiter.end().error, LockCancelled)
    theirs.release()


def test_an_extension_that_is_answered_late_brings_no_end_nearer(memory: Memory) -> None:
    """P7: renewals that were sent after it have given more."""
    mine = memory.lock(terms=CALM).acquire()
    apply = memory.session.store.apply

    def late(key: str, step: Step, timeout: float) -> Reply:
        reply = apply(key, step, timeout)
        memory.server.advance(CALM.lease / 2)  # renews
        return reply

    memory.session.store.apply = late  # type: ignore[method-assign]
    until = grant_of(mine).lease.until
    mine.extend()
    assert mine.held
    assert grant_of(mine).lease.until >= until + CALM.lease / 3 - 1
    memory.session.store.apply = apply  # type: ignore[method-assign]
    mine.release()


def test_a_release_of_many_keys_waits_for_one_answer(memory: Memory) -> None:
    """P6: where the first has none, the others are released in the background."""
    session = memory.new_session(Elected)
    store: Any = session.store
    mine = make_lock(session, "a", "b", "c", terms=LONG, wait=None)
    mine.acquire()
    for grant in mine._own.grants:
        grant.lease.uncontended = False
    store.down = True
    mine.release()
    assert store.tries == 1
    store.down = False


@pytest.mark.parametrize("looks", [False, True], ids=["sleeps", "looks"])
def test_the_first_who_was_overtaken_is_told_that_it_is_the_first_again(memory: Memory, looks: bool) -> None:
    """F175, F27: one who came before it is put back before it, and dies: as a holder, whose lease ends sooner than the
    one it knew of, or as a waiter, after it had looked."""
    theirs = memory.other().acquire()
    session = Session(MemoryStore(memory.server, Limits()), now=memory.server.now)  # one that moves no clock
    waiter = Waiter(memory.in_thread, make_lock(session, terms=LONG, wait=None))
    assert eventually(lambda: memory.server.documents.get("k", {}).get("waiters"))
    (grant,) = session.queue.waiting.values()
    session.renewals.renew([grant])
    time.sleep(0.05)
    read, looked = session.store.read, list[Reply]()

    def look(*arguments: Any) -> Reply:
        looked.append(read(*arguments))
        return looked[-1]

    session.store.read = look  # type: ignore[method-assign, assignment]
    dead = Step(ask="dead", add=entry("dead", "dead", LONG, {}), waited=60_000)
    session.store.apply("k", dead, TIMEOUT)
    if looks:
        session.waits.look()
        assert eventually(lambda: looked)
        session.store.apply("k", Step(remove=("dead",)), TIMEOUT)
    else:
        theirs.release()
        assert memory.holders() == ["dead"]
    number = len(looked)
    session.renewals.renew([grant])
    assert eventually(lambda: len(looked) > number)
    session.renewals.renew([grant])
    assert not eventually(lambda: len(looked) > number + 1, 0.1)
    assert looked[-1].place == 0
    session.close()
    waiter.let_go().end()


def test_a_wrong_guess_lengthens_no_wait(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F118: the short form takes four of five seconds and finds the key held: one second is left for the whole rule."""
    given: list[float] = []
    apply = memory.session.store.apply

    def guess_wrong(*arguments: Any) -> None:
        memory.server._moved += 4.0

    def note(key: str, step: Step, timeout: float) -> Reply:
        given.append(timeout)
        return apply(key, step, timeout)

    monkeypatch.setattr(memory.session.store, "take_free", guess_wrong)
    monkeypatch.setattr(memory.session.store, "apply", note)
    memory.session.commands._free_keys.released("k")
    memory.lock(terms=CALM).acquire()
    assert given[0] <= 1.1


# Clean-up


def undo_a_release(memory: Memory) -> Elected:
    """Take and release the lock; an election undoes the release. Return the store whose primary has changed."""
    session = memory.new_session(Elected)
    lock = make_lock(session, terms=LONG).acquire()
    held = copy.deepcopy(memory.server.documents["k"])
    lock.release()
    assert memory.holders() == []
    memory.server.documents["k"] = held
    assert isinstance(session.store, Elected)
    session.store.name = "two"
    return session.store


@pytest.mark.parametrize("closes", [False, True])
def test_a_release_that_an_election_has_undone_is_made_again(memory: Memory, closes: bool) -> None:
    """F7: so nobody waits for the end of the lease; also where the session ends before it would look."""
    undo_a_release(memory)
    if closes:
        memory._made[-1].close()
    else:
        memory.server.advance(FAILOVER_LOOK_EVERY)
    assert eventually(lambda: memory.holders() == [])


def test_the_end_of_a_session_makes_up_for_what_had_failed(memory: Memory) -> None:
    """P6: what is held or to be removed when the process ends is removed before it does."""
    mine = memory.lock().acquire()
    memory.server.away = threading.Thread()
    mine.release()
    assert memory.session.cleanup.pending
    memory.server.away = None
    memory.lock("held").acquire()
    memory.session.close()
    assert (memory.holders(), memory.server.documents["held"]["holders"]) == ([], [])


@pytest.mark.parametrize("what", ["acquire", "release", "arelease"])
def test_what_is_struck_before_its_caller_knows_leaves_no_lock(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """F29, F64, F65: a signal handler raises when the lock is granted and the caller does not have it yet, or before
    the release has begun. It is given back, also while the lock object lives on; what was had is kept for its hold."""
    run = memory.session.run

    def struck(steps: Any) -> None:
        if what == "acquire":
            run(steps)
        raise KeyboardInterrupt

    async def in_a_task() -> None:
        await mine.aacquire()
        monkeypatch.setattr(memory.session, "arun", struck)
        await mine.arelease()

    mine = memory.lock(terms=replace(LONG, min_hold=600.0))
    if what == "release":
        mine.acquire()
    if what != "arelease":
        monkeypatch.setattr(memory.session, "run", struck)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(in_a_task()) if what == "arelease" else getattr(mine, what)()
    assert eventually(lambda: ["released" in each for each in memory.entries()] == [True] * (what != "acquire"))
    assert not mine.held


def test_a_signal_in_a_release_ends_no_minimum_hold(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F29: of any of its keys; they are given back all the same."""

    def struck(*_: object) -> None:
        raise KeyboardInterrupt

    mine = memory.lock("k", "l", terms=replace(LONG, min_hold=600.0)).acquire()
    monkeypatch.setattr(memory.session, "_perform", struck)
    with pytest.raises(KeyboardInterrupt):
        mine.release()
    assert eventually(lambda: ["released" in each for key in "kl" for each in memory.entries(key)] == [True, True])


def test_the_end_of_a_session_ends_no_minimum_hold(memory: Memory) -> None:
    """P6: also if a copy of the command that was granted may still arrive."""
    mine = memory.lock(terms=replace(LONG, min_hold=600.0)).acquire()
    grant_of(mine).outcome_unknown = True
    memory.session.close()
    assert ["released" in each for each in memory.entries()] == [True]


def test_the_heartbeat_finds_what_was_not_reported_to_it(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F33, F65: a lock object dies, and a signal strikes before the reference to it says whose it was."""
    monkeypatch.setattr(memory.session.heartbeat, "adopt", lambda _: None)
    mine = memory.lock().acquire()
    with pytest.warns(ResourceWarning, match="'k', acquired at"):  # noqa: PT031
        del mine
        gc.collect()
        memory.session.orphans.do_due(memory.session.now())
    assert eventually(lambda: memory.holders() == [])


def test_who_leaves_the_queue_has_the_next_of_its_line_queued(memory: Memory) -> None:
    """P2: and that one is told at once."""
    memory.lock("another").acquire()
    with memory.other():
        first, second = (new_grant(memory.session, memory.lock(), object()) for _ in range(2))
        for grant in (first, second):
            memory.session.queue.join(grant, trial=False)
        memory.session.commands.send(QueueNext("k", first.id))
        assert [entry["grant"] for entry in memory.server.documents["k"]["waiters"]] == [second.id]
        assert second.waiting.answer is not None
        assert not second.waiting.handover_reserved


def test_a_wrong_guess_leaves_the_whole_command_its_time(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """P8: what was left when the short one had its answer."""
    given: list[float] = []
    apply = memory.session.store.apply

    def timed(key: str, step: Step, timeout: float) -> Reply:
        given.append(timeout)
        return apply(key, step, timeout)

    monkeypatch.setattr(memory.session.commands._free_keys, "guess", lambda _: True)
    monkeypatch.setattr(memory.session.store, "take_free", lambda *_: None)
    monkeypatch.setattr(memory.session.store, "apply", timed)
    memory.lock(wait=0).acquire()
    assert given == [pytest.approx(TIMEOUT, abs=1)]


@pytest.mark.parametrize("tokens", [(5, 7), (7, 5), (7, 7)])
def test_of_two_bells_the_newer_grant_is_the_news(memory: Memory, tokens: tuple[int, int]) -> None:
    """F28: a bell may come late."""
    grant = new_grant(memory.session, memory.lock(), object())
    memory.session.queue.waiting[grant.id] = grant
    for token in tokens:
        memory.session.waits.hear(Bell(memory.session.id, grant.id, News(token, datetime.now(UTC))))
    assert grant.waiting.news is not None
    assert grant.waiting.news.token == 7
    memory.session.queue.leave(grant)


def test_an_observer_does_not_hold_up_the_heartbeat(in_thread: InThread) -> None:
    """P8: what the session has noticed itself, such as a dropped lock, is told by another thread."""
    memory, told = Memory(in_thread), []
    memory.session.notifications._observer = lambda event, _: told.append((event, threading.current_thread().name))
    mine = memory.lock().acquire()
    told.clear()
    with pytest.warns(ResourceWarning):  # noqa: PT031
        del mine
        gc.collect()
        assert eventually(lambda: told != [])
    ((event, thread),) = told
    assert event == "released"
    assert not thread.startswith("mongolock-heartbeat")
    memory.close()


def test_a_lock_stays_with_the_session_that_has_acquired_it(memory: Memory) -> None:
    """P3: also when its backend has opened another one since."""
    sessions = [memory.session, memory.new_session(), memory.new_session()]
    mine = MongoLock(lambda: sessions.pop(0), ("k",), LONG, LockOptions(), dict)
    with mine:
        assert mine._session() is memory.session
        assert len(sessions) == 2
    assert mine._session() is not memory.session


class Idle:
    """A chore that is never due."""

    def next_due(self) -> float:
        return FOREVER

    def do_due(self, now: float) -> None: ...


@pytest.fixture
def idle(memory: Memory) -> Iterator[Heartbeat]:
    """A heartbeat that has nothing to do, and has not begun."""
    heartbeat = Heartbeat(memory.session.threads, memory.session.now)
    heartbeat.serve([Idle()], lambda _: None)
    yield heartbeat
    heartbeat.close()


def test_a_heartbeat_sleeps_while_nothing_is_due(idle: Heartbeat, caplog: pytest.LogCaptureFixture) -> None:
    """P8: until it is woken, with no error on the way."""
    adopted: list[Any] = []
    idle.adopt = adopted.append
    idle.start()
    assert eventually(lambda: idle.wakes_at == FOREVER)
    inbox: Any = idle.inbox
    inbox.put("one")
    assert eventually(lambda: adopted == ["one"])
    assert caplog.text == ""


def test_an_error_in_one_dropped_lock_takes_nothing_from_the_next(idle: Heartbeat) -> None:
    """P4: where warnings are errors, that of the first is raised in the heartbeat."""

    def adopt(item: Any) -> None:
        adopted.append(item)
        raise ResourceWarning(item)

    adopted: list[Any] = []
    idle.adopt = adopt
    inbox: Any = idle.inbox
    inbox.put("one")
    inbox.put("two")
    idle.start()
    assert eventually(lambda: adopted == ["one", "two"])


# Threads


async def test_what_was_sent_once_stays_sent(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F36: a command that is taken back before it is begun takes back nothing of one that was sent before it: whoever
    gives up then has the place in the queue removed."""
    grant = new_grant(memory.session, memory.lock(), object())
    memory.session.registry.add(grant)
    await memory.session.commands.acall(grant.acquisition.enter(trial=False))
    gate, submitted = threading.Event(), COMMAND_THREADS
    for _ in range(submitted):
        memory.session.threads.submit(lambda: gate.wait(20))
    taken_back = asyncio.ensure_future(memory.session.commands.acall(grant.acquisition.enter(trial=False)))
    await asyncio.sleep(0)
    taken_back.cancel()
    await asyncio.wait([taken_back])
    gate.set()
    assert grant.waiting.sent
    memory.session.ending.end(grant, How.ABANDONED)


@pytest.mark.parametrize("way", ["release", "hand-over"])
async def test_a_release_goes_before_what_asks_for_a_lock(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """P6: however many commands of this process are waiting for their answers: it lets others in."""
    apply, gate, waiting = memory.session.store.apply, threading.Event(), []

    def held_up(key: str, step: Step, timeout: float) -> Reply:
        if key != "k":
            waiting.append(key)
            gate.wait(20)
        return apply(key, step, timeout)

    mine = await memory.lock().aacquire()
    before = memory.holders()
    locks = [memory.lock(f"busy{number}") for number in range(COMMAND_THREADS)]
    if way == "hand-over":
        locks.insert(0, memory.lock())
    for door in ("apply", "take_free"):
        monkeypatch.setattr(memory.session.store, door, held_up)
    asking = [asyncio.create_task(lock.aacquire()) for lock in locks]
    assert await asyncio.to_thread(eventually, lambda: len(waiting) >= COMMAND_THREADS * SHARES[REQUEST])
    await mine.arelease()
    assert len(memory.holders()) == (way == "hand-over")
    assert memory.holders() != before
    gate.set()
    await asyncio.gather(*asking)


def test_a_request_is_for_the_grants_that_it_names(memory: Memory) -> None:
    """P7: of two readers, only the one that is asked finds that its release is requested."""
    sessions = [memory.new_session(), memory.new_session()]
    terms = replace(LONG, mode="shared", capacity=2)
    readers = [make_lock(session, terms=terms).acquire() for session in sessions]
    step = Step(request_release_of=(grant_of(readers[0]).id,), requested_by="ann")
    sessions[0].store.apply("k", step, TIMEOUT)
    for session, lock in zip(sessions, readers, strict=True):
        session.renewals.renew([grant_of(lock)])
    assert [lock.release_requested for lock in readers] == ["ann", None]


def test_the_end_of_a_session_ends_its_waits_and_its_heartbeat(memory: Memory) -> None:
    """P6: nobody waits for ever in a session that does nothing any more: neither the first nor those behind it."""
    theirs = memory.other().acquire()
    session = memory.new_session()
    waiters = [Waiter(memory.in_thread, make_lock(session, terms=LONG, wait=None)) for _ in range(3)]
    assert eventually(lambda: len(session.queue.waiting) == 3)
    assert eventually(lambda: session.heartbeat.thread)
    heartbeat = session.heartbeat.thread
    assert heartbeat is not None
    session.close()
    assert [type(waiter.end().error) for waiter in waiters] == [LockMisused] * 3
    assert eventually(lambda: not heartbeat.is_alive())
    theirs.release()


def test_removals_that_come_while_others_are_looked_at(memory: Memory) -> None:
    """F18: the garbage collector lets another thread in at any allocation; the heartbeat's work goes on."""
    never = Removal(Apply("k", Step(remove=("g",))), float("inf"), float("inf"))
    memory.session.cleanup.pending.update({f"g{number}": never for number in range(1_000)})

    def come(*_: object) -> None:
        memory.session.cleanup.pending[f"late{len(memory.session.cleanup.pending)}"] = never

    before = gc.get_threshold()
    gc.callbacks.append(come)
    gc.set_threshold(1)
    try:
        memory.session.cleanup.do_due(0)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(come)
    assert len(memory.session.cleanup.pending) > 1_000
    memory.session.cleanup.pending.clear()
