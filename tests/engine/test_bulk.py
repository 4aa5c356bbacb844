"""P6, P8: One command serves many grants, also after a failure and at the end of a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from django_mongolock.engine.rule.document import UNLIMITED, Step, Terms
from django_mongolock.engine.rule.replies import Found
from django_mongolock.engine.session import bulk
from django_mongolock.engine.session.grant import Grant
from django_mongolock.exceptions import LockBackendFailed
from tests.engine.conftest import make_lock
from tests.engine.memory import Memory
from tests.engine.waiters import Waiter
from tests.support.waiting import eventually

#: A third of its lease is 10 seconds.
LEASE = Terms(lease=30, margin=1)
#: As 3,000 locks in batches of 1,000, but faster.
NUMBER, SIZE = 300, 100


class Renewals:
    """The renewals of a session. A test counts them, and may let them fail.

    - stuck: keys with documents that answer nothing.
    """

    def __init__(self, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes, self.down, self.stuck = list[int](), False, set[str]()
        self._session, self._renew = memory.session, memory.session.store.renew
        monkeypatch.setattr(memory.session.store, "renew", self.renew)

    def renew(self, keys: Sequence[str], step: Step, timeout: float) -> dict[str, Found]:
        self.sizes.append(len(keys))
        if self.down or not self.stuck.isdisjoint(keys):
            raise LockBackendFailed("no answer")
        return self._renew(keys, step, timeout)

    def beat(self, seconds: float = 0.0) -> list[int]:
        """Let time go by without the heartbeat, and renew the due grants. Return the numbers of keys in each
        command."""
        self.sizes.clear()
        self._session.store.server._moved += seconds  # type: ignore[attr-defined]
        self._session.renewals.do_due(self._session.now())
        return sorted(self.sizes, reverse=True)


@pytest.fixture
def renewals(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> Renewals:
    monkeypatch.setattr(bulk, "BATCH", SIZE)
    return Renewals(memory, monkeypatch)


def hold(memory: Memory, number: int) -> list[Any]:
    """Locks that the session holds, and that nothing renews but a test."""
    memory.session.heartbeat.close()
    return [memory.lock(f"k{each:05}", terms=LEASE).acquire() for each in range(number)]


def test_an_outage_unfolds_no_renewal(memory: Memory, renewals: Renewals) -> None:
    """F180, P8: While the server does not answer, each batch is retried as a whole. After the outage, a beat costs as
    little as before."""
    locks = hold(memory, NUMBER)
    renewals.down = True
    for pause in (10, 0, 1, 1, 1):
        assert sum(map(bool, renewals.beat(pause))) <= NUMBER / SIZE
    renewals.down = False
    assert renewals.beat(1) == [SIZE] * 3
    assert all(lock.held for lock in locks)


def test_a_document_that_is_stuck_is_found_by_splitting(memory: Memory, renewals: Renewals) -> None:
    """F66, F180: If other documents answer, a batch that fails is split in ten until the document that answers nothing
    is found."""
    locks = hold(memory, NUMBER)
    renewals.stuck = {"k00123"}
    sizes = renewals.beat(10)
    assert len(sizes) <= 3 + 10 + 10 + 10 + 4
    assert sum(sizes) >= NUMBER
    late = {lock.key for lock in locks if lock.remaining < 25}
    assert late == {"k00123"}
    assert [size for size in renewals.beat() if size] == [1]
    renewals.stuck.clear()
    renewals.beat()
    assert all(lock.remaining > 25 for lock in locks)


def test_nothing_is_sent_for_a_lock_that_is_lost(memory: Memory, renewals: Renewals) -> None:
    """F180: Nothing is sent for a lock after an outage that was longer than its lease."""
    locks = hold(memory, 20)
    renewals.down = True
    renewals.beat(10)
    renewals.down = False
    assert renewals.beat(25) == []
    assert all(lock.lost for lock in locks)


def test_a_place_that_is_gone_is_not_renewed(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F181: A waiter whose entry was not found is woken, asks again in one command, and is renewed when it has a
    place."""
    theirs = memory.other().acquire()
    waiter = memory.waiter(terms=LEASE)
    documents = memory.server.documents
    assert eventually(lambda: "k" in documents and documents["k"]["waiters"])
    (grant,) = memory.session.queue.waiting.values()
    reads = list[str]()
    monkeypatch.setattr(memory.session.store, "read", counted(memory.session.store.read, reads))
    memory.apply(remove=(grant.id,))
    memory.session.renewals.renew([grant])
    assert eventually(lambda: documents["k"]["waiters"])
    assert eventually(lambda: grant.lease.until)
    assert (reads, grant.lease.failures) == ([], 0)
    assert grant.lease.renew_at < float("inf")
    theirs.release()
    waiter.let_go().end()


KINDS = {
    "plain": {},
    "minimum hold": {"terms": Terms(lease=30, margin=1, min_hold=0.1)},
    "readers": {"terms": Terms(lease=30, margin=1, mode="shared", capacity=UNLIMITED)},
}


@pytest.mark.parametrize("kind", [*KINDS, "waited for", "places"])
def test_the_end_of_a_process_is_bulk(memory: Memory, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """F182, P6, P8: A process that ends leaves nothing, and sends at most a tenth of a command for each lock."""
    number, options = 60, {"terms": LEASE, **KINDS.get(kind, {})}
    keys = [f"k{each:05}" for each in range(number)]
    leaves, stays = memory.new_session(), memory.new_session()
    first, second = (stays, leaves) if kind == "places" else (leaves, stays)
    locks = [make_lock(first, key, **options).acquire() for key in keys]
    if kind == "readers":
        locks += [make_lock(second, key, **options).acquire() for key in keys]
    waiters = list[Waiter]()
    if kind in ("waited for", "places"):
        waiters = [Waiter(memory.in_thread, make_lock(second, key, wait=None, **options)) for key in keys]
        assert eventually(lambda: all(memory.server.documents[key]["waiters"] for key in keys), 60)
    sent = list[str]()
    for name in ("apply", "renew", "release_uncontended", "read"):
        monkeypatch.setattr(leaves.store, name, counted(getattr(leaves.store, name), sent))
    leaves.close()
    assert len(sent) <= number / 10
    documents = [memory.server.documents[key] for key in keys]
    left = [entry for each in documents for entry in (*each["holders"], *each["waiters"])]
    assert not [each for each in left if each["session"] == leaves.id and "released" not in each]
    for waiter in waiters:
        waiter.let_go().end()
    assert kind != "waited for" or all(waiter.error is None for waiter in waiters)
    stays.close()


def counted(call: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """Note each call of it."""

    def noted(*arguments: Any) -> Any:
        calls.append(call.__name__)
        return call(*arguments)

    return noted


def queued(memory: Memory) -> tuple[Waiter, Grant]:
    """Return a waiter that has a place in the queue, and its grant."""
    waiter = memory.waiter(terms=LEASE)
    assert eventually(lambda: memory.session.queue.waiting)
    (grant,) = memory.session.queue.waiting.values()
    assert eventually(lambda: grant.lease.until)
    return waiter, grant


def test_a_place_is_gone_only_if_the_renewal_came_later(memory: Memory) -> None:
    """F236: A renewal that was sent before the answer to the waiter's command may be older than that command."""
    theirs = memory.other().acquire()
    waiter, grant = queued(memory)
    grant.waiting.seen_at += 1.0  # the answer took that long
    assert not grant.place_is_gone(grant.waiting.seen_at - 0.5)
    assert grant.place_is_gone(grant.waiting.seen_at)
    theirs.release()
    waiter.let_go().end()


def test_a_place_that_another_command_has_made(memory: Memory) -> None:
    """F236: A waiter that asks again, and finds that an earlier command has queued it, is renewed at once."""
    theirs = memory.other().acquire()
    waiter, grant = queued(memory)
    memory.session.heartbeat.close()
    assert grant.place_is_gone(memory.session.now())
    reply = memory.session.store.read("k", grant.id, 5.0)
    memory.session.commands.answer(grant.id, reply, memory.session.now(), number=-1)
    assert (grant.waiting.place_gone, grant.lease.renew_at <= memory.session.now()) == (False, True)
    theirs.release()
    waiter.let_go().end()
