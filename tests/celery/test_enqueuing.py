"""`enqueue_once` without a worker, with the state of the queue and of the lock. test_redelivery has the tests with
workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock
from uuid import UUID

import pytest
from celery import Celery, chain, group, shared_task, states
from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import task_postrun, task_prerun, task_rejected, task_revoked, task_unknown
from django.db import transaction
from kombu.exceptions import OperationalError
from pydantic import BaseModel

from django_mongolock import mongo_lock
from django_mongolock.contrib.celery import OnceTask, enqueue, enqueue_once
from django_mongolock.contrib.celery.enqueue import HEADER
from django_mongolock.contrib.celery.once_keys import call_key, once_key
from django_mongolock.engine.lock import detached
from django_mongolock.engine.lock.detached import Parked
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.text_checks import check_key
from django_mongolock.exceptions import LockBackendFailed, LockKeyInvalid
from tests.celery.running import in_task
from tests.support.forking import FORKS, in_child
from tests.support.looking import document, held_elsewhere, holder, holders, new_key
from tests.support.waiting import eventually

app: Any = Celery("enqueue_tests", broker="memory://", backend="cache+memory://", set_as_current=False)


@app.task(name="tests.export")  # type: ignore[untyped-decorator]
def export(*args: Any, **kwargs: Any) -> str:
    return "done"


@pytest.fixture
def eager() -> Iterator[None]:
    app.conf.task_always_eager = True
    yield
    app.conf.task_always_eager = False


def left(key: str) -> float:
    """Return the seconds for which the key stays taken."""
    found = holder(key)
    return float((found["until"] - datetime.now(UTC)).total_seconds())


@pytest.mark.parametrize(("queue_lease", "countdown"), [(3_600, 0), (50, 550)])
def test_a_parked_lock(queue_lease: float, countdown: float) -> None:
    """The lock belongs to the task's id. The lease lasts as long as the task may be in the queue, although nobody
    renews the lock. F80: no process believes that it holds the lock, and no margin is needed."""
    key = new_key()
    result, sent = enqueue_once(export, ["x"], key=key, queue_lease=queue_lease, countdown=countdown)
    assert sent
    found = holder(key)
    assert (found["owner"], found["process"], found["label"]) == (result.id, "none", "tests.export")
    assert found["server_lease"] == found["lease"]
    assert left(key) == pytest.approx(queue_lease + countdown, abs=10)
    again, sent = enqueue_once(export, ["x"], key=key)
    assert (again.id, sent) == (result.id, False)


@pytest.mark.parametrize("form", [datetime.astimezone, partial(datetime.replace, tzinfo=None), datetime.isoformat])
def test_eta(form: Any) -> None:
    """An eta counts, with or without a time zone, also as text. A countdown has precedence, as in Celery."""
    eta = form(datetime.now(UTC) + timedelta(seconds=1_000))
    for seconds, countdown in ((1_500, None), (2_500, 2_000)):
        key = new_key()
        enqueue_once(export, key=key, queue_lease=500, eta=eta, countdown=countdown)
        assert left(key) == pytest.approx(seconds, abs=60)


def test_a_task_that_cannot_be_sent_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker's error comes through, and the key is free."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError

    key = new_key()
    for broken in (export, app.amqp):
        monkeypatch.setattr(broken, "apply_async" if broken is export else "send_task_message", fail)
        with pytest.raises(ConnectionError):
            enqueue_once(export, key=key)
        monkeypatch.undo()
        assert eventually(lambda: not holders(key))


@pytest.mark.long
def test_a_broker_that_cannot_be_reached() -> None:
    """F128: The connection is made before the key is taken, because others wait between the key and the message."""
    key = new_key()
    away: Any = Celery("away", broker="redis://127.0.0.1:1", set_as_current=False)
    with pytest.raises(OperationalError):
        enqueue_once(away.task(export.run, name="tests.away", shared=False), key=key)
    assert document(key) == {}


def test_a_process_that_dies_before_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """F105, F191: The key of a message that was never sent is free after a lease. Until then, a call sends its message
    without the key, within a second."""
    key = new_key()
    with monkeypatch.context() as patch:
        patch.setattr(Parked, "keep", lambda *args, **kwargs: True)  # the sender died before
        enqueue_once(export, key=key)
    assert left(key) < 60
    monkeypatch.setattr(enqueue, "LONGEST", 0.1)
    assert enqueue_once(export, key=key)[1]


class TestOnceTask:
    """A task whose every call is enqueued once."""

    @pytest.fixture
    def task(self) -> Any:
        return app.task(each_ad, name=f"tests.{new_key()}", base=OnceTask, once_key=f"{new_key()}:{{ad_id}}")

    def test_every_way(self, task: Any) -> None:
        """The result is that of the message on its way, in every way to call the task."""
        first = task.delay(1)
        key = task.once_key.format(ad_id=1)
        calls: list[Callable[[], Any]] = [
            task.s(1).delay,
            lambda: task.apply_async(kwargs={"ad_id": 1}),
            lambda: enqueue_once(task, [1], key=key)[0],
        ]
        assert {call().id for call in calls} == {first.id}
        assert holder(key)["owner"] == first.id
        assert task.delay(2).id != first.id

    @pytest.mark.django_db
    def test_after_the_commit(self, task: Any, django_capture_on_commit_callbacks: Any) -> None:
        """Celery's short forms for Django's tasks are there, too."""
        with django_capture_on_commit_callbacks() as calls:
            task.delay_on_commit(1)
        assert [call().id for call in calls] == [task.delay(1).id]

    def test_where_others_wait_for_it(self, task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a chain, a group, or with a link, a task is sent although an equal one is on its way, because that one
        calls no other."""
        first = task.delay(1)
        sent: list[Any] = []
        monkeypatch.setattr(app.amqp, "send_task_message", lambda *args, **options: sent.append(args[1]))
        chain(task.s(1), export.s()).apply_async()
        group(task.s(1), task.s(1)).apply_async()
        task.apply_async([1], link=export.s())
        assert len(sent) == 4
        assert holder(task.once_key.format(ad_id=1))["owner"] == first.id

    def test_without_a_key(self) -> None:
        """The default key is that of `enqueue_once`, made of the name and the arguments."""
        task: Any = app.task(each_ad, name=f"tests.{new_key()}", base=OnceTask)
        assert task.delay(1).id == task.delay(ad_id=1).id == enqueue_once(task, [1])[0].id

    @pytest.mark.parametrize(
        ("options", "said"),
        [({"once_key": "a:{b}"}, "b"), ({"once_release": "x"}, '"end" or "start"'), ({"once_lease": 0}, "more than 0")],
    )
    def test_mistakes(self, options: Any, said: str) -> None:
        with pytest.raises((TypeError, ValueError), match=said):
            app.task(each_ad, name=f"tests.{new_key()}", base=OnceTask, lazy=False, shared=False, **options)


def each_ad(ad_id: int) -> None: ...


@pytest.mark.parametrize("meanwhile", [True, False])
def test_released_at_the_start(meanwhile: bool) -> None:
    """With release="start" the key is free when the task starts. A task that comes back takes the key again, if it is
    free."""
    key = new_key()
    first, _ = enqueue_once(export, key=key, release="start")
    headers = {HEADER: [key, 3_600, None, "start"]}
    with in_task(export, first.id, headers=headers):
        task_prerun.send(sender=export, task_id=first.id, task=export)
        assert eventually(lambda: not holders(key))
        second = enqueue_once(export, key=key, release="start")[0] if meanwhile else first
        export.signature_from_request(export.request).apply_async()
        task_postrun.send(sender=export, task_id=first.id, task=export, state=states.RETRY, retval=None)
    (found,) = holders(key)
    assert (found["owner"], found["process"]) == (second.id, "none")


@pytest.mark.usefixtures("eager")
def test_eager() -> None:
    """A task that runs at once has ended at once."""
    key = new_key()
    for _ in range(2):
        result, sent = enqueue_once(export, key=key)
        assert (result.get(), sent) == ("done", True)
        assert holders(key) == []
    assert document(key)["expired"] == 0


def test_revoked() -> None:
    """A revoked task, reported by a worker's own process, frees its own key only."""
    key, other = new_key(), new_key()
    result, _ = enqueue_once(export, key=key)
    enqueue_once(export, key=other)
    request = SimpleNamespace(id=result.id, headers={HEADER: [key, 3_600, None, "end"]})
    task_revoked.send(sender=export, request=request, terminated=False, signum=None, expired=True)
    assert eventually(lambda: not holders(key))
    assert holders(other)


@pytest.mark.parametrize("signal", [task_unknown, task_rejected])
def test_no_worker_can_run_it(signal: Any) -> None:
    """The worker that gets a message of an unknown task, or an unreadable one, releases its key."""
    key = new_key()
    result, _ = enqueue_once(export, key=key)
    headers = {"id": result.id, HEADER: [key, 3_600, None, "end"]}
    signal.send(sender=None, message=SimpleNamespace(headers=headers), exc=None, name="tests.gone", id=result.id)
    assert eventually(lambda: not holders(key))


@pytest.mark.parametrize(("state", "stays"), [(states.SUCCESS, False), (states.FAILURE, False), (states.RETRY, True)])
def test_an_outage_when_the_task_begins(monkeypatch: pytest.MonkeyPatch, state: str, stays: bool) -> None:
    """F96: A task that began without its lock during an outage still frees its key at its end."""
    key = new_key()
    result, _ = enqueue_once(export, key=key)
    task = running(result.id, key)
    with monkeypatch.context() as patch:
        patch.setattr(MongoLock, "acquire", away)
        task_prerun.send(sender=export, task_id=result.id, task=task)
    task_postrun.send(sender=export, task_id=result.id, task=task, state=state, retval=None)
    assert eventually(lambda: bool(holders(key)) is stays)


@pytest.mark.parametrize("ended", ["revoked", "without its lock"])
def test_an_outage_when_it_has_ended(monkeypatch: pytest.MonkeyPatch, ended: str) -> None:
    """F192: A process that learns of the end of a task tries until the key is free."""
    key = new_key()
    result, _ = enqueue_once(export, key=key)
    monkeypatch.setattr(detached, "RELEASE_PAUSES", (0.0, 0.1))
    task = running(result.id, key)
    with monkeypatch.context() as patch:
        patch.setattr(Parked, "send", away)
        patch.setattr(MongoLock, "acquire", away)
        if ended == "revoked":
            task_revoked.send(sender=export, request=task.request, terminated=False, signum=None, expired=True)
        else:
            task_prerun.send(sender=export, task_id=result.id, task=task)
            task_postrun.send(sender=export, task_id=result.id, task=task, state=states.SUCCESS, retval=None)
        time.sleep(0.3)
        assert holders(key)
    assert eventually(lambda: not holders(key))


def test_the_end_of_a_second_delivery() -> None:
    """F95: A delivery without the lock does not free the key of the run that is at work."""
    key = new_key()
    result, _ = enqueue_once(export, key=key)
    first, second = running(result.id, key), running(result.id, key)
    for task in (first, second):
        task_prerun.send(sender=export, task_id=result.id, task=task)
    for task, count in ((second, 1), (first, 0)):
        task_postrun.send(sender=export, task_id=result.id, task=task, state=states.SUCCESS, retval=None)
        assert len(holders(key)) == count


def running(task_id: str, key: str) -> Any:
    request = SimpleNamespace(id=task_id, headers={HEADER: [key, 3_600, None, "end"]}, delivery_info={})
    return SimpleNamespace(name=export.name, request=request, acks_late=False)


def away(*args: Any) -> None:
    raise LockBackendFailed("no answer")


class TestForks:
    """The locks of a task of this process, in a forked child."""

    pytestmark: ClassVar = FORKS

    @pytest.mark.parametrize("state", [states.SUCCESS, states.RETRY])
    def test_the_end_of_the_task(self, state: str) -> None:
        """F63: The end of the task in the child, or its next try, is not the end for the parent."""
        key = new_key()
        result, _ = enqueue_once(export, key=key)
        task = running(result.id, key)
        ended = partial(task_postrun.send, sender=export, task_id=result.id, task=task, state=state, retval=None)
        task_prerun.send(sender=export, task_id=result.id, task=task)
        (before,) = holders(key)
        assert before["pid"] == os.getpid()
        in_child(ended)
        assert holders(key) == [before]
        ended()
        assert [each["process"] for each in holders(key)] == ([] if state == states.SUCCESS else ["none"])


def test_a_key_that_is_no_tasks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """F191: A lock that does not belong to a task stops no message. A warning names its holder."""
    key = new_key()
    monkeypatch.setattr(enqueue, "LONGEST", 0.1)
    with held_elsewhere(key):
        assert enqueue_once(export, key=key)[1]
    assert "a task is sent without the key" in caplog.text
    assert "held by host" in caplog.text


class TestNothingStopsTheMessage:
    """F191: The next task of a chain is sent, whatever happens to its key. The sender waits a second at most."""

    @pytest.fixture
    def task(self) -> Any:
        return app.task(each_ad, name=f"tests.{new_key()}", base=OnceTask, once_key=f"{new_key()}:{{ad_id}}")

    @pytest.mark.parametrize("value", ["x" * 600, "a\nb", "\ud800", None, ["y" * 9000], {"a": None}, "e\u0301" * 5000])
    def test_any_argument(self, task: Any, value: Any) -> None:
        """Each value makes a valid key. The key keeps an equal call away."""
        plain: Any = app.task(each_ad, name=f"tests.{new_key()}", base=OnceTask)
        for each in (task, plain):
            keys = [once_key(each, (given,), {}, each.once_key) for given in (value, value, [value])]
            assert keys[0] == keys[1] != keys[2]
            assert all(check_key(key) == key for key in keys)

    def test_a_value_without_a_text(self, task: Any, caplog: pytest.LogCaptureFixture) -> None:
        """A key that cannot be made is no reason to lose the task."""
        assert task.apply_async([object()], serializer="pickle").id
        assert "a task is sent without the key" in caplog.text

    @pytest.mark.django_db
    def test_mongodb_is_away(
        self, task: Any, away: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tasks are sent without the key if MongoDB does not answer for longer than a sender waits."""
        monkeypatch.setattr(enqueue, "LONGEST", 0.1)
        assert task.delay(5).id
        assert "a task is sent without the key" in caplog.text

    def test_its_own_time_limit(self, task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A soft time limit of the sending task is not swallowed."""
        monkeypatch.setattr(enqueue, "_take", Mock(side_effect=SoftTimeLimitExceeded))
        with pytest.raises(SoftTimeLimitExceeded):
            task.delay(5)


def test_a_task_that_sends_itself() -> None:
    """F194: The key of a task that sends itself is handed on to the new message, and keeps further calls away."""
    key = new_key()
    first, _ = enqueue_once(export, key=key)
    headers = {HEADER: [key, 3_600, None, "end"]}
    with in_task(export, first.id, headers=headers):
        task_prerun.send(sender=export, task_id=first.id, task=export)
        second, sent = enqueue_once(export, key=key)
        assert (sent, enqueue_once(export, key=key)[0].id) == (True, second.id)
        task_postrun.send(sender=export, task_id=first.id, task=export, state=states.SUCCESS, retval=None)
    (found,) = holders(key)
    assert (found["owner"], found["process"]) == (second.id, "none")
    assert left(key) > 60


@pytest.mark.django_db(transaction=True)
def test_inside_a_transaction(caplog: pytest.LogCaptureFixture) -> None:
    """F194: A task that may run before the commit is sent with one warning. The warning names the cure."""
    task: Any = app.task(each_ad, name=f"tests.{new_key()}", base=OnceTask)
    with transaction.atomic():
        task.delay_on_commit(1)
        assert caplog.text == ""
        task.delay(2)
        task.delay(3)
    assert caplog.text.count("delay_on_commit()") == 1


class Ad(BaseModel):
    """An argument of a pydantic task."""

    id: int
    text: str = ""


def with_model(ad: Ad, other: Ad | None = None) -> None: ...


@pytest.mark.parametrize("template", [None, "ad:{ad.id}"])
def test_pydantic(template: str | None) -> None:
    """F194: A dict and the model that the task makes of it have one key."""
    task: Any = app.task(with_model, name=f"tests.{new_key()}", pydantic=True)
    keys = [once_key(task, (given,), {}, template) for given in (Ad(id=5), {"id": 5}, {"id": 6})]
    assert keys[0] == keys[1] != keys[2]


@shared_task(name="tests.configured")
def configured(ad_id: Any, to: Any = None, *more: Any, **options: Any) -> None: ...


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [([1], {}), ([], {"ad_id": 1}), ((1, None), {}), ([1], {"to": None}), ([], {"to": None, "ad_id": 1})],
)
def test_one_call_in_all_its_ways(args: Any, kwargs: Any) -> None:
    """Arguments by position, by name, or by default make one key."""
    assert once_key(configured, tuple(args), kwargs) == "once:tests.configured:ad_id=1:more=[]:options={}:to=None"


def test_other_calls() -> None:
    """Other calls have other keys, even if a name is that of the parameter for all others."""
    calls: list[tuple[list[Any], dict[str, Any]]] = [
        ([1], {}), ([2], {}), ([1, 2], {}), ([1, 2, 3], {}),
        ([1], {"more": 1}), ([1], {"options": {}}), ([1], {"x": 1}),
    ]  # fmt: skip
    assert len({once_key(configured, tuple(args), kwargs) for args, kwargs in calls}) == len(calls)


def test_the_default_key() -> None:
    """The name and the arguments, so that no two different calls meet."""
    assert call_key("a.b", {"z": 1, "b": "=", "a": "x:y"}) == 'once:a.b:a="x%3Ay":b="%3D":z=1'
    plain = [1, "1", 1.0, "1.0", True, "True", Decimal(1), UUID(int=1), str(UUID(int=1)), date(2030, 1, 2), "2030"]
    empty: list[Any] = [None, "None", b"1", b"", "", [], {}, "[]"]
    lists = [[1], ["1"], [[1]], [None], ["a", "b"], ["a,b"], ['a","b'], [["a", "b"]], [["a"], "b"]]
    mappings = [{"a": 1}, {"a": "1"}, {1: "a"}, {"a": 1, "b": 2}, {"a": {"b": 2}}]
    different: list[Any] = [*plain, *empty, *lists, *mappings]
    assert len({call_key("a.b", {"value": value}) for value in different}) == len(different)
    assert call_key("a.b", {"x": {"b": [1, (2,)], "a": 0}}) == call_key("a.b", {"x": {"a": 0, "b": (1, [2])}})
    with pytest.raises(LockKeyInvalid, match="which nothing fills"):
        enqueue_once(export, key="export:{ad_id}")
    with pytest.raises(TypeError, match="cannot be part of a key"):
        call_key("a.b", {"x": {1}})
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'ad_id'"):
        enqueue_once(configured)
    for wrong in (export.s(5), export.run, "tests.export"):
        with pytest.raises(TypeError, match=r"takes a Celery task, as in enqueue_once\(export_ad, \[5\]\)"):
            enqueue_once(wrong)
    result, sent = enqueue_once(export, [new_key()], {"to": "x"})
    assert sent
    with mongo_lock("once:tests.export"):  # another key
        assert result.id
