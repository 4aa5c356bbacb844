"""The response of a view whose lock is held, the lock of a streaming response, and ATOMIC_REQUESTS.

With ATOMIC_REQUESTS, Django opens its transaction around a view and all its decorators. A lock on the view would be
released before the commit. A locked view therefore declares to Django that it wants no transaction, and opens the
transaction inside the lock: acquire, commit, release.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.utils.translation import gettext as _

from ..conf import get_settings
from ..engine.logs import WARNING, log
from ..exceptions import LockBackendFailed, LockError, LockKeyInvalid, LockNotAcquired
from ..locks import DjangoLock

#: The Retry-After while MongoDB does not answer, in seconds.
RETRY_AFTER_FAILURE: Final = 5


@dataclass(frozen=True, slots=True)
class HttpRefusal:
    """The refusal that a client gets.

    - status: HTTP status.
    - after: seconds to wait. 0: do not try again.
    - code: code for programs.
    - message: sentence for people.
    """

    status: int
    after: int
    code: str
    message: str


def refusal(error: LockError | LockKeyInvalid) -> HttpRefusal:
    """Return the refusal for *error*. Raises any other *error*.

    The status is 423 Locked while the lock is held, 503 while MongoDB does not answer, and 400 if the request makes no
    key. The refusal names neither the holder nor the key, since clients need not know them.
    """
    if isinstance(error, LockNotAcquired):
        message = _("This is in use at the moment. Please try again shortly.")
        return HttpRefusal(get_settings().CONTENTION_STATUS, math.ceil(error.come_back_in), "locked", message)
    if isinstance(error, LockBackendFailed):
        message = _("This cannot be done at the moment. Please try again later.")
        return HttpRefusal(503, RETRY_AFTER_FAILURE, "unavailable", message)
    if isinstance(error, LockKeyInvalid):
        log(WARNING, "a request makes no lock key", error=error)
        return HttpRefusal(400, 0, "invalid", _("This address or form is not valid."))
    raise error


def make_response(request: HttpRequest, error: LockError | LockKeyInvalid) -> HttpResponseBase:
    """Return the `refusal` with Retry-After, as JSON, HTML or plain text, according to the client's preference.

    The page is the template django_mongolock/contention.html. A project may override the template.
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
    """Return the page, or None if the project's template engines do not find it."""
    try:
        return render_to_string("django_mongolock/contention.html", {"refusal": refused}, request)
    except (TemplateDoesNotExist, ImproperlyConfigured):
        return None


#: The seconds that closing a response waits for the cleanup of its stream.
CLEANUP = 30


def hold_while_streaming(result: object, lock: DjangoLock) -> None:
    """If *result* is a streaming response, release *lock* at its end or when it is closed.

    A server closes every response, also after the client has disconnected. A response that is dropped without being
    closed releases the lock when it is garbage-collected. If the lock was lost, the stream breaks off at its end, so
    that the client does not take it for complete.
    """
    if not (isinstance(result, HttpResponseBase) and result.streaming):
        return
    lock.released_later = True
    held = _Held(lock)
    # Do not set `streaming_content`. The wrapper refers to the response, so a dropped response would be collected late.
    # A server could no longer send a file by itself. Closing it would not reach the iterator of the view.
    inside: Any = result
    if inside.is_async:
        stream = inside._iterator = _until_end_async(inside._iterator, held)
        inside._resource_closers.append(partial(held.close, stream))
    else:
        inside._iterator = _until_end(inside._iterator, held)
        inside._resource_closers.append(held.release)


class _Held:
    """A lock that is released once, by the first end of its response."""

    def __init__(self, lock: DjangoLock) -> None:
        self.lock = lock
        self.loop: asyncio.AbstractEventLoop | None = None
        self._once = threading.Lock()
        self._closing: asyncio.Task[None] | None = None

    def release(self) -> None:
        if self._once.acquire(blocking=False):
            self.lock.released_later = False
            self.lock.__exit__(None, None, None)

    async def arelease(self) -> None:
        if self._once.acquire(blocking=False):
            self.lock.released_later = False
            await self.lock.__aexit__(None, None, None)

    def close(self, stream: Any) -> None:
        """End an async *stream* in its event loop, so that the stream cleans up before the release."""
        if self._once.locked():
            return
        if self.loop is None or not self.loop.is_running():
            self.release()
        elif self.loop is _running_loop():
            self._closing = self.loop.create_task(self._finish(stream))
        else:
            finished = asyncio.run_coroutine_threadsafe(self._finish(stream), self.loop)
            with suppress(concurrent.futures.TimeoutError):
                finished.result(CLEANUP)

    async def _finish(self, stream: Any) -> None:
        try:
            with suppress(RuntimeError):  # the stream is running, and another task closes it
                await stream.aclose()
        finally:
            await self.arelease()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _until_end(parts: Iterator[Any], held: _Held) -> Iterator[Any]:
    yield from parts
    held.release()


async def _until_end_async(parts: AsyncIterator[Any], held: _Held) -> AsyncIterator[Any]:
    held.loop = asyncio.get_running_loop()
    try:
        async for part in parts:
            yield part
    finally:
        if isinstance(parts, AsyncGenerator):
            await parts.aclose()
    await held.arelease()


class Deferred(set[str]):
    """The ``_non_atomic_requests`` of a locked view.

    The *owner* opens its transactions inside the lock instead of Django.

    As a set, it contains the aliases on which the view itself wants no transaction. ``@non_atomic_requests`` above the
    lock adds to them.
    """

    def __init__(self, owner: object, declined: Iterable[str]) -> None:
        super().__init__(declined)
        self.owner = owner

    def __contains__(self, alias: object) -> bool:
        return True

    def wanted(self) -> list[str]:
        declined, every = super().__contains__, connections.settings.items()
        return [alias for alias, settings in every if settings["ATOMIC_REQUESTS"] and not declined(alias)]

    @classmethod
    def put_on(cls, view: Any, owner: object) -> None:
        """Mark the view.

        If it has several locks, the mark of the innermost stays, and the innermost opens the transactions.
        """
        declined = getattr(view, "_non_atomic_requests", ())
        if not isinstance(declined, cls):
            view._non_atomic_requests = cls(owner, declined)


def deferred_aliases(request: HttpRequest | None, owner: object) -> Sequence[str]:
    """Return the aliases on which Django leaves the transaction of this *request* to *owner*."""
    match = request.resolver_match if request is not None else None
    deferred = getattr(match.func, "_non_atomic_requests", None) if match is not None else None
    return deferred.wanted() if isinstance(deferred, Deferred) and deferred.owner is owner else ()


@contextmanager
def atomic(aliases: Sequence[str]) -> Iterator[None]:
    """Open a transaction on each of *aliases*."""
    with ExitStack() as stack:
        for alias in aliases:
            stack.enter_context(transaction.atomic(using=alias))
        yield
