"""`enqueue_once` and `OnceTask`: a task is not queued a second time while it is queued, runs, or waits for a retry.

The owner of the lock is the id of the task. While the message is in the queue, the lock is detached
(`engine.lock.detached`): no process renews it. The worker that starts the task resumes it, renews it while the task
runs, and releases it however the task ends; a task that is sent again, for a retry, detaches it before the message can
reach another worker.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from celery import Task, states
from celery.contrib.django.task import DjangoTask
from celery.exceptions import Reject
from celery.result import AsyncResult
from celery.signals import after_task_publish, before_task_publish, task_postrun, task_prerun, task_revoked
from celery.utils import uuid

from ...backends import get_backend
from ...conf import get_settings
from ...context import holder_facts, redelivery_wait, running_celery_task
from ...engine.lock import detached
from ...engine.lock.detached import Parked
from ...engine.lock.lock import MongoLock
from ...engine.logs import WARNING, log
from ...engine.protocol.processes import NO_PROCESS
from ...engine.rule.document import Terms
from ...engine.rule.options import Seconds, check_seconds
from ...engine.rule.replies import Reply
from ...engine.text_checks import check_key, tidy_fact
from ...exceptions import LockBackendFailed, LockError
from ...keys import KeyTemplate, LockKey, as_key, call_arguments
from ...locks import mongo_lock
from ...owners import CLEANUP_TIMEOUT, release_holders
from .once_keys import once_key

#: The header of the message: what `Once` says.
HEADER: Final = "mongolock_once"
#: How often to try if the lock is busy, but held for no task: its holder may release it at any moment.
TRIES: Final = 5

#: For how long to wait for another process that is sending it, and how often to look, in seconds.
SENDING: Final = 5.0
LOOK_EVERY: Final = 0.1
#: How often to try to connect to the broker before the key is taken.
CONNECTS: Final = 3

#: Attributes of the request of a running task. LOCK: its lock, a MongoLock, or a Parked once it is detached. SENT: that
#: it was sent again.
LOCK, SENT = "mongolock_once_lock", "mongolock_once_sent"

Release = Literal["end", "start"]


class Once(NamedTuple):
    """What a message carries: the key, the seconds that it may be in the queue, the DATABASES alias, and whether the
    key is free when the task has ended or when it starts."""

    key: str
    queue_lease: Any
    using: str | None = None
    release: Release = "end"

    def checked(self) -> Once:
        """Return this with seconds as a number. Raises TypeError and ValueError for wrong values."""
        if self.release not in {"end", "start"}:
            raise ValueError(f'release is "end" or "start", not {self.release!r}')
        return self._replace(queue_lease=check_seconds("queue_lease", self.queue_lease))

    @property
    def stored(self) -> str:
        return check_key(self.key, get_settings().KEY_PREFIX)

    def park(self, task_id: str, name: str, lease: float) -> Parked | Reply:
        """Take the key for a message of this task, if it is free."""
        session = get_backend(self.using).session()
        return detached.park(session, self.stored, _terms(task_id, _until_sent(lease)), _facts(task_id, name))


def enqueue_once(
    task: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    key: str | None = None,
    queue_lease: Seconds = 3_600,
    release: Release = "end",
    using: str | None = None,
    **options: Any,
) -> tuple[AsyncResult[Any], bool]:
    """Send *task* unless it is already on its way; return its result and whether it was sent.

    If it was not, the result is that of the task on its way. A task is on its way until it has ended, by success,
    failure, revocation or rejection; one that will be retried, or was replaced by another task, has not ended. To have
    every call of a task be like this, see `OnceTask`.

    key: the same for equal tasks; without it, the name of the task and its arguments. queue_lease: seconds, counted
    from the eta, after which the key is free if the broker loses the message. release: with "start", the key is free
    when the task starts, so that a call meanwhile sends one more. options: those of `apply_async`.

    This saves work; it does not keep two runs apart, since a message may outlast its *queue_lease*, and brokers may
    deliver it twice. For that, put `mongo_locked` on the task as well. In a transaction, call it after the commit
    (`transaction.on_commit`). Raises LockBackendFailed if MongoDB does not answer, and what `apply_async` raises; the
    key is then free. It raises LockBackendFailed too if another process has not sent an equal task within 5 seconds.
    """
    if not isinstance(task, Task):
        raise TypeError(f"enqueue_once() takes a Celery task, as in enqueue_once(export_ad, [5]), not {task!r}")
    given, named = tuple(args), dict(kwargs or {})
    name: Any = once_key(task, given, named) if key is None else as_key(key)
    once = Once(str(name), queue_lease, using, release).checked()
    return _enqueue(once, task, partial(task.apply_async, given, named), options)


class OnceTask(DjangoTask):  # type: ignore[type-arg]
    """The base of tasks that are enqueued once, however they are sent: by `delay`, beat, a chain, or another canvas.

        @shared_task(base=OnceTask, once_key="export:{ad_id}")

    once_key: a template, filled from the arguments; without it, the key is made as by `enqueue_once`, whose other
    arguments are once_lease (its queue_lease), once_release and once_using. A call while the task is on its way sends
    nothing, and returns the result of that one. But where others wait for this very message (in a chain, a group or a
    chord, by ``task_id=`` or ``link=``), it is sent all the same. ``app.send_task`` knows only the name of the task,
    and sends as always.
    """

    abstract = True
    once_key: str | None = None
    once_lease: Seconds = 3_600
    once_release: Release = "end"
    once_using: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise TypeError and ValueError for invalid options of the task."""
        super().__init_subclass__(**options)
        Once("", cls.once_lease, cls.once_using, cls.once_release).checked()
        if cls.once_key is not None:
            KeyTemplate(cls.once_key).check(inspect.signature(cls.run), cls.__qualname__)

    def apply_async(  # type: ignore[override]  # those of Task, by name
        self, args: Any = None, kwargs: Any = None, **options: Any
    ) -> AsyncResult[Any]:
        """Send the task unless it is on its way; return its result."""
        send = super().apply_async
        if HEADER in (options.get("headers") or {}) or _sent_again({"id": options.get("task_id")}):
            return send(args, kwargs, **options)
        given, named = tuple(args or ()), dict(kwargs or {})
        if self.once_key is None:
            key: object = once_key(self, given, named)
        else:
            key = KeyTemplate(self.once_key).fill(call_arguments(inspect.signature(self.run), given, named))
        once = Once(str(key), self.once_lease, self.once_using, self.once_release).checked()
        # In a canvas, each has an id before it is sent.
        waited_for = bool(options.get("task_id") or options.get("link"))
        return _enqueue(once, self, partial(send, given, named), options, waited_for=waited_for)[0]


def _enqueue(
    once: Once, task: Any, send: Callable[..., Any], options: dict[str, Any], *, waited_for: bool = False
) -> tuple[AsyncResult[Any], bool]:
    """See enqueue_once(). waited_for: send it although it is on its way."""
    in_queue = once.queue_lease + _delay(options.get("countdown"), options.get("eta"))
    task_id = options.pop("task_id", None) or uuid()
    headers = {**(options.pop("headers", None) or {}), HEADER: list(once)}
    with task.app.producer_or_acquire(options.pop("producer", None)) as producer:
        # All that takes long in a fresh process, before the key is taken: others wait from then until it is sent.
        if not task.app.conf.task_always_eager and not producer.connection.connected and task.backend is not None:
            producer.connection.ensure_connection(max_retries=CONNECTS)
        parked = _take(once.key, lambda: once.park(task_id, task.name, in_queue))
        if isinstance(parked, str):
            if waited_for:
                headers.pop(HEADER)
                return send(task_id=task_id, producer=producer, headers=headers, **options), True
            return task.AsyncResult(parked), False
        try:
            result = send(task_id=task_id, producer=producer, headers=headers, **options)
        except BaseException:
            _try("removed", once.key, parked.give_up)
            raise
    # Only now: if this process had died before, the key would have been free after a short lease.
    _try("extended", once.key, lambda: parked.keep(in_queue))
    return result, True


def _take(key: str, park: Callable[[], Parked | Reply]) -> Parked | str:
    """Take the lock of *key*; or return the id of the task that is on its way. Raises LockBackendFailed."""
    tries, end = 0, time.monotonic() + SENDING
    while tries < TRIES:
        if isinstance(found := park(), Parked):
            return found
        theirs: Any = found.theirs or {}
        if theirs.get("process") == NO_PROCESS and not theirs.get("beat"):
            # Parked without a message so far: its process may fail to send it, or has died.
            if time.monotonic() > end:
                raise LockBackendFailed("another process is sending it, or has died: try again", key)
            time.sleep(LOOK_EVERY)
            continue
        if (owner := theirs.get("owner")) is not None:
            return str(owner)
        tries += 1
    raise LockBackendFailed("its holder is not a task: choose another key=", key, passing=False)


def _until_sent(in_queue: float) -> float:
    """The lease until the message is sent: short, as its process may die before; no renewal makes it shorter."""
    return min(get_settings().LEASE, in_queue)


def _terms(task_id: str, lease: float) -> Terms:
    """By the server's clock alone, without a margin: no process believes to hold what is parked."""
    return Terms(lease=lease, margin=0, clock_margin=0, owner=tidy_fact(task_id))


def _facts(task_id: str, task_name: str) -> dict[str, str | int]:
    place = tidy_fact(f"queue, task {task_name} {task_id}")
    return {**holder_facts(), "place": place, "label": tidy_fact(task_name[-200:])}


def _delay(countdown: float | None, eta: datetime | str | None) -> float:
    """The seconds until a task may start. Celery, too, compares an eta with the wall clock of this machine."""
    if countdown or eta is None:
        return max(0.0, countdown or 0.0)
    moment = datetime.fromisoformat(eta) if isinstance(eta, str) else eta
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(0.0, (aware - datetime.now(UTC)).total_seconds())


def _try(what: str, key: str, call: Callable[[], object]) -> None:
    """Log an error of the lock, which ends with its lease: the task must not fail because of it."""
    try:
        call()
    except LockError as error:
        log(WARNING, f"not {what}: the lock ends with its lease", key=key, error=error)


def _once(request: Any) -> Once | None:
    carried = (getattr(request, "headers", None) or {}).get(HEADER)
    return Once(*carried) if isinstance(carried, (list, tuple)) and len(carried) == len(Once._fields) else None


@task_prerun.connect(weak=False, dispatch_uid="django_mongolock.once.begin")
def _begin(task_id: str, task: Any, **kwargs: object) -> None:
    """A task starts: resume its lock, or release it."""
    if (once := _once(task.request)) is None:
        return
    if once.release == "start":
        _try("released", once.key, lambda: _release(once, task_id))
        return
    lock = mongo_lock(
        LockKey(once.key, f"once:{task.name}"),
        wait=redelivery_wait(),
        owner=tidy_fact(task_id),
        label=task.name[-200:],
        using=once.using,
    )
    try:
        setattr(task.request, LOCK, lock.acquire())
    except LockError as error:
        log(WARNING, "a task runs without the lock that it was sent with", key=once.key, task=task_id, error=error)


@before_task_publish.connect(weak=False, dispatch_uid="django_mongolock.once.before")
def _detach(headers: dict[str, Any], **kwargs: object) -> None:
    """A running task is sent again, or another one that replaces it. From now on its next run may start, which finds
    the lock detached, or if it was released at the start, taken again.

    Its lease is short until the message is sent: if this process died before, no run would release it.
    """
    task = _sent_again(headers)
    if task is None or (once := _once(task.request)) is None:
        return
    headers.setdefault(HEADER, list(once))  # the message of a task that replaces it has none
    lock, lease = getattr(task.request, LOCK, None), _until_sent(once.queue_lease)
    setattr(task.request, LOCK, None)

    def park() -> None:
        if isinstance(lock, MongoLock):
            parked: Any = _park(task, lock, lease)
        else:
            parked = once.park(task.request.id, task.name, lease) if once.release == "start" else None
        setattr(task.request, LOCK, parked if isinstance(parked, Parked) else None)

    _try("detached", once.key, park)


@after_task_publish.connect(weak=False, dispatch_uid="django_mongolock.once.after")
def _keep(headers: Mapping[str, Any], **kwargs: object) -> None:
    """The running task is sent: its key is taken for as long as the message may be in the queue."""
    task = _sent_again(headers)
    parked, once = getattr(task and task.request, LOCK, None), _once(task and task.request)
    if once is not None and isinstance(parked, Parked):
        lease = once.queue_lease + _delay(None, headers.get("eta"))
        setattr(task.request, SENT, True)
        _try("extended", once.key, lambda: parked.keep(lease))


def _sent_again(headers: object) -> Any:
    """The task that runs here, if it is the one that is sent with these headers."""
    task = running_celery_task()
    return task if task is not None and isinstance(headers, Mapping) and headers.get("id") == task.request.id else None


@task_postrun.connect(weak=False, dispatch_uid="django_mongolock.once.end")
def _end(task_id: str, task: Any, state: str | None = None, retval: object = None, **kwargs: object) -> None:
    """A task has ended, or will come back: release its lock, or leave it detached."""
    request = task.request
    lock, once = getattr(request, LOCK, None), _once(request)
    if once is None:
        return
    setattr(request, LOCK, None)
    requeued = isinstance(retval, Reject) and bool(getattr(retval, "requeue", False))
    # A task that runs eagerly has ended, too, when its retries have: they ran inside of it.
    retried = state == states.RETRY and not getattr(request, "is_eager", False)
    if requeued or retried or getattr(request, SENT, False):
        if requeued or isinstance(lock, MongoLock):
            _try("detached", once.key, lambda: _park_requeued(task, lock, once.queue_lease))
    elif lock is not None:
        _try("released", once.key, lock.give_up if isinstance(lock, Parked) else lock.release)
    elif once.release == "end":
        # MongoDB did not answer when the task began: its lock may still be detached.
        _try("released", once.key, lambda: _release(once, task_id, gone=True))


def _park_requeued(task: Any, lock: MongoLock | Parked | None, lease: float) -> None:
    """Park the lock of a message that the broker delivers again: it needs no sending."""
    parked = _park(task, lock, lease) if isinstance(lock, MongoLock) else lock
    if parked is not None:
        parked.keep(lease)


def _park(task: Any, lock: MongoLock, lease: float) -> Parked | None:
    return detached.park_held(lock, _terms(task.request.id, lease), _facts(task.request.id, task.name))


@task_revoked.connect(weak=False, dispatch_uid="django_mongolock.once.revoked")
def _revoked(request: Any, **kwargs: object) -> None:
    """A task was revoked or has expired. Celery calls this in the worker's main process, which did not run it."""
    if (once := _once(request)) is not None:
        _try("released", once.key, lambda: _release(once, request.id))


def _release(once: Once, task_id: str, *, gone: bool = False) -> None:
    """Release the key of a task. gone: not if another run of the task may hold it."""
    release_holders(tidy_fact(task_id), once.using, key=once.stored, gone=gone, timeout=CLEANUP_TIMEOUT)
