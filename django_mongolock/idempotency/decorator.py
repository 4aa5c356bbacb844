"""`idempotent`: a request or a task that is sent again is not done again; it gets the result of the first run."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, Never, TypeVar, overload

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.http import HttpRequest
from django.utils.translation import gettext as _

from ..backends.base import get_backend
from ..backends.courier import Courier, send
from ..backends.transactions import open_transactions
from ..conf import get_settings
from ..decorator.atomic_requests import atomic, deferred_aliases, first_after_commit
from ..decorator.calls import Arguments, Keywords, LockedCall, Plan
from ..decorator.contention import SKIPPED, Refusal, RequestRefused, Unlocked, candidates, find_request, resolve
from ..decorator.mongo_locked import decorate
from ..engine.lock.commit_hooks import out_of_commit_hook
from ..engine.lock.lock import MongoLock
from ..engine.logs import WARNING, log
from ..engine.protocol import runner
from ..engine.rule.options import Seconds, as_seconds, check_flag, check_seconds
from ..engine.store.mongo import MongoStore
from ..engine.text_checks import check_key
from ..exceptions import LockBackendFailed, LockKeyInvalid, LockLost, LockMisused, LockNotAcquired, LockReentry
from ..keys import KeyTemplate, LockKey, call_arguments, unexpected
from . import http
from .results import Results, results_beside

__all__ = ["idempotent"]

C = TypeVar("C", bound=Callable[..., Any])
Document = dict[str, Any]
#: A command on the results, or None to call the function.
Steps = Generator[Callable[[Results], Any] | None, Any, Any]

#: The most bytes that a response or a result may have to be kept.
LARGEST: Final = 1_000_000
#: The rights that a process needs on the collection of the results.
RIGHTS: Final = "find, insert and update"
#: Methods that change nothing: such requests are not kept.
SAFE: Final = ("GET", "HEAD", "OPTIONS", "TRACE")
#: The name of a header.
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@overload
def idempotent(function: C, /) -> C: ...
@overload
def idempotent(
    *,
    header: str = ...,
    keep: Seconds = ...,
    required: bool = ...,
    client: Callable[[Any], str] | None = ...,
    key: str | None = ...,
    lease: Seconds | None = ...,
    using: str | None = ...,
) -> Callable[[C], C]: ...
def idempotent(
    function: Any = None,
    /,
    *,
    header: Any = "Idempotency-Key",
    keep: Seconds = timedelta(days=1),
    required: Any = True,
    client: Any = None,
    key: str | None = None,
    lease: Seconds | None = None,
    using: str | None = None,
    **unknown: Never,
) -> Any:
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
    known = [name for name in inspect.signature(idempotent).parameters if name not in ("function", "unknown")]
    for name in unknown:
        raise unexpected(name, known)
    if not (isinstance(header, str) and _TOKEN.fullmatch(header)):
        raise TypeError(f'header is the name of an HTTP header, such as "Idempotency-Key", not {header!r}')
    check_flag("required", required)
    if client is not None and (not callable(client) or iscoroutinefunction(client)):
        raise TypeError("client must be a function, not async, that takes the request and returns text")
    if key is not None and (client is not None or not required):
        raise TypeError("key= is for tasks, which have no request: client= and required= are for views")
    if key is not None:
        check_key(key)
    if lease is not None:
        check_seconds("lease", lease)
    options: dict[str, Any] = {"lease": lease, "using": using}
    templates = () if key is None else (KeyTemplate(key),)
    if key is None:
        options["wait"] = 0.0
    policy: Any = "respond" if key is None else "retry"
    plan = Plan(templates, None if templates else find_request, policy, options, name="idempotent")
    make_call = partial(IdempotentCall, header, check_seconds("keep", keep), required, client)
    make = partial(_decorate, make_call, plan)
    return make if function is None else make(function)


def _decorate(make_call: Any, plan: Plan, function: Any) -> Any:
    if hasattr(getattr(function, "cls", function), "authentication_classes"):
        raise TypeError("put @idempotent below @api_view, or on the methods of the class: around it, users are unknown")
    return decorate(plan, function, make_call)


class IdempotentCall(LockedCall):
    """Wraps one function; each call is made by a copy, which has its *key* and the *fingerprint* of the request."""

    key = LockKey("", "")
    fingerprint = ""
    call: tuple[Arguments, Keywords] = (), {}

    def __init__(  # noqa: PLR0917 - see idempotent()
        self, header: str, keep: float, required: bool, client: Any, plan: Plan, wrapped: Callable[..., Any]
    ) -> None:
        super().__init__(plan, wrapped)
        if inspect.isgeneratorfunction(wrapped) or inspect.isasyncgenfunction(wrapped):
            raise TypeError("@idempotent goes on a function, not on a generator, whose results come one by one")
        self.header, self.keep, self.required, self.client = header, keep, required, client

    # One call

    def function(self) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            request = self._request(args, kwargs)
            if self._passes(request):
                with atomic(deferred_aliases(request, self.plan)):
                    return self.wrapped(*args, **kwargs)
            try:
                return LockedCall.function(self._of(args, kwargs, request))(*args, **kwargs)
            except _NotBegun as reason:
                return resolve(self.policy, reason.error, args, kwargs)

        return wrapper

    def coroutine(self) -> Callable[..., Any]:
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            request = self._request(args, kwargs)
            if self._passes(request):
                return await self.wrapped(*args, **kwargs)
            try:
                # In a thread: it may load the user of the request, and the session.
                call = await sync_to_async(self._of)(args, kwargs, request)
                return await LockedCall.coroutine(call)(*args, **kwargs)
            except _NotBegun as reason:
                return resolve(self.policy, reason.error, args, kwargs)

        return wrapper

    def _passes(self, request: HttpRequest | None) -> bool:
        """Whether a request runs as if its view were not decorated."""
        return request is not None and (
            request.method in SAFE or (not self.required and self.header not in request.headers)
        )

    def _request(self, args: Arguments, kwargs: Keywords) -> HttpRequest | None:
        request = find_request(args, kwargs)
        if (request is None) != bool(self.plan.templates):
            raise TypeError(
                f"@idempotent on {self.name}: a view has its key in a header of its request; for a task, or another "
                'function, give its template: @idempotent(key="charge:{order_id}")'
            )
        return request

    def _of(self, args: Arguments, kwargs: Keywords, request: HttpRequest | None) -> IdempotentCall:
        """A copy of this for one call. Raises _NotBegun."""
        if opened := open_transactions():
            raise LockMisused(
                f"{self.name} was called inside the transaction that is open on {opened[0].alias!r}, before whose "
                "commit its result would be kept: open the transaction inside of it; for a view of another framework "
                "than Django under ATOMIC_REQUESTS, exempt its address (transaction.non_atomic_requests)"
            )
        made, where = copy.copy(self), f"idempotent:{self.name}"
        made.call = args, kwargs
        try:
            if request is None:
                (template,) = self.plan.templates
                filled = template.fill(call_arguments(self.signature, args, kwargs))
                made.key = LockKey(f"{where}:{filled}", f"{where}:{template.template}")
            else:
                named = json.dumps([self._client(request), self._sent_key(request)])
                made.key = LockKey(f"idempotent:{hashlib.sha256(named.encode()).hexdigest()}", where)
                made.fingerprint = http.fingerprint(request)
        except LockKeyInvalid as error:
            raise _NotBegun(error) from error
        return made

    def _sent_key(self, request: HttpRequest) -> str:
        if (sent := request.headers.get(self.header)) is None:
            raise self._refusal(400, "missing_key", _("This needs the header %(header)s."))
        if (key := http.read_key(sent)) is None:
            raise self._refusal(400, "invalid_key", _("The header %(header)s is not valid."))
        return key

    def _client(self, request: HttpRequest) -> str:
        """Who sends the request."""
        if self.client is not None:
            name = self.client(request)
            if not (isinstance(name, str) and name):
                raise LockMisused(f"client= of {self.name} returned {type(name).__name__}: it must return a name")
            return f"client:{name}"
        user = getattr(request, "user", None)
        if subject := user if getattr(user, "is_authenticated", False) else getattr(request, "auth", None):
            name = subject if isinstance(subject, str) else getattr(subject, "pk", None)
            subject_class = f"{subject.__class__.__module__}.{subject.__class__.__qualname__}"
        else:
            session: Any = getattr(request, "session", None)
            name, subject_class = getattr(session, "session_key", None), "session"
            if name is not None and not session.exists(name):  # a made-up cookie
                name = None
        if name is None:
            log(WARNING, "a request has neither user nor session, give client=", place=self.name)
            raise self._refusal(403, "anonymous", _("Please log in first."))
        return f"{subject_class}:{name}"

    def _refusal(self, status: int, code: str, message: str, after: int = 0) -> RequestRefused:
        return RequestRefused(Refusal(status, after, code, message % {"header": self.header}))

    def _keys(self, args: Arguments, kwargs: Keywords) -> list[Any]:
        return [self.key]

    # Under the lock

    def _run(self, lock: MongoLock, args: Arguments, kwargs: Keywords, aliases: Sequence[str]) -> Any:
        if "result" in (found := runner.run(self._begin(lock), self._send)):
            return self._replayed(found["result"])
        losses: list[LockLost | None] = []

        def keep(kept: Document | None) -> None:
            if not losses:  # once
                losses.append(runner.run(self._keep(lock, kept), self._send))

        try:
            with atomic(aliases):
                result = self._finished(self.wrapped(*args, **kwargs))
                if aliases:
                    first_after_commit(aliases[0], partial(keep, self._kept(result)))
        except BaseException as error:
            if out_of_commit_hook(error):
                keep(self._without_result())
            raise
        keep(self._kept(result))
        return _unless(losses[0], result)

    async def _arun(self, lock: MongoLock, args: Arguments, kwargs: Keywords) -> Any:
        """See _run(). Django opens no transaction around an async view."""
        if "result" in (found := await runner.arun(self._begin(lock), self._asend)):
            return self._replayed(found["result"])
        try:
            result = self._finished(await self.wrapped(*args, **kwargs))
        except BaseException as error:
            if out_of_commit_hook(error):
                await runner.arun(self._keep(lock, self._without_result()), self._asend)
            raise
        return _unless(await runner.arun(self._keep(lock, self._kept(result)), self._asend), result)

    def _begin(self, lock: MongoLock) -> Steps:
        """The document of the key. Raises LockLost if a later run has begun."""
        (key,), token = lock.keys, lock.fencing_token
        lease = as_seconds(self.options["lease"]) or get_settings().LEASE
        found = yield from _asked(lambda results: results.begin(key, token, lease))
        if "result" not in found and found["token"] != token:
            raise LockLost(key, token, "another run has begun")
        return found

    def _keep(self, lock: MongoLock, kept: Document | None) -> Steps:
        """Keep this, if it is anything; return why not, if the lock was lost."""
        if kept is None:
            return None
        (key,), token = lock.keys, lock.fencing_token
        try:
            lock.ensure_held()
            done = yield lambda results: results.keep(key, token, kept, self.keep)
            return None if done else LockLost(key, token, "another run has begun")
        except LockLost as error:
            return error
        except LockBackendFailed as error:
            log(WARNING, "a result is not kept, the next call runs", key=key, error=error)
            return None

    def _refused(self, error: Unlocked, args: Arguments, kwargs: Keywords, *, trial: bool = False) -> Any:
        if isinstance(error, LockReentry):
            raise LockMisused(f"{self.name} was called inside of another call with the same key: decorate one of them")
        if not isinstance(error, LockNotAcquired):
            return super()._refused(error, args, kwargs, trial=trial)
        if iscoroutinefunction(self.wrapped):
            return runner.arun(self._meanwhile(error, trial), self._asend)
        return runner.run(self._meanwhile(error, trial), self._send)

    def _meanwhile(self, error: LockNotAcquired, trial: bool) -> Steps:
        """The result if there is one: its lock is held for a moment by another who gets it. Else the refusal."""
        key = check_key(str(self.key), get_settings().KEY_PREFIX)
        if (found := (yield from _asked(lambda results: results.find(key)))) is not None:
            return self._replayed(found["result"])
        if self.plan.templates:
            return super()._refused(error, *self.call, trial=trial)
        message = _("A request with this %(header)s is being processed. Please try again shortly.")
        refused = self._refusal(
            409, "in_progress", message, math.ceil(max(1.0, min(error.retry_after, error.held_for)))
        )
        return resolve("respond", refused, *self.call)

    def _send(self, command: Any) -> Any:
        results = self._results()
        return results.run(_command(command)) if isinstance(results, Courier) else command(results)

    async def _asend(self, command: Any) -> Any:
        results = self._results()
        return await results.arun(_command(command)) if isinstance(results, Courier) else command(results)

    def _results(self) -> Any:
        session = get_backend(self.options["using"]).session()
        store: Any = session.store
        if not isinstance(store, MongoStore):  # in memory, for tests
            return store.results
        return Courier(results_beside(store.collection), get_settings().COMMAND_TIMEOUT, session.errands, RIGHTS)

    # Results

    def _finished(self, result: Any) -> Any:
        """See LockedCall. A response is rendered here, in the transaction of its view."""
        result = super()._finished(result)
        if not self.plan.templates:
            http.check_response(self.name, result, candidates(*self.call))
        return result

    def _kept(self, result: Any) -> Document | None:
        """What is kept of a result; None for a response that means "try again", and for what was not done."""
        if result is SKIPPED:
            return None
        if self.plan.templates:
            try:
                text = json.dumps(result)
            except (TypeError, ValueError):
                text = ""
            if not 0 < len(text) <= LARGEST:
                log(WARNING, "a result is not kept, it is too large or not JSON", place=self.name)
                return self._without_result()
            return {"text": text}
        if (kept := http.as_kept(result)) is not None and http.size(kept) > LARGEST:
            log(WARNING, "a response is not kept, it is too large", place=self.name)
            return self._without_result()
        return kept and {"for": self.fingerprint, **kept}

    def _without_result(self) -> Document:
        """What is kept where only the fact is."""
        return {"text": ""} if self.plan.templates else {"for": self.fingerprint, "status": None}

    def _replayed(self, kept: Document) -> Any:
        """The result of an earlier run."""
        if self.plan.templates:
            return json.loads(kept["text"]) if kept["text"] else SKIPPED
        if kept["for"] != self.fingerprint:
            message = _("This %(header)s was used for another request.")
            return resolve("respond", self._refusal(422, "key_reused", message), *self.call)
        if kept["status"] is None:
            message = _("This was done, but its response is not available any more.")
            return resolve("respond", self._refusal(410, "not_kept", message), *self.call)
        return http.replayed(kept)


def _unless(loss: LockLost | None, result: Any) -> Any:
    """Return *result*. Raises *loss*."""
    if loss is not None:
        raise loss
    return result


class _NotBegun(Exception):
    """The function was not called: the call makes no key, or MongoDB did not say whether there is a result."""

    def __init__(self, error: Unlocked) -> None:
        self.error = error


def _asked(command: Callable[[Results], Any]) -> Steps:
    """What the results answer before the function is called. Raises _NotBegun."""
    try:
        return (yield command)
    except LockBackendFailed as error:
        raise _NotBegun(error) from error


def _command(command: Callable[[Results], Any]) -> Any:
    return send(lambda collection: command(Results(collection)))
