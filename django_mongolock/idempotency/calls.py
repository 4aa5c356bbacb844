"""One call under `idempotent`: its key, its result, what is answered instead, and the documents with the results."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final, NamedTuple, cast

from asgiref.sync import sync_to_async
from bson import Int64
from django.http import HttpRequest
from django.utils.translation import gettext as _
from pymongo import ReturnDocument
from pymongo.collection import Collection

from ..backends import get_backend
from ..conf import get_settings
from ..decorator.calls import Arguments, Keywords, LockedCall, LockedFunction
from ..decorator.policies import SKIPPED, CallKind, Respond, Retry, Unlocked, candidates
from ..decorator.views import HttpRefusal, RequestRefused, deferred_aliases, first_after_commit
from ..engine.lock.transaction import out_of_commit_hook
from ..engine.logs import WARNING, log
from ..engine.protocol import actions
from ..engine.store.mongo import MongoStore
from ..exceptions import LockBackendFailed, LockLost, LockMisused, LockNotAcquired, LockReentry
from ..keys import LockKey
from ..locks import DjangoLock
from ..other_collections.courier import Courier, send
from ..transactions import open_transactions
from . import http

Document = dict[str, Any]
#: A command on the results, or None to call the function.
Steps = Generator["Callable[[Results], Any] | None", Any, Any]

#: How much longer than the lease of its run a mark lives, in seconds: longer than any command takes.
MARGIN: Final = 30.0
#: Whether there is a result whose time is not over.
_IS_KEPT: Final = {"$and": [{"$gt": ["$purge_at", "$$NOW"]}, {"$ne": [{"$type": "$result"}, "missing"]}]}
#: The rights that a process needs on the collection of the results.
RIGHTS: Final = "find, insert and update"
#: Methods that change nothing: such requests are not kept.
SAFE: Final = ("GET", "HEAD", "OPTIONS", "TRACE")

#: What is said of what has no key, or a result that cannot be kept.
_UNFIT: Final[Mapping[CallKind, str]] = dict.fromkeys(
    ("view", "call", "generator"),
    "@idempotent on {name}: a view has its key in a header of its request; for a task, or a function, "
    'give its template: @idempotent(key="charge:{{order_id}}"). A generator has results that come one by one',
)


class KeepResponse(Respond):
    """For a view: while another request with its key is processed, it answers 409."""

    unfit = _UNFIT

    def answer(self, error: Unlocked, call: Any) -> Any:
        """See Respond."""
        if isinstance(error, LockNotAcquired):
            message = _("A request with this %(header)s is being processed. Please try again shortly.")
            error = call.refusal(409, "in_progress", message, math.ceil(error.come_back_in))
        return super().answer(error, call)


class KeepResult(Retry):
    """For a task or another function."""

    unfit = _UNFIT


class KeepRules(NamedTuple):
    """The arguments of `idempotent` that concern requests and results."""

    header: str
    keep: float
    required: bool
    client: Callable[[Any], str] | None


class IdempotentCall(LockedCall):
    """One call. key: of its lock, and of its result. fingerprint: what is the same in a request that is sent again.

    under: the lock of the run. has_ended: whether it is known what is kept of it. loss: why nothing is, if it is lost.
    """

    key = LockKey("", "")
    fingerprint = ""
    under: DjangoLock
    has_ended = False
    loss: LockLost | None = None

    def __init__(self, rules: KeepRules, function: LockedFunction, args: Arguments, kwargs: Keywords) -> None:
        super().__init__(function, args, kwargs)
        self.rules = rules

    @property
    def passes(self) -> bool:
        """See LockedCall: a request that changes nothing, or has no key where none is required."""
        request = self.request
        return request is not None and (
            request.method in SAFE or (not self.rules.required and self.rules.header not in request.headers)
        )

    def prepare(self) -> None:
        """See LockedCall.prepare()."""
        self._find_key()
        super().prepare()

    async def aprepare(self) -> None:
        """See prepare(). In a thread: it may load the user of the request, and the session."""
        await sync_to_async(self._find_key)()
        await super().aprepare()

    def _find_key(self) -> None:
        """Find the key. Raises LockKeyInvalid, and LockMisused inside of a transaction."""
        name = self.function.name
        if opened := open_transactions():
            raise LockMisused(
                f"{name} was called inside the transaction that is open on {opened[0].alias!r}, before whose "
                "commit its result would be kept: open the transaction inside of it; for a view of another framework "
                "than Django under ATOMIC_REQUESTS, exempt its address (transaction.non_atomic_requests)"
            )
        where = f"idempotent:{name}"
        if self.request is None:
            (filled,) = super().keys()
            self.key = LockKey(f"{where}:{filled}", f"{where}:{self.function.plan.templates[0].template}")
        else:
            client = self._client(self.request)
            if (sent := self.request.headers.get(self.rules.header)) is None:
                raise self.refusal(400, "missing_key", _("This needs the header %(header)s."))
            if (key := http.read_key(sent)) is None:
                raise self.refusal(400, "invalid_key", _("The header %(header)s is not valid."))
            sender = json.dumps([client, key])
            self.key = LockKey(f"idempotent:{hashlib.sha256(sender.encode()).hexdigest()}", where)
            self.fingerprint = http.fingerprint(self.request)

    def keys(self) -> tuple[Any, ...]:
        """See LockedCall.keys()."""
        return (self.key,)

    def _client(self, request: HttpRequest) -> str:
        """Who sends the request."""
        name: Any
        if self.rules.client is not None:
            name = self.rules.client(request)
            if not (isinstance(name, str) and name):
                function = self.function.name
                raise LockMisused(f"client= of {function} returned {type(name).__name__}: it must return a name")
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
            log(WARNING, "a request has neither user nor session, give client=", place=self.function.name)
            raise self.refusal(403, "anonymous", _("Please log in first."))
        return f"{subject_class}:{name}"

    def refusal(self, status: int, code: str, message: str, after: int = 0) -> RequestRefused:
        """The error for a request that is not served; *message* may name the header."""
        return RequestRefused(HttpRefusal(status, after, code, message % {"header": self.rules.header}))

    # Under the lock

    def run(self, lock: DjangoLock) -> Any:
        """See LockedCall.run(). Not if there is a result."""
        return actions.run(self._work(lock), self._send)

    async def arun(self, lock: DjangoLock) -> Any:
        """See run()."""
        return await actions.arun(self._work(lock), self._asend)

    def _work(self, lock: DjangoLock) -> Steps:
        """The result, of this run or an earlier one. Raises LockLost if a later run has begun."""
        (key,), token = lock.keys, lock.fencing_token
        found = yield lambda results: results.begin(key, token, lock.terms.lease)
        if "result" in found:
            return self._replayed(found["result"])
        if found["token"] != token:
            raise LockLost(key, token, "another run has begun")
        self.under = lock
        try:
            result = yield None
        except BaseException as error:
            if out_of_commit_hook(error):
                yield from self._keep({"for": self.fingerprint, **http.ONLY_THE_FACT})
            raise
        yield from self._keep(self._kept(result))
        if self.loss is not None:
            raise self.loss
        return result

    def _keep(self, kept: Document | None) -> Steps:
        """Keep this, if it is anything, once. Note why not, if the lock was lost."""
        if self.has_ended:
            return
        self.has_ended = True
        (key,), token = self.under.keys, self.under.fencing_token
        try:
            if kept is not None:
                self.under.ensure_held()
                if not (yield lambda results: results.keep(key, token, kept, self.rules.keep)):
                    self.loss = LockLost(key, token, "another run has begun")
        except LockLost as error:
            self.loss = error
        except LockBackendFailed as error:
            log(WARNING, "a result is not kept, the next call runs", key=key, error=error)

    def refused(self, error: Unlocked) -> Any:
        """See LockedCall.refused()."""
        return actions.run(self._meanwhile(error), self._send)

    async def arefused(self, error: Unlocked) -> Any:
        """See refused()."""
        if self.request is not None:
            return await super().arefused(error)
        return await actions.arun(self._meanwhile(error), self._asend)

    def _meanwhile(self, error: Unlocked) -> Steps:
        """The result if there is one: its lock is held for a moment by another who gets it. Else what is refused."""
        if self.begun:
            raise error
        if isinstance(error, LockReentry):
            name = self.function.name
            raise LockMisused(f"{name} was called inside of another call with the same key: decorate one of them")
        if isinstance(error, LockNotAcquired):
            key = error.key
            try:
                if (found := (yield lambda results: results.find(key))) is not None:
                    return self._replayed(found["result"])
            except (LockBackendFailed, RequestRefused) as failure:
                error = failure
        return super().refused(error)

    def _send(self, command: Any) -> Any:
        if command is None:
            return super().run(self.under)
        results = self._results()
        return results.run(_command(command)) if isinstance(results, Courier) else command(results)

    async def _asend(self, command: Any) -> Any:
        if command is None:
            return await super().arun(self.under)
        results = self._results()
        return await results.arun(_command(command)) if isinstance(results, Courier) else command(results)

    def _results(self) -> Any:
        session = get_backend(self.options.using).session()
        store: Any = session.store
        if not isinstance(store, MongoStore):  # in memory, for tests
            return store.results
        return Courier(results_beside(store.collection), get_settings().COMMAND_TIMEOUT, session.errands, RIGHTS)

    # Results

    def finished(self, result: Any) -> Any:
        """See LockedCall. A response is rendered here, in the transaction of its view, and kept after its commit."""
        result = super().finished(result)
        if self.request is not None:
            http.check_response(self.function.name, result, candidates(self.args, self.kwargs))
        if aliases := deferred_aliases(self.request, self.function.plan):
            keep = self._keep(self._kept(result))
            first_after_commit(aliases, lambda: actions.run(keep, self._send))
        return result

    async def afinished(self, result: Any) -> Any:
        """See finished(). In a thread, where Django, too, renders the response of an async view."""
        return await sync_to_async(self.finished)(result)

    def _kept(self, result: Any) -> Document | None:
        """What is kept of a result; None for a response that means "try again", and for what was not done."""
        if result is SKIPPED:
            return None
        try:
            kept = http.json_as_kept(result) if self.request is None else http.as_kept(result)
        except (TypeError, ValueError, RecursionError) as error:
            log(WARNING, "a result is not kept, only that there was one", place=self.function.name, error=error)
            kept = http.ONLY_THE_FACT
        return kept and {"for": self.fingerprint, **kept}

    def _replayed(self, kept: Document) -> Any:
        """The result of an earlier run. Raises RequestRefused if it is not for this request."""
        if self.request is None:
            return SKIPPED if kept["status"] is None else json.loads(kept["body"])
        if kept["for"] != self.fingerprint:
            message = _("This %(header)s was used for another request.")
            raise self.refusal(422, "key_reused", message)
        if kept["status"] is None:
            message = _("This was done, but its response is not available any more.")
            raise self.refusal(410, "not_kept", message)
        return http.replayed(kept)


def _command(command: Callable[[Results], Any]) -> Any:
    return send(lambda collection: command(Results(collection)))


class Results:
    """The results, as documents. Each command may be sent again.

    A run marks the key with its fencing token before it begins, and its result is stored only where no later run has
    left its mark: so the result of a run that lost its lock never takes the place of a later one's. A mark without a
    result lives for as long as the lease of its run and a margin; in a longer run, it may be gone.
    """

    def __init__(self, collection: Collection[Document]) -> None:
        self._collection = collection

    def find(self, key: str) -> Document | None:
        """Return the document of *key* if it has a result."""
        return self._collection.find_one({"_id": {"$eq": key}, "$expr": _IS_KEPT})

    def begin(self, key: str, token: int, seconds: float) -> Document:
        """Return the document of *key* if it has a result; otherwise mark it for the run with this *token*.

        The mark in what is returned is that of a later run, if there is one. seconds: the lease of the run.
        """
        mark = {"_id": "$_id", "token": {"$max": ["$token", Int64(token)]}, "purge_at": _from_now(seconds + MARGIN)}
        return self._update(key, {"$cond": [_IS_KEPT, "$$ROOT", mark]})

    def keep(self, key: str, token: int, result: Document, seconds: float) -> bool:
        """Keep *result* for so many seconds unless a later run has begun than that with this *token*; return whether
        it is kept."""
        mine = {"_id": "$_id", "token": Int64(token), "result": {"$literal": result}, "purge_at": _from_now(seconds)}
        is_newest = {"$lte": [{"$ifNull": ["$token", Int64(0)]}, Int64(token)]}
        return bool(self._update(key, {"$cond": [is_newest, mine, "$$ROOT"]})["token"] == token)

    def _update(self, key: str, new: Document) -> Document:
        found = self._collection.find_one_and_update(
            {"_id": {"$eq": key}}, [{"$replaceWith": new}], upsert=True, return_document=ReturnDocument.AFTER
        )
        return cast("Document", found)  # it is there: upsert


def _from_now(seconds: float) -> Document:
    return {"$add": ["$$NOW", Int64(seconds * 1_000)]}


def results_beside(locks: Collection[Document]) -> Collection[Document]:
    """The collection of the results."""
    return locks.database.get_collection(f"{locks.name}_results", codec_options=locks.codec_options)
