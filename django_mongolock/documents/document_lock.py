"""`DocumentLock`: a lock inside a business document, in the fields that it has already."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Collection as SizedCollection
from types import TracebackType
from typing import Any, Generic, TypeVar

from django.db.models import Model
from pymongo.collection import Collection

from ..conf import get_settings
from ..engine import clock
from ..engine.document import tidy_fact
from ..exceptions import DocumentDamaged, LockMisused
from . import registry, steps, sweep, updates
from .holding import Batch, Desk, HeldDocument
from .rules import Fields, Rules, check_version
from .sender import Sender
from .source import ModelSource, make_source
from .steps import Steps
from .sweep import StuckDocument, Swept
from .updates import Claim, Document, Stuck

D = TypeVar("D")
T = TypeVar("T")


class DocumentLock(Generic[D]):
    """The lock of each document of a model or a collection, kept in the document itself.

    Declare it once, beside the model. A document is granted to one flow at a time, in one update that MongoDB's
    primary judges by its own clock: only with the version that the caller has read, and only if its state is settled,
    or nobody holds it, or the same owner does. Nobody waits: whoever is refused is told why.

    It is a claim without a lease that is renewed: if its holder dies, the document stays pending until `clear_stale`
    (``manage.py clear_stale_locks``) sets it to its failed state. And it binds only those who go by it.
    """

    def __init__(
        self,
        place: type[D] | Collection[D] | Callable[[], Collection[D]],  # type: ignore[type-var] # a document, or a model
        *,
        state: str,
        pending: Mapping[str, str],
        final: SizedCollection[str],
        stale_after: float,
        holder: str = "lockedBy",
        version: str = "documentVersion",
        time: str = "lockTimestamp",
        attempt: str = "lockAttempt",
        name: str | None = None,
        using: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Declare the lock. Raises TypeError and ValueError that name the cure.

        place: a model on MongoDB, a PyMongo collection, or a function that returns one. state, holder, version, time:
        the fields that say how far a document is, who holds it (text), which version it has (a whole number), and
        since when it is held (a date); of a model by the names of its fields, or those that they have in the
        documents. attempt: a field for the lock's own use, which the model need not have. pending: the states of work
        under way, each with its failed state. final: the states in which work ends. stale_after: seconds after which
        a pending document is stale: far more than the longest work takes, or call `HeldDocument.renew`.
        name: what commands and pages call this lock, if not by collection and state. using: the DATABASES alias of a
        model. timeout: the bound on one command, if not MONGOLOCK["COMMAND_TIMEOUT"].
        """
        self._source = source = make_source(place, using)
        names = {"holder": holder, "state": state, "version": version, "time": time}
        columns = {role: source.column(field) for role, field in names.items()}
        for role, field in names.items():
            source.check_kind(role, field)
        fields = Fields(**columns, attempt=source.column(attempt, must_exist=False))
        self.rules = Rules.declare(fields, pending, final, stale_after, source.longest(holder))
        choices = source.choices(state)
        for one in (*self.rules.pending, *self.rules.settled):
            if choices and one not in choices:
                raise ValueError(f"the field {state!r} has no choice {one!r}: it has {', '.join(sorted(choices))}")
        self.name = name or f"{source.name}.{fields.state}"
        self._timeout = timeout
        registry.declare(self)

    def __repr__(self) -> str:
        return f"<DocumentLock {self.name!r}>"

    @property
    def model(self) -> type[Model] | None:
        """Its model; None for a collection."""
        return self._source.model if isinstance(self._source, ModelSource) else None

    @property
    def alias(self) -> str | None:
        """The DATABASES alias of its model; None for a collection."""
        return self._source.alias()

    # One document

    def hold(
        self,
        document: Any,
        pending: str | None = None,
        *,
        owner: str | None = None,
        final: str | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Hold[D]:
        """A document, not yet acquired: use it with ``with`` or ``async with``. It is pending inside, final after it,
        failed after an error; see `HeldDocument`.

        document: as you have read it (its version counts), or (id, version). pending: which work, if there are
        several. owner: which flow; the same owner may take a document over that it holds already, with a new version.
        None: a name that nobody else has. final: the state in which the work ends, if there are several and the block
        does not say so by `HeldDocument.finish`. changes: what to write in the same update that grants it.
        """
        id_, version = self._reference(document)
        return Hold(self, id_, version, self._claims(pending, owner, changes), self._check_final(final))

    def acquire(self, document: Any, pending: str | None = None, **options: Any) -> HeldDocument[D]:
        """Acquire a document; the arguments are those of hold().

        Raises DocumentNotFound, DocumentChanged, DocumentHeld, DocumentDamaged, LockBackendFailed.
        """
        return self.hold(document, pending, **options).acquire()

    async def aacquire(self, document: Any, pending: str | None = None, **options: Any) -> HeldDocument[D]:
        """See acquire()."""
        return await self.hold(document, pending, **options).aacquire()

    # Several documents

    def acquire_many(
        self,
        documents: Iterable[Any],
        pending: str | None = None,
        *,
        owner: str | None = None,
        final: str | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Batch[D]:
        """Acquire those of many documents that are to be had; see `Batch`. The arguments are those of hold().

        Three commands for 500 documents, however many of them are refused. Raises LockBackendFailed.
        """
        desk, sent, final = self._desk(), clock.now(), self._check_final(final)
        claim, versions = self._claims(pending, owner, changes)(), self._references(documents)
        outcome = desk.sender.run(steps.acquire_many(desk.target, claim, versions))
        return _batch(desk, claim, outcome, final, sent)

    async def aacquire_many(
        self,
        documents: Iterable[Any],
        pending: str | None = None,
        *,
        owner: str | None = None,
        final: str | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Batch[D]:
        """See acquire_many(). A queryset must have been read before."""
        desk, sent, final = self._desk(), clock.now(), self._check_final(final)
        claim, versions = self._claims(pending, owner, changes)(), self._references(documents)
        outcome = await desk.sender.arun(steps.acquire_many(desk.target, claim, versions))
        return _batch(desk, claim, outcome, final, sent)

    # Stale documents

    def stale(self, *, owner: str | None = None, older_than: float = 0.0, limit: int = 0) -> list[StuckDocument]:
        """Pending documents whose holder has had them for longer than `stale_after`; changes nothing.

        owner: only those of one holder. older_than: only those that have been stale for so many seconds.
        """
        return self._run(sweep.find(self.rules, Stuck(owner, older_than), limit))

    async def astale(self, *, owner: str | None = None, older_than: float = 0.0, limit: int = 0) -> list[StuckDocument]:
        """See stale()."""
        return await self._arun(sweep.find(self.rules, Stuck(owner, older_than), limit))

    def clear_stale(
        self,
        ids: Iterable[Any] | None = None,
        *,
        owner: str | None = None,
        older_than: float = 0.0,
        batch: int = sweep.SWEEP_BATCH,
    ) -> Swept:
        """Set stale documents to the failed state that belongs to their work, held by nobody; a retry job takes it
        from there. Their holders, if they still live, are refused whatever they then write.

        The server decides in the update itself: a document that is finished or renewed in the same moment stays.
        ids: only these documents.
        """
        return self._run(sweep.sweep(self.rules, self._stuck(ids, owner, older_than), batch))

    async def aclear_stale(
        self,
        ids: Iterable[Any] | None = None,
        *,
        owner: str | None = None,
        older_than: float = 0.0,
        batch: int = sweep.SWEEP_BATCH,
    ) -> Swept:
        """See clear_stale()."""
        return await self._arun(sweep.sweep(self.rules, self._stuck(ids, owner, older_than), batch))

    def has_index(self) -> bool:
        """Is there an index by which stale documents are found? Without one, each sweep reads the whole collection."""
        return bool(self._run(steps.send(lambda collection: sweep.has_index(collection, self.rules))))

    # How

    def _run(self, what: Steps[T]) -> T:
        return self._sender().run(what)

    async def _arun(self, what: Steps[T]) -> T:
        return await self._sender().arun(what)

    def _sender(self) -> Sender:
        return Sender(self._source.collection(), self._timeout or get_settings().COMMAND_TIMEOUT)

    def _desk(self) -> Desk:
        return Desk(self._source, self.rules, self._sender())

    def _stuck(self, ids: Iterable[Any] | None, owner: str | None, older_than: float) -> Stuck:
        return Stuck(owner, older_than, None if ids is None else [self._source.key(id_) for id_ in ids])

    def _claims(self, pending: str | None, owner: str | None, changes: Mapping[str, Any] | None) -> Callable[[], Claim]:
        """Makes what is sent. It is checked now, and gets its names when it is sent: a process may fork in between."""
        rules = self.rules
        made = rules.check_changes(self._source.changes(changes or {}))
        state, given = rules.check_pending(pending), rules.check_owner(owner)

        def claim() -> Claim:
            name = given or tidy_fact(f"{secrets.token_hex(12)}/{socket.gethostname()}/{os.getpid()}")
            return Claim(name[: rules.longest_owner], state, updates.new_attempt(), made)

        return claim

    def _check_final(self, final: str | None) -> str | None:
        return final if final is None else self.rules.check_final(final)

    def _reference(self, document: Any) -> tuple[Any, int]:
        if isinstance(document, StuckDocument):
            return document.id, document.version
        if isinstance(document, tuple):
            if len(document) != 2:
                raise TypeError("pass the document as you have read it, or (id, version)")
            return self._source.key(document[0]), check_version(document[1])
        key, field = self._source.key(document), self.rules.fields.version
        version = self._source.read(document, field)
        if isinstance(version, bool) or not isinstance(version, int):
            found = "missing" if version is None else type(version).__name__
            problem = f"its field {field!r} is {found}, not a whole number (0 for one that never had a version)"
            raise DocumentDamaged(self._source.name, key, problem)
        return key, check_version(version)

    def _references(self, documents: Iterable[Any]) -> dict[Any, int]:
        return dict(self._reference(document) for document in documents)


def _batch(desk: Desk, claim: Claim, outcome: steps.Outcome, final: str | None, sent: float) -> Batch[Any]:
    held = [HeldDocument[Any](desk, claim, document, final, sent) for document in outcome.granted]
    return Batch(held, outcome.refused, desk.sender)


class Hold(Generic[D]):
    """A document that is acquired at the beginning of the block."""

    def __init__(
        self, lock: DocumentLock[D], id_: Any, version: int, claims: Callable[[], Claim], final: str | None
    ) -> None:
        self._lock = lock
        self._id = id_
        self._version = version
        self._claims = claims
        self._final = final
        self._claim: Claim
        self._held: HeldDocument[D]
        self._used = False

    def acquire(self) -> HeldDocument[D]:
        """See DocumentLock.acquire()."""
        desk, sent = self._lock._desk(), clock.now()
        return self._keep(desk, desk.sender.run(self._steps(desk)), sent)

    async def aacquire(self) -> HeldDocument[D]:
        """See DocumentLock.acquire()."""
        desk, sent = self._lock._desk(), clock.now()
        return self._keep(desk, await desk.sender.arun(self._steps(desk)), sent)

    def _steps(self, desk: Desk) -> Steps[Document]:
        if self._used:
            raise LockMisused("this document was asked for before: call hold() for each time")
        self._used = True
        self._claim = self._claims()
        return steps.acquire(desk.target, self._claim, self._id, self._version)

    def _keep(self, desk: Desk, document: Document, sent: float) -> HeldDocument[D]:
        self._held = HeldDocument(desk, self._claim, document, self._final, sent)
        return self._held

    def __enter__(self) -> HeldDocument[D]:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.__exit__(kind, error, traceback)

    async def __aenter__(self) -> HeldDocument[D]:
        return await self.aacquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._held.__aexit__(kind, error, traceback)
