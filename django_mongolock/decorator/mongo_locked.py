"""`mongo_locked`: a callable that runs under a lock."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Literal, NoReturn, ParamSpec, Protocol, TypeVar, Unpack, overload

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.views import View

from ..engine.document import check_key
from ..keys import KeyTemplate
from ..locks import LockOptions, check_options
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


class _Skipping(Protocol):
    """What `mongo_locked(on_contention="skip")` does to the types: a call may also return `SKIPPED`."""

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
    **options: Unpack[LockOptions],
) -> _Skipping: ...
@overload
def mongo_locked(
    *templates: str,
    key: KeyFunction | None = None,
    on_contention: Policy = "raise",
    **options: Unpack[LockOptions],
) -> Callable[[C], C]: ...
def mongo_locked(
    *templates: Any, key: KeyFunction | None = None, on_contention: Policy = "raise", **options: Any
) -> Any:
    """Run a function, coroutine function, generator, view, view class, method or Celery task under a lock.

    templates: keys, filled from the arguments of the call by their parameters' names: ``"order:{order_id}"``,
    ``"sync:{account.pk}"``. key: or a callable that takes the same arguments and returns the key, or a model
    instance. With neither, the key is the function's dotted name. options: those of `mongo_lock`.

    on_contention: "raise" LockNotAcquired; "skip" (return `SKIPPED`, which is false); "respond" (views: 423 with
    Retry-After, 503 while MongoDB is away); "retry" (Celery tasks: come back later, without using up retries); or
    a callable that takes the error and the arguments of the call, and whose result is returned (awaited, where the
    function is async). Generators know "raise" and "skip", which yields nothing. While MongoDB is away nobody knows
    if there is contention: all but "respond" raise LockBackendFailed then.

    How long it waits without ``wait=``: MONGOLOCK["WAIT"]; in views and with "retry" MONGOLOCK["SHORT_WAIT"], so that
    no worker is held up; with "skip" not at all.

    Every call has a lock of its own. A generator holds it until it ends or is closed, a streaming response until it
    is sent or closed. A view under ATOMIC_REQUESTS commits before its lock is released. For a task, put it below
    ``@shared_task``; for a view class, on the class or on one of its methods.
    Raises TypeError and ValueError at once for what it cannot decorate and for templates that do not fit.
    """
    first: Any = templates[0] if len(templates) == 1 else None
    if callable(first) or isinstance(first, (classmethod, property)):
        return _decorate(Plan((), None, "raise", {}), first)
    check_policy(on_contention)
    check_options(options, [*LockOptions.__annotations__, "key", "on_contention"])
    if templates and key is not None:
        raise TypeError("give either templates or key=, not both")
    made_by: Any = key
    if key is not None and (not callable(made_by) or iscoroutinefunction(made_by)):
        raise TypeError("key= is a function, not async, that makes the key; a template goes without key=")
    for template in templates:
        check_key(template)
    plan = Plan(tuple(KeyTemplate(template) for template in templates), key, on_contention, options)
    return Decorator(_decorate, plan)


class Decorator(functools.partial):  # type: ignore[type-arg]
    """What `mongo_locked` returns with arguments: to be put on a function."""

    def __enter__(self) -> NoReturn:
        raise TypeError("mongo_locked() goes on a function, as its decorator: a block takes `with mongo_lock(...):`")

    __aenter__ = __exit__ = __aexit__ = __enter__  # Python looks for all of them before it enters


def _decorate(plan: Plan, function: Any) -> Any:
    if isinstance(function, type):
        return _decorate_class(plan, function)
    if hasattr(function, "apply_async"):
        raise TypeError("put @mongo_locked below the decorator that makes the Celery task, next to the function")
    if isinstance(function, (staticmethod, classmethod)) or not callable(function):
        raise TypeError(f"@mongo_locked goes on a function, not on a {type(function).__name__}: put it below that")
    call = LockedCall(plan, function)
    wrapper = functools.update_wrapper(_wrapper(call), function)
    check_policy_call(plan.policy, call.signature, call.name)
    # Celery looks at the wrapper itself to tell wrong arguments where the task is sent.
    wrapper.__signature__ = resolved_signature(function) or call.signature  # type: ignore[attr-defined]
    if not (iscoroutinefunction(wrapper) or _is_generator(wrapper)):
        Deferred.put_on(wrapper, plan)
    return wrapper


def _is_generator(function: Any) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _wrapper(call: LockedCall) -> Callable[..., Any]:
    """The one of the four ways to call it that fits the function."""
    function, policy = call.wrapped, call.policy
    if _is_generator(function):
        if policy not in ("raise", "skip"):
            raise TypeError('a generator has nothing to return: its on_contention is "raise" or "skip"')
        return call.async_generator() if inspect.isasyncgenfunction(function) else call.generator()
    if iscoroutinefunction(function):
        return call.coroutine()
    if callable(policy) and iscoroutinefunction(policy):
        raise TypeError(f"on_contention is async, and {call.name} is not")
    return call.function()


def _decorate_class(plan: Plan, cls: type) -> type:
    if not issubclass(cls, View):
        raise TypeError(f"@mongo_locked goes on functions, methods and view classes, not on {cls.__name__}")
    dispatch: Any = cls.dispatch

    def run(view: View, request: HttpRequest, /, *args: Any, **kwargs: Any) -> Any:
        return dispatch(view, request, *args, **kwargs)

    async def arun(view: View, request: HttpRequest, /, *args: Any, **kwargs: Any) -> Any:
        return await dispatch(view, request, *args, **kwargs)

    locked = functools.wraps(dispatch)(arun if cls.view_is_async else run)
    # The key of last resort must be this class's own, also where it has inherited its dispatch().
    locked.__module__, locked.__qualname__ = cls.__module__, f"{cls.__qualname__}.dispatch"
    cls.dispatch = _decorate(plan, locked)  # type: ignore[method-assign]
    return cls
