"""Tasks that come back, without a worker: what is sent, when, and what it remembers."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry
from pytest_django import Settings

from django_mongolock import SKIPPED, LockBackendFailed, LockNotAcquired, mongo_locked, once_per
from django_mongolock.backends import mongo_store
from django_mongolock.context import RETURNED
from django_mongolock.contrib.celery import retry_task
from django_mongolock.contrib.celery.retry_task import Note, retry_current_task
from django_mongolock.engine.rule.document import Step, Terms, entry
from django_mongolock.exceptions import LockError, LockReentry
from tests.celery.running import OtherRun, in_task
from tests.support.looking import held_elsewhere, holder, holders

app = Celery("coming_back", broker="memory://", set_as_current=False)
BUSY = LockNotAcquired("key", retry_after=20)
AWAY = LockBackendFailed("no answer")


@app.task(shared=False)
def task(*args: Any) -> None: ...


def ran() -> Any:
    return "ran"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    messages: list[Any] = []

    def send(message: Any) -> None:
        messages.append(message)

    monkeypatch.setattr("celery.canvas.Signature.apply_async", send)
    return messages


def carries(**facts: Any) -> dict[str, Any]:
    """The headers of a message that came back."""
    return {RETURNED: asdict(Note(sender="before", **facts))}


def note(message: Any) -> Note:
    return Note(**message.options["headers"][RETURNED])


def deliver(function: Any, message: Any = None, **request: Any) -> Any:
    """Let a task make this call, as that of *message*. Returns its result, or the class of what it tells Celery."""
    headers = {} if message is None else message.options["headers"]
    with in_task(task, headers=headers, **request):
        try:
            return function()
        except (Retry, Ignore) as outcome:
            return type(outcome)


def comes_back(sent: list[Any], error: Exception, headers: Any = None, **request: Any) -> Any:
    """Let a task come back because of *error*; return the message."""
    with in_task(task, headers=headers or {}, **request), pytest.raises(Retry):
        retry_current_task(error)  # type: ignore[arg-type]
    return sent[-1].options


@pytest.mark.parametrize(("times", "longest"), [(0, 0.25), (1, 0.5), (3, 2), (5, 5), (90, 5)])
def test_the_countdown_doubles(sent: list[Any], times: int, longest: float) -> None:
    """It comes back soon at first, and then every few seconds; never all at once."""
    countdowns = {comes_back(sent, BUSY, carries(times=times))["countdown"] for _ in range(20)}
    assert len(countdowns) > 10
    assert all(longest / 2 <= each <= longest for each in countdowns)
    assert (note(sent[-1]).times, note(sent[-1]).number) == (times + 1, 1)


def test_the_end_of_the_lease(sent: list[Any]) -> None:
    """It comes sooner where the lease of the holder ends sooner."""
    assert comes_back(sent, LockNotAcquired("key", retry_after=1), carries(times=9))["countdown"] <= 1


def test_the_visibility_timeout(sent: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """F95: a countdown is shorter than it, or the broker would deliver the waiting message twice."""
    monkeypatch.setitem(app.conf, "broker_transport_options", {"visibility_timeout": 4})
    assert comes_back(sent, BUSY, carries(times=9))["countdown"] <= 2


def test_an_outage_is_bounded(sent: list[Any], settings: Settings) -> None:
    """F97: while MongoDB does not answer, it comes back for RETRY_OUTAGE seconds, and then it fails."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "RETRY_OUTAGE": 60}
    comes_back(sent, AWAY)
    since = note(sent[-1]).away_since
    assert since is not None
    assert since == pytest.approx(time.time(), abs=5)
    comes_back(sent, AWAY, carries(times=5, away_since=since - 50))
    assert note(sent[-1]).away_since == since - 50
    with in_task(task, headers=carries(times=5, away_since=since - 70)), pytest.raises(LockBackendFailed):
        retry_current_task(AWAY)


def test_an_outage_that_is_over_is_forgotten(sent: list[Any]) -> None:
    """F97: if MongoDB answers that the lock is busy, the next outage has the whole time again."""
    comes_back(sent, BUSY, carries(times=5, away_since=1.0))
    assert (note(sent[-1]).times, note(sent[-1]).away_since) == (6, None)


@pytest.mark.parametrize(
    ("limit", "error"), [(0, AWAY), (600, LockBackendFailed("no rights", passing=False)), (600, LockReentry("key"))]
)
def test_some_failures_are_final(sent: list[Any], settings: Settings, limit: float, error: LockError) -> None:
    """F97: without a time for it, and for what does not pass, the task fails at once."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "RETRY_OUTAGE": limit}
    with in_task(task), pytest.raises(type(error)):
        retry_current_task(error)
    assert sent == []


def test_a_retry_of_its_own_starts_afresh() -> None:
    """What a message remembers of its wait is not carried on by what the task itself sends when it runs."""
    with in_task(task, headers={**carries(times=7), "theirs": 1}) as request:
        assert mongo_locked(uuid.uuid4().hex, on_contention="retry")(ran)() == "ran"
        assert request.headers == {"theirs": 1}


@pytest.mark.parametrize("header", ["x", [1], {**carries()[RETURNED], "former": ["key"]}, {"tries": 1}, None])
def test_a_header_of_another_program(sent: list[Any], header: Any) -> None:
    comes_back(sent, BUSY, {RETURNED: header})
    assert (note(sent[-1]).number, note(sent[-1]).times) == (1, 1)


@pytest.mark.parametrize("policy", ["raise", "skip", "retry", "call", "once_per"])
def test_a_second_delivery(sent: list[Any], key: str, policy: Any) -> None:
    """F95: a delivery that finds its own task at work comes back, under every policy, and then has nothing to do."""
    on_contention = (lambda error: "called") if policy == "call" else policy
    decorator = (
        once_per(key, hours=1) if policy == "once_per" else mongo_locked(key, on_contention=on_contention, wait=0)
    )
    function: Any = decorator(ran)
    with OtherRun(key, task, "the-id") as run:
        assert deliver(function) is Retry
        (message,) = sent
        assert (note(message).times, note(message).former) == (1, (key, holder(key)["delivery"], 0))
        assert deliver(function, message) is Retry
        run.end()
        assert deliver(function, sent[-1]) is Ignore


async def coroutine() -> str:
    return "ran"


def generator() -> Iterator[str]:
    yield "ran"


async def async_generator() -> AsyncIterator[str]:
    yield "ran"


@pytest.mark.parametrize("function", [coroutine, generator, async_generator])
def test_a_second_delivery_to_other_functions(sent: list[Any], key: str, function: Any) -> None:
    """F95: of every kind that a task may call."""
    locked = mongo_locked(key, wait=0)(function)

    async def call() -> Any:
        return await locked() if function is coroutine else [item async for item in locked()]

    def work() -> Any:
        return list(locked()) if function is generator else asyncio.run(call())

    with OtherRun(key, task, "the-id") as run:
        assert deliver(work) is Retry
        assert deliver(work, sent[-1]) is Retry
        run.end()
        assert deliver(work, sent[-1]) is Ignore


def test_another_holder_since(sent: list[Any], key: str) -> None:
    """F95: the run has ended, even if another holds the lock now."""
    function: Any = mongo_locked(key, on_contention="skip")(ran)
    with OtherRun(key, task, "the-id"):
        assert deliver(function) is Retry
    with held_elsewhere(key):
        assert deliver(function, sent[-1]) is Ignore
        assert deliver(function) is SKIPPED


@pytest.mark.parametrize("since", ["nothing happened", "another held the lock"])
def test_the_first_run_died(sent: list[Any], key: str, since: str) -> None:
    """F95: while a run on another machine has a lease, the second delivery comes back; when that ends, it runs."""
    function: Any = mongo_locked(key, on_contention="retry")(ran)
    terms = Terms(lease=0.3, margin=0, owner="the-id")
    run = entry("there.1", "there", terms, {"run": "r", "delivery": "0.0.0"}, process="a machine elsewhere 7 7")
    assert mongo_store().apply(key, Step(ask="there.1", add=run), 5).held
    assert deliver(function) is Retry
    assert deliver(function, sent[-1]) is Retry
    time.sleep(0.4)
    if since == "another held the lock":
        mongo_locked(key)(lambda: None)()
    assert deliver(function, sent[-1]) == "ran"
    assert len(sent) == 2


def test_the_first_run_died_and_was_resumed(sent: list[Any], key: str) -> None:
    """F95: another delivery of the same message took over from it: the second one still comes back for that."""
    function: Any = mongo_locked(key, on_contention="retry")(ran)
    with OtherRun(key, task, "the-id"):
        assert deliver(function) is Retry
    with OtherRun(key, task, "the-id") as run:
        assert deliver(function, sent[-1]) is Retry
        run.end()
        assert deliver(function, sent[-1]) is Ignore


def test_the_run_ends_at_that_moment(sent: list[Any], key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F95: a second delivery does not run because the first run ends between its look and its try."""
    function: Any = mongo_locked(key, on_contention="retry")(ran)
    read = retry_task._Found.read
    with OtherRun(key, task, "the-id") as run:
        assert deliver(function) is Retry

        def and_then_it_ends(*args: Any) -> Any:
            found = read(*args)
            run.end()
            return found

        monkeypatch.setattr(retry_task._Found, "read", and_then_it_ends)
        assert deliver(function, sent[-1]) is Retry
    assert deliver(function, sent[-1]) is Ignore


def test_the_first_run_cannot_be_read(sent: list[Any], key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F95: a second delivery that gets no answer about the first run does not run, though it could acquire the lock."""
    function: Any = mongo_locked(key, on_contention="skip")(ran)
    with OtherRun(key, task, "the-id"):
        assert deliver(function) is Retry
    monkeypatch.setattr(retry_task._Found, "read", Mock(side_effect=AWAY))
    with pytest.raises(LockBackendFailed):
        deliver(function, sent[-1], delivery_info={"redelivered": True})


def test_a_retry_that_overtakes(sent: list[Any], key: str) -> None:
    """F96: a retry without a countdown starts while the run that sent it still ends. It is no second delivery."""
    function: Any = mongo_locked(key, on_contention="skip")(ran)
    with OtherRun(key, task, "the-id", retries=0):
        assert deliver(function, retries=1) is Retry
    (message,) = sent
    assert note(message).former is None
    assert deliver(function, message, retries=1) == "ran"


def test_a_run_meets_its_sender(sent: list[Any], key: str) -> None:
    """F122: it comes again, under any policy, and is never dropped, although its sender has ended by then."""
    function: Any = mongo_locked(key, on_contention="skip")(ran)
    headers: dict[str, Any] = carries(number=1)
    with OtherRun(key, task, "the-id"):
        for number in (2, 3):
            with in_task(task, headers=headers), pytest.raises(Retry):
                function()
            assert (note(sent[-1]).number, note(sent[-1]).former) == (number, None)
            headers = sent[-1].options["headers"]
    with in_task(task, headers=headers):
        assert function() == "ran"


def test_a_minimum_hold_of_its_own(sent: list[Any], key: str) -> None:
    """What a task keeps locked for the minimum hold is no run of it: the policy decides, also in its next run."""
    function: Any = once_per(key, hours=1)(ran)
    assert deliver(lambda: (function(), function())) == ("ran", SKIPPED)
    assert deliver(function) is deliver(function, retries=1) is SKIPPED
    with pytest.raises(LockNotAcquired):
        deliver(mongo_locked(key, wait=0)(ran))
    assert sent == []


def test_two_coroutines_of_one_run(sent: list[Any], key: str) -> None:
    """The one that waits for the other in vain gets the error: it is no second delivery."""

    @mongo_locked(key, wait=0.1)
    async def function() -> None:
        await asyncio.sleep(0.3)

    async def both() -> Any:
        return await asyncio.gather(function(), function(), return_exceptions=True)

    assert [type(each) for each in deliver(lambda: asyncio.run(both()))] == [type(None), LockNotAcquired]
    assert sent == []


def test_it_is_sent_when_the_outermost_call_is_left(sent: list[Any], key: str, settings: Settings) -> None:
    """F122: until then, nothing is sent, so the next run meets no lock of this one. What is caught is not sent."""
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
            with in_task(task), suppress(Retry):
                assert outer(work) == "ran something else"
            assert len(sent) == count
    assert holders(f"{key} outer") == []


def test_the_broker_refuses_for_a_while(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F127: after a pause it is asked again; the task comes back, once."""
    tries: list[float] = []

    def send(message: Any) -> None:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise ConnectionError

    monkeypatch.setattr("celery.canvas.Signature.apply_async", send)
    monkeypatch.setattr(retry_task, "SHORTEST_REFUSED", 0.05)
    with in_task(task), pytest.raises(Retry):
        retry_current_task(BUSY)
    assert all(later - earlier > least for least, (earlier, later) in zip((0.05, 0.1), pairwise(tries), strict=True))
    assert len(tries) == 3


# Where there is no later


@app.task(max_retries=0, shared=False)
@mongo_locked("{key}", wait=0, on_contention="retry")
def returning(key: str) -> str:
    return "ran"


def test_without_a_worker(key: str) -> None:
    """A task that is called as a function, or runs where it is sent, is locked as well; it has no later, and fails."""
    assert (returning(key), returning.apply((key,)).get()) == ("ran", "ran")
    with held_elsewhere(key):
        with pytest.raises(LockNotAcquired):
            returning(key)
        assert isinstance(returning.apply((key,)).result, LockNotAcquired)


@pytest.mark.parametrize("late", [True, False])
def test_broker_away(monkeypatch: pytest.MonkeyPatch, settings: Settings, late: bool) -> None:
    """F106, F127: a task that cannot be sent again is handed back to the broker; acknowledged, it fails. It is never
    lost without a word."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "RETRY_OUTAGE": 0}
    monkeypatch.setattr(retry_task, "GIVE_BACK", 0)

    def fail(message: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr("celery.canvas.Signature.apply_async", fail)
    monkeypatch.setattr(task, "acks_late", late)
    with in_task(task), pytest.raises(Reject if late else ConnectionError) as caught:
        retry_current_task(BUSY)
    assert getattr(caught.value, "requeue", False) is late
    assert isinstance(caught.value, Ignore) is late  # F127: `autoretry_for=(Exception,)` leaves an Ignore alone


@pytest.mark.parametrize("wait", [0, 5, None])
def test_a_second_delivery_does_not_wait_in_the_pool(sent: list[Any], key: str, wait: float | None) -> None:
    """F95, F98: however long the task may wait for others, it does not wait for itself."""
    function: Any = mongo_locked(key, wait=wait)(ran)
    again: Any = {"delivery_info": {"redelivered": True}}
    with OtherRun(key, task, "the-id"):
        assert deliver(function, **again) is Retry
    with OtherRun(key, task, "another") as run:
        threading.Timer(0.1, run.enough.set).start()
        if wait == 0:
            with pytest.raises(LockNotAcquired):
                deliver(function, **again)
        else:
            assert deliver(function, **again) == "ran"


def test_a_short_hold_is_waited_for(sent: list[Any], key: str, settings: Settings) -> None:
    """F98: for a lock that was taken just now and has no waiter, a task waits in the pool; otherwise it comes back."""
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
    """F98: a task that has waited in the pool in vain comes back as late as it would have otherwise."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "SHORT_WAIT": 0.3}
    function: Any = mongo_locked(key, on_contention="retry")(ran)
    with OtherRun(key, task, "another"), in_task(task, headers=carries(times=4)), pytest.raises(Retry):
        function()
    assert note(sent[-1]).times == 5
