"""The response of a view that cannot acquire its lock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.utils.translation import gettext as _

from ..conf import get_settings
from ..engine.logs import WARNING, log
from ..exceptions import LockBackendFailed, LockError, LockKeyInvalid, LockNotAcquired

#: The Retry-After while MongoDB does not answer, in seconds.
RETRY_AFTER_FAILURE: Final = 5


@dataclass(frozen=True, slots=True)
class HttpRefusal:
    """What the client gets: a status, the seconds to wait (0: not to try again), a code for programs and a sentence for
    people."""

    status: int
    after: int
    code: str
    message: str


class RequestRefused(LockKeyInvalid):
    """A request that is not served for a reason of its own, which *refusal* says."""

    def __init__(self, refusal: HttpRefusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def seconds_until(error: LockNotAcquired) -> int:
    """Return in how many seconds it makes sense to try again (`LockNotAcquired.come_back_in`), in whole seconds."""
    return math.ceil(error.come_back_in)


def refusal(error: LockError | LockKeyInvalid) -> HttpRefusal:
    """423 Locked while the lock is held, 503 while MongoDB does not answer, 400 for a request that makes no key. Raises
    any other *error*.

    It names neither the holder nor the key, since clients need not know them.
    """
    if isinstance(error, LockNotAcquired):
        message = _("This is in use at the moment. Please try again shortly.")
        return HttpRefusal(get_settings().CONTENTION_STATUS, seconds_until(error), "locked", message)
    if isinstance(error, LockBackendFailed):
        message = _("This cannot be done at the moment. Please try again later.")
        return HttpRefusal(503, RETRY_AFTER_FAILURE, "unavailable", message)
    if isinstance(error, RequestRefused):
        return error.refusal
    if isinstance(error, LockKeyInvalid):
        log(WARNING, "a request makes no lock key", error=error)
        return HttpRefusal(400, 0, "invalid", _("This address or form is not valid."))
    raise error


def make_response(request: HttpRequest, error: LockError | LockKeyInvalid) -> HttpResponseBase:
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


def _page(request: HttpRequest, refused: HttpRefusal) -> str | None:
    """The page; None if the project's template engines do not find it."""
    try:
        return render_to_string("django_mongolock/contention.html", {"refusal": refused}, request)
    except (TemplateDoesNotExist, ImproperlyConfigured):
        return None
