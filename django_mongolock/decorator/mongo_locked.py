"""`mongo_locked`: the decorator that runs a callable under a lock."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final, Literal, NoReturn, ParamSpec, Protocol, TypeVar, Unpack, overload

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.views import View

from ..engine.text_checks import check_key
from ..keys import KeyTemplate
from ..locks import LockOptions, check_options, check_permits
from .atomic_requests import Deferred
from .calls import LockedCall, Plan, resolved_signature
from .contention import SKIPPED, Policy, Skipped, check_policy, check_policy_call

__all__ = ["SKIPPED", "mongo_locked"]

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])
#: A generator that is skipped yields nothing, so its type stays.
G = TypeVar("G", bound=Callable[..., Iterator[Any]] | Callable[..., AsyncIterator[Any]])
KeyFunction = Callable[..., Any]


#: The attribute of a decorated callable that has the templates of its keys, for the checks.
TEMPLATES: Final = "_mongolock_templates"


class _Skipping(Protocol):
    """The types of `mongo_locked(on_contention="skip")`: a call may also return `SKIPPED`."""

    @overload
    def __call__(self, function: G, /) -> G: ...
    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> Callable[P, Coroutine[Any, Any, T | Skipped]]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> Callable[P, T | Skipped]: ...


@overload
def mongo_locked(function: C, /) -> C: ...
@overload
def mongo_locked(
    *templates: str,
    key: KeyFunction | None = None,
    on_contention: Literal["skip"],
    permits: int | None = None,
    weight: int = 1,
    resize: bool = False,
    **options: Unpack[LockOptions],
) -> _Skipping: ...
@overload
def mongo_locked(
    *templates: str,
    key: KeyFunction | None = None,
    on_contention: Policy = "raise",
    permits: int | None = None,
    weight: int = 1,
    resize: bool = False,
    **options: Unpack[LockOptions],
) -> Callable[[C], C]: ...
def mongo_locked(
    *templates: Any,
    key: KeyFunction | None = None,
    on_contention: Policy = "raise",
    permits: int | None = None,
    weight: int = 1,
    resize: bool = False,
    **options: Any,
) -> Any:
    """Run a function, coroutine function, generator, view, view class, method or Celery task under a lock.

    templates: keys, filled from the arguments of the call by the names of their parameters: ``"order:{order_id}"``,
    ``"sync:{account.pk}"``. key: instead, a callable that takes the same arguments and returns the key, or a model
    instance. With neither, the key is the dotted name of the function: all its calls share one lock, whatever their
    arguments. permits, weight, resize: how many calls may run at once, as in `mongo_semaphore`; without it, one.
    options: those of `mongo_lock`.

    on_contention: "raise" LockNotAcquired; "skip": return `SKIPPED`, which is false; "respond": for views, 423 with
    Retry-After, or 503 while MongoDB does not answer; "retry": a task comes back later, in Celery without using up its
    retries; or a callable that takes the error and the arguments of the call, and whose result is returned (awaited if
    the function is async). Generators accept "raise" and "skip", which yields nothing. While MongoDB does not answer,
    it is not known whether the lock is busy: all but "respond" and "retry" raise LockBackendFailed then, and "retry"
    does after MONGOLOCK["RETRY_OUTAGE"] seconds.

    Without ``wait=``, it waits for MONGOLOCK["WAIT"]; in views for MONGOLOCK["SHORT_WAIT"], so that it does not block a
    worker; with "skip" not at all. A task with "retry" waits for SHORT_WAIT if the lock has been held for less and no
    other waits for it, and otherwise comes back.

    Every call has a lock of its own. A generator holds it until it ends or is closed, a streaming response until it is
    sent or closed. A view under ATOMIC_REQUESTS commits before its lock is released. Put it below ``@shared_task`` for
    a task, and on the class or on one of its methods for a view class.
    Raises TypeError and ValueError at once for what it cannot decorate and for templates that do not fit.
    """
    first: Any = templates[0] if len(templates) == 1 else None
    if callable(first) or isinstance(first, (classmethod, property)):
        return decorate(Plan((), None, "raise", {}), first)
    check_policy(on_contention)
    check_options(options, [*LockOptions.__annotations__, "key", "on_contention", "permits", "weight", "resize"])
    if permits is None and (resize or weight != 1):
        raise TypeError("weight= and resize= belong to permits=, which is missing")
    if permits is not None and (len(templates) > 1 or "mode" in options):
        raise TypeError("permits= is for one key, and takes no mode=")
    if templates and key is not None:
        raise TypeError("give either templates or key=, not both")
    made_by: Any = key
    if key is not None and (not callable(made_by) or iscoroutinefunction(made_by)):
        raise TypeError("key= must be a function, not async, that returns the key; pass a template without key=")
    for template in templates:
        check_key(template)
    makers = tuple(KeyTemplate(template) for template in templates)
    semaphore = None
    if permits is not None:
        check_permits(permits, weight, resize)
        semaphore = {"permits": permits, "weight": weight, "resize": resize}
    return Decorator(decorate, Plan(makers, key, on_contention, options, semaphore))


class Decorator(functools.partial):  # type: ignore[type-arg]
    """The decorator that `mongo_locked` returns if it is called with arguments."""

    def __enter__(self) -> NoReturn:
        raise TypeError("mongo_locked() decorates a function: for a block, use `with mongo_lock(...):`")

    __aenter__ = __exit__ = __aexit__ = __enter__  # Python looks them all up before it enters


def decorate(plan: Plan, function: Any, make_call: Callable[[Plan, Any], LockedCall] = LockedCall) -> Any:
    """Return *function*, or a view class, with its calls made by what *make_call* returns."""
    if isinstance(function, type):
        return _decorate_class(plan, function, make_call)
    if hasattr(function, "apply_async"):
        raise TypeError(f"put @{plan.name} below the decorator that makes the Celery task, next to the function")
    if isinstance(function, (staticmethod, classmethod)) or not callable(function):
        raise TypeError(f"@{plan.name} goes on a function, not on a {type(function).__name__}: put it below that")
    call = make_call(plan, function)
    wrapper = functools.update_wrapper(_wrapper(call), function)
    check_policy_call(plan.policy, call.signature, call.name)
    # Celery reads this from the wrapper itself, to refuse wrong arguments when a task is sent.
    wrapper.__signature__ = resolved_signature(function) or call.signature  # type: ignore[attr-defined]
    setattr(wrapper, TEMPLATES, (*getattr(function, TEMPLATES, ()), *plan.templates))
    if not (iscoroutinefunction(wrapper) or _is_generator(wrapper)):
        Deferred.put_on(wrapper, plan)
    return wrapper


def _is_generator(function: Any) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _wrapper(call: LockedCall) -> Callable[..., Any]:
    """The wrapper that fits the kind of the function."""
    function, policy = call.wrapped, call.policy
    if _is_generator(function):
        if policy not in ("raise", "skip"):
            raise TypeError('a generator returns no result: its on_contention must be "raise" or "skip"')
        return call.async_generator() if inspect.isasyncgenfunction(function) else call.generator()
    if iscoroutinefunction(function):
        return call.coroutine()
    if callable(policy) and iscoroutinefunction(policy):
        raise TypeError(f"on_contention is async, but {call.name} is not")
    return call.function()


def _decorate_class(plan: Plan, cls: type, make_call: Callable[[Plan, Any], LockedCall]) -> type:
    if not issubclass(cls, View):
        raise TypeError(f"@{plan.name} goes on functions, methods and view classes, not on {cls.__name__}")
    dispatch: Any = cls.dispatch

    def run(view: View, request: HttpRequest, /, *args: Any, **kwargs: Any) -> Any:
        return dispatch(view, request, *args, **kwargs)

    async def arun(view: View, request: HttpRequest, /, *args: Any, **kwargs: Any) -> Any:
        return await dispatch(view, request, *args, **kwargs)

    locked = functools.wraps(dispatch)(arun if cls.view_is_async else run)
    # The default key must be that of this class, also if it inherits its dispatch().
    locked.__module__, locked.__qualname__ = cls.__module__, f"{cls.__qualname__}.dispatch"
    cls.dispatch = decorate(plan, locked, make_call)  # type: ignore[method-assign]
    return cls
