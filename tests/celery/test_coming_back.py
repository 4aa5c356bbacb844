"""Tasks that come back, without a worker: their messages, their times, and their memory."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partialmethod
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery, states
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import task_retry
from kombu.exceptions import OperationalError
from pytest_django import Settings

from django_mongolock import SKIPPED, LockBackendFailed, LockNotAcquired, mongo_locked, once_per
from django_mongolock.backends import mongo_store
from django_mongolock.conf import get_settings
from django_mongolock.context import MESSAGE, RETURNED
from django_mongolock.contrib.celery import retry_task
from django_mongolock.contrib.celery.retry_task import Note, retry_current_task
from django_mongolock.decorator.calls import LockedCall
from django_mongolock.engine.rule.document import Step, Terms, entry
from django_mongolock.exceptions import LockError, LockReentry
from django_mongolock.models import Lock
from testproject.servers import Redis
from tests import parts
from tests.celery.running import OtherRun, ended, in_task
from tests.support.looking import document, held_elsewhere, holders
from tests.support.waiting import eventually

app = Celery("coming_back", broker="memory://", set_as_current=False)
BUSY = LockNotAcquired("key", retry_after=20)
AWAY = LockBackendFailed("no answer")


@app.task(shared=False, acks_late=True)
def task(*args: Any) -> None: ...


def ran() -> Any:
    return "ran"


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs that are shorter than in a worker leave their proof, too."""
    monkeypatch.setattr(retry_task, "LONG_ENOUGH", 0.0)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    messages: list[Any] = []

    def send(message: Any, **options: Any) -> None:
        message.options["headers"] = {**message.options["headers"], MESSAGE: uuid.uuid4().hex}
        messages.append(message)

    monkeypatch.setattr("celery.canvas.Signature.apply_async", send)
    return messages


NAME = f"{get_settings().DATABASE} key"
AGAIN: dict[str, Any] = {"delivery_info": {"redelivered": True}}


def carries(times: int = 0, since: float | None = None, lock: str = NAME, **facts: Any) -> dict[str, Any]:
    """Return the headers of a message that came back."""
    return {RETURNED: asdict(Note(waits={lock: (times, since)}, **facts))}


def note(message: Any) -> Note:
    return Note(**message.options["headers"][RETURNED])


def wait_of(message: Any, key: str = "key") -> tuple[int, float | None]:
    """Return how often the task came back for a lock, and the start of the outage of MongoDB, if any."""
    return note(message).waits[f"{get_settings().DATABASE} {key}"]


def deliver(function: Any, message: Any = None, **request: Any) -> Any:
    """Let a task make this call, as that of *message*. Return its result, or the class of its exception for Celery."""
    headers = {} if message is None else message.options["headers"]
    with in_task(task, headers=headers, **request) as current:
        try:
            result = function()
        except Retry as outcome:
            task_retry.send(sender=task, request=current, reason=outcome, einfo=SimpleNamespace())
            ended(task, states.RETRY)
            return Retry
        except Ignore as outcome:
            return type(outcome)
        ended(task)
        return result


def comes_back(sent: list[Any], error: Exception, headers: Any = None, **request: Any) -> Any:
    """Let a task come back because of *error*, and return the message."""
    message = SimpleNamespace(options={"headers": headers or {}})
    assert deliver(lambda: retry_current_task(error), message, **request) is Retry  # type: ignore[arg-type]
    return sent[-1].options


@pytest.mark.parametrize(("times", "longest"), [(0, 0.25), (1, 0.5), (3, 2), (5, 5), (90, 5)])
def test_the_countdown_doubles(sent: list[Any], times: int, longest: float) -> None:
    """A task comes back soon at first, and then every few seconds. Tasks never come back all at once."""
    countdowns = {comes_back(sent, BUSY, carries(times))["countdown"] for _ in range(20)}
    assert len(countdowns) > 10
    assert all(longest / 2 <= each <= longest for each in countdowns)
    assert wait_of(sent[-1])[0] == times + 1


def test_the_end_of_the_lease(sent: list[Any]) -> None:
    """A task comes back sooner if the lease of the holder ends sooner."""
    assert comes_back(sent, LockNotAcquired("key", retry_after=1), carries(9))["countdown"] <= 1


def test_the_visibility_timeout(sent: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """F95: A countdown is shorter than the visibility timeout. Otherwise the broker would deliver the waiting message
    twice."""
    monkeypatch.setitem(app.conf, "broker_transport_options", {"visibility_timeout": 4})
    assert comes_back(sent, BUSY, carries(9))["countdown"] <= 2


def test_an_outage_is_bounded(sent: list[Any], settings: Settings) -> None:
    """F97: While MongoDB does not answer, a task comes back for RETRY_OUTAGE seconds. After that time, the task
    fails."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "RETRY_OUTAGE": 60}
    comes_back(sent, AWAY)
    _, since = wait_of(sent[-1], "")
    assert since is not None
    assert since == pytest.approx(time.time(), abs=5)
    lock = NAME.removesuffix("key")
    comes_back(sent, AWAY, carries(5, since - 50, lock))
    assert wait_of(sent[-1], "") == (6, since - 50)
    with in_task(task, headers=carries(5, since - 70, lock)), pytest.raises(LockBackendFailed):
        retry_current_task(AWAY)


def test_an_outage_that_is_over_is_forgotten(sent: list[Any]) -> None:
    """F97: After an answer that the lock is busy, the next outage has the whole time again."""
    comes_back(sent, BUSY, carries(5, 1.0))
    assert wait_of(sent[-1]) == (6, None)


def test_each_lock_has_a_wait_of_its_own(sent: list[Any], key: str) -> None:
    """F233, F234: An inner lock backs off, and gives up in an outage, as a single lock does."""
    outer: Any = mongo_locked(f"{key} outer", on_contention="retry")(lambda work: work())
    inner: Any = mongo_locked(key, on_contention="retry", wait=0)(ran)
    message = None
    with held_elsewhere(key):
        for times in (1, 2, 3):
            assert deliver(lambda: outer(inner), message) is Retry
            message = sent[-1]
            assert wait_of(message, key)[0] == times
    away = Mock(side_effect=LockBackendFailed("no answer"))
    failing: Any = mongo_locked(f"{key} far", on_contention="retry")(ran)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LockedCall, "lock", partialmethod(lock_unless, away, f"{key} far"))
        deliver(lambda: outer(failing), message)
        first = wait_of(sent[-1], f"{key} far")
        deliver(lambda: outer(failing), sent[-1])
    assert first[1] is not None
    assert wait_of(sent[-1], f"{key} far") == (2, first[1])


make_lock = LockedCall.lock


def lock_unless(call: LockedCall, away: Any, key: str) -> Any:
    """Make the lock of a call. MongoDB does not answer for *key*."""
    lock = make_lock(call)
    return away() if lock.keys == (key,) else lock


def test_one_message_from_one_run(sent: list[Any], key: str) -> None:
    """F232: A helper under "retry" in a caller's try block multiplies nothing, because a swallowed Retry sends no
    message."""
    process: Any = mongo_locked(f"{key}:{{row}}", on_contention="retry", wait=0)(lambda row: row)

    def rows() -> str:
        for row in range(3):
            with suppress(Exception):
                process(row)
        return "done"

    def then_one_escapes() -> None:
        rows()
        process(0)

    with held_elsewhere(f"{key}:0"), held_elsewhere(f"{key}:1"), held_elsewhere(f"{key}:2"):
        assert (deliver(rows), sent) == ("done", [])
        assert deliver(then_one_escapes) is Retry
    assert len(sent) == 1


@pytest.mark.parametrize(
    ("limit", "error"), [(0, AWAY), (600, LockBackendFailed("no rights", passing=False)), (600, LockReentry("key"))]
)
def test_some_failures_are_final(sent: list[Any], settings: Settings, limit: float, error: LockError) -> None:
    """F97: Without time for retries, or after an error that does not pass, the task fails at once."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "RETRY_OUTAGE": limit}
    with in_task(task), pytest.raises(type(error)):
        retry_current_task(error)
    assert sent == []


def test_a_retry_of_its_own_starts_afresh() -> None:
    """The memory of a wait in a message is not carried on to messages that the task itself sends."""
    with in_task(task, headers={**carries(7), "theirs": 1}) as request:
        assert mongo_locked(uuid.uuid4().hex, on_contention="retry")(ran)() == "ran"
        assert request.headers == {"theirs": 1}


@pytest.mark.parametrize("header", ["x", [1], {**carries()[RETURNED], "former": ["key"]}, {"tries": 1}, None])
def test_a_header_of_another_program(sent: list[Any], header: Any) -> None:
    comes_back(sent, BUSY, {RETURNED: header})
    assert wait_of(sent[-1])[0] == 1


@pytest.mark.parametrize("policy", ["raise", "skip", "retry", "call", "once_per"])
def test_a_second_delivery(sent: list[Any], key: str, policy: Any) -> None:
    """F95: A delivery that finds its own task at work comes back, under every policy, and then has nothing to do."""
    on_contention = (lambda error: "called") if policy == "call" else policy
    decorator = (
        once_per(key, hours=1) if policy == "once_per" else mongo_locked(key, on_contention=on_contention, wait=0)
    )
    function: Any = decorator(ran)
    with OtherRun(key, task, "the-id") as run:
        assert deliver(function, **AGAIN) is Retry
        (message,) = sent
        assert (note(message).former, note(message).again) == ((key, None, 0), "0.0")
        assert deliver(function, message) is Retry
        run.end()
        assert outcome(function, sent) is Ignore


def outcome(function: Any, sent: list[Any]) -> Any:
    """Deliver the last message, and the messages by which it comes back, until it does something else."""
    for _ in range(retry_task.LOOKS + 1):
        if (result := deliver(function, sent[-1])) is not Retry:
            return result
    return Retry


@pytest.mark.parametrize("end", ["cold shutdown", "forced", "no document"])
def test_no_proof(sent: list[Any], key: str, end: str) -> None:
    """F230, F231: A run that is gone without a report of its worker has not ended. The second delivery runs."""
    function: Any = mongo_locked(key, on_contention="retry")(ran)
    run = OtherRun(key, task, "the-id")
    run.state = "" if end == "cold shutdown" else states.SUCCESS
    with run:
        assert deliver(function, **AGAIN) is Retry
        if end == "forced":
            Lock.objects.filter(key=key).force_release()
            run.state = ""
        run.end()
        if end == "no document":
            assert eventually(lambda: document(key)["tombstones"])
            mongo_store().collection.delete_one({"_id": key})
        assert outcome(function, sent) == "ran"


def test_the_proof_has_an_alias(sent: list[Any], key: str) -> None:
    """F231: The lock of the first run is read in the database where it was found."""
    function: Any = mongo_locked(key, on_contention="retry")(ran)
    with OtherRun(key, task, "the-id"):
        assert deliver(function, **AGAIN) is Retry
    read = Mock(return_value=({}, set()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retry_task, "_other_runs", read)
        sent[-1].options["headers"][RETURNED]["former"] = [key, "elsewhere", 0]
        deliver(function, sent[-1])
    read.assert_called_once_with(key, "elsewhere")


@pytest.mark.parametrize("redelivered", [False, True])
def test_two_messages_with_one_id(sent: list[Any], key: str, redelivered: bool) -> None:
    """F235: Another message is no second delivery, and runs after the first, also if the broker repeats it."""
    function: Any = mongo_locked(key, on_contention="retry", wait=0)(ran)
    second = SimpleNamespace(options={"headers": {MESSAGE: "second"}})
    again = AGAIN if redelivered else {}
    with OtherRun(key, task, "the-id"):
        assert deliver(function, second, **again) is Retry
    assert outcome(function, sent) == "ran"


async def coroutine() -> str:
    return "ran"


def generator() -> Iterator[str]:
    yield "ran"


async def async_generator() -> AsyncIterator[str]:
    yield "ran"


@pytest.mark.parametrize("function", [coroutine, generator, async_generator])
def test_a_second_delivery_to_other_functions(sent: list[Any], key: str, function: Any) -> None:
    """F95: A second delivery is recognised in every kind of function that a task may call."""
    locked = mongo_locked(key, wait=0)(function)

    async def call() -> Any:
        return await locked() if function is coroutine else [item async for item in locked()]

    def work() -> Any:
        return list(locked()) if function is generator else asyncio.run(call())

    with OtherRun(key, task, "the-id") as run:
        assert deliver(work, **AGAIN) is Retry
        assert deliver(work, sent[-1]) is Retry
        run.end()
        assert outcome(work, sent) is Ignore


def test_another_holder_since(sent: list[Any], key: str) -> None:
    """F95: The run has ended, even if another holds the lock now."""
    function: Any = mongo_locked(key, on_contention="skip")(ran)
    with OtherRun(key, task, "the-id"):
        assert deliver(function, **AGAIN) is Retry
    with held_elsewhere(key):
        assert outcome(function, sent) is Ignore
        assert deliver(function) is SKIPPED


@pytest.mark.parametrize("since", ["nothing happened", "another held the lock"])
def test_the_first_run_died(sent: list[Any], key: str, since: str) -> None:
    """F95: While a run on another machine has a lease, the second delivery comes back. After the lease, it runs."""
    function: Any = mongo_locked(key, on_contention="retry")(ran)
    terms = Terms(lease=0.3, margin=0, owner="the-id")
    run = entry("there.1", "there", terms, {"run": "r", "delivery": "0.0"}, process="a machine elsewhere 7 7")
    assert mongo_store().apply(key, Step(ask="there.1", add=run), 5).held
    assert deliver(function, **AGAIN) is Retry
    assert deliver(function, sent[-1]) is Retry
    time.sleep(0.4)
    if since == "another held the lock":
        mongo_locked(key)(lambda: None)()
    assert outcome(function, sent) == "ran"
    assert len(sent) == 2 + retry_task.LOOKS


def test_the_run_ends_at_that_moment(sent: list[Any], key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F95: A second delivery does not run because the first run leaves its proof after the look."""
    function: Any = mongo_locked(key, on_contention="retry")(ran)
    with OtherRun(key, task, "the-id") as run:
        assert deliver(function, **AGAIN) is Retry

        with monkeypatch.context() as patch:
            patch.setattr(retry_task, "_other_runs", lambda *args: ({}, set()))
            assert deliver(function, sent[-1]) is Retry
        run.end()
    assert outcome(function, sent) is Ignore


def test_the_first_run_cannot_be_read(sent: list[Any], key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F95: A second delivery without an answer about the first run does not run, although it could acquire the lock."""
    function: Any = mongo_locked(key, on_contention="skip")(ran)
    with OtherRun(key, task, "the-id"):
        assert deliver(function, **AGAIN) is Retry
    monkeypatch.setattr(retry_task, "_other_runs", Mock(side_effect=AWAY))
    with pytest.raises(LockBackendFailed):
        deliver(function, sent[-1], **AGAIN)


def test_a_retry_that_overtakes(sent: list[Any], key: str) -> None:
    """F96: A retry without a countdown starts while the run that sent it still ends. The retry is no second
    delivery."""
    function: Any = mongo_locked(key, on_contention="skip")(ran)
    with OtherRun(key, task, "the-id", retries=0):
        assert deliver(function, retries=1) is Retry
    (message,) = sent
    assert note(message).former is None
    assert deliver(function, message, retries=1) == "ran"


def test_a_run_meets_its_sender(sent: list[Any], key: str) -> None:
    """F122: A run that meets its sender comes again under any policy, and is never dropped, although its sender has
    ended by then."""
    function: Any = mongo_locked(key, on_contention="skip")(ran)
    headers: dict[str, Any] = {MESSAGE: "second"}
    with OtherRun(key, task, "the-id"):
        for _ in range(2):
            assert deliver(function, SimpleNamespace(options={"headers": headers})) is Retry
            assert note(sent[-1]).former is None
            headers = sent[-1].options["headers"]
    with in_task(task, headers=headers):
        assert function() == "ran"


def test_a_minimum_hold_of_its_own(sent: list[Any], key: str) -> None:
    """A key that a task keeps locked for the minimum hold is no run of the task. The policy decides, also in the next
    run."""
    function: Any = once_per(key, hours=1)(ran)
    assert deliver(lambda: (function(), function())) == ("ran", SKIPPED)
    assert deliver(function) is deliver(function, retries=1) is SKIPPED
    with pytest.raises(LockNotAcquired):
        deliver(mongo_locked(key, wait=0)(ran))
    assert sent == []


def test_two_coroutines_of_one_run(sent: list[Any], key: str) -> None:
    """If one coroutine waits in vain for another of its run, it gets the error. The coroutine is no second delivery."""

    @mongo_locked(key, wait=0.1)
    async def function() -> None:
        await asyncio.sleep(0.3)

    async def both() -> Any:
        return await asyncio.gather(function(), function(), return_exceptions=True)

    assert [type(each) for each in deliver(lambda: asyncio.run(both()))] == [type(None), LockNotAcquired]
    assert sent == []


def test_it_is_sent_when_the_run_has_ended(sent: list[Any], key: str, settings: Settings) -> None:
    """F122: Nothing is sent before the end of the run, and the next run meets no lock of this one. A caught Retry is
    not sent."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "SHORT_WAIT": 0.01}
    outer: Any = mongo_locked(f"{key} outer", on_contention="retry")(lambda work: work())
    inner: Any = mongo_locked(key, on_contention="retry")(ran)

    def cleans_up() -> None:
        try:
            inner()
        finally:
            assert sent == []

    def catches() -> str:
        with pytest.raises(Retry):
            inner()
        return "ran something else"

    with held_elsewhere(key):
        for work, count in ((cleans_up, 1), (catches, 1)):
            assert deliver(lambda work=work: outer(work)) in {Retry, "ran something else"}
            assert len(sent) == count
    assert holders(f"{key} outer") == []


# Tasks without a later run


@app.task(max_retries=0, shared=False)
@mongo_locked("{key}", wait=0, on_contention="retry")
def returning(key: str) -> str:
    return "ran"


def test_without_a_worker(key: str) -> None:
    """A task that is called as a function, or that runs where it is sent, is locked as well. Without a later run, it
    fails."""
    assert (returning(key), returning.apply((key,)).get()) == ("ran", "ran")
    with held_elsewhere(key):
        with pytest.raises(LockNotAcquired):
            returning(key)
        assert isinstance(returning.apply((key,)).result, LockNotAcquired)


def come_back_to(broker: str, *, late: bool) -> Any:
    """Let a task come back by this broker, and return the exception that its worker gets, or None."""
    other: Any = Celery("with_broker", broker=broker, set_as_current=False)
    coming = other.task(ran, name="tests.coming", shared=False, acks_late=late)
    einfo = SimpleNamespace(exception=None)
    with in_task(coming, args=()) as request:
        with pytest.raises(Retry) as caught:
            retry_current_task(BUSY)
        task_retry.send(sender=coming, request=request, reason=caught.value, einfo=einfo)
    return einfo.exception


@pytest.mark.long
@pytest.mark.parametrize("late", [True, False])
def test_broker_away(monkeypatch: pytest.MonkeyPatch, settings: Settings, late: bool) -> None:
    """F106, F127: A task that cannot be sent again is handed back to the broker. An acknowledged task fails. No task is
    lost silently."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "RETRY_OUTAGE": 0.2}
    monkeypatch.setattr(retry_task, "GIVE_BACK", 0.2)
    monkeypatch.setattr(retry_task, "PAUSE", 0.1)
    failure = come_back_to("redis://127.0.0.1:1", late=late)
    assert isinstance(failure, Reject if late else OperationalError)
    assert getattr(failure, "requeue", False) is late


@pytest.mark.long
@parts.needs("Redis")
@pytest.mark.parametrize("late", [True, False])
def test_broker_away_for_a_while(late: bool) -> None:
    """F127: The message is tried until the broker is there again."""
    with Redis(durable=True) as broker:
        broker.kill()
        threading.Timer(2.5, broker.restart).start()
        assert come_back_to(broker.uri, late=late) is None
        with Celery(broker=broker.uri, set_as_current=False).connection_for_write() as connection:
            assert connection.default_channel.client.llen("celery") == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("wait", [0, 5, None])
def test_a_second_delivery_does_not_wait_in_the_pool(sent: list[Any], key: str, wait: float | None) -> None:
    """F95, F98: A second delivery does not wait for its own run, however long the task may wait for others."""
    function: Any = mongo_locked(key, wait=wait)(ran)
    again: Any = {**AGAIN, "task_id": f"id-{wait}"}
    with OtherRun(key, task, again["task_id"]):
        assert deliver(function, **again) is Retry
    again["task_id"] = "third"
    with OtherRun(key, task, "another") as run:
        threading.Timer(0.1, run.enough.set).start()
        if wait == 0:
            with pytest.raises(LockNotAcquired):
                deliver(function, **again)
        else:
            assert deliver(function, **again) == "ran"


def test_a_short_hold_is_waited_for(sent: list[Any], key: str, settings: Settings) -> None:
    """F98: A task waits in the pool for a lock that was taken just now and has no waiter. For other locks it comes
    back."""
    function: Any = mongo_locked(key, on_contention="retry")(ran)
    with OtherRun(key, task, "another") as run:
        run.thread.join(0.1)
        run.enough.set()
        assert deliver(function) == "ran"
    settings.MONGOLOCK = {**settings.MONGOLOCK, "SHORT_WAIT": 0.05}
    with OtherRun(key, task, "another") as run:
        run.thread.join(0.1)
        assert deliver(function) is Retry


def test_the_wait_goes_on_after_a_short_hold(sent: list[Any], key: str, settings: Settings) -> None:
    """F98: A task that has waited in the pool in vain comes back as late as without that wait."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "SHORT_WAIT": 0.3}
    function: Any = mongo_locked(key, on_contention="retry")(ran)
    headers = carries(4, lock=f"{get_settings().DATABASE} {key}")
    with OtherRun(key, task, "another"):
        assert deliver(function, SimpleNamespace(options={"headers": headers})) is Retry
    assert wait_of(sent[-1], key)[0] == 5
