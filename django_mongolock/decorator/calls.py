"""The four ways to call a decorated function. Each call makes a lock, calls, and releases the lock."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import _AsyncGeneratorContextManager, _GeneratorContextManager, aclosing, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from django.http import HttpRequest

from ..conf import get_settings
from ..context import is_redelivered, running_celery_task, serving, task_owner
from ..engine.lock.lock import MongoLock
from ..exceptions import LockBackendFailed, LockError, LockKeyInvalid, LockNotAcquired, LockReentry
from ..keys import KeyTemplate, LockKey, call_arguments
from ..locks import mongo_lock, mongo_semaphore
from .atomic_requests import atomic, deferred_aliases
from .contention import Policy, Unlocked, deliveries, find_request, resolve
from .streaming import hold_while_streaming

#: Why a call has no lock: contention, a server that does not answer, a value of the call that makes no key.
_UNLOCKED = (LockNotAcquired, LockBackendFailed, LockKeyInvalid)
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


#: The functions of the project's modules whose calls share one lock, although they have arguments: for a check.
shared_by_all: Final[set[str]] = set()


@dataclass(frozen=True, eq=False)
class Plan:
    """The arguments of `mongo_locked`, or of the decorator with this *name*."""

    templates: tuple[KeyTemplate, ...]
    key: Callable[..., Any] | None
    policy: Policy
    options: dict[str, Any]
    #: The arguments of `mongo_semaphore`, if it is one.
    semaphore: dict[str, Any] | None = None
    name: str = "mongo_locked"


class LockedCall:
    """Wraps one function. It keeps no state of a call, since calls run concurrently."""

    def __init__(self, plan: Plan, wrapped: Callable[..., Any]) -> None:
        self.plan = plan
        self.wrapped = wrapped
        self.policy = plan.policy
        self.name = _dotted_name(wrapped)
        self.signature = _signature(wrapped)
        self.options = {"label": self.name[-200:], **plan.options}
        if not plan.templates and plan.key is None and self.name.endswith("<lambda>"):
            raise TypeError("a lambda has no name that could be the key: give a template, or pass the lambda as key=")
        for template in plan.templates:
            template.check(self.signature, self.name)
        keyless = plan.name == "mongo_locked" and not plan.templates and plan.key is None
        if keyless and _has_arguments(self.signature) and "<locals>" not in self.name:
            shared_by_all.add(self.name)

    def lock(
        self, args: Arguments, kwargs: Keywords, request: HttpRequest | None = None, *, trial: bool = False
    ) -> MongoLock:
        """A new lock for one call. For a Celery task, its owner is the id of the task. trial: it does not wait."""
        options = {"wait": self._wait(request), "owner": task_owner(), **self.options}
        if trial:
            options["wait"] = 0.0
        if request is not None:
            # Inside a transaction of ATOMIC_REQUESTS, the lock is released after it.
            options.setdefault("release", "on_commit")
        if self.plan.semaphore is not None:
            (key,) = self._keys(args, kwargs)
            return mongo_semaphore(key, **self.plan.semaphore, **options)
        return mongo_lock(*self._keys(args, kwargs), **options)

    def _keys(self, args: Arguments, kwargs: Keywords) -> list[Any]:
        if self.plan.key is not None:
            return [self.plan.key(*args, **kwargs)]
        if not self.plan.templates:
            return [LockKey(self.name, self.name)]
        arguments = call_arguments(self.signature, args, kwargs)
        return [template.fill(arguments) for template in self.plan.templates]

    def _wait(self, request: HttpRequest | None) -> float | None:
        """How long to wait unless wait= says: briefly in a view, and where the call does something else instead."""
        settings = get_settings()
        if self.policy == "skip":
            return 0.0
        if request is None and self.policy != "retry":
            return settings.WAIT
        return settings.SHORT_WAIT if settings.WAIT is None else min(settings.SHORT_WAIT, settings.WAIT)

    @property
    def _comes_back(self) -> bool:
        """Whether this is a call of a Celery task that can wait outside of the pool of its worker."""
        return self.policy == "retry" and "wait" not in self.options and running_celery_task() is not None

    def _waits_after(self, error: LockError) -> bool:
        """Whether a task whose first try was refused waits in the pool.

        One that can wait outside of it does so only for a lock that is held for a moment, and that no other waits for:
        it takes the lock over at once, and of each key, one task waits in the pools.
        """
        if isinstance(error, LockReentry) or not self._comes_back:
            return not isinstance(error, LockReentry)
        return isinstance(error, LockNotAcquired) and not error.waiting and error.held_for < get_settings().SHORT_WAIT

    def function(self) -> Callable[..., Any]:
        def call(args: Arguments, kwargs: Keywords, request: HttpRequest | None, *, first: bool = True) -> Any:
            found = deliveries()
            aliases = deferred_aliases(request, self.plan)
            trial, entered = first and (self._comes_back or is_redelivered()), False
            try:
                if first and found is not None:
                    found.begin_delivery(self.options.get("using"))
                # No ExitStack: a signal that strikes in its Python would leave the lock behind.
                with self.lock(args, kwargs, request, trial=trial) as lock:
                    entered = True
                    result = self._run(lock, args, kwargs, aliases)
                    hold_while_streaming(result, lock)
                    return result
            except _UNLOCKED as error:
                if entered:
                    raise  # the function's own
                return self._refused(error, args, kwargs, trial=trial)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            request, found = self._request(args, kwargs), deliveries()
            with serving(request), found.returning() if found is not None else nullcontext():
                try:
                    return call(args, kwargs, request)
                except _WaitAfterAll:
                    return call(args, kwargs, request, first=False)

        return wrapper

    def coroutine(self) -> Callable[..., Any]:
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            request = self._request(args, kwargs)
            with serving(request):
                entered = False
                try:
                    async with self.lock(args, kwargs, request) as lock:
                        entered = True
                        result = await self._arun(lock, args, kwargs)
                        hold_while_streaming(result, lock)
                        return result
                except _UNLOCKED as error:
                    if entered:
                        raise
                    result = self._refused(error, args, kwargs)
                    return await result if inspect.isawaitable(result) else result

        return wrapper

    def generator(self) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            entered = False
            try:
                with self.lock(args, kwargs):
                    entered = True
                    return (yield from self.wrapped(*args, **kwargs))
            except _UNLOCKED as error:
                if entered:
                    raise
                return self._refused(error, args, kwargs)

        return wrapper

    def async_generator(self) -> Callable[..., Any]:
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            entered = False
            try:
                async with self.lock(args, kwargs), aclosing(self.wrapped(*args, **kwargs)) as items:
                    entered = True
                    step = anext(items)
                    while True:  # as `yield from` does in a generator
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
            except _UNLOCKED as error:
                if entered:
                    raise
                self._refused(error, args, kwargs)

        return wrapper

    def _run(self, lock: MongoLock, args: Arguments, kwargs: Keywords, aliases: Sequence[str]) -> Any:
        """Call the function under *lock*, in transactions on *aliases*."""
        with atomic(aliases):
            return self._finished(self.wrapped(*args, **kwargs))

    async def _arun(self, lock: MongoLock, args: Arguments, kwargs: Keywords) -> Any:
        """See _run()."""
        return await self.wrapped(*args, **kwargs)

    def _refused(self, error: Unlocked, args: Arguments, kwargs: Keywords, *, trial: bool = False) -> Any:
        """The result of a call that could not acquire its lock; or raise what is raised instead."""
        if isinstance(error, LockKeyInvalid):
            return resolve(self.policy, error, args, kwargs)
        if (found := deliveries()) is not None and not isinstance(error, LockReentry):
            found.refuse_second_delivery(error, self.options.get("using"))
        if trial and self._waits_after(error):
            raise _WaitAfterAll from None
        return resolve(self.policy, error, args, kwargs)

    def _request(self, args: Arguments, kwargs: Keywords) -> HttpRequest | None:
        request = find_request(args, kwargs)
        if request is not None and self.policy in ("skip", "retry"):
            raise TypeError(f'on_contention="{self.policy}" makes no response: use "respond" for {self.name}')
        if request is None and self.policy == "respond":
            raise TypeError(f'on_contention="respond" is for views: {self.name} was called without a request')
        return request

    def _finished(self, result: Any) -> Any:
        """Return *result*; raise TypeError if it is work that would only begin after the release."""
        if inspect.isawaitable(result) or isinstance(result, _UNFINISHED):
            if inspect.iscoroutine(result):
                result.close()
            raise TypeError(
                f"{self.name} returned a {type(result).__name__}, which would run without the lock: "
                f"put @{self.plan.name} directly on the coroutine or generator function, "
                "or on the view class instead of its dispatch()"
            )
        return result


class _WaitAfterAll(Exception):
    """The first try of a task was refused: wait for the lock."""


#: The types of results that have not done their work yet.
_UNFINISHED = (Generator, AsyncGenerator, _GeneratorContextManager, _AsyncGeneratorContextManager)


def _has_arguments(signature: inspect.Signature) -> bool:
    """Whether calls may differ in more than the request."""
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    named = {parameter.name for parameter in signature.parameters.values() if parameter.kind not in variable}
    return bool(named - {"self", "cls", "request"})


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature by which *function* is called."""
    inner = inspect.unwrap(function, stop=lambda f: isinstance(f, functools.partial) or hasattr(f, "__signature__"))
    if isinstance(inner, functools.partial):
        # method_decorator() marks its partial of a bound method as wrapping the method, which has `self` besides.
        inner = functools.partial(inner.func, *inner.args, **inner.keywords)
    return inspect.signature(inner)


def resolved_signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of *function* with annotations that are text resolved, or None if that is not possible or needed.

    Code that reads the annotations of a wrapper, as django-ninja does, would look their names up in the wrong module.
    """
    try:
        plain = inspect.signature(function)
        annotations = [parameter.annotation for parameter in plain.parameters.values()]
        if not any(isinstance(annotation, str) for annotation in (*annotations, plain.return_annotation)):
            return None
        return inspect.signature(function, eval_str=True)
    except Exception:  # noqa: BLE001 - annotations may raise anything: they stay text
        return None


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
