"""What is sent again is not done again. An app of its own: "django_mongolock.idempotency" in INSTALLED_APPS."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, Never, TypeVar

from asgiref.sync import iscoroutinefunction

from ..conf import used_apps
from ..decorator import decorate
from ..decorator.calls import LockPlan
from ..decorator.policies import find_request
from ..engine.rule.options import Seconds, check_flag, check_seconds
from ..engine.text_checks import check_key
from ..keys import KeyTemplate
from ..locks import chosen
from .calls import IdempotentCall, KeepResponse, KeepResult, KeepRules

__all__ = ["idempotent"]

C = TypeVar("C", bound=Callable[..., Any])
#: The name of a header.
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def idempotent(
    *functions: Never,
    header: str = "Idempotency-Key",
    keep: Seconds = timedelta(days=1),
    required: bool = True,
    client: Callable[[Any], str] | None = None,
    key: str | None = None,
    lease: Seconds | None = None,
    using: str | None = None,
    **unknown: Never,
) -> Callable[[C], C]:
    """Run a view once for each Idempotency-Key of a client, or a task once for each key; later calls get its result.

    The first request with a key runs under a lock, and its response is kept. A later one with the same method, address
    and body gets it again, marked by the header Idempotent-Replayed; another one gets 422. While the first one runs, it
    gets 409 with Retry-After. A header that is missing (if *required*), unreadable or too long gets 400. GET, HEAD and
    OPTIONS run as always.

    keep: for how long, in seconds or as a `timedelta`. Not kept are exceptions, responses that mean "try again" (from
    500 on, 408, 423, 425, 429, or with Retry-After), and cookies; the next request runs. Instead of a response above a
    million bytes, 410 is kept; so it is if a function of ``transaction.on_commit`` raises: the work is committed. A
    streaming response raises LockMisused, as does a call inside of a transaction.

    A key belongs to the user that the request is authenticated as, or to its session; without these it gets 403.
    client: a function that returns another name for the client: ``client=lambda request: request.auth.name``.

    key: for a task, or any function: a template as in `mongo_locked`, ``"charge:{order_id}"``. Its result must be JSON;
    of one that is not, or is too large, only the fact is kept, and later calls return `SKIPPED`. While the first one
    runs, a Celery task comes back later, and any other call raises LockNotAcquired.

    A run that dies has kept nothing: after its *lease*, the next one runs. So does one after a run that lost its lock,
    which stores nothing and raises LockLost. lease, using: those of `mongo_lock`.
    """
    if functions:
        raise TypeError("write @idempotent(), with brackets")
    known = ["header", "keep", "required", "client", "key", "lease", "using"]
    options = chosen({"lease": lease, "using": using, **unknown}, known)
    given: Any = header, client
    if not (isinstance(given[0], str) and _TOKEN.fullmatch(header)):
        raise TypeError(f'header is the name of an HTTP header, such as "Idempotency-Key", not {header!r}')
    check_flag("required", required)
    if client is not None and (not callable(given[1]) or iscoroutinefunction(client)):
        raise TypeError("client must be a function, not async, that takes the request and returns text")
    if key is not None and (client is not None or not required):
        raise TypeError("key= is for tasks, which have no request: client= and required= are for views")
    rules = KeepRules(header, check_seconds("keep", keep), required, client)
    plan = LockPlan(KeepResponse(), options, name="idempotent", kind_of_call=partial(IdempotentCall, rules))
    if key is None:
        plan = replace(plan, key=find_request, options=replace(options, wait=0.0))
    else:
        plan = replace(plan, policy=KeepResult(), templates=(KeyTemplate(check_key(key)),))
    return partial(_decorate, plan)


def _decorate(plan: LockPlan, function: Any) -> Any:
    if hasattr(getattr(function, "cls", function), "authentication_classes"):
        raise TypeError("put @idempotent below @api_view, or on the methods of the class: around it, users are unknown")
    return decorate(plan, function)


#: It removes what is kept too long.
used_apps["django_mongolock.idempotency"] = "@idempotent"
