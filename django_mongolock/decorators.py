"""`mongo_locked`: a callable that runs under a lock."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, _AsyncGeneratorContextManager, _GeneratorContextManager, aclosing, contextmanager
from typing import Any, TypeVar, Unpack, overload

from asgiref.sync import iscoroutinefunction
from django.db import connections, transaction
from django.http import HttpRequest
from django.views import View

from .contention import SKIPPED, Policy, check_policy, find_request, resolve
from .context import current_request, task_owner
from .engine.document import check_key
from .engine.locks import MongoLock
from .exceptions import LockBackendError, LockNotAcquired
from .keys import KeyTemplate, LockKey, call_arguments
from .locks import LockOptions, check_options, mongo_lock

__all__ = ["SKIPPED", "mongo_locked"]

C = TypeVar("C", bound=Callable[..., Any])
KeyFunction = Callable[..., Any]


@overload
def mongo_locked(function: C, /) -> C: ...
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
    function is async). Generators know "raise" and "skip", which yields nothing.

    Every call has a lock of its own. A generator holds it until it ends or is closed. A view under ATOMIC_REQUESTS
    commits before its lock is released; what is done after the view has returned, such as sending a streaming
    response, is done without the lock. For a task, put it below ``@shared_task``; for a view class, on the class.
    Raises TypeError and ValueError at once for what it cannot decorate and for templates that do not fit.
    """
    if len(templates) == 1 and (callable(templates[0]) or isinstance(templates[0], (classmethod, property))):
        return _Decorator((), None, "raise", {})(templates[0])
    check_policy(on_contention)
    check_options(options)
    return _Decorator(templates, key, on_contention, options)


class _Decorator:
    """Makes a callable run under a lock. Keeps nothing of a call: calls run beside one another."""

    def __init__(self, templates: tuple[Any, ...], key: Any, policy: Policy, options: dict[str, Any]) -> None:
        if templates and key is not None:
            raise TypeError("give either templates or key=, not both")
        if key is not None and (not callable(key) or iscoroutinefunction(key)):
            raise TypeError("key= is a function, not async, that makes the key; a template goes without key=")
        for template in templates:
            check_key(template)
        self.templates = [KeyTemplate(template) for template in templates]
        self.key = key
        self.policy = policy
        self.options = options

    def __call__(self, function: Any) -> Any:
        if isinstance(function, type):
            return self._decorate_class(function)
        if hasattr(function, "apply_async"):
            raise TypeError("put @mongo_locked below the decorator that makes the Celery task, next to the function")
        if isinstance(function, (staticmethod, classmethod)) or not callable(function):
            raise TypeError(f"@mongo_locked goes on a function, not on a {type(function).__name__}: put it below that")
        call = _LockedCall(self, function)
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            if self.policy not in ("raise", "skip"):
                raise TypeError('a generator has nothing to return: its on_contention is "raise" or "skip"')
            wrapper = call.async_generator() if inspect.isasyncgenfunction(function) else call.generator()
        elif iscoroutinefunction(function):
            wrapper = call.coroutine()
        elif callable(self.policy) and iscoroutinefunction(self.policy):
            raise TypeError(f"on_contention is async, and {call.name} is not")
        else:
            wrapper = call.function()
            functools.update_wrapper(wrapper, function)
            _Deferred.put_on(wrapper, self)
            return wrapper
        return functools.update_wrapper(wrapper, function)

    def _decorate_class(self, cls: type) -> type:
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
        cls.dispatch = self(locked)  # type: ignore[method-assign]
        return cls


class _Deferred(set[str]):
    """What Django finds as ``_non_atomic_requests`` on a locked view: with it, Django opens no transaction of
    ATOMIC_REQUESTS around the lock, and *decorator* opens it inside. As a set, it has the aliases that the view
    itself wants no transaction on; ``@non_atomic_requests`` above the lock adds to them.
    """

    def __init__(self, decorator: _Decorator, declined: Iterable[str]) -> None:
        super().__init__(declined)
        self.decorator = decorator

    def __contains__(self, alias: object) -> bool:
        return True

    def wanted(self) -> list[str]:
        declined = super().__contains__
        return [alias for alias in _atomic_aliases() if not declined(alias)]

    @classmethod
    def put_on(cls, view: Any, decorator: _Decorator) -> None:
        """Where several locks are on one view, the innermost opens the transactions: leave its own there."""
        declined = getattr(view, "_non_atomic_requests", ())
        if not isinstance(declined, cls):
            view._non_atomic_requests = cls(decorator, declined)


def _atomic_aliases() -> list[str]:
    return [alias for alias, settings in connections.settings.items() if settings["ATOMIC_REQUESTS"]]


class _LockedCall:
    """The four ways to call a decorated function. Each makes a lock, calls, and gives the lock back."""

    def __init__(self, decorator: _Decorator, wrapped: Callable[..., Any]) -> None:
        self.decorator = decorator
        self.wrapped = wrapped
        self.policy = decorator.policy
        self.templates = decorator.templates
        self.key = decorator.key
        self.name = _dotted_name(wrapped)
        self.signature = _signature(wrapped)
        self.options = {"label": self.name[-200:], **decorator.options}
        if not self.templates and self.key is None and self.name.endswith("<lambda>"):
            raise TypeError("a lambda has no name to make a key of: give a template, or is it meant as key=?")
        for template in self.templates:
            template.check(self.signature, self.name)

    def lock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MongoLock:
        """A fresh lock for one call. That of a Celery task that would be redelivered belongs to the task's id."""
        options = self.options if "owner" in self.options else {**self.options, "owner": task_owner()}
        if self.key is not None:
            return mongo_lock(self.key(*args, **kwargs), **options)
        if not self.templates:
            return mongo_lock(LockKey(self.name, self.name), **options)
        arguments = call_arguments(self.signature, args, kwargs)
        keys = (LockKey(template.fill(arguments), template.template) for template in self.templates)
        return mongo_lock(*keys, **options)

    def function(self) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            request = self._request(args, kwargs)
            aliases = self._transactions(request)
            with _request_known(request):
                entered = False
                try:
                    with self.lock(args, kwargs):
                        entered = True
                        with _atomic(aliases):
                            return self._finished(self.wrapped(*args, **kwargs))
                except (LockNotAcquired, LockBackendError) as error:
                    if entered:
                        raise  # the function's own
                    return resolve(self.policy, error, args, kwargs)

        return wrapper

    def coroutine(self) -> Callable[..., Any]:
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            with _request_known(self._request(args, kwargs)):
                entered = False
                try:
                    async with self.lock(args, kwargs):
                        entered = True
                        return await self.wrapped(*args, **kwargs)
                except (LockNotAcquired, LockBackendError) as error:
                    if entered:
                        raise
                    result = resolve(self.policy, error, args, kwargs)
                    return await result if inspect.isawaitable(result) else result

        return wrapper

    def generator(self) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            entered = False
            try:
                with self.lock(args, kwargs):
                    entered = True
                    return (yield from self.wrapped(*args, **kwargs))
            except (LockNotAcquired, LockBackendError) as error:
                if entered:
                    raise
                return resolve(self.policy, error, args, kwargs)

        return wrapper

    def async_generator(self) -> Callable[..., Any]:
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            entered = False
            try:
                async with self.lock(args, kwargs), aclosing(self.wrapped(*args, **kwargs)) as items:
                    entered = True
                    step = anext(items)
                    while True:  # what `yield from` is to generators
                        try:
                            item = await step
                        except StopAsyncIteration:
                            return
                        try:
                            step = items.asend((yield item))
                        except GeneratorExit:
                            raise
                        except BaseException as error:  # noqa: BLE001 - all of it goes to the generator
                            step = items.athrow(error)
            except (LockNotAcquired, LockBackendError) as error:
                if entered:
                    raise
                resolve(self.policy, error, args, kwargs)

        return wrapper

    def _request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HttpRequest | None:
        request = find_request(args, kwargs)
        if request is not None and self.policy == "skip":
            raise TypeError(f'on_contention="skip" gives a view no response: use "respond" for {self.name}')
        if request is None and self.policy == "respond":
            raise TypeError(f'on_contention="respond" is for views: {self.name} was called without a request')
        return request

    def _transactions(self, request: HttpRequest | None) -> Sequence[str]:
        """The aliases on which ATOMIC_REQUESTS promises a transaction that Django has left to this lock."""
        match = request.resolver_match if request is not None else None
        if match is None or not (aliases := _atomic_aliases()):
            return ()
        declined = getattr(match.func, "_non_atomic_requests", ())
        if isinstance(declined, _Deferred):
            return declined.wanted() if declined.decorator is self.decorator else ()
        if opened := [alias for alias in aliases if alias not in declined]:
            raise RuntimeError(
                f"{self.name} is called inside the transaction that ATOMIC_REQUESTS opened on {opened[0]!r}, and its "
                "lock would be released before the commit: put @mongo_locked on the view function or view class that "
                "the URL names, or mark that @non_atomic_requests"
            )
        return ()

    def _finished(self, result: Any) -> Any:
        """Return *result*, unless it is work that would only begin after the lock was given back."""
        if inspect.isawaitable(result) or isinstance(result, _UNFINISHED):
            if inspect.iscoroutine(result):
                result.close()
            raise TypeError(
                f"{self.name} returned a {type(result).__name__}, which would run without the lock: put @mongo_locked "
                "right on the coroutine or generator function, or on the view class instead of its dispatch()"
            )
        return result


#: What a function returns that has not done its work yet.
_UNFINISHED = (Generator, AsyncGenerator, _GeneratorContextManager, _AsyncGeneratorContextManager)


@contextmanager
def _atomic(aliases: Sequence[str]) -> Iterator[None]:
    """A transaction on each of *aliases*."""
    with ExitStack() as stack:
        for alias in aliases:
            stack.enter_context(transaction.atomic(using=alias))
        yield


@contextmanager
def _request_known(request: HttpRequest | None) -> Iterator[HttpRequest | None]:
    """Let the lock record the view and user of *request*."""
    if request is None:
        yield None
        return
    token = current_request.set(request)
    try:
        yield request
    finally:
        current_request.reset(token)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """How *function* is called."""
    inner = inspect.unwrap(function, stop=lambda f: isinstance(f, functools.partial) or hasattr(f, "__signature__"))
    if isinstance(inner, functools.partial):
        # method_decorator() says of its partial of a bound method that it wraps the method, which has a `self` more.
        inner = functools.partial(inner.func, *inner.args, **inner.keywords)
    return inspect.signature(inner)


def _dotted_name(function: Callable[..., Any]) -> str:
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    if inspect.ismethod(inner):
        owner = inner.__self__ if isinstance(inner.__self__, type) else type(inner.__self__)
        return f"{owner.__module__}.{owner.__qualname__}.{inner.__name__}"
    if not hasattr(inner, "__qualname__"):
        inner = type(inner)
    return f"{inner.__module__}.{inner.__qualname__}"
