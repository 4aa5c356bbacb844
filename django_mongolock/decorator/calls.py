"""The four ways to call a decorated function. Each call makes a lock, calls, and releases the lock."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

from asgiref.sync import iscoroutinefunction, sync_to_async

from ..conf import get_settings
from ..context import serving, task_owner
from ..engine import clock
from ..engine.lock.transaction import finished
from ..engine.rule.options import LockOptions, Unset
from ..exceptions import LockBackendFailed, LockKeyInvalid, LockNotAcquired
from ..keys import KeyTemplate, LockKey, call_arguments
from ..locks import DjangoLock, make_lock
from .locked_command import sigterm_as_exit
from .policies import AGAIN, VARIABLE, CallFacts, Policy, Unlocked, find_request, policy_here
from .views import atomic, deferred_aliases, hold_while_streaming

#: Why a call has no lock: contention, a server that does not answer, a value of the call that makes no key.
_UNLOCKED = (LockNotAcquired, LockBackendFailed, LockKeyInvalid)
#: How much the latest hold counts in the mean of a function.
LATEST: Final = 0.2
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


#: The functions of the project's modules whose calls share one lock, although they have arguments: for a check.
shared_by_all: Final[set[str]] = set()


class LockedFunction:
    """Wraps one function. It keeps no state of a call, since calls run concurrently: each is a `LockedCall`."""

    def __init__(self, plan: LockPlan, wrapped: Callable[..., Any]) -> None:
        self.plan = plan
        self.wrapped = wrapped
        self.name = _dotted_name(wrapped)
        self.signature = _signature(wrapped)
        self.options = replace(plan.options, label=plan.options.label or self.name[-200:])
        #: For how many seconds its lock is usually held, as far as this process knows.
        self.usual: float | None = None
        self.is_generator = inspect.isgeneratorfunction(wrapped) or inspect.isasyncgenfunction(wrapped)
        if self.is_generator:
            plan.policy.accepts("generator", self.name)
        plan.policy.check(wrapped, self.signature, self.name)
        self._check_key()

    def _check_key(self) -> None:
        plan = self.plan
        for template in plan.templates:
            template.check(self.signature, self.name)
        if plan.templates or plan.key is not None:
            return
        if self.name.endswith("<lambda>"):
            raise TypeError("a lambda has no name that could be the key: give a template, or pass the lambda as key=")
        if not plan.default_key and _has_arguments(self.signature) and "<locals>" not in self.name:
            shared_by_all.add(self.name)

    def wrapper(self) -> Callable[..., Any]:
        """Return what runs each call under its lock, as the kind of the function needs it."""
        if self.is_generator:
            return self.async_generator() if inspect.isasyncgenfunction(self.wrapped) else self.generator()
        return self.coroutine() if iscoroutinefunction(self.wrapped) else self.function()

    def _call(self, args: Arguments, kwargs: Keywords) -> LockedCall:
        """A new call. Raises TypeError if the policy does not fit it."""
        call = LockedCall(self, args, kwargs)
        if not self.is_generator:
            call.request = find_request(args, kwargs)
            self.plan.policy.accepts("call" if call.request is None else "view", self.name)
        return call

    def _note(self, call: LockedCall, seconds: float) -> None:
        """Note how long the lock was held, for those who are refused: a mean in which the latest counts most."""
        if call.begun:
            self.usual = seconds if self.usual is None else self.usual + LATEST * (seconds - self.usual)

    def function(self) -> Callable[..., Any]:
        def attempt(call: LockedCall) -> Any:
            try:
                call.begin()
                # No ExitStack: a signal that strikes in its Python would leave the lock behind.
                with call.lock() as lock:
                    began = clock.now()
                    result = call.run(lock)
                    self._note(call, clock.now() - began)
                    hold_while_streaming(result, lock)
                    return result
            except _UNLOCKED as error:
                return call.refused(error)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = self._call(args, kwargs)
            with serving(call.request), sigterm_as_exit(only_in_commands=True):
                while (result := attempt(call)) is AGAIN:
                    time.sleep(call.pause)
                return result

        return wrapper

    def coroutine(self) -> Callable[..., Any]:
        async def attempt(call: LockedCall) -> Any:
            try:
                call.begin()
                async with call.lock() as lock:
                    began = clock.now()
                    result = await call.arun(lock)
                    self._note(call, clock.now() - began)
                    hold_while_streaming(result, lock)
                    return result
            except _UNLOCKED as error:
                result = await call.arefused(error)
                return await result if inspect.isawaitable(result) else result

        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = self._call(args, kwargs)
            with serving(call.request), sigterm_as_exit(only_in_commands=True):
                while (result := await attempt(call)) is AGAIN:  # noqa: ASYNC110 - another process ends the wait
                    await asyncio.sleep(call.pause)
                return result

        return wrapper

    def generator(self) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            call = self._call(args, kwargs)
            try:
                call.policy.begin(call)
                with call.lock():
                    call.begun = True
                    return (yield from self.wrapped(*args, **kwargs))
            except _UNLOCKED as error:
                return call.refused(error)

        return wrapper

    def async_generator(self) -> Callable[..., Any]:
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            call = self._call(args, kwargs)
            try:
                call.policy.begin(call)
                async with call.lock(), aclosing(self.wrapped(*args, **kwargs)) as items:
                    call.begun = True
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
                call.refused(error)

        return wrapper


class LockedCall(CallFacts):
    """One call of a decorated function.

    begun: whether the function itself was called; what it raises is its own.
    """

    begun = False

    def __init__(self, function: LockedFunction, args: Arguments, kwargs: Keywords) -> None:
        super().__init__(function.options, args, kwargs)
        self.function = function
        self.policy = policy_here(function.plan.policy)

    def begin(self) -> None:
        """Begin a try. Raises what the policy raises."""
        if self.tries == 0:
            self.policy.begin(self)
        self.trial = self.tries == 0 and self.policy.tries_first(self)

    def lock(self) -> DjangoLock:
        """Return a new lock. For a Celery task, its owner is the id of the task."""
        options, wait = self.options, 0.0 if self.trial else self.options.wait
        if isinstance(wait, Unset):
            wait = self.policy.first_wait(get_settings(), self)
        # Inside a transaction of ATOMIC_REQUESTS, the lock is released after it.
        release = options.release or ("on_commit" if self.request is not None else None)
        owner = options.owner or task_owner()
        lock = make_lock(self.keys(), options, wait=wait, owner=owner, release=release)
        self.lock_keys = lock.keys
        self.policy.made(self)
        return lock

    def keys(self) -> tuple[Any, ...]:
        """Return the keys of this call."""
        plan, function = self.function.plan, self.function
        if plan.key is not None:
            return (plan.key(*self.args, **self.kwargs),)
        if not plan.templates:
            name = f"{plan.default_key}{function.name}"
            return (LockKey(name, name),)
        arguments = call_arguments(function.signature, self.args, self.kwargs)
        return tuple(template.fill(arguments) for template in plan.templates)

    def run(self, lock: DjangoLock) -> Any:
        """Call the function under *lock*, in the transactions that Django leaves to it."""
        self.begun = True
        try:
            with atomic(deferred_aliases(self.request, self.function.plan)):
                return self.finished(self.function.wrapped(*self.args, **self.kwargs))
        except BaseException as error:
            if self.policy.gives_up(error):
                lock.release(early=True)
            raise

    async def arun(self, lock: DjangoLock) -> Any:
        """See run(). Django opens no transaction around an async view."""
        self.begun = True
        try:
            return self.finished(await self.function.wrapped(*self.args, **self.kwargs))
        except BaseException as error:
            if self.policy.gives_up(error):
                await lock.arelease(early=True)
            raise

    def refused(self, error: Unlocked) -> Any:
        """Return the result of a call that could not acquire its lock; or raise what is raised instead.

        If the function was called, *error* is its own, and is raised.
        """
        if self.begun:
            raise error
        self.tries += 1
        if isinstance(error, LockNotAcquired):
            error.usual = max(self.function.usual or 0.0, self.options.min_hold) or None
        return self.policy.refused(error, self)

    async def arefused(self, error: Unlocked) -> Any:
        """See refused(). A view's answer is made in a thread: the project's page may load the user of the request."""
        return self.refused(error) if self.request is None else await sync_to_async(self.refused)(error)

    def finished(self, result: Any) -> Any:
        """Return *result*; raise TypeError if it is work that would only begin after the release."""
        name = self.function.plan.name
        here = "directly on the coroutine or generator function, or on the view class instead of its dispatch()"
        return finished(result, self.function.name, f"put @{name} {here}")


@dataclass(frozen=True, eq=False)
class LockPlan:
    """The arguments of `mongo_locked`, or of the decorator with this *name*.

    default_key: what begins the key if there is neither a template nor a function for it, before the function's name.
    """

    policy: Policy
    options: LockOptions = LockOptions()  # noqa: RUF009 - it is frozen
    templates: tuple[KeyTemplate, ...] = ()
    key: Callable[..., Any] | None = None
    name: str = "mongo_locked"
    default_key: str = ""


def _has_arguments(signature: inspect.Signature) -> bool:
    """Whether calls may differ in more than the request."""
    named = {parameter.name for parameter in signature.parameters.values() if parameter.kind not in VARIABLE}
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
