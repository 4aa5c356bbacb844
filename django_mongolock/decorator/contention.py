"""The policies of ``on_contention``: what a decorated callable does when it cannot acquire its lock."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.utils.translation import gettext as _
from django.views import View

from ..conf import get_settings
from ..engine.logs import INFO, WARNING, log
from ..exceptions import LockBackendFailed, LockError, LockKeyInvalid, LockNotAcquired, LockReentry
from ..signals import lock_skipped, send

Policy = Literal["raise", "skip", "respond", "retry"] | Callable[..., Any]
#: Why a call could not acquire its lock.
Unlocked = LockError | LockKeyInvalid
POLICIES: Final = ("raise", "skip", "respond", "retry")
#: The Retry-After while MongoDB does not answer, in seconds.
RETRY_AFTER_FAILURE: Final = 5


class Skipped:
    """The type of `SKIPPED`, the false value that a call returns if it was skipped because its lock was busy."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "SKIPPED"

    def __reduce__(self) -> str:
        return "SKIPPED"

    def __json__(self) -> bool:
        """The value in a Celery result backend that stores JSON."""
        return False


#: What a skipped call returns. It is false.
SKIPPED: Final = Skipped()


def check_policy(policy: object) -> None:
    """Raise ValueError if *policy* is not a policy."""
    if policy not in POLICIES and not callable(policy):
        raise ValueError(f"on_contention is one of {', '.join(map(repr, POLICIES))}, or a callable, not {policy!r}")


def check_policy_call(policy: Policy, call: inspect.Signature, name: str) -> None:
    """Raise TypeError if *policy* is a callable that cannot be called with the error and the arguments of a *call*."""
    try:
        own = inspect.signature(policy) if callable(policy) else None
    except (TypeError, ValueError):  # written in C
        own = None
    if own is None:
        return
    plain = [each for each in call.parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    needed = [each for each in plain if each.default is each.empty]
    if not (_fits(own, plain) and _fits(own, needed)):
        raise TypeError(
            f"on_contention of {name} is called with the error and then the arguments of the call, as in "
            f"def busy(error, *args, **kwargs): {own} does not take (error, {', '.join(each.name for each in plain)})"
        )


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


def resolve(policy: Policy, error: Unlocked, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a call that could not acquire its lock. Raises *error*, or what the policy raises.

    A lock that this thread holds already (LockReentry) is a mistake in the code, not contention. And while MongoDB is
    away it is not known whether there is contention, so only "respond" and "retry" have an answer to that; only
    "respond" has one to a request that makes no key.
    """
    if policy == "raise" or isinstance(error, LockReentry):
        raise error
    if policy == "respond" and (request := find_request(args, kwargs)) is not None:
        for responder in _responders:
            responder(error, candidates(args, kwargs))
        return response(request, error)
    if policy == "retry" and isinstance(error, LockBackendFailed):
        return _registered("retry")(error)
    if policy == "respond" or not isinstance(error, LockNotAcquired):
        raise error
    if policy == "skip":
        log(INFO, "skipped, the lock is busy", key=error.key, template=error.template, holder=error.holder)
        send(lock_skipped, key=error.key, template=error.template, reason=error.holder or "")
        return SKIPPED
    if policy == "retry":
        return _registered("retry")(error)
    return policy(error, *args, **kwargs)


#: Registered by `contrib`: the policies that need another package, and what raises another framework's exceptions.
_policies: Final[dict[str, Callable[[LockError], Any]]] = {}
_responders: Final[list[Callable[[Unlocked, list[object]], None]]] = []
_deliveries: Final[list[Callable[[], Any]]] = []


def register_policy(name: str, act: Callable[[LockError], Any]) -> None:
    """Set what the policy *name* does. What *act* returns is the result of the call."""
    _policies[name] = act


def register_responder(responder: Callable[[Unlocked, list[object]], None]) -> None:
    """Have "respond" call *responder* with the error and the arguments among which a view has its request.

    It raises the exception from which its framework makes a response, or does nothing if the view is not its own.
    """
    if responder not in _responders:
        _responders.append(responder)


def register_deliveries(find: Callable[[], Any]) -> None:
    """Have decorated calls ask *find* for the deliveries of the task queue whose task runs, if one does: for
    ``returning()``, a context around each call; ``begin_delivery(using)``, before it acquires its lock; and
    ``refuse_second_delivery(error, using)``. Each may raise what ends the running delivery."""
    _deliveries[:] = [find]


def deliveries() -> Any:
    """See `register_deliveries`."""
    return _deliveries[0]() if _deliveries else None


def _registered(policy: str) -> Callable[[LockError], Any]:
    try:
        return _policies[policy]
    except KeyError:
        raise ImproperlyConfigured(
            f'on_contention="{policy}" is registered when Django starts: put "django_mongolock" into INSTALLED_APPS'
        ) from None


def find_request(args: tuple[Any, ...], kwargs: dict[str, Any]) -> HttpRequest | None:
    """The request among the arguments of a view: a function, a method of a view class, or a DRF view.

    Reads no attributes of the arguments except from their ``__dict__``: a model or lazy object could send a query.
    """
    for candidate in candidates(args, kwargs):
        inner = getattr(candidate, "__dict__", {}).get("_request", candidate)
        if issubclass(type(inner), HttpRequest):
            return cast(HttpRequest, inner)
    return None


def candidates(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[object]:
    """The arguments among which a view has its request."""
    candidates = [*args[:2], kwargs.get("request")]
    if args and issubclass(type(args[0]), View):
        candidates.append(getattr(args[0], "request", None))
    return candidates


@dataclass(frozen=True, slots=True)
class Refusal:
    """What the client gets: a status, the seconds to wait (0: not to try again), a code for programs and a sentence for
    people."""

    status: int
    after: int
    code: str
    message: str


class RequestRefused(LockKeyInvalid):
    """A request that is not served for a reason of its own, which *refusal* says."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def refusal(error: Unlocked) -> Refusal:
    """423 Locked while the lock is held, 503 while MongoDB does not answer, 400 for a request that makes no key. Raises
    any other *error*.

    It names neither the holder nor the key, since clients need not know them.
    """
    if isinstance(error, LockNotAcquired):
        message = _("This is in use at the moment. Please try again shortly.")
        return Refusal(get_settings().CONTENTION_STATUS, max(1, math.ceil(error.retry_after)), "locked", message)
    if isinstance(error, LockBackendFailed):
        message = _("This cannot be done at the moment. Please try again later.")
        return Refusal(503, RETRY_AFTER_FAILURE, "unavailable", message)
    if isinstance(error, RequestRefused):
        return error.refusal
    if isinstance(error, LockKeyInvalid):
        log(WARNING, "a request makes no lock key", error=error)
        return Refusal(400, 0, "invalid", _("This address or form is not valid."))
    raise error


def response(request: HttpRequest, error: Unlocked) -> HttpResponseBase:
    """The `refusal` with Retry-After, as JSON, HTML or plain text, according to the client's preference.

    The page is the template django_mongolock/contention.html, which a project may override.
    """
    refused = refusal(error)
    kind = request.get_preferred_type(["text/html", "application/json", "text/plain"])
    if kind == "application/json":
        facts = {"code": refused.code, "detail": refused.message, "retry_after": refused.after or None}
        made: HttpResponse = JsonResponse(facts, status=refused.status)
    else:
        page = _page(request, refused) if kind == "text/html" else None
        plain = None if page is not None else "text/plain; charset=utf-8"
        made = HttpResponse(page or refused.message, content_type=plain, status=refused.status)
    if refused.after:
        made.headers["Retry-After"] = str(refused.after)
    made.headers["Cache-Control"] = "no-store"
    return made


def _page(request: HttpRequest, refused: Refusal) -> str | None:
    """The page; None if the project's template engines do not find it."""
    try:
        return render_to_string("django_mongolock/contention.html", {"refusal": refused}, request)
    except (TemplateDoesNotExist, ImproperlyConfigured):
        return None
