"""`enqueue_once` with a delay: the last call is followed by a run, and many calls by one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Reject

from django_mongolock import mongo_lock
from django_mongolock.contrib.celery import enqueue, enqueue_once
from django_mongolock.contrib.celery.debounce import NAME
from django_mongolock.engine.detached import Parked
from django_mongolock.exceptions import LockBackendFailed
from tests import parts
from tests.celery import app as tasks
from tests.celery.conftest import MakePlace
from tests.celery.running import in_task
from tests.support.looking import holder, holders, new_key
from tests.support.waiting import eventually

app = Celery("debounce", broker="memory://", backend="cache+memory://", set_as_current=False)


@app.task(name="tests.reindex")
def reindex(*args: Any) -> str:
    """Reads what is current."""
    return "done"


def call(key: str, **options: Any) -> tuple[str, bool]:
    """Enqueue it; return the id of its task, and whether a message was sent."""
    result, sent = enqueue_once(reindex, key=key, **{"delay": 100, "longest": 1_000, **options})
    return result.id, sent


class Sent:
    """What is sent, instead of reaching the broker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts: list[Any] = []
        self.tasks: list[Any] = []
        self.again: list[Any] = []
        begin = app.tasks[NAME]
        monkeypatch.setattr(begin, "apply_async", lambda args, **options: self.starts.append((*args, options)))
        monkeypatch.setattr("celery.canvas.Signature.apply_async", lambda each: self._send(each))  # noqa: PLW0108 - unbound

    def _send(self, signature: Any) -> None:
        (self.tasks if signature.task == reindex.name else self.again).append(signature)

    def start(self, **request: Any) -> bool:
        """Run the first of the messages that start tasks; return whether the task was sent."""
        signature, lock, _ = self.starts[0]
        before = len(self.tasks)
        with in_task(app.tasks[NAME], **{"args": (signature, lock), **request}):
            app.tasks[NAME].run(signature, lock)
        return len(self.tasks) > before


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """What is sent."""
    return Sent(monkeypatch)


def lasts(key: str) -> float:
    """The seconds from the first call to the end of the parked lock."""
    found = holder(f"{key}:delayed")
    return float((found["until"] - found["acquired_at"]).total_seconds())


def test_one_message(sent: Sent) -> None:
    """The first call sends it; the others move the start, and return the same result."""
    key = new_key()
    first, *others = [call(key, queue_lease=500) for _ in range(3)]
    assert first[1]
    assert others == [(first[0], False)] * 2
    ((signature, _, options),) = sent.starts
    assert (signature.options["task_id"], options["countdown"]) == (first[0], 100)
    assert lasts(key) == pytest.approx(600, abs=60)


def test_each_call_moves_the_start(sent: Sent) -> None:
    """Up to the longest delay, and never nearer."""
    key = new_key()
    for delay, expected in ((100, 600), (300, 800), (200, 800), (1_000, 1_100)):
        call(key, delay=delay, longest=max(600, delay), queue_lease=500)
        if delay < 1_000:
            assert lasts(key) == pytest.approx(expected, abs=60)
    assert len(sent.starts) == 1


def test_no_further_than_the_longest(sent: Sent) -> None:
    """Counted from the first call."""
    key = new_key()
    call(key, delay=1, longest=300, queue_lease=500)
    time.sleep(2)
    call(key, delay=300, longest=300, queue_lease=500)
    assert 795 < lasts(key) < 801.5  # the end is written a moment after the first call was looked at


def test_the_longest_is_over(sent: Sent) -> None:
    """Though the last call was a moment ago: no lease can be made shorter than the first delay."""
    key, begun = new_key(), time.monotonic()
    call(key, delay=4, longest=4)
    time.sleep(3)
    call(key, delay=4, longest=4)
    assert lasts(key) - 3_600 > 6  # it would be its time then
    assert eventually(sent.start)
    assert time.monotonic() - begun < 6


def test_its_time_has_not_come(sent: Sent) -> None:
    """The message is sent again, to come when it may have; the key stays."""
    key = new_key()
    call(key)
    assert not sent.start()
    (again,) = sent.again
    assert again.options["countdown"] == pytest.approx(100, abs=60)
    assert list(again.args) == list(sent.starts[0][:2])
    assert holders(f"{key}:delayed")


def test_its_time_has_come(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is free before the task is sent: a call that came before is followed by it, one after is a first one."""
    key = new_key()
    call(key, delay=0.001)
    time.sleep(0.01)
    free: list[bool] = []
    monkeypatch.setattr("celery.canvas.Signature.apply_async", lambda each: free.append(not holders(f"{key}:delayed")))
    sent.start()
    assert free == [True]
    assert call(key)[1]


def test_a_second_delivery(sent: Sent) -> None:
    """The first run may have died before it sent the task."""
    call(new_key(), delay=0.001)
    time.sleep(0.01)
    assert sent.start()
    assert sent.start()
    assert (app.tasks[NAME].acks_late, app.tasks[NAME].reject_on_worker_lost) == (True, True)


@pytest.mark.parametrize("delay", [0.001, 100])
def test_a_broker_that_does_not_answer(sent: Sent, monkeypatch: pytest.MonkeyPatch, delay: float) -> None:
    """The message goes back into the queue, and what it starts is not lost."""

    def fail(*args: Any) -> None:
        raise ConnectionError

    call(new_key(), delay=delay)
    time.sleep(0.01)
    monkeypatch.setattr("celery.canvas.Signature.apply_async", fail)
    with pytest.raises(Reject) as caught:
        sent.start()
    assert caught.value.requeue  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["times", "give_up"])
def test_a_database_that_does_not_answer(sent: Sent, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The task is not sent while its key cannot be removed: later calls would find it, and start nothing."""

    def fail(*args: Any) -> None:
        raise LockBackendFailed("no answer")

    call(new_key(), delay=0.001)
    time.sleep(0.01)
    monkeypatch.setattr(Parked, what, fail)
    assert not sent.start()
    assert sent.again


def test_a_process_that_dies_before_it_sends(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    """F105: it is not on its way, and no call moves the end of its key, free after a lease. Nobody is told that
    nothing has to be done."""
    key = new_key()
    monkeypatch.setattr(enqueue, "SENDING", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(Parked, "keep", lambda *args: True)  # it died before
        call(key)
    before = lasts(key)
    with pytest.raises(LockBackendFailed, match="or has died: try again"):
        call(key)
    assert lasts(key) == before < 60


def test_a_message_that_is_lost(sent: Sent) -> None:
    """Calls that go on do not keep the key for ever: once it is time, they move nothing."""
    key = new_key()
    call(key, delay=0.001, longest=0.001, queue_lease=500)
    time.sleep(0.01)
    before = lasts(key)
    call(key, delay=0.001, longest=0.001, queue_lease=1_000)
    assert lasts(key) == before


def test_a_busy_key_of_something_else(sent: Sent) -> None:
    """A lock that is no task's is not waited for."""
    key = new_key()
    with mongo_lock(f"{key}:delayed"), pytest.raises(LockBackendFailed, match="not a task"):
        call(key)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"delay": 10}, "belong together"),
        ({"longest": 10}, "belong together"),
        ({"delay": 10, "longest": 5}, "is shorter than delay=10"),
        ({"delay": 0, "longest": 5}, "delay must be more than 0"),
        ({"delay": "1", "longest": 5}, "delay is a number of seconds"),
        ({"delay": 1, "longest": 5, "countdown": 3}, "leave out countdown="),
    ],
)
def test_wrong_options(options: Any, text: str) -> None:
    """Nothing is sent."""
    with pytest.raises((TypeError, ValueError), match=text):
        enqueue_once(reindex, key=new_key(), **options)


@pytest.fixture
def eager() -> Iterator[None]:
    """Tasks run where they are sent."""
    app.conf.task_always_eager = True
    yield
    app.conf.task_always_eager = False


@pytest.mark.usefixtures("eager")
def test_eager() -> None:
    """A task that runs where it is sent waits for no further call."""
    key = new_key()
    for _ in range(2):
        assert call(key, queue_lease=1)[1]
        assert holders(f"{key}:delayed") == []


def test_to_the_queue_of_the_task(sent: Sent) -> None:
    """The message that starts it goes where it goes itself."""
    call(new_key(), queue="slow")
    assert sent.starts[0][2]["queue"].name == "slow"


@pytest.mark.long
@parts.needs("Redis")
def test_with_workers(place: MakePlace, name: str) -> None:
    """Many calls make one run, after the last of them; calls that never stop make one all the same; a call that comes
    during a run makes another."""
    here = place()
    here.start(concurrency=2)

    def runs(key: str) -> list[dict[str, Any]]:
        return here.story.of("begin", name=key)

    for _ in range(20):
        enqueue_once(tasks.plain, (name,), delay=3, longest=60)
    last = time.monotonic()
    assert eventually(lambda: runs(name), 60), here.logs()
    assert runs(name)[0]["at"] > last + 2.9
    # Calls that do not stop, until it runs; and one while it does.
    busy = f"{name}-busy"

    def calls() -> bool:
        enqueue_once(tasks.plain, (busy, 3), delay=2, longest=4)
        return bool(runs(busy))

    assert eventually(calls, 60), here.logs()
    enqueue_once(tasks.plain, (busy, 3), delay=2, longest=4)
    assert eventually(lambda: len(runs(busy)) == 2 and here.is_quiet(), 60), here.logs()
    assert len(runs(name)) == 1
