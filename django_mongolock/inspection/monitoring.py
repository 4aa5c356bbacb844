"""`lock_status`: the facts of the dashboard as JSON, for monitoring programs."""

from __future__ import annotations

from typing import Final

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from ..exceptions import LockBackendFailed
from .as_json import problem_as_json, status_as_json
from .status import Alarm, current_status

PERMISSION: Final = "django_mongolock.view_lock_status"


@never_cache
@require_safe
def lock_status(request: HttpRequest) -> HttpResponse:
    """Report the status of the locks to a user with the permission ``django_mongolock.view_lock_status``.

    The user is `request.user`, and need not be of the staff. 403: without the permission. 503: MongoDB does not answer.
    Otherwise 200; "problems" lists what needs a person. The admin has this view at
    ``admin:django_mongolock_lock_status``; you can route it elsewhere as well.
    """
    user = getattr(request, "user", None)
    if user is None or not user.has_perm(PERMISSION):
        return JsonResponse({"error": f"this needs the permission {PERMISSION}"}, status=403)
    try:
        return JsonResponse(status_as_json(current_status()))
    except LockBackendFailed as error:
        problems = [problem_as_json(Alarm.SERVER, 1, error.problem)]
        return JsonResponse({"error": error.problem, "problems": problems}, status=503)
