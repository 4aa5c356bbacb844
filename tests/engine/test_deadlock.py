"""Deadlocks over threads, tasks and processes are found in the documents, and only real ones."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

import pytest
from pymongo.collection import Collection

from django_mongolock.engine import clock
from django_mongolock.engine.protocol import procedures
from django_mongolock.engine.rule.deadlock import cycle_of, cycles
from django_mongolock.engine.rule.document import Limits, Step, Terms, entry
from django_mongolock.engine.session.ending import EndReason
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockDeadlock
from django_mongolock.testing.memory_server import MemoryServer, MemoryStore
from tests.engine.conftest import QUICK, Document, Entries, Here, HoldUp, LockMaker, make_lock
from tests.engine.processes import processes
from tests.engine.waiters import InThread, Waiter
from tests.support.waiting import eventually

READER = Terms(mode="shared", capacity=2**31 - 1, lease=1.0, margin=0.1, waiter_lease=1.0)
PERMIT = Terms(mode="semaphore", capacity=2, lease=1.0, margin=0.1, waiter_lease=1.0)
OF_THREE = replace(PERMIT, capacity=3)
HEAVY = replace(OF_THREE, weight=2)


@pytest.fixture(autouse=True)
def suspicious(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a deadlock suspected after 0.2 s, so that a test need not wait for it."""
    monkeypatch.setattr(procedures, "DEADLOCK_CHECK_AFTER", 0.2)


def queue_is(entries: Entries, key: str, length: int) -> bool:
    return len(entries(key)) == length


def ring(in_thread: InThread, makers: Sequence[LockMaker], entries: Entries) -> list[Waiter]:
    """Let each waiter hold one key and want the key of the next.

    The last waiter closes the cycle, and is the youngest.
    """
    names = [f"key{number}" for number in range(len(makers))]
    wanted = names[1:] + names[:1]
    parties = [
        Waiter(in_thread, make(want, wait=60), first=make(have, wait=60)).ready()
        for make, have, want in zip(makers, names, wanted, strict=True)
    ]
    for party, want in zip(parties, wanted, strict=True):
        party.go()
        assert eventually(partial(queue_is, entries, want, 2))
    return parties


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("apart", [True, False], ids=["processes", "threads"])
def test_the_youngest_of_a_cycle_gives_up_and_the_others_go_on(here: Here, count: int, apart: bool) -> None:
    """F45: A holds 1 and wants 2, and B holds 2 and wants 1, also over three sessions. The youngest waiter alone gets
    LockDeadlock with the cycle."""
    sessions = [here.new_session() for _ in range(count if apart else 1)] * (1 if apart else count)

    def maker(session: Session) -> LockMaker:
        return lambda *keys, **options: make_lock(session, *keys, **options)

    started = clock.now()
    *others, youngest = ring(here.in_thread, [maker(session) for session in sessions], here.entries)
    for party in (youngest, *reversed(others)):
        party.end(15).let_go()
    assert clock.now() - started < 15
    assert isinstance(youngest.error, LockDeadlock)
    assert set(youngest.error.keys) == {f"key{number}" for number in range(count)}
    assert all(repr(key) in str(youngest.error) for key in youngest.error.keys)
    assert [party.error for party in others] == [None] * len(others)


async def test_tasks_of_one_loop_find_their_deadlock(session: Session) -> None:
    """F45: Two coroutines of one thread are two waiters."""
    holding = asyncio.Barrier(2)

    async def take(have: str, want: str) -> str:
        async with make_lock(session, have, wait=20):
            await holding.wait()
            await asyncio.sleep(0.05 * (have == "b"))
            async with make_lock(session, want, wait=20):
                return "got it"

    outcomes = await asyncio.gather(take("a", "b"), take("b", "a"), return_exceptions=True)
    assert outcomes[0] == "got it"
    assert isinstance(outcomes[1], LockDeadlock)


@pytest.mark.long
def test_processes_find_their_deadlock(collection: Collection[Document], entries: Entries) -> None:
    """F45: Real processes find their deadlock at the default pace."""
    with (
        processes(1, "nested", collection.name, "a", "b") as one,
        processes(1, "nested", collection.name, "b", "a") as two,
    ):
        for process in (*one, *two):
            process.hear()
        one[0].say()
        assert eventually(lambda: len(entries("b")) == 2)
        two[0].say()
        outcomes = [one[0].hear(), two[0].hear()]
    assert outcomes == [{"error": None}, {"error": "LockDeadlock"}]


def documents_of(*asked: tuple[str, str, Terms]) -> tuple[list[Document], datetime]:
    """Return the documents and the time after workers have asked for keys, one after the other."""
    server = MemoryServer()
    for key, worker, terms in asked:
        add = entry(f"{key} {worker}", "s", terms, {}, worker)
        MemoryStore(server, Limits()).apply(key, Step(ask=add["grant"], add=add), 5.0)
    return [{**document, "_id": key} for key, document in server.documents.items()], server.time


@pytest.mark.parametrize(
    ("held", "owner", "found"),
    [
        pytest.param([READER, READER], QUICK, True, id="a writer waits for every reader"),
        pytest.param([PERMIT, PERMIT], PERMIT, False, id="one of two permits is enough"),
        pytest.param([None, PERMIT, PERMIT], PERMIT, True, id="both permits are in the cycle"),
        pytest.param([OF_THREE, HEAVY], HEAVY, True, id="the one that is free is too little"),
        pytest.param([HEAVY, OF_THREE], HEAVY, False, id="the heavy one is free"),
        pytest.param([None, QUICK], QUICK, True, id="two"),
        pytest.param([READER, READER], PERMIT, True, id="a permit waits for every reader"),
    ],
)
def test_what_makes_a_cycle(held: list[Terms | None], owner: Terms, found: bool) -> None:
    """F45: The owner of "data" waits for "gpu". The holders of "gpu" wait for "data", except the first, which is free.
    A deadlock exists only if the weight that the first will release is not enough."""
    users = [(str(number), terms) for number, terms in enumerate(held) if terms is not None]
    waits = [("data", user, QUICK) for user, _ in users if user != "0"]
    asked = [("data", "owner", QUICK), *(("gpu", *user) for user in users), *waits, ("gpu", "owner", owner)]
    documents, now = documents_of(*asked)
    cycle = cycle_of(documents, "gpu owner", now)
    assert (cycle is not None) == found == bool(cycles(documents, now))
    for each in cycles(documents, now):
        assert {"gpu owner"} < each.grants <= {"gpu owner", "data 1", "data 2"}
        assert (len(each.waits), each.waits[0].key in ("gpu", "data")) == (2, True)
    assert cycle_of(documents, "nobody", now) is None
    assert not cycles(documents, now + timedelta(hours=1))  # whose places are over


def test_who_goes_on_is_in_no_cycle() -> None:
    """F45: A worker with two waits goes on when both are over. A waiter needs the weight that waiters ahead in the
    queue need. A damaged entry is not a wait."""
    ring = [("a", "1", QUICK), ("b", "2", QUICK), ("b", "1", QUICK), ("a", "2", QUICK)]
    documents, now = documents_of(*ring, ("free", "3", QUICK), ("free", "1", QUICK))
    assert len(cycles(documents, now)) == 1
    ahead = [("gpu", "0", OF_THREE), ("gpu", "1", OF_THREE), ("gpu", "2", HEAVY), ("gpu", "owner", OF_THREE)]
    documents, now = documents_of(("data", "owner", QUICK), *ahead, ("data", "1", QUICK))
    assert not cycles(documents, now)
    assert not cycles([{"_id": "k", "holders": [{}]}, {"_id": "l", "holders": 3, "waiters": [{}]}], now)


@pytest.mark.long
def test_a_release_that_is_on_its_way_is_no_deadlock(here: Here, hold_up: HoldUp) -> None:
    """F45, F100: A thread that lost its lock object, for example to a signal, and asks again waits for the release."""
    gate = hold_up(here.session.ending, "end", lambda grant, how: how is EndReason.ABANDONED)
    here.lock(wait=0).acquire()  # and its object is gone
    timer = threading.Timer(0.8, gate.go.set)
    timer.start()
    with here.lock(wait=20) as again:
        assert again.held
    timer.join()
