"""The middleware that lets every lock record the view and the user of the request in which it is taken."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest, HttpResponseBase

from .context import serving

__all__ = ["LockContextMiddleware"]

Handler = Callable[[HttpRequest], HttpResponseBase | Awaitable[HttpResponseBase]]


class LockContextMiddleware:
    """Remembers the request for `context.holder_facts`. Put it after the authentication middleware."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Handler) -> None:
        self.get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        if self._is_async:
            return self._acall(request)
        with serving(request):
            return self.get_response(request)

    async def _acall(self, request: HttpRequest) -> HttpResponseBase:
        with serving(request):
            return await cast(Awaitable[HttpResponseBase], self.get_response(request))
