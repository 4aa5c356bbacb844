"""The facts that a lock records about its holder, such as host, process, view, task and user."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.core.exceptions import BadRequest
from django.http import HttpRequest, QueryDict
from django.utils.decorators import sync_and_async_middleware
from django.utils.encoding import escape_uri_path
from django.utils.functional import LazyObject
from django.utils.http import escape_leading_slashes

from .engine.protocol.processes import this_process
from .engine.session.grant_registry import current_task
from .engine.text_checks import tidy_fact

__all__ = ["LockContextMiddleware"]

logger = logging.getLogger("django_mongolock")

#: The request that this context serves, set by the middleware and by `mongo_locked`.
current_request: ContextVar[HttpRequest | None] = ContextVar("mongolock_request", default=None)

#: The host in the entry of an edit lock. No process holds such a lock.
BROWSER: Final = "a browser tab"
#: The host in the entry of a claim. No process holds such a lock either.
CLAIMED: Final = "no process: a claim"

#: The headers of a task's message: its own id, and the note of a message that was sent again because of a lock.
MESSAGE, RETURNED = "mongolock_message", "mongolock_retry"
#: The attribute in which the request of a running task keeps its `task_run`.
_RUN: Final = "mongolock_run"

_HOST: Final = tidy_fact(socket.gethostname())


@contextmanager
def serving(request: HttpRequest | None) -> Iterator[None]:
    """Let locks in the block record the view and the user of *request*. None changes nothing."""
    if request is None:
        yield
        return
    token = current_request.set(request)
    try:
        yield
    finally:
        current_request.reset(token)


@sync_and_async_middleware
def LockContextMiddleware(get_response: Any) -> Callable[[HttpRequest], Any]:  # noqa: N802 - as Django's are named
    """Middleware that remembers the request for `holder_facts`. Put it after the authentication middleware."""

    def middleware(request: HttpRequest) -> Any:
        with serving(request):
            return get_response(request)

    async def amiddleware(request: HttpRequest) -> Any:
        with serving(request):
            return await get_response(request)

    return amiddleware if iscoroutinefunction(get_response) else middleware


def holder_facts(label: str | None = None) -> dict[str, str | int]:
    """Return the known facts: host, process, thread or asyncio task, view or Celery task, and user."""
    request, coroutine = current_request.get(), current_task()
    worker = threading.current_thread().name if coroutine is None else coroutine.get_name()
    facts: dict[str, str | int] = {"host": _HOST, "pid": os.getpid(), "thread": tidy_fact(worker)}
    if (task := running_celery_task()) is not None:
        facts["place"] = task_place(task.name, task.request.id)
        # By `process`, a worker finds the locks of a killed process of its pool. By the run, a task finds other runs.
        facts |= {"process": this_process(), **task_run(task.request)}
    elif request is not None:
        facts["place"] = tidy_fact(view_name(request))
    if request is not None and (user := _username(request)):
        facts["user"] = tidy_fact(user)
    if label is not None:
        facts["label"] = label
    return facts


def running_celery_task() -> Any | None:
    """Return the Celery task that runs here, or None. Celery is not imported, because without it no task runs."""
    celery = sys.modules.get("celery")
    task = getattr(celery, "current_task", None) if celery is not None else None
    return task if task and task.request.id else None


def task_place(name: str, task_id: str) -> str:
    """Return the place of a lock that a Celery task holds, as it is recorded."""
    return tidy_fact(f"task {name} {task_id}")


def task_owner() -> str | None:
    """Return the id of the Celery task that runs here.

    The id stays the same when the message is delivered again, or the task is retried. The next run therefore resumes
    the locks of a run that has died.
    """
    task = running_celery_task()
    return tidy_fact(task.request.id) if task is not None else None


def task_run(request: Any) -> dict[str, str]:
    """Return the id of this run of a Celery task, and the name of the delivery that it runs for.

    Two runs have the same delivery if the broker delivered one message twice, or if one of them came back for a lock
    after such a second delivery. Any other message has another name, also one that this run sends.
    """
    run: dict[str, str] | None = getattr(request, _RUN, None)
    if run is None:
        headers = request.headers or {}
        note = headers.get(RETURNED)
        again = note.get("again") if isinstance(note, dict) else None
        # A program without this library gives its messages no id.
        delivery = again or headers.get(MESSAGE) or f"{request.replaced_task_nesting or 0}.{request.retries or 0}"
        run = {"run": secrets.token_hex(6), "delivery": str(delivery)}
        setattr(request, _RUN, run)
    return run


def is_redelivered() -> bool:
    """Return whether the Celery task here has a message that was delivered before.

    The other run may be dead or alive.
    """
    task = running_celery_task()
    return task is not None and bool((task.request.delivery_info or {}).get("redelivered"))


def view_name(request: HttpRequest) -> str:
    """Return the view that serves a request, as a lock records it."""
    match = getattr(request, "resolver_match", None)
    return f"view {match.view_name or match._func_path}" if match is not None else f"{request.method} {request.path}"


def check_encoding(request: HttpRequest) -> None:
    """Raise BadRequest if the text of *request* is not in the project's encoding, as Django itself does for forms.

    Some encodings have texts that neither a page nor a database can hold.
    """
    if (request.encoding or settings.DEFAULT_CHARSET).lower() != settings.DEFAULT_CHARSET.lower():
        raise BadRequest("the request has another encoding than this site")


def own_address(request: HttpRequest, query: QueryDict | None = None) -> str:
    """Return the address of the page that serves *request*, for a redirect or a form. The address is always on this
    site.

    A path that begins with two slashes would be the name of another host. Browsers read a backslash as a slash, and
    leave out tabs.
    """
    path = escape_leading_slashes(escape_uri_path(request.path))
    return f"{path}?{query.urlencode()}" if query else path


def _username(request: HttpRequest) -> str:
    """Return the user's name, if reading it does not change the behaviour of the view.

    Reading the name loads the session, and makes the response vary by cookie. For that reason the name is read only
    with a session cookie, and never in a coroutine, where loading would block. If the reading fails, the lock has no
    name.
    """
    known = request.__dict__
    user = known.get("_cached_user") or known.get("_acached_user") or known.get("user")
    unread = settings.SESSION_COOKIE_NAME not in request.COOKIES or current_task() is not None
    if unread and issubclass(type(user), LazyObject):
        return ""
    try:
        return str(user.get_username()) if user is not None and user.is_authenticated else ""
    except Exception:
        logger.debug("the user of a lock is not recorded", exc_info=True)
        return ""
