"""The policies of ``on_contention``. Each class is one reaction of a decorated call that cannot acquire its lock."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Literal, cast

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.views import View

from ..conf import LockSettings
from ..engine import clock
from ..engine.logs import INFO, log
from ..engine.rule.options import LockOptions
from ..exceptions import LockBackendFailed, LockError, LockKeyInvalid, LockNotAcquired, LockReentry
from ..signals import lock_skipped, send
from .views import make_response

__all__ = ["CallFacts", "Policy"]

#: The errors of a call that could not acquire its lock.
Unlocked = LockError | LockKeyInvalid
#: The kind of the decorated callable.
CallKind = Literal["view", "call", "generator"]
#: The return value of `Policy.refused` that makes the call try again and wait for its lock.
AGAIN: Final = object()
#: The error messages for a policy that does not fit the callable.
_UNFIT: Final[Mapping[CallKind, str]] = {
    "view": 'on_contention="{policy}" makes no response: use "respond" for {name}',
    "call": 'on_contention="{policy}" is for views: {name} was called without a request. A Celery task takes "retry"',
    "generator": 'a generator returns no result: its on_contention must be "raise" or "skip"',
}


class CallFacts:
    """The facts about a call that a policy knows.

    - request: request of a view.
    - trial: whether this is a first try without a wait.
    - began: start of the call, by the local clock.
    - tries: number of times that the call has been refused.
    - pause: seconds until its next try.
    - lock_keys: keys of its lock, as they are stored.
    """

    def __init__(self, options: LockOptions, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.options, self.args, self.kwargs = options, args, kwargs
        self.request: HttpRequest | None = None
        self.trial = False
        self.began = clock.now()
        self.tries = 0
        self.pause = 0.0
        self.lock_keys: tuple[str, ...] = ()


class Policy:
    """The reaction of a call that cannot acquire its lock.

    - name: value of ``on_contention=``.
    - kinds: kinds of callables that the policy fits.
    - unfit: error messages for the other kinds.
    - answers: errors that the policy has an answer to. All other errors are raised. A LockReentry is always raised,
      because it is a mistake in the code.

    While MongoDB does not answer, nobody knows whether the lock is busy. Only "respond" and "retry" have an answer
    then. In a Celery task, `InTask` acts for the policy. Generators call only `begin` and `refused`.
    """

    name: ClassVar[str] = ""
    kinds: ClassVar[tuple[CallKind, ...]] = ("view", "call")
    unfit: ClassVar[Mapping[CallKind, str]] = _UNFIT
    answers: ClassVar[tuple[type[Exception], ...]] = (LockNotAcquired,)

    def accepts(self, kind: CallKind, name: str) -> None:
        """Raise TypeError if the policy does not fit a callable of this *kind* and *name*."""
        if kind not in self.kinds:
            raise TypeError(self.unfit[kind].format(policy=self.name, name=name))

    def check(self, function: Callable[..., Any], signature: inspect.Signature, name: str) -> None:
        """Raise TypeError if the policy does not fit a *function* with this *signature*."""

    def first_wait(self, settings: LockSettings, call: CallFacts) -> float | None:
        """Return the seconds that a call waits if its options do not say."""
        return settings.WAIT if call.request is None else settings.short_wait

    def refused(self, error: Unlocked, call: CallFacts) -> Any:
        """Return the result of a call without its lock. Raises *error*, or the policy's own error."""
        if isinstance(error, LockReentry) or not isinstance(error, self.answers):
            raise error
        return self.answer(error, call)

    def answer(self, error: Any, call: CallFacts) -> Any:
        """Return the result of a call that got one of the errors in `answers`."""
        raise error

    # Few policies need to change these.

    def comes_back(self, error: Unlocked) -> bool:
        """Return whether a Celery task that gets this error is sent again."""
        return False

    def tries_first(self, call: CallFacts) -> bool:
        """Return whether a call first tries without waiting."""
        return False

    def begin(self, call: CallFacts) -> None:
        """Prepare the call before its first try."""

    def made(self, call: CallFacts) -> None:
        """Inspect the lock that was made for a try of the call."""

    def gives_up(self, error: BaseException) -> bool:
        """Return whether a call that raises *error* gives up the minimum hold of its lock."""
        return False


class Raise(Policy):
    """The policy that raises the error."""

    name = "raise"
    kinds = ("view", "call", "generator")


class Skip(Policy):
    """The policy by which the call returns `SKIPPED`."""

    name = "skip"
    kinds: ClassVar[tuple[CallKind, ...]] = ("call", "generator")

    def first_wait(self, settings: LockSettings, call: CallFacts) -> float | None:
        """Return 0 for a single try, because a skipped call has nothing to wait for."""
        return 0.0

    def answer(self, error: LockNotAcquired, call: CallFacts) -> Any:
        """Return `SKIPPED`, and send the signal."""
        log(INFO, "skipped, the lock is busy", key=error.key, template=error.template, holder=error.holder)
        send(lock_skipped, key=error.key, template=error.template, reason=error.holder or "")
        return SKIPPED


class Respond(Policy):
    """The policy by which a view answers 423 with Retry-After.

    The answer is 503 while MongoDB does not answer, and 400 if the request makes no key.
    """

    name = "respond"
    kinds = ("view",)
    answers = (LockNotAcquired, LockBackendFailed, LockKeyInvalid)

    def answer(self, error: Unlocked, call: CallFacts) -> Any:
        """Return the response, or raise the exception from which another framework makes the response."""
        for responder in responders:
            responder(error, candidates(call.args, call.kwargs))
        return make_response(cast(HttpRequest, call.request), error)


class Retry(Policy):
    """The policy by which a Celery task comes back later.

    In a task, `contrib.celery.retry_task.InTask` acts for this policy. Elsewhere this policy raises the error.
    """

    name = "retry"
    kinds = ("call",)
    answers = (LockNotAcquired, LockBackendFailed)

    def first_wait(self, settings: LockSettings, call: CallFacts) -> float | None:
        """Return a short wait, because a task that comes back takes no place in the pool of its worker."""
        return settings.short_wait

    def comes_back(self, error: Unlocked) -> bool:
        """See Policy.comes_back()."""
        return isinstance(error, self.answers) and not isinstance(error, LockReentry)


class CallFunction(Policy):
    """The policy that calls the project's own function with the error and the arguments of the call."""

    name = "a function"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def check(self, function: Callable[..., Any], signature: inspect.Signature, name: str) -> None:
        """See Policy.check(). The function must accept the error and the arguments of each call."""
        if iscoroutinefunction(self.function) and not iscoroutinefunction(function):
            raise TypeError(f"on_contention is async, but {name} is not")
        try:
            own = inspect.signature(self.function)
        except (TypeError, ValueError):  # written in C
            return
        plain = [each for each in signature.parameters.values() if each.kind not in VARIABLE]
        needed = [each for each in plain if each.default is each.empty]
        if not (_fits(own, plain) and _fits(own, needed)):
            names = ", ".join(["error", *(each.name for each in plain)])
            raise TypeError(
                f"on_contention of {name} is called with the error and then the arguments of the call, as in "
                f"def busy(error, *args, **kwargs): {own} does not take ({names})"
            )

    def answer(self, error: LockNotAcquired, call: CallFacts) -> Any:
        """Return the result of the function."""
        return self.function(error, *call.args, **call.kwargs)


#: The policies with a name.
POLICIES: Final[dict[str, Policy]] = {each.name: each for each in (Raise(), Skip(), Respond(), Retry())}


def as_policy(given: object) -> Policy:
    """Return the policy for an ``on_contention=``: a name, a function or a policy. Raises ValueError."""
    if isinstance(given, Policy):
        return given
    if callable(given):
        return CallFunction(given)
    if isinstance(given, str) and given in POLICIES:
        return POLICIES[given]
    raise ValueError(f"on_contention is one of {', '.join(map(repr, POLICIES))}, or a callable, not {given!r}")


#: The kinds of parameters that take all other arguments.
VARIABLE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _fits(own: inspect.Signature, given: list[inspect.Parameter]) -> bool:
    """Return whether *given* can be passed, some by position and the rest by name."""
    for count in range(len(given) + 1):
        first, rest = given[:count], given[count:]
        if any(each.kind is each.KEYWORD_ONLY for each in first) or any(
            each.kind is each.POSITIONAL_ONLY for each in rest
        ):
            continue
        try:
            own.bind(None, *first, **{each.name: each for each in rest})
        except TypeError:
            continue
        return True
    return False


# The hooks of `contrib`

#: Functions that turn a policy into the one for a task of a queue. `contrib.register` adds them.
adapters: Final[list[Callable[[Policy], Policy]]] = []
#: Functions that get the arguments of a view and raise the exception from which its framework makes a response.
responders: Final[list[Callable[[Unlocked, list[object]], None]]] = []


def policy_here(policy: Policy) -> Policy:
    """Return the policy to use in the present context."""
    for adapt in adapters:
        policy = adapt(policy)
    return policy


def find_request(args: tuple[Any, ...], kwargs: dict[str, Any]) -> HttpRequest | None:
    """Return the request among the arguments of a view (a function, a method of a view class, or a DRF view).

    Only the ``__dict__`` of the arguments is read. Other attributes of a model or a lazy object could send a query.
    """
    for candidate in candidates(args, kwargs):
        inner = getattr(candidate, "__dict__", {}).get("_request", candidate)
        if issubclass(type(inner), HttpRequest):
            return cast(HttpRequest, inner)
    return None


def candidates(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[object]:
    """Return the arguments of a view that may be its request."""
    candidates = [*args[:2], kwargs.get("request")]
    if args and issubclass(type(args[0]), View):
        candidates.append(getattr(args[0], "request", None))
    return candidates


class Skipped:
    """The type of `SKIPPED`, the false value of a call that was skipped because its lock was busy."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "SKIPPED"

    def __reduce__(self) -> str:
        return "SKIPPED"

    def __json__(self) -> bool:
        """Return the value for a Celery result backend that stores JSON."""
        return False


SKIPPED: Final = Skipped()
