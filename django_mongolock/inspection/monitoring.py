"""`lock_status`: the facts of the dashboard as JSON, for monitoring programs."""

from __future__ import annotations

import base64
from typing import Any, Final

from django.contrib.auth import authenticate
from django.contrib.auth.models import AbstractUser, AnonymousUser
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_safe

from ..conf import get_settings
from ..engine.text_checks import tidy_fact
from ..exceptions import LockBackendFailed
from .as_json import problem_as_json, status_as_json
from .status import Alarm, current_status

PERMISSION: Final = "django_mongolock.view_lock_status"

User = AbstractUser | AnonymousUser


@never_cache
@require_safe
def lock_status(request: HttpRequest) -> HttpResponse:
    """Report the status of the locks to a user with the permission ``django_mongolock.view_lock_status``.

    The user is logged in, or sends HTTP basic authentication where MONGOLOCK["STATUS_BASIC_AUTH"] is on, and need not
    be of the staff. 401: neither; 403, if basic authentication is off. 403: without the permission. 503: MongoDB does
    not answer. Otherwise 200; "problems" lists what needs a person. The admin has this view at
    ``admin:django_mongolock_lock_status``; you can route it elsewhere as well.
    """
    is_basic = get_settings().STATUS_BASIC_AUTH
    user = _user(request, is_basic=is_basic)
    if not user.is_authenticated and not is_basic:
        return JsonResponse({"error": "log in: basic authentication is off"}, status=403)
    if not user.is_authenticated:
        headers = {"WWW-Authenticate": 'Basic realm="locks", charset="UTF-8"'}
        return JsonResponse({"error": "log in, or use basic authentication"}, status=401, headers=headers)
    if not user.has_perm(PERMISSION):
        return JsonResponse({"error": f"this needs the permission {PERMISSION}"}, status=403)
    try:
        return JsonResponse(status_as_json(current_status()))
    except LockBackendFailed as error:
        problems = [problem_as_json(Alarm.SERVER, 1, error.problem)]
        return JsonResponse({"error": error.problem, "problems": problems}, status=503)


@sensitive_variables()
def _user(request: HttpRequest, *, is_basic: bool) -> User:
    user: Any = getattr(request, "user", None) or AnonymousUser()
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    if user.is_authenticated or scheme.lower() != "basic" or not is_basic:
        return user  # type: ignore[no-any-return]
    try:
        name, colon, password = base64.b64decode(credentials, validate=True).decode().partition(":")
    except ValueError:  # no ASCII, no base64, no UTF-8
        return AnonymousUser()
    is_name = colon and tidy_fact(name) == name  # no NUL, which some databases refuse with an error
    found: Any = authenticate(request, username=name, password=password) if is_name else None
    return found or AnonymousUser()
