"""`once_per`: a job runs once in a period, however many schedulers and workers there are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Never, TypeVar

from asgiref.sync import iscoroutinefunction

from ..context import redelivery_wait, running_celery_task, task_owner
from ..engine.lock import MongoLock
from ..engine.logs import INFO, log
from ..engine.options import Seconds
from ..exceptions import LockNotAcquired
from ..keys import KeyTemplate, LockKey, call_arguments, unexpected
from ..locks import mongo_lock
from ..signals import lock_skipped, send
from .contention import SKIPPED, begin_delivery, refuse_second_delivery

__all__ = ["once_per"]

C = TypeVar("C", bound=Callable[..., Any])

#: The part of the period for which a run keeps others away. The rest allows for clocks that differ, and for queues.
PART: Final = 0.9


def once_per(
    template: str | None = None,
    *,
    days: float = 0,
    hours: float = 0,
    minutes: float = 0,
    seconds: float = 0,
    lease: Seconds | None = None,
    using: str | None = None,
    **unknown: Never,
) -> Callable[[C], C]:
    """Run a function once in the period of its schedule: further calls return `SKIPPED`, which is false.

    template: the key, filled from the arguments of the call as in `mongo_locked`; each key has a period of its own.
    Without it, the key is ``"once:"`` and the dotted name of the function. days, hours, minutes, seconds: the period of
    the schedule. lease, using: those of `mongo_lock`.

    The period counts from the start of a run, according to MongoDB's clock, and ends a tenth early, so that the next
    run is not skipped because it starts a moment sooner than the last one did. A run keeps the key for as long as it
    takes, also beyond its period. A run that raises or dies does not count: the key is free again, at the latest a
    lease later. A task that is redelivered after the death of its worker waits for that instead of skipping.

    It decorates functions and coroutine functions; put it below ``@shared_task`` for a Celery task. It is not meant for
    periods of a few seconds, nor for exact ones. A job that must never run twice, whatever happens, needs a check of
    its own.
    """
    given = {"days": days, "hours": hours, "minutes": minutes, "seconds": seconds}
    for name in unknown:
        raise unexpected(name, [*given, "lease", "using"])
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} is a number, not {type(value).__name__}")
    period = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if period <= timedelta():
        raise TypeError("@once_per needs the period of the schedule: @once_per(hours=24), @once_per('a:{b}', days=1)")
    # Whether the period is over, the server decides according to its own clock, in the command of the next caller.
    options: dict[str, Any] = {"min_hold": period.total_seconds() * PART, "lease": lease, "using": using}
    return functools.partial(_decorate, KeyTemplate(template) if template is not None else None, options)


def _decorate(template: KeyTemplate | None, options: dict[str, Any], function: Any) -> Any:
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"@once_per goes on a function, not on {function!r}")
    if hasattr(function, "apply_async"):
        raise TypeError("put @once_per below the decorator that makes the Celery task, next to the function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError("@once_per goes on a function, not on a generator, which runs when its caller consumes it")
    name = f"{function.__module__}.{function.__qualname__}"
    signature = inspect.signature(function)
    if template is not None:
        template.check(signature, name)

    def new_lock(args: tuple[Any, ...], kwargs: dict[str, Any]) -> MongoLock:
        if template is None:
            key = LockKey(f"once:{name}", f"once:{name}")
        else:
            key = template.fill(call_arguments(signature, args, kwargs))
        begin_delivery(options["using"])
        task = running_celery_task()
        wait = redelivery_wait(task, options["lease"]) if task is not None else 0
        return mongo_lock(key, wait=wait, owner=task_owner(), label=name[-200:], **options)

    make = _coroutine if iscoroutinefunction(function) else _function
    wrapper = make(new_lock, function, options["using"])
    return functools.update_wrapper(wrapper, function)


NewLock = Callable[[tuple[Any, ...], dict[str, Any]], MongoLock]


def _function(new_lock: NewLock, function: Callable[..., Any], using: str | None) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        entered = False
        try:
            with new_lock(args, kwargs) as lock:
                entered = True
                try:
                    return function(*args, **kwargs)
                except BaseException:
                    lock.release(early=True)  # this run does not count
                    raise
        except LockNotAcquired as error:
            if entered:
                raise  # the function's own
            return _skip(error, using)

    return wrapper


def _coroutine(new_lock: NewLock, function: Callable[..., Any], using: str | None) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        entered = False
        try:
            async with new_lock(args, kwargs) as lock:
                entered = True
                try:
                    return await function(*args, **kwargs)
                except BaseException:
                    await lock.arelease(early=True)
                    raise
        except LockNotAcquired as error:
            if entered:
                raise
            return _skip(error, using)

    return wrapper


def _skip(error: LockNotAcquired, using: str | None) -> Any:
    refuse_second_delivery(error, using)
    log(INFO, "skipped, the job has run in this period or is running", key=error.key, holder=error.holder)
    send(lock_skipped, key=error.key, template=error.template, reason=error.holder or "")
    return SKIPPED
