"""`enqueue_once` and `OnceTask`: no second message while a task is queued, runs, or waits for a retry.

A lock on a key stands for the message. While the message is in the queue, the lock is parked (`engine.lock.detached`),
and no process renews it. The worker that starts the task takes the lock up, renews it while the task runs, and releases
it at the end. A task that is sent again parks its lock before another worker can get the message.

This deduplication saves work, and never stops work. If the lock cannot be taken or taken up, a warning gives the
reason, and the task is sent or runs without the lock. Only `mongo_locked` keeps two runs apart.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from celery import Task, signals, states
from celery.contrib.django.task import DjangoTask
from celery.exceptions import Reject, SoftTimeLimitExceeded
from celery.result import AsyncResult
from celery.utils import uuid

from ...backends import get_backend
from ...conf import get_settings
from ...context import holder_facts, running_celery_task
from ...engine.lock import detached
from ...engine.lock.detached import Parked
from ...engine.lock.lock import MongoLock
from ...engine.logs import WARNING, log
from ...engine.protocol.processes import NO_PROCESS
from ...engine.rule.document import Terms
from ...engine.rule.options import Seconds, check_seconds
from ...engine.rule.replies import Reply
from ...engine.text_checks import check_key, tidy_fact
from ...exceptions import LockError
from ...keys import KeyTemplate, LockKey, as_key
from ...locks import mongo_lock
from ...transactions import open_transactions
from .once_keys import once_key, valid_key

#: The header of a message that has a lock: a `Once`.
HEADER: Final = "mongolock_once"
#: The seconds that a sender spends on the lock before it sends without one, and the seconds between two looks at a busy
#: lock.
LONGEST: Final = 1.0
LOOK_EVERY: Final = 0.1
#: The number of attempts to connect to the broker before the key is taken.
CONNECTS: Final = 3

#: Attributes of the request of a running task. LOCK holds its MongoLock, or a Parked once the lock is detached. SENT is
#: true if the task was sent again.
LOCK, SENT = "mongolock_once_lock", "mongolock_once_sent"
#: Options of a message that others wait for.
_WAITED_FOR: Final = ("task_id", "link", "link_error", "chord", "group_id")
#: Log lines.
KEPT: Final = "the key of a task is not kept: it is free when its lease ends"
RELEASED: Final = "the key of a task is not released: it is free when its lease ends"
#: The tasks that were sent inside a transaction.
_warned: Final[set[str]] = set()

Release = Literal["end", "start"]


class Once(NamedTuple):
    """The lock of a message, as its header carries it.

    key: the key, without the project's prefix.
    queue_lease: the seconds that the message may be in the queue.
    using: the DATABASES alias.
    release: whether the key is free when the task has ended, or when it starts.
    """

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

    def park(self, task_id: str, name: str, lease: float, timeout: float | None = None) -> Parked | Reply:
        """Take the key for a message of this task, if it is free."""
        terms, facts = _parking(task_id, name, min(get_settings().LEASE, lease))
        return detached.park(get_backend(self.using).session(), self.stored, terms, facts, timeout=timeout)

    def release_parked(self, task_id: str) -> None:
        """Release the parked lock of this task in the background, until an answer comes or the lease is over."""
        with _logging(RELEASED, self.key):
            owner = tidy_fact(task_id)
            detached.release_parked(get_backend(self.using).session(), self.stored, owner, self.queue_lease)


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
    """Send *task* unless it is already on its way. Return its result and whether it was sent.

    If it was not sent, the result is that of the task on its way. A task is on its way until it has ended by success,
    failure, revocation or rejection. A task that will be retried, or was replaced by another one, has not ended. To
    have every call of a task be like this, see `OnceTask`.

    key: the same for equal tasks. Default: the name of the task and its arguments.
    queue_lease: seconds, counted from the eta, after which the key is free if the broker loses the message.
    release: with "start", the key is free when the task starts, so that a call meanwhile sends one more.
    using: the DATABASES alias. Default: the setting DATABASE.
    options: those of `apply_async`.

    This saves work. It does not keep two runs apart. Put `mongo_locked` on the task for that. If the key cannot be
    taken within a second, the task is sent without it, and a warning is logged. Raises what `apply_async` raises.
    """
    if not isinstance(task, Task) or isinstance(args, str) or not isinstance(args, Sequence):
        both = f"{task!r} and {args!r:.40}"
        raise TypeError(f"enqueue_once() takes a Celery task, as in enqueue_once(export_ad, [5]), not {both}")
    given, named = tuple(args), dict(kwargs or {})
    chosen = None if key is None else str(as_key(key))
    make = partial(once_key, task, given, named) if chosen is None else partial(valid_key, chosen)
    once = Once("", queue_lease, using, release).checked()
    return _enqueue(once, make, task, partial(task.apply_async, given, named), options)


class OnceTask(DjangoTask):  # type: ignore[type-arg]
    """The base of tasks that are enqueued once, however they are sent: by `delay`, beat, a chain, or another canvas.

        @shared_task(base=OnceTask, once_key="export:{ad_id}")

    - once_key: template, filled from the arguments. Default: name of the task and its arguments.
    - once_lease, once_release, once_using: queue_lease, release and using of `enqueue_once`.

    A call while the task is on its way sends nothing, and returns the result of the earlier call. If others wait for
    this very message (in a chain, a group or a chord, by ``task_id=`` or ``link=``), the message is sent all the same.
    A task that sends itself again passes its key on to the new message. ``app.send_task`` knows only the name of the
    task, and sends as always.
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
        """Send the task unless it is on its way. Return its result."""
        send = super().apply_async
        if HEADER in (options.get("headers") or {}) or _sent_again({"id": options.get("task_id")}):
            return send(args, kwargs, **options)
        given, named = tuple(args or ()), dict(kwargs or {})
        make = partial(once_key, self, given, named, self.once_key)
        once = Once("", self.once_lease, self.once_using, self.once_release).checked()
        return _enqueue(once, make, self, partial(send, given, named), options)[0]


def _enqueue(
    once: Once, make_key: Callable[[], str], task: Any, send: Callable[..., Any], options: dict[str, Any]
) -> tuple[AsyncResult[Any], bool]:
    """See enqueue_once()."""
    waited_for = any(map(options.get, _WAITED_FOR))
    in_queue = once.queue_lease + _delay(options.get("countdown"), options.get("eta"))
    task_id = options.pop("task_id", None) or uuid()
    with task.app.producer_or_acquire(options.pop("producer", None)) as producer:
        # Connect before taking the key. The first connection of a process takes long, and other senders wait for the
        # key.
        if not task.app.conf.task_always_eager and not producer.connection.connected and task.backend is not None:
            producer.connection.ensure_connection(max_retries=CONNECTS)
        _warn_of_transaction(task.name)
        end, parked = time.monotonic() + LONGEST, None
        with _logging("a task is sent without the key that keeps a second message away", task.name):
            once = once._replace(key=make_key())
            parked = _take(once, task, task_id, in_queue, end)
        if isinstance(parked, str) and not waited_for:
            return task.AsyncResult(parked), False
        if isinstance(parked, Parked):
            options["headers"] = {**(options.get("headers") or {}), HEADER: list(once)}
        try:
            result = send(task_id=task_id, producer=producer, **options)
        except BaseException:
            if isinstance(parked, Parked):
                once.release_parked(task_id)
            raise
    # If this process dies before this point, the key is free after a short lease.
    if isinstance(parked, Parked):
        with _logging(KEPT, once.key):
            parked.keep(in_queue, timeout=max(LOOK_EVERY, end - time.monotonic()))
    return result, True


def _warn_of_transaction(name: str) -> None:
    """Log once for each task that it is sent inside a transaction. Its worker may not see the changes of the
    transaction.
    """
    if name not in _warned and open_transactions():
        _warned.add(name)
        log(WARNING, "a task is sent inside a transaction: send it with delay_on_commit()", task=name)


def _take(once: Once, task: Any, task_id: str, in_queue: float, end: float) -> Parked | str:
    """Take the key, or return the id of the task that is on its way. Raises LockError, also when *end* has come."""
    while True:
        found = once.park(task_id, task.name, in_queue, max(LOOK_EVERY, end - time.monotonic()))
        if isinstance(found, Parked):
            return found
        theirs: Any = found.theirs or {}
        owner, running = theirs.get("owner"), running_celery_task()
        if running is not None and owner == tidy_fact(running.request.id) and theirs.get("process") != NO_PROCESS:
            return _hand_on(running, once, task_id)
        # A parked lock without a message so far. Its process may fail to send the message, or has died.
        is_being_sent = theirs.get("process") == NO_PROCESS and not theirs.get("beat")
        if owner is not None and not is_being_sent:
            return str(owner)
        if time.monotonic() > end:
            raise LockError(f"{once.key!r} is held by {found.holder or 'another process, which is sending the task'}")
        time.sleep(LOOK_EVERY)


def _hand_on(running: Any, once: Once, task_id: str) -> Parked:
    """Park the lock of the running task for the message by which the task sends itself again."""
    lock = getattr(running.request, LOCK, None)
    if not isinstance(lock, MongoLock) or lock.keys != (once.stored,):
        raise LockError(f"{once.key!r} is held by another run, or for another purpose, of the task that sends")
    setattr(running.request, LOCK, None)
    setattr(running.request, SENT, True)
    if (parked := detached.park_held(lock, *_parking(task_id, running.name, get_settings().LEASE))) is None:
        raise LockError("the key was lost while the task ran")
    return parked


def _parking(task_id: str, name: str, lease: float) -> tuple[Terms, dict[str, str | int]]:
    """Return the terms and the facts of a parked lock. There is no margin, because no process believes to hold the
    lock.
    """
    place, label = tidy_fact(f"queue, task {name} {task_id}"), tidy_fact(name[-200:])
    terms = Terms(lease=lease, margin=0, clock_margin=0, owner=tidy_fact(task_id))
    return terms, {**holder_facts(), "place": place, "label": label}


def _delay(countdown: float | None, eta: datetime | str | None) -> float:
    """Return the seconds until a task may start. Celery also compares an eta with the wall clock of this machine."""
    if countdown or eta is None:
        return max(0.0, countdown or 0.0)
    moment = datetime.fromisoformat(eta) if isinstance(eta, str) else eta
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(0.0, (aware - datetime.now(UTC)).total_seconds())


@contextmanager
def _logging(text: str, name: str) -> Iterator[None]:
    """Log an error of the lock. Nothing here may change what becomes of the task, except its own time limit."""
    try:
        yield
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - it is logged
        log(WARNING, "the key of a task failed", task=name, reason=text, error=error)


def _once(carrier: Any) -> Once | None:
    """Return the lock of a request or a message."""
    carried = (getattr(carrier, "headers", None) or {}).get(HEADER)
    return Once(*carried) if isinstance(carried, (list, tuple)) and len(carried) == len(Once._fields) else None


@signals.task_prerun.connect(weak=False, dispatch_uid="django_mongolock.once.begin")
def _begin(task_id: str, task: Any, **kwargs: object) -> None:
    """Take the lock of a task that starts up, or release it. Nothing waits here, because two runs may be at work."""
    if (once := _once(task.request)) is None:
        return
    if once.release == "start":
        once.release_parked(task_id)
        return
    name = LockKey(once.key, f"once:{task.name}")
    with _logging("a task runs without the lock that it was sent with", once.key):
        lock = mongo_lock(name, wait=0, owner=tidy_fact(task_id), label=task.name[-200:], using=once.using)
        setattr(task.request, LOCK, lock.acquire())


@signals.before_task_publish.connect(weak=False, dispatch_uid="django_mongolock.once.before")
def _detach(headers: dict[str, Any], **kwargs: object) -> None:
    """Park the lock of a running task that is sent again, or replaced by another task.

    From now on, the next run may start. If the lock was released at the start, it is taken again. The lease is short
    until the message is sent. If this process dies before, no run releases the lock.
    """
    task = _sent_again(headers)
    if task is None or (once := _once(task.request)) is None:
        return
    lock: Any = getattr(task.request, LOCK, None)
    parked: Any = None
    with _logging(KEPT, once.key):
        if isinstance(lock, MongoLock):
            parked = detached.park_held(lock, *_parking(task.request.id, task.name, get_settings().LEASE))
        elif once.release == "start":
            parked = once.park(task.request.id, task.name, once.queue_lease)
    setattr(task.request, LOCK, parked if isinstance(parked, Parked) else None)
    headers.setdefault(HEADER, list(once))  # the message of a task that replaces this one has none


@signals.after_task_publish.connect(weak=False, dispatch_uid="django_mongolock.once.after")
def _keep(headers: Mapping[str, Any], **kwargs: object) -> None:
    """Keep the key of a running task that was sent again for as long as the message may be in the queue."""
    task = _sent_again(headers)
    parked, once = getattr(task and task.request, LOCK, None), _once(task and task.request)
    if once is not None and isinstance(parked, Parked):
        setattr(task.request, SENT, True)
        with _logging(KEPT, once.key):
            parked.keep(once.queue_lease + _delay(None, headers.get("eta")))


def _sent_again(headers: object) -> Any:
    """Return the task that runs here, if it is the one sent with these headers."""
    task = running_celery_task()
    return task if task is not None and isinstance(headers, Mapping) and headers.get("id") == task.request.id else None


@signals.task_postrun.connect(weak=False, dispatch_uid="django_mongolock.once.end")
def _end(task_id: str, task: Any, state: str | None = None, retval: object = None, **kwargs: object) -> None:
    """Release the lock of a task that has ended, or keep it for a task that comes back."""
    request = task.request
    lock, once = getattr(request, LOCK, None), _once(request)
    if once is None:
        return
    setattr(request, LOCK, None)
    requeued = isinstance(retval, Reject) and bool(getattr(retval, "requeue", False))
    # A task that runs eagerly has ended when its retries have, because they ran inside of it.
    retried = state == states.RETRY and not getattr(request, "is_eager", False)
    with _logging(RELEASED, once.key):
        if requeued or retried:
            if isinstance(lock, MongoLock):
                lock = detached.park_held(lock, *_parking(task_id, task.name, once.queue_lease))
            if isinstance(lock, Parked):
                lock.keep(once.queue_lease)
        elif isinstance(lock, MongoLock):
            lock.release()
        elif once.release == "end" and not getattr(request, SENT, False):
            # The lock was not taken up when the task began. Either the lock is still parked, or another run has it.
            once.release_parked(task_id)


@signals.task_revoked.connect(weak=False, dispatch_uid="django_mongolock.once.revoked")
def _revoked(request: Any, **kwargs: object) -> None:
    """Release the key of a task that was revoked or has expired. Celery calls this in the worker's main process."""
    if (once := _once(request)) is not None:
        once.release_parked(request.id)


@signals.task_rejected.connect(weak=False, dispatch_uid="django_mongolock.once.rejected")
@signals.task_unknown.connect(weak=False, dispatch_uid="django_mongolock.once.unknown")
def _refused(message: Any, **kwargs: object) -> None:
    """Release the key of a message that no worker can run, with an unknown task or an unreadable body."""
    if (once := _once(message)) is not None:
        once.release_parked(str(message.headers.get("id")))
