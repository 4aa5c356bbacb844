"""`once_per`: a job runs once in a period, however many schedulers and workers there are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Never, TypeVar

from ..context import redelivery_wait, running_celery_task
from ..engine.lock.commit_hooks import out_of_commit_hook
from ..engine.lock.lock import MongoLock
from ..engine.rule.options import Seconds
from ..keys import KeyTemplate, LockKey, unexpected
from .calls import Arguments, Keywords, LockedCall, Plan
from .mongo_locked import decorate

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
    lease later. But one counts whose error comes out of a function of ``transaction.on_commit``: its work is committed.
    A task that is redelivered after the death of its worker waits for that instead of skipping.

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
    templates = () if template is None else (KeyTemplate(template),)
    return functools.partial(decorate, Plan(templates, None, "skip", options, name="once_per"), make_call=OnceCall)


class OnceCall(LockedCall):
    """Wraps one function. Its lock has a minimum hold, which a run that fails gives up."""

    def __init__(self, plan: Plan, wrapped: Callable[..., Any]) -> None:
        if inspect.isgeneratorfunction(wrapped) or inspect.isasyncgenfunction(wrapped):
            raise TypeError("@once_per goes on a function, not on a generator, which runs when its caller consumes it")
        super().__init__(plan, wrapped)

    def _keys(self, args: Arguments, kwargs: Keywords) -> list[Any]:
        return super()._keys(args, kwargs) if self.plan.templates else [LockKey(*[f"once:{self.name}"] * 2)]

    def _wait(self, request: Any) -> float | None:
        task = running_celery_task()
        return redelivery_wait(task, self.options["lease"]) if task is not None else 0.0

    def _run(self, lock: MongoLock, args: Arguments, kwargs: Keywords, aliases: Any) -> Any:
        try:
            return super()._run(lock, args, kwargs, aliases)
        except BaseException as error:
            if not out_of_commit_hook(error):
                lock.release(early=True)  # this run does not count
            raise

    async def _arun(self, lock: MongoLock, args: Arguments, kwargs: Keywords) -> Any:
        """See _run()."""
        try:
            return await super()._arun(lock, args, kwargs)
        except BaseException as error:
            if not out_of_commit_hook(error):
                await lock.arelease(early=True)
            raise
