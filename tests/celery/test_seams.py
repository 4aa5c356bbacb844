"""The meetings of tasks, messages and locks in canvases, second deliveries, outages and shutdowns, with a real
Redis."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from celery import chain, chord, group
from pymongo import MongoClient

from django_mongolock import mongo_lock
from django_mongolock.backends import mongo_store
from testproject.servers import ReplicaSet
from tests.celery import app as tasks
from tests.celery.conftest import WITH_WORKERS, MakePlace
from tests.celery.test_outage import mongod  # noqa: F401 - a fixture
from tests.celery.test_redelivery import begun, done
from tests.support.looking import holders
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, *WITH_WORKERS]


def all_free(prefix: str) -> bool:
    """Return whether no key with these prefixes is held."""
    return not any(map(holders, prefix.split()))


def test_a_second_delivery(place: MakePlace, name: str) -> None:
    """F190: A OnceTask above mongo_locked runs once, although Redis delivers it again while it runs."""
    here = place(visibility=2)
    here.start()
    result = tasks.indexed.delay(name, "a", 5)
    assert done(here, result) == "a"
    assert eventually(here.is_quiet, 60), here.logs()
    assert here.story.count("begin") == 1, here.logs()
    assert eventually(lambda: here.story.count("state", state="IGNORED"), 60), here.logs()
    assert eventually(lambda: all_free(f"index:{name} index:{name}:running"), 10)


@pytest.mark.parametrize("end", [signal.SIGQUIT, signal.SIGTERM])
def test_a_shutdown_after_a_second_delivery(place: MakePlace, name: str, end: signal.Signals) -> None:
    """F230: After a cold shutdown the second delivery runs. After a warm one nothing is left to do."""
    here = place(visibility=2)
    here.start_all(2, concurrency=1)
    tasks.told.delay(name, "a")
    first = here.of(begun(here, 1)[0]["pid"])
    assert eventually(lambda: here.story.count("retry"), 60), here.logs()
    os.kill(first.process.pid, end)
    if end == signal.SIGQUIT:
        begun(here, 2)
    tasks.tell("a")
    assert eventually(lambda: here.story.count("state", state="SUCCESS"), 60), here.logs()
    first.process.wait(60)
    assert eventually(here.is_quiet, 90), here.logs()
    assert here.story.count("begin") == (2 if end == signal.SIGQUIT else 1), here.logs()


@pytest.mark.parametrize("value", ["x" * 600, "a\nb"])
def test_the_next_task_of_a_chain(place: MakePlace, name: str, value: str) -> None:
    """F191: The next task of a chain runs, whatever argument its key is made of."""
    here = place()
    here.start()
    assert done(here, chain(tasks.given.s(value), tasks.tail.s()).delay()) == "tail"
    tasks.given.apply_async((f"{name}{value}",), link=tasks.tail.s())
    assert eventually(lambda: here.story.count("end", name="tail") == 2, 60), here.logs()


def test_the_next_task_during_an_outage(place: MakePlace, mongod: ReplicaSet, name: str) -> None:  # noqa: F811
    """F191: A chain, a chord and a group go on while MongoDB is away. None of their tasks fails."""
    here = place(mongo=mongod.uri)
    here.start(concurrency=4)
    assert done(here, tasks.given.delay("warm")) == "warm"
    mongod.members[0].kill()
    results = [
        chain(tasks.given.s(f"{name}1"), tasks.tail.s()).delay(),
        group(tasks.tail.s(f"{name}{number}") for number in (2, 3)).delay(),
        chain(tasks.given.s(1), tasks.given.si(f"{name}4"), tasks.tail.s()).delay(),
    ]
    assert [done(here, each) for each in results] == ["tail", ["tail", "tail"], "tail"]
    mongod.members[0].restart()
    assert here.story.count("state", state="FAILURE") == 0, here.logs()


def test_canvases(place: MakePlace, name: str, redis: Any) -> None:
    """The body of a chord, the members of a group, and both links of a task are sent, and their keys are free then."""
    here = place(result_backend=redis.uri)
    here.start(concurrency=4)
    body = chord([tasks.given.s(1), tasks.given.s(2)], tasks.tail.si(f"{name}1")).delay()
    members = group(tasks.tail.s(f"{name}2"), tasks.tail.s(f"{name}2")).delay()
    tasks.given.apply_async((f"{name}3",), link=tasks.tail.si(f"{name}3"))
    tasks.fails.apply_async(link_error=tasks.tail.si(f"{name}4"))
    assert (done(here, body), done(here, members)) == ("tail", ["tail", "tail"])
    assert eventually(lambda: here.story.count("end", name="tail") == 5, 60), here.logs()
    assert eventually(lambda: all_free(" ".join(f"tail:{name}{number}" for number in range(1, 5))), 10)


def test_a_retry_at_once(place: MakePlace, name: str) -> None:
    """A task that is retried at once keeps its key until its second run has ended."""
    here = place()
    here.start(concurrency=4)
    assert done(here, tasks.tail.delay(name, "again")) == "tail"
    assert here.story.count("begin", name="tail") == 2
    assert eventually(lambda: all_free(f"tail:{name}"), 10)


def test_released_at_the_start(place: MakePlace, name: str) -> None:
    """With once_release="start", a call during the run sends one more message, and no second one."""
    here = place()
    here.start(concurrency=1)
    first = tasks.from_start.delay(name)
    begun(here, 1)
    assert eventually(lambda: all_free(f"start:{name}"), 10)
    second = tasks.from_start.delay(name)
    assert tasks.from_start.delay(name).id == second.id != first.id
    tasks.tell(name)
    assert [done(here, each) for each in (first, second)] == [name, name]
    assert here.story.count("begin") == 2


def test_a_task_that_sends_itself(place: MakePlace, name: str) -> None:
    """F194: Each run sends the next one under its own key."""
    here = place()
    here.start(concurrency=2)
    tasks.sends_itself.delay(name)
    assert eventually(lambda: here.story.count("end", name=name) == 3, 60), here.logs()
    assert eventually(lambda: all_free(f"chain:{name}"), 10)


def test_keys_of_tasks_that_end_in_an_outage(place: MakePlace, mongod: ReplicaSet, name: str) -> None:  # noqa: F811
    """F192: Tasks that begin, end, or are revoked while MongoDB is away leave no key behind."""
    here = place(mongo=mongod.uri)
    here.start(concurrency=8)
    with MongoClient[Any](mongod.uri) as client:
        locks = client[mongo_store().config.database][mongo_store().config.collection]
        held = {"_id": {"$regex": f"^index:{name}[0-9]+$"}, "holders.0": {"$exists": True}}
        # Six begin now, two in the outage, two are revoked in it.
        ids = done(here, tasks.sends_all.delay([(f"{name}{number}", 0) for number in range(6)]))
        ids += done(here, tasks.sends_all.delay([(f"{name}{number}", 6) for number in range(6, 8)]))
        ids += done(here, tasks.sends_all.delay([(f"{name}{number}", 10) for number in range(8, 10)]))
        begun(here, 6)
        assert locks.count_documents(held) == 10
        mongod.members[0].kill()
        tasks.app.control.revoke(ids[8:])
        assert eventually(lambda: here.story.count("end") == 6, 60), here.logs()
        time.sleep(10)
        mongod.members[0].restart()
        assert eventually(lambda: here.story.count("end") == 8, 60), here.logs()
        assert eventually(lambda: not locks.count_documents(held), 40), here.logs()


def test_rows(place: MakePlace, name: str) -> None:
    """F232: A helper that comes back in a caller's `try` sends at most one message from one run."""
    here, keys = place(), [f"{name}{number}" for number in range(3)]
    here.start(concurrency=2)
    with mongo_lock(*keys):
        result = tasks.through_rows.delay(keys, name)
        assert done(here, result) == name
    assert here.story.count("row") == 3
    assert eventually(here.is_quiet, 30)
    assert here.story.count("begin", name=name) == 1, here.logs()


def test_an_inner_lock_backs_off(place: MakePlace, name: str) -> None:
    """F233: An inner lock backs off, as a single lock does."""
    here = place()
    here.start(concurrency=2)
    with mongo_lock(f"{name}-inner"):
        result = tasks.two_locks.delay(f"{name}-outer", f"{name}-inner", name)
        time.sleep(12)
        count = here.story.count("message", id=result.id)
    assert done(here, result) == name
    assert 4 <= count <= 9, here.logs()


def test_two_messages_with_one_id(place: MakePlace, name: str) -> None:
    """F235: Both messages run, one after the other."""
    here = place()
    here.start(concurrency=2)
    for number in (1, 2):
        tasks.late.apply_async((name, f"{number}", 1), task_id=name)
        begun(here, 1)
    assert eventually(lambda: here.story.count("end") == 2, 60), here.logs()
    assert eventually(here.is_quiet, 30)
