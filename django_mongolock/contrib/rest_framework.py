"""Django REST framework: a busy lock as an APIException, rendered in the format that the client accepts.

A view under ``@mongo_locked(…, on_contention="respond")`` needs nothing else. For locks taken inside views, set
``REST_FRAMEWORK = {"EXCEPTION_HANDLER": "django_mongolock.contrib.rest_framework.exception_handler"}``.
"""

from __future__ import annotations

from typing import Any

from rest_framework.exceptions import APIException
from rest_framework.response import Response
from rest_framework.views import exception_handler as default_handler

from ..decorator.policies import Unlocked
from ..decorator.views import refusal
from ..exceptions import LockBackendFailed, LockNotAcquired, LockReentry

__all__ = ["LockAPIException", "exception_handler"]


class LockAPIException(APIException):  # type: ignore[misc]  # it has no types
    """The error of a view whose lock is busy, whose request makes no lock key, or whose MongoDB does not answer.

    The status is 423 (or MONGOLOCK["CONTENTION_STATUS"]), 400 or 503.

    - wait: seconds of Retry-After.
    - error: error of the lock.
    """

    def __init__(self, error: Unlocked) -> None:
        refused = refusal(error)
        super().__init__(refused.message, refused.code)
        self.status_code = refused.status
        self.wait = refused.after
        self.error = error


def exception_handler(error: Exception, context: dict[str, Any]) -> Response | None:
    """Extend Django REST framework's handler to LockNotAcquired and LockBackendFailed.

    LockReentry is a mistake in the code and stays an error 500. The thread then holds the lock already.
    """
    if isinstance(error, (LockNotAcquired, LockBackendFailed)) and not isinstance(error, LockReentry):
        error = LockAPIException(error)
    response: Response | None = default_handler(error, context)
    if response is not None and isinstance(error, LockAPIException):
        response["Cache-Control"] = "no-store"
    return response
