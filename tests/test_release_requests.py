"""Asking a holder to release its lock, taking one by hand, and seeing deadlocks: by command, admin and ORM."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.management import CommandError

from django_mongolock import LockDeadlock, mongo_lock
from django_mongolock.models import Lock
from django_mongolock.signals import lock_release_requested
from tests.support.lock_documents import Locks
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.waiting import eventually
from tests.test_admin import LIST, NAMES, browser
from tests.test_commands import run

pytestmark = WITH_MONGO


@pytest.fixture
def deadlock(locks: Locks) -> Iterator[Callable[[], list[object]]]:
    """Two threads that each hold what the other waits for. Call it to have the end: what each of them met."""
    met: list[object] = []
    both = threading.Barrier(2)

    def take(first: str, second: str) -> None:
        with mongo_lock(first, wait=None):
            both.wait(10)
            try:
                with mongo_lock(second, wait=None):
                    met.append("got it")
            except LockDeadlock as error:
                met.append(error)

    threads = [threading.Thread(target=take, args=pair) for pair in (("a", "b"), ("b", "a"))]

    def end() -> list[object]:
        for thread in threads:
            thread.join(20)
        return met

    for thread in threads:
        thread.start()
    yield end
    end()


@pytest.mark.long
def test_the_holder_is_asked_and_does_as_it_sees_fit(locks: Locks) -> None:
    """The holder learns of it at its next renewal: by its lock, its callback and a signal, once each."""
    heard: list[Any] = []

    def receive(**facts: Any) -> None:
        heard.append((facts["key"], facts["reason"]))

    lock_release_requested.connect(receive)
    try:
        with mongo_lock("k", lease=1, on_release_requested=heard.append) as lock:
            before = lock.release_requested
            assert before is None
            out, _ = run("release_lock", "k", "--ask", "--by", "$anna: deploying")
            assert "1 asked" in out
            assert eventually(lambda: len(heard) == 2, 3)
            assert lock.release_requested == "$anna: deploying"
            assert lock.held
            time.sleep(0.7)  # two more beats
        assert len(heard) == 2
    finally:
        lock_release_requested.disconnect(receive)


def test_the_orm_asks(locks: Locks) -> None:
    """One lock, or all that a query finds; who is not held is not asked."""
    locks.held("order:1", "order:2", "ad:1")
    locks.free("order:3")
    assert Lock.objects.filter(key__startswith="order:").ask_to_release("me") == 2
    assert Lock.objects.get(key="ad:1").ask_to_release("me") == 1
    assert locks.read("order:1")["holders"][0]["release_requested_by"] == "me"
    assert Lock.objects.get(key="order:3").ask_to_release("me") == 0


def test_release_lock_takes_a_lock_from_its_holder(locks: Locks) -> None:
    """By hand, by its whole key; the holder learns of its loss."""
    lock = mongo_lock("order:5").acquire()
    with pytest.raises(CommandError, match="--no-input"):
        run("release_lock", "order:5")
    with pytest.raises(CommandError, match="control characters"):
        run("release_lock", "order:5", "--ask", "--by", "a\nb")
    out, _ = run("release_lock", "order:5", "--no-input")
    assert "'order:5' was taken" in out
    with pytest.raises(CommandError, match="'order:5' is not held") as refusal:
        run("release_lock", "order:5", "--no-input")
    assert refusal.value.returncode == 3
    assert not lock.release()


def test_a_deadlock_is_shown_and_ends(deadlock: Callable[[], list[object]]) -> None:
    """F45: while it lasts, the command and the admin show the cycle; then its youngest waiter gives up."""
    assert eventually(lambda: "'a'" in run("list_locks", "--deadlocks")[0], 5)
    page = browser(*NAMES).get(f"{LIST}?state=waited").content.decode()
    met = deadlock()
    assert len(met) == 2
    (error,) = [each for each in met if isinstance(each, LockDeadlock)]
    assert set(error.keys) == {"a", "b"}
    assert "got it" in met
    assert "these wait for one another" in page
    assert run("list_locks", "--deadlocks")[0].strip() == "There are no deadlocks."
    assert json.loads(run("list_locks", "--deadlocks", "--json")[0]) == {"deadlocks": []}
