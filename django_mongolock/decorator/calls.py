"""The four kinds of decorated calls. Each call makes a lock, calls the function, and releases the lock."""

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

#: The errors of a call without a lock: contention, a server that does not answer, a value that makes no key.
_UNLOCKED = (LockNotAcquired, LockBackendFailed, LockKeyInvalid)
#: The weight of the latest hold in the mean of a function.
LATEST: Final = 0.2
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


#: The functions of the project's modules whose calls share one lock although they have arguments, for a check.
shared_by_all: Final[set[str]] = set()


class LockedFunction:
    """The wrapper of one function. Calls run concurrently, so the state of a call is in a `LockedCall`."""

    def __init__(self, plan: LockPlan, wrapped: Callable[..., Any]) -> None:
        self.plan = plan
        self.wrapped = wrapped
        self.name = _dotted_name(wrapped)
        self.signature = _signature(wrapped)
        self.options = replace(plan.options, label=plan.options.label or self.name[-200:])
        #: The seconds for which its lock is usually held, as far as this process knows.
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
        """Return the wrapper that runs each call under its lock, of the same kind as the function."""
        if self.is_generator:
            return self.async_generator() if inspect.isasyncgenfunction(self.wrapped) else self.generator()
        return self.coroutine() if iscoroutinefunction(self.wrapped) else self.function()

    def _call(self, args: Arguments, kwargs: Keywords) -> LockedCall:
        """Return a new call. Raises TypeError if the policy does not fit the call."""
        call = LockedCall(self, args, kwargs)
        if not self.is_generator:
            call.request = find_request(args, kwargs)
            self.plan.policy.accepts("call" if call.request is None else "view", self.name)
        return call

    def _note(self, call: LockedCall, seconds: float) -> None:
        """Add a hold to the mean for refused callers. The latest hold has the most weight."""
        if call.begun:
            self.usual = seconds if self.usual is None else self.usual + LATEST * (seconds - self.usual)

    def function(self) -> Callable[..., Any]:
        def attempt(call: LockedCall) -> Any:
            try:
                call.begin()
                # Do not use ExitStack. A signal that interrupts its Python code would leave the lock behind.
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

    - begun: whether the function itself was called. Errors after that are the function's own.
    """

    begun = False

    def __init__(self, function: LockedFunction, args: Arguments, kwargs: Keywords) -> None:
        super().__init__(function.options, args, kwargs)
        self.function = function
        self.policy = policy_here(function.plan.policy)

    def begin(self) -> None:
        """Begin a try. Raises the errors of the policy."""
        if self.tries == 0:
            self.policy.begin(self)
        self.trial = self.tries == 0 and self.policy.tries_first(self)

    def lock(self) -> DjangoLock:
        """Return a new lock. In a Celery task, the owner of the lock is the id of the task."""
        options, wait = self.options, 0.0 if self.trial else self.options.wait
        if isinstance(wait, Unset):
            wait = self.policy.first_wait(get_settings(), self)
        # Inside a transaction of ATOMIC_REQUESTS, release the lock after the transaction.
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
        """Return the result of a call that could not acquire its lock, or raise the policy's error.

        If the function was called, *error* is the function's own, and is raised.
        """
        if self.begun:
            raise error
        self.tries += 1
        if isinstance(error, LockNotAcquired):
            error.usual = max(self.function.usual or 0.0, self.options.min_hold) or None
        return self.policy.refused(error, self)

    async def arefused(self, error: Unlocked) -> Any:
        """See refused().

        A thread makes the answer of a view, because the project's page may load the user of the request.
        """
        return self.refused(error) if self.request is None else await sync_to_async(self.refused)(error)

    def finished(self, result: Any) -> Any:
        """Return *result*. Raises TypeError if the work would only begin after the release."""
        name = self.function.plan.name
        here = "directly on the coroutine or generator function, or on the view class instead of its dispatch()"
        return finished(result, self.function.name, f"put @{name} {here}")


@dataclass(frozen=True, eq=False)
class LockPlan:
    """The arguments of `mongo_locked`, or of the decorator with this *name*.

    - default_key: prefix of the function's name in the key, if neither a template nor a function for the key is given.
    """

    policy: Policy
    options: LockOptions = LockOptions()  # noqa: RUF009 - it is frozen
    templates: tuple[KeyTemplate, ...] = ()
    key: Callable[..., Any] | None = None
    name: str = "mongo_locked"
    default_key: str = ""


def _has_arguments(signature: inspect.Signature) -> bool:
    """Return whether calls may differ in more than the request."""
    named = {parameter.name for parameter in signature.parameters.values() if parameter.kind not in VARIABLE}
    return bool(named - {"self", "cls", "request"})


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature by which *function* is called."""
    inner = inspect.unwrap(function, stop=lambda f: isinstance(f, functools.partial) or hasattr(f, "__signature__"))
    if isinstance(inner, functools.partial):
        # method_decorator() marks its partial of a bound method as a wrapper of the method. The method has `self`
        # besides.
        inner = functools.partial(inner.func, *inner.args, **inner.keywords)
    return inspect.signature(inner)


def resolved_signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of *function* with text annotations resolved, or None if that is impossible or unnecessary.

    Code that reads the annotations of a wrapper, as django-ninja does, would look up their names in the wrong module.
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
