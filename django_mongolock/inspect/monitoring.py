"""`lock_status`: the dashboard's facts as JSON, for programs that watch over the site."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

from django.contrib.auth import authenticate
from django.contrib.auth.models import AbstractUser, AnonymousUser
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_safe

from ..exceptions import LockBackendFailed
from .as_json import overview_as_json, servers_as_json
from .status import current_status

PERMISSION: Final = "django_mongolock.view_lock_status"

User = AbstractUser | AnonymousUser


@never_cache
@require_safe
def lock_status(request: HttpRequest) -> HttpResponse:
    """Tell how the locks are, to a user with the permission ``django_mongolock.view_lock_status``.

    The user is who is logged in, or who names itself by HTTP basic authentication; it need not be of the staff. 401:
    nobody did. 403: without the permission. 503: MongoDB does not answer. Otherwise 200, and "troubles" tells what
    needs somebody's attention. The admin has it at ``admin:django_mongolock_lock_status``; route it elsewhere as well
    if you like.
    """
    user = _user(request)
    if not user.is_authenticated:
        headers = {"WWW-Authenticate": 'Basic realm="locks", charset="UTF-8"'}
        return JsonResponse({"error": "log in, or use basic authentication"}, status=401, headers=headers)
    if not user.has_perm(PERMISSION):
        return JsonResponse({"error": f"this needs the permission {PERMISSION}"}, status=403)
    try:
        status = current_status()
    except LockBackendFailed as error:
        troubles = [{"alarm": "server", "amount": 1, "about": error.problem}]
        return JsonResponse({"error": error.problem, "troubles": troubles}, status=503)
    troubles = [
        {"alarm": trouble.alarm, "amount": round(trouble.amount, 3), "about": trouble.about}
        for trouble in status.troubles
    ]
    found = overview_as_json(status.locks) | {"servers": servers_as_json(status.servers)}
    return JsonResponse({"troubles": troubles} | found)


@sensitive_variables()
def _user(request: HttpRequest) -> User:
    user: Any = getattr(request, "user", None) or AnonymousUser()
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    if user.is_authenticated or scheme.lower() != "basic":
        return user  # type: ignore[no-any-return]
    try:
        name, colon, password = base64.b64decode(credentials, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return AnonymousUser()
    found: Any = authenticate(request, username=name, password=password) if colon else None
    return found or AnonymousUser()
