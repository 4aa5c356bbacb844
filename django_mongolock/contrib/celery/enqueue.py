"""`enqueue_once`: a task is not queued a second time while it is queued, runs, or waits for a retry.

The owner of the lock is the id of the task. While the message is in the queue, the lock is detached
(`engine.detached`): no process renews it. The worker that starts the task resumes it, renews it while the task runs,
and releases it however the task ends; a task that is sent again, for a retry, detaches it before the message can reach
another worker.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from celery import Task, states
from celery.exceptions import Reject
from celery.result import AsyncResult
from celery.signals import after_task_publish, before_task_publish, task_postrun, task_prerun, task_revoked
from celery.utils import uuid

from ...backends.base import get_backend
from ...conf import get_settings
from ...context import holder_facts, redelivery_wait, running_celery_task
from ...engine import detached
from ...engine.detached import Parked
from ...engine.document import Terms
from ...engine.lock import MongoLock
from ...engine.logs import WARNING, log
from ...engine.options import Seconds, check_seconds
from ...engine.processes import NO_PROCESS
from ...engine.replies import Reply
from ...engine.text_checks import check_key, tidy_fact
from ...exceptions import LockBackendFailed, LockError
from ...keys import LockKey, as_key, escape
from ...locks import mongo_lock
from ...owners import CLEANUP_TIMEOUT, release_holders
from .debounce import Pause, send_later

#: The header of the message: the key, the seconds that it may be in the queue, and the DATABASES alias.
HEADER: Final = "mongolock_once"
#: How often to try if the lock is busy, but held for no task: its holder may release it at any moment.
TRIES: Final = 5

#: For how long to wait for another process that is sending it, and how often to look, in seconds.
SENDING: Final = 5.0
LOOK_EVERY: Final = 0.1

#: The attribute in which the request of a running task keeps its lock: a MongoLock, or a Parked once it is detached.
LOCK: Final = "mongolock_once_lock"


def enqueue_once(
    task: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    key: str | None = None,
    queue_lease: Seconds = 3_600,
    delay: Seconds | None = None,
    longest: Seconds | None = None,
    using: str | None = None,
    **options: Any,
) -> tuple[AsyncResult[Any], bool]:
    """Send *task* unless it is already on its way; return its result and whether it was sent.

    If it was not, the result is that of the task on its way. A task is on its way until it has ended, by success,
    failure, revocation or rejection; one that will be retried has not ended. key: the same for equal tasks; without it,
    the name of the task and its arguments. queue_lease: seconds, counted from the eta, after which the key is free if
    the broker loses the message. options: those of `apply_async`.

    delay: a debounce. The task starts when no equal one has been enqueued for that many seconds, but at most *longest*
    seconds after the first, with the arguments of the first. A call that comes after the start is a first one.

    This saves work; it does not keep two runs apart, since a message may outlast its *queue_lease*, and brokers may
    deliver it twice. For that, put `mongo_locked` on the task as well. In a transaction, call it after the commit
    (`transaction.on_commit`). Raises LockBackendFailed if MongoDB does not answer, and what `apply_async` raises; the
    key is then free. It raises LockBackendFailed too if another process has not sent an equal task within 5 seconds.
    """
    if not isinstance(task, Task):
        raise TypeError(f"enqueue_once() takes a Celery task, as in enqueue_once(export_ad, [5]), not {task!r}")
    given, named = tuple(args), dict(kwargs or {})
    name: Any = once_key(task, given, named) if key is None else as_key(key)
    pause = Pause.check(delay, longest, options)
    if pause is not None:
        name = f"{name}:delayed"  # apart from runs that began before
    stored = check_key(name, get_settings().KEY_PREFIX)
    kept = check_seconds("queue_lease", queue_lease)
    in_queue = kept + (pause.delay if pause else _delay(options.get("countdown"), options.get("eta")))
    store = get_backend(using).session().store
    task_id = options.pop("task_id", None) or uuid()

    def park() -> Parked | Reply:
        return detached.park(store, stored, _terms(task_id, _until_sent(in_queue)), _facts(task_id, task.name))

    parked = _take(name, park, lambda found: pause is None or pause.prolong(store, stored, found, kept))
    if isinstance(parked, str):
        return task.AsyncResult(parked), False
    try:
        if pause:
            send_later(task.signature(given, named, task_id=task_id, **options), parked, pause, kept, using)
            result = task.AsyncResult(task_id)
        else:
            headers = {**(options.pop("headers", None) or {}), HEADER: [name, kept, using]}
            result = task.apply_async(given, named, task_id=task_id, headers=headers, **options)
    except BaseException:
        _try("removed", name, parked.give_up)
        raise
    # Only now: if this process had died before, the key would have been free after a short lease.
    _try("extended", name, lambda: parked.keep(in_queue))
    return result, True


def once_key(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The key of a task with these arguments, as `@mongo_locked` binds them: by name, with the defaults.

    Those of another call make another key, also 1 and "1". Texts that Unicode calls the same (NFC) are the same, and so
    are lists and tuples, which are one to a broker. Raises TypeError for a call that the task does not take, and for
    values without a text of their own.
    """
    bound = inspect.signature(task.run).bind(*args, **kwargs)
    bound.apply_defaults()
    return call_key(task.name, bound.arguments)


def call_key(name: str, arguments: Mapping[str, Any]) -> str:
    """The key of a task of this name with these arguments."""
    try:
        parts = [f"{escape(word)}={_literal(arguments[word])}" for word in sorted(arguments)]
    except TypeError as error:
        raise TypeError(f"the arguments of {name} cannot be part of a key ({error}): give one as key=") from None
    return ":".join(["once", escape(name), *parts])


def _literal(value: object) -> str:
    """The text of an argument, as it would be written in a call."""
    match value:
        case str():
            return f'"{escape(value)}"'
        case None:
            return "None"
        case bytes():
            return f"bytes({value.hex()})"
        case list() | tuple():
            return f"[{_joined(map(_literal, value))}]"
        case dict():
            return f"{{{_joined(sorted(_joined(map(_literal, item)) for item in value.items()))}}}"
    text = escape(value)
    return text if type(value) in (int, float, bool) else f"{type(value).__name__}({text})"


def _joined(texts: Iterable[str]) -> str:
    """These texts in one, of which other texts make another."""
    return ",".join(text.replace("%", "%25").replace(",", "%2C") for text in texts)


def _take(key: str, park: Callable[[], Parked | Reply], is_on_its_way: Callable[[Reply], bool]) -> Parked | str:
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
        if (owner := theirs.get("owner")) is not None and is_on_its_way(found):
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


def _delay(countdown: float | None, eta: datetime | None) -> float:
    """The seconds until a task may start. Celery, too, compares an eta with the wall clock of this machine."""
    if eta is not None:
        aware = eta if eta.tzinfo is not None else eta.replace(tzinfo=UTC)
        return max(0.0, (aware - datetime.now(UTC)).total_seconds())
    return max(0.0, countdown or 0.0)


def _try(what: str, key: str, call: Callable[[], object]) -> None:
    """Log an error of the lock, which ends with its lease: the task must not fail because of it."""
    try:
        call()
    except LockError as error:
        log(WARNING, f"not {what}: the lock ends with its lease", key=key, error=error)


def _header(request: Any) -> tuple[str, float, str | None] | None:
    match (getattr(request, "headers", None) or {}).get(HEADER):
        case [str(key), int() | float() as lease, str() | None as using]:
            return key, lease, using
    return None


@task_prerun.connect(weak=False, dispatch_uid="django_mongolock.once.begin")
def _begin(task_id: str, task: Any, **kwargs: object) -> None:
    """A task starts: resume its lock."""
    if (header := _header(task.request)) is None:
        return
    key, _, using = header
    lock = mongo_lock(
        LockKey(key, f"once:{task.name}"),
        wait=redelivery_wait(task),
        owner=tidy_fact(task_id),
        label=task.name[-200:],
        using=using,
    )
    try:
        setattr(task.request, LOCK, lock.acquire())
    except LockError as error:
        log(WARNING, "a task runs without the lock that it was sent with", key=key, task=task_id, error=error)


@before_task_publish.connect(weak=False, dispatch_uid="django_mongolock.once.before")
def _detach(headers: Mapping[str, Any], **kwargs: object) -> None:
    """A running task is sent again. From now on its next run may start, which finds the lock detached.

    Its lease is short until the message is sent: if this process died before, no run would release it.
    """
    task = _sent_again(headers)
    lock, header = getattr(task and task.request, LOCK, None), _header(task and task.request)
    if task is not None and header is not None and isinstance(lock, MongoLock):
        setattr(task.request, LOCK, None)
        _try("detached", header[0], lambda: setattr(task.request, LOCK, _park(task, lock, _until_sent(header[1]))))


@after_task_publish.connect(weak=False, dispatch_uid="django_mongolock.once.after")
def _keep(headers: Mapping[str, Any], **kwargs: object) -> None:
    """The running task is sent: its key is taken for as long as the message may be in the queue."""
    task = _sent_again(headers)
    parked, header = getattr(task and task.request, LOCK, None), _header(task and task.request)
    if header is not None and isinstance(parked, Parked):
        eta = headers.get("eta")
        lease = header[1] + _delay(None, datetime.fromisoformat(eta) if isinstance(eta, str) else None)
        _try("extended", header[0], lambda: parked.keep(lease))


def _sent_again(headers: object) -> Any:
    """The task that runs here, if it is the one that is sent with these headers."""
    task = running_celery_task()
    return task if task is not None and isinstance(headers, Mapping) and headers.get("id") == task.request.id else None


@task_postrun.connect(weak=False, dispatch_uid="django_mongolock.once.end")
def _end(task_id: str, task: Any, state: str | None = None, retval: object = None, **kwargs: object) -> None:
    """A task has ended, or will come back: release its lock, or leave it detached."""
    lock, header = getattr(task.request, LOCK, None), _header(task.request)
    if header is None:
        return
    setattr(task.request, LOCK, None)
    requeued = isinstance(retval, Reject) and bool(getattr(retval, "requeue", False))
    # A task that runs eagerly has ended, too, when its retries have: they ran inside of it.
    comes_back = requeued or (state == states.RETRY and not getattr(task.request, "is_eager", False))
    if lock is None or isinstance(lock, Parked):
        if not comes_back:
            # Without a lock, MongoDB did not answer when the task began: it may still be detached.
            _try("released", header[0], lock.give_up if lock else lambda: _release(header, task_id, gone=True))
    elif comes_back:
        _try("detached", header[0], lambda: _park_requeued(task, lock, header[1]))
    else:
        _try("released", header[0], lock.release)


def _park_requeued(task: Any, lock: MongoLock, lease: float) -> None:
    """Park the lock of a message that the broker delivers again: it needs no sending."""
    if (parked := _park(task, lock, lease)) is not None:
        parked.keep(lease)


def _park(task: Any, lock: MongoLock, lease: float) -> Parked | None:
    return detached.park_held(lock, _terms(task.request.id, lease), _facts(task.request.id, task.name))


@task_revoked.connect(weak=False, dispatch_uid="django_mongolock.once.revoked")
def _revoked(request: Any, **kwargs: object) -> None:
    """A task was revoked or has expired. Celery calls this in the worker's main process, which did not run it."""
    if (header := _header(request)) is not None:
        _try("released", header[0], lambda: _release(header, request.id))


def _release(header: tuple[str, float, str | None], task_id: str, *, gone: bool = False) -> None:
    """Release the key of a task. gone: not if another run of the task may hold it."""
    key, _, using = header
    stored, owner = check_key(key, get_settings().KEY_PREFIX), tidy_fact(task_id)
    release_holders(owner, using, key=stored, gone=gone, timeout=CLEANUP_TIMEOUT)
