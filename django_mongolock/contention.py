"""What a decorated callable does when its lock is not to be had: the policies of ``on_contention``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Literal, cast

from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.utils.translation import gettext as _
from django.views import View

from .conf import get_settings
from .engine.logs import INFO, log
from .exceptions import LockBackendError, LockError, LockNotAcquired, LockReentryError
from .signals import lock_skipped, send

Policy = Literal["raise", "skip", "respond", "retry"] | Callable[..., Any]
POLICIES: Final = ("raise", "skip", "respond", "retry")


class Skipped:
    """The type of `SKIPPED`, which a call returns that was skipped because its lock was busy. It is false."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "SKIPPED"

    def __reduce__(self) -> str:
        return "SKIPPED"

    def __json__(self) -> bool:
        """What a Celery result backend stores that writes JSON."""
        return False


SKIPPED: Final = Skipped()


def check_policy(policy: object) -> None:
    """Raise ValueError if this is no policy."""
    if policy not in POLICIES and not callable(policy):
        raise ValueError(f"on_contention is one of {', '.join(map(repr, POLICIES))}, or a callable, not {policy!r}")


def resolve(policy: Policy, error: LockError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the call returns instead of its own result. Raises *error*, or what the policy raises.

    A lock that this very thread holds already (LockReentryError) is a mistake in the code, not contention; and
    while MongoDB is away nobody knows if there is contention, so only "respond" has an answer to that.
    """
    if policy == "raise" or isinstance(error, LockReentryError):
        raise error
    if policy == "respond" and (request := find_request(args, kwargs)) is not None:
        return response(request, error)
    if policy == "respond" or not isinstance(error, LockNotAcquired):
        raise error
    if policy == "skip":
        log(INFO, "skipped, the lock is busy", key=error.key, template=error.template, holder=error.holder)
        send(lock_skipped, key=error.key, template=error.template, reason=error.holder or "")
        return SKIPPED
    if policy == "retry":
        from .contrib.celery import retry_current_task

        return retry_current_task(error)
    return policy(error, *args, **kwargs)


def find_request(args: tuple[Any, ...], kwargs: dict[str, Any]) -> HttpRequest | None:
    """The request among the arguments of a view: of a function, a method of a view class, or a DRF view.

    Asks arguments only for what they are: an attribute of a model or of a lazy object could cost a query.
    """
    candidates = [*args[:2], kwargs.get("request")]
    if args and issubclass(type(args[0]), View):
        candidates.append(getattr(args[0], "request", None))
    for candidate in candidates:
        inner = getattr(candidate, "__dict__", {}).get("_request", candidate)
        if issubclass(type(inner), HttpRequest):
            return cast(HttpRequest, inner)
    return None


def response(request: HttpRequest, error: LockError) -> HttpResponseBase:
    """423 Locked with Retry-After while somebody holds the lock; 503 while MongoDB cannot be asked.

    JSON where the client prefers it, else a plain page. It names neither the holder nor the key: whoever sends
    requests need not know them.
    """
    if isinstance(error, LockNotAcquired):
        status, after = get_settings().CONTENTION_STATUS, max(1, math.ceil(error.retry_after))
        code, message = "locked", _("Somebody else is working on this just now. Please try again in a moment.")
    elif isinstance(error, LockBackendError):
        status, after = 503, 5
        code, message = "unavailable", _("This cannot be done at the moment. Please try again later.")
    else:
        raise error
    if request.get_preferred_type(["text/html", "application/json"]) == "application/json":
        made: HttpResponse = JsonResponse({"code": code, "detail": message, "retry_after": after}, status=status)
    else:
        made = HttpResponse(message, content_type="text/plain; charset=utf-8", status=status)
    made.headers["Retry-After"] = str(after)
    made.headers["Cache-Control"] = "no-store"
    return made
