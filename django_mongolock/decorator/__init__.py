"""Callables that run under a lock: `mongo_locked`, and `once_per` for a job that runs once in a period."""

from __future__ import annotations

import functools
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Never, NoReturn, ParamSpec, TypeVar, Unpack, overload

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.views import View

from ..conf import LockSettings, get_settings
from ..engine import clock
from ..engine.lock.transaction import out_of_commit_hook
from ..engine.rule.document import Terms
from ..engine.rule.options import UNSET, Seconds, Unset
from ..engine.text_checks import check_key
from ..exceptions import LockNotAcquired, LockReentry
from ..keys import KeyTemplate
from ..locks import LockKeywords, chosen
from .calls import LockedFunction, LockPlan, resolved_signature
from .locked_command import busy_error
from .policies import AGAIN, SKIPPED, CallFacts, Policy, Skip, Skipped, Unlocked, as_policy
from .views import Deferred

__all__ = ["SKIPPED", "mongo_locked", "once_per"]

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])
#: A generator that is skipped yields nothing, so its type stays.
G = TypeVar("G", bound=Callable[..., Iterator[Any]] | Callable[..., AsyncIterator[Any]])
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    OnContention = Literal["raise", "skip", "respond", "retry"] | Policy | Callable[..., Any]
    Chosen = TypeVarWithDefault("Chosen", bound=OnContention, default=Literal["raise"])
else:
    Chosen = TypeVar("Chosen")

#: The attribute of a decorated callable with the templates of its keys, for the checks.
TEMPLATES: Final = "_mongolock_templates"


class LockedKeywords(LockKeywords, total=False):
    """The options of `mongo_locked`, for type checkers: see `LockOptions`."""

    permits: int | None
    weight: int
    resize: bool


class LockedDecorator(Generic[Chosen]):
    """The decorator that `mongo_locked` returns. With ``on_contention="skip"``, a call may also return `SKIPPED`."""

    def __init__(self, plan: LockPlan) -> None:
        self._plan = plan

    @overload
    def __call__(self: LockedDecorator[Literal["skip"]], function: G, /) -> G: ...
    @overload
    def __call__(
        self: LockedDecorator[Literal["skip"]], function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> Callable[P, Coroutine[Any, Any, T | Skipped]]: ...
    @overload
    def __call__(self: LockedDecorator[Literal["skip"]], function: Callable[P, T], /) -> Callable[P, T | Skipped]: ...
    @overload
    def __call__(self, function: C, /) -> C: ...
    def __call__(self, function: Any, /) -> Any:
        return decorate(self._plan, function)

    def __enter__(self) -> NoReturn:
        raise TypeError("mongo_locked() decorates a function: for a block, use `with mongo_lock(...):`")

    __aenter__ = __exit__ = __aexit__ = __enter__  # Python looks all of them up before it enters


def mongo_locked(
    *templates: str,
    key: Callable[..., Any] | None = None,
    on_contention: Chosen = "raise",  # type: ignore[assignment]  # the default of the type
    **options: Unpack[LockedKeywords],
) -> LockedDecorator[Chosen]:
    """Run a function, coroutine function, generator, view, view class, method or Celery task under a lock.

    - templates: keys, filled from the arguments of the call by the names of their parameters: ``"order:{order_id}"``,
      ``"sync:{account.pk}"``.
    - key: callable that replaces the templates. The callable takes the arguments of the call and returns the key or a
      model instance.
    - permits, weight, resize: number of calls that may run at once, as in `mongo_semaphore`. Without them, one call
      runs.
    - on_contention: reaction to a busy lock, see below.
    - options: as in `mongo_lock`.

    Without templates and key, the key is the dotted name of the function. All calls of the function then share one
    lock, whatever their arguments.

    The values of on_contention:

    - "raise" raises LockNotAcquired.
    - "skip" returns `SKIPPED`, a false value.
    - "respond" is for views. The answer is 423 with Retry-After, or 503 while MongoDB does not answer.
    - "retry" is for Celery tasks. The task comes back later, without using up its retries.
    - A callable gets the error and the arguments of the call. Its result is returned (awaited if the function is
      async). The callables of `contrib.queues` are examples.

    Generators accept "raise" and "skip". With "skip", a generator yields nothing. While MongoDB does not answer, nobody
    knows whether the lock is busy. All policies but "respond" and "retry" raise LockBackendFailed then. "retry" raises
    it after MONGOLOCK["RETRY_OUTAGE"] seconds.

    Without ``wait=``, a call waits for MONGOLOCK["WAIT"]. A view waits for MONGOLOCK["SHORT_WAIT"], so that it does not
    block a worker. With "skip", a call does not wait at all. A task with "retry" waits for SHORT_WAIT if the lock has
    been held for less and no other waits for it. Otherwise the task comes back.

    Every call has a lock of its own. A generator holds it until it ends or is closed, a streaming response until it is
    sent or closed. A view under ATOMIC_REQUESTS commits before its lock is released. Put the decorator below
    ``@shared_task`` for a task, and on the class or on one of its methods for a view class.

    Raises TypeError and ValueError at once for things that it cannot decorate, and for templates that do not fit.
    """
    given: tuple[object, ...] = templates
    for template in given:
        if callable(template) or isinstance(template, (classmethod, property)):
            raise TypeError(
                "write @mongo_locked(), with brackets: then all calls of the function share one lock. "
                "If it is what makes the key, pass the function, or the lambda as key="
            )
        check_key(template)
    policy = as_policy(on_contention)
    asked = chosen(options, [*LockedKeywords.__annotations__, "key", "on_contention"])
    if asked.permits is not None and len(templates) > 1:
        raise TypeError("permits= is for one key")
    if templates and key is not None:
        raise TypeError("give either templates or key=, not both")
    made_by: Any = key
    if key is not None and (not callable(made_by) or iscoroutinefunction(made_by)):
        raise TypeError("key= must be a function, not async, that returns the key; pass a template without key=")
    return LockedDecorator(LockPlan(policy, asked, tuple(map(KeyTemplate, templates)), key))


def decorate(plan: LockPlan, function: Any) -> Any:
    """Return *function* or a view class, with its calls made according to the plan."""
    if isinstance(function, type):
        return _decorate_class(plan, function)
    if hasattr(function, "apply_async"):
        raise TypeError(f"put @{plan.name} below the decorator that makes the Celery task, next to the function")
    if isinstance(function, (staticmethod, classmethod)) or not callable(function):
        raise TypeError(f"@{plan.name} goes on a function, not on a {type(function).__name__}: put it below that")
    locked = LockedFunction(plan, function)
    wrapper = functools.update_wrapper(locked.wrapper(), function)
    # Celery reads this from the wrapper itself, to refuse wrong arguments when a task is sent.
    wrapper.__signature__ = resolved_signature(function) or locked.signature  # type: ignore[attr-defined]
    setattr(wrapper, TEMPLATES, (*getattr(function, TEMPLATES, ()), *plan.templates))
    if not (locked.is_generator or iscoroutinefunction(wrapper)):
        Deferred.put_on(wrapper, plan)
    return wrapper


def _decorate_class(plan: LockPlan, cls: type) -> type:
    if not issubclass(cls, View):
        raise TypeError(f"@{plan.name} goes on functions, methods and view classes, not on {cls.__name__}")
    plan.policy.accepts("view", cls.__name__)
    dispatch: Any = cls.dispatch

    def run(view: View, request: HttpRequest, /, *args: Any, **kwargs: Any) -> Any:
        return dispatch(view, request, *args, **kwargs)

    async def arun(view: View, request: HttpRequest, /, *args: Any, **kwargs: Any) -> Any:
        return await dispatch(view, request, *args, **kwargs)

    locked = functools.wraps(dispatch)(arun if cls.view_is_async or iscoroutinefunction(dispatch) else run)
    # The default key must be that of this class, even if the class inherits its dispatch().
    locked.__module__, locked.__qualname__ = cls.__module__, f"{cls.__qualname__}.dispatch"
    cls.dispatch = decorate(plan, locked)  # type: ignore[method-assign]
    return cls


#: Seconds between two looks at a running run. The pause doubles from one look to the next.
SHORTEST_LOOK, LONGEST_LOOK = 0.1, 1.0
#: Seconds that a call waits beyond the lease of a run that may have died.
MARGIN: Final = 1.0
#: The part of the period for which a run keeps others away. The rest allows for clocks that differ, and for queues.
PART: Final = 0.9


def once_per(
    template: str | None = None,
    *,
    days: float = 0,
    hours: float = 0,
    minutes: float = 0,
    seconds: float = 0,
    wait: Seconds | Unset | None = UNSET,
    lease: Seconds | None = None,
    using: str | None = None,
    **unknown: Never,
) -> Callable[[C], C]:
    """Run a function once in the period of its schedule. Further calls return `SKIPPED`, a false value.

    - template: key, filled from the arguments of the call as in `mongo_locked`. Each key has a period of its own.
      Default: ``"once:"`` and the dotted name of the function.
    - days, hours, minutes, seconds: period of the schedule.
    - wait: seconds that a call waits for the end of a running run. Default: lease and margin. The run of a dead process
      is over after that time.
    - lease, using: as in `mongo_lock`.

    A call is skipped only if the run of the period has ended well. While a run is at work, a call waits for its end, or
    for its death. If the run is still at work then, the call raises LockNotAcquired, and a management command exits
    with code 75. A Celery task does not wait, but comes back until the run has ended.

    The period counts from the start of a run, according to MongoDB's clock. The period ends a tenth early, because the
    next run may start a moment sooner than the last one did. A run keeps the key as long as it takes, also beyond its
    period. A run that raises, is ended by SIGTERM, or dies does not count. The key is free again, at the latest a lease
    later. A run counts if its error comes out of a function of ``transaction.on_commit``, because its work is
    committed.

    The decorator accepts functions and coroutine functions. Put it below ``@shared_task`` for a Celery task. Do not use
    it for periods of a few seconds or for exact periods. A job that must never run twice, whatever happens, needs a
    check of its own.
    """
    given = {"days": days, "hours": hours, "minutes": minutes, "seconds": seconds}
    options = chosen({"wait": wait, "lease": lease, "using": using, **unknown}, [*given, "wait", "lease", "using"])
    period = timedelta(**given)
    if period <= timedelta():
        raise TypeError("@once_per needs the period of the schedule: @once_per(hours=24), @once_per('a:{b}', days=1)")
    policy = OncePolicy(options.wait)
    # The server decides by its own clock whether the period is over, in the command of the next caller.
    options = replace(options, min_hold=period.total_seconds() * PART, wait=UNSET)
    templates = () if template is None else (KeyTemplate(template),)
    return functools.partial(decorate, LockPlan(policy, options, templates, name="once_per", default_key="once:"))


class OncePolicy(Skip):
    """The policy of `once_per`: return `SKIPPED` if a run of this period has ended well, wait while a run is at work.

    - wait: seconds to wait. None: without end.
    """

    kinds = ("call",)
    unfit = {  # noqa: RUF012 - a constant
        **Skip.unfit,
        "generator": "@once_per goes on a function, not on a generator, which runs when its caller consumes it",
    }

    def __init__(self, wait: float | Unset | None) -> None:
        self.wait = wait

    def tries_first(self, call: CallFacts) -> bool:
        """See Policy.tries_first()."""
        return True

    def comes_back(self, error: Unlocked) -> bool:
        """See Policy.comes_back()."""
        return isinstance(error, LockNotAcquired) and not (error.kept or isinstance(error, LockReentry))

    def answer(self, error: LockNotAcquired, call: CallFacts) -> Any:
        """Return `SKIPPED` if the run has ended well. Otherwise try again until the time is over."""
        if error.kept:
            return super().answer(error, call)
        if (left := self._deadline(get_settings(), call) - clock.now()) <= 0:
            raise busy_error(error)
        # A place in the queue would not help, because the end of the run keeps the key.
        call.pause = min(left, LONGEST_LOOK, SHORTEST_LOOK * 2 ** min(call.tries, 8))
        return AGAIN

    def _deadline(self, settings: LockSettings, call: CallFacts) -> float:
        if self.wait is None:
            return math.inf
        if not isinstance(self.wait, Unset):
            return call.began + self.wait
        lease = settings.LEASE if call.options.lease is None else call.options.lease
        return call.began + Terms(clock_margin=settings.CLOCK_MARGIN).server_lease_of(lease) + MARGIN

    def gives_up(self, error: BaseException) -> bool:
        """Return False for an error of a function of ``transaction.on_commit``, because the work of the run is
        committed.
        """
        return not out_of_commit_hook(error)
