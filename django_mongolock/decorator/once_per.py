"""`once_per`: a job that runs once in a period, however many schedulers and workers there are."""

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
from ..exceptions import LockNotAcquired
from ..keys import KeyTemplate, LockKey, call_arguments, unexpected
from ..locks import mongo_lock
from ..signals import lock_skipped, send
from .contention import SKIPPED

__all__ = ["once_per"]

C = TypeVar("C", bound=Callable[..., Any])

#: For which part of the period a run keeps others away. The rest is for schedulers whose clocks differ, and for queues.
PART: Final = 0.9


def once_per(
    template: str | None = None,
    *,
    days: float = 0,
    hours: float = 0,
    minutes: float = 0,
    seconds: float = 0,
    lease: float | None = None,
    using: str | None = None,
    **unknown: Never,
) -> Callable[[C], C]:
    """Run a function once in the period of its schedule: whoever comes a second time gets `SKIPPED`, which is false.

    template: the key, filled from the arguments of the call as for `mongo_locked`; each key has a period of its own.
    Without it, the key is ``"once:"`` and the function's dotted name. The rest is the period that the schedule has.

    The period counts from the start of a run, by MongoDB's clock, and ends a tenth early: so the next one is not
    missed because it comes a moment sooner after its predecessor was held up. A run keeps the key for as long as it
    takes, also beyond its period. A run that raises does not count, nor does one that dies: the key is free again,
    at the latest a lease later. A task that is redelivered after its worker died waits for that instead of skipping.

    Works on functions and coroutine functions; for a Celery task, put it below ``@shared_task``. It is not for
    periods under a few seconds, nor for exact ones: what must never run twice, whatever happens, needs a check of
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
    # The server judges by its own clock, in the command of who comes next, whether the period is over.
    options: dict[str, Any] = {"min_hold": period.total_seconds() * PART, "lease": lease, "using": using}
    return functools.partial(_decorate, KeyTemplate(template) if template is not None else None, options)


def _decorate(template: KeyTemplate | None, options: dict[str, Any], function: Any) -> Any:
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"@once_per goes on a function, not on {function!r}")
    if hasattr(function, "apply_async"):
        raise TypeError("put @once_per below the decorator that makes the Celery task, next to the function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError("@once_per goes on a function, not on a generator, which runs when its caller likes")
    name = f"{function.__module__}.{function.__qualname__}"
    signature = inspect.signature(function)
    if template is not None:
        template.check(signature, name)

    def new_lock(args: tuple[Any, ...], kwargs: dict[str, Any]) -> MongoLock:
        if template is None:
            key = LockKey(f"once:{name}", f"once:{name}")
        else:
            key = LockKey(template.fill(call_arguments(signature, args, kwargs)), template.template)
        task = running_celery_task()
        wait = redelivery_wait(task, options["lease"]) if task is not None else 0
        return mongo_lock(key, wait=wait, owner=task_owner(), label=name[-200:], **options)

    wrapper = _coroutine(new_lock, function) if iscoroutinefunction(function) else _function(new_lock, function)
    return functools.update_wrapper(wrapper, function)


NewLock = Callable[[tuple[Any, ...], dict[str, Any]], MongoLock]


def _function(new_lock: NewLock, function: Callable[..., Any]) -> Callable[..., Any]:
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
            return _skip(error)

    return wrapper


def _coroutine(new_lock: NewLock, function: Callable[..., Any]) -> Callable[..., Any]:
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
            return _skip(error)

    return wrapper


def _skip(error: LockNotAcquired) -> Any:
    log(INFO, "skipped, it has run in this period or runs now", key=error.key, holder=error.holder)
    send(lock_skipped, key=error.key, template=error.template, reason=error.holder or "")
    return SKIPPED
