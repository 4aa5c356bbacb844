"""`DocumentLock`: a lock inside a business document, in fields that it has already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Collection as SizedCollection
from typing import Any, Final, Generic, TypeVar, Unpack

from django.db.models import Model
from pymongo.collection import Collection

from ..conf import get_settings
from ..engine import clock
from ..engine.options import Seconds, check_seconds, check_wait
from ..inspection.server_facts import DOCUMENT_RIGHTS, missing_rights
from . import acquiring, forcing, sweep
from .batch import Batch
from .hold import BatchOptions, Hold, HoldOptions, PendingState, Plan
from .holding import FinalState, HeldDocument
from .lock_context import Context
from .open_transactions import calling_place
from .queryset import DocumentQuerySet
from .requests import Requests
from .rules import Fields, Rules, check_age
from .sender import Sender
from .snapshot import DocumentSnapshot
from .source import make_source
from .steps import Steps, send
from .sweep import Swept
from .updates import StaleFilter

D = TypeVar("D")
T = TypeVar("T")

#: The document locks of this project by name: for the commands, the admin and the checks.
_declared: Final[dict[str, DocumentLock[Any]]] = {}


class DocumentLock(Generic[D]):
    """The lock of each document of a model or a collection, kept in the document itself.

    Declare it once, beside the model. A document is granted to one flow at a time, in one update that MongoDB's
    primary judges by its own clock: only in the version that the caller has read, and only if no work on it is under
    way, or it has no holder, or a former run of the same owner holds it that has ended or is stale. There is no queue:
    a refusal is an error that says why.

    No lease is renewed: if the holder dies, the document stays pending until `clear_stale`
    (``manage.py clear_stale_locks``) sets it to its failed state. Only code that uses the lock is kept out.
    """

    def __init__(
        self,
        place: type[D] | Collection[D] | Callable[[], Collection[D]],  # type: ignore[type-var] # a document, or a model
        *,
        state: str,
        pending: Mapping[str, str],
        final: SizedCollection[str],
        stale_after: Seconds,
        holder: str = "lockedBy",
        version: str = "documentVersion",
        time: str = "lockTimestamp",
        attempt: str = "lockAttempt",
        name: str | None = None,
        using: str | None = None,
        timeout: Seconds | None = None,
    ) -> None:
        """Declare the lock. Raises TypeError and ValueError that name the cure.

        place: a model on MongoDB, a PyMongo collection, or a function that returns one. state, holder, version, time:
        the fields for the state of the work, who holds the document (text), its version (a whole number), and since
        when it is held (a date); of a model by the names of its fields, or those that they have in the documents.
        attempt: a field for the lock's own use, which the model need not have. pending: the states of work under way,
        each with its failed state. final: the states in which work ends. stale_after: seconds after which a pending
        document is stale: far more than the longest work takes, or call `HeldDocument.renew`. name: what commands and
        pages call this lock, if not by collection and state. using: the DATABASES alias of a model. timeout: the bound
        on one command, if not MONGOLOCK["COMMAND_TIMEOUT"].
        """
        self._source = source = make_source(place, using)
        names = {"holder": holder, "state": state, "version": version, "time": time}
        columns = {role: source.column(field) for role, field in names.items()}
        for role, field in names.items():
            source.check_kind(role, field)
        fields = Fields(**columns, attempt=source.column(attempt, must_exist=False))
        self.rules = Rules.declare(fields, pending, final, stale_after, source.longest(holder))
        choices = source.choices(state)
        for one in (*self.rules.pending, *self.rules.ended):
            if choices and one not in choices:
                raise ValueError(f"the field {state!r} has no choice {one!r}: it has {', '.join(sorted(choices))}")
        self.name = name or f"{source.name}.{fields.state}"
        self._timeout = None if timeout is None else check_seconds("timeout", timeout)
        self._requests = Requests(source, self.rules)
        declare(self)

    def __repr__(self) -> str:
        return f"<DocumentLock {self.name!r}>"

    @property
    def model(self) -> type[Model] | None:
        """Its model; None for a collection."""
        return self._source.model

    @property
    def alias(self) -> str | None:
        """The DATABASES alias of its model; None for a collection."""
        return self._source.alias

    # One document

    def hold(
        self,
        document: Any,
        pending: PendingState = None,
        *,
        owner: str | None = None,
        final: FinalState = None,
        changes: Mapping[str, Any] | None = None,
        wait: Seconds | None = 0,
    ) -> Hold[D]:
        """Prepare to hold a document: use it with ``with`` or ``async with``. The document is pending inside the
        block, final after it, failed after an error; see `HeldDocument`.

        document: as you have read it (its version counts), or (id, version). pending: which work, if there are
        several; or a function that chooses it for the document. owner: which flow; it may resume the work of a former
        run whose process has certainly ended, or that is stale. None: a unique name. final: the state in which the
        work ends, if there are several and the block does not call `HeldDocument.finish`; or a function that chooses
        it for the document, as it is at the end. changes: what to write in the same update that grants it; they mean
        what they mean to MongoDB's `$set`.

        wait: 0: a single try, and only in the version that was read. Seconds: until then, it tries again while another
        flow holds the document, and reads the document again if it has changed; so decide inside the block, or in
        *pending*. None: without end.
        """
        requests = self._requests
        made, flow = requests.check_changes(changes), self.rules.check_owner(owner)
        plan = Plan(
            request=requests.make(document, pending, made),
            again=lambda found: requests.make(self._source.instance(found), pending, made),
            attempt=lambda: requests.attempt(flow),
            final=requests.check_final(final),
            wait=check_wait(wait),
            place=calling_place(),
        )
        return Hold(self._context, plan)

    def acquire(self, document: Any, pending: PendingState = None, **options: Unpack[HoldOptions]) -> HeldDocument[D]:
        """Acquire a document; the arguments are those of hold().

        Raises DocumentNotFound, DocumentChanged, DocumentHeld, DocumentDamaged, DocumentRefused, LockBackendFailed.
        """
        return self.hold(document, pending, **options).acquire()

    async def aacquire(
        self, document: Any, pending: PendingState = None, **options: Unpack[HoldOptions]
    ) -> HeldDocument[D]:
        """See acquire()."""
        return await self.hold(document, pending, **options).aacquire()

    def check_id(self, id: object) -> Any:  # noqa: A002
        """Return *id* as the `_id` of a document. Raises TypeError or ValueError for what can be none."""
        return self._source.checked_key(id)

    # Several documents

    def acquire_many(
        self, documents: Iterable[Any], pending: PendingState = None, **options: Unpack[BatchOptions]
    ) -> Batch[D]:
        """Acquire those of many documents that are available; see `Batch`. The arguments are those of hold().

        Three commands for 500 documents, however many of them are refused. Raises LockBackendFailed.
        """
        context = self._context()
        return context.sender.run(self._acquire_many(context, documents, pending, calling_place(), **options))

    async def aacquire_many(
        self, documents: Iterable[Any], pending: PendingState = None, **options: Unpack[BatchOptions]
    ) -> Batch[D]:
        """See acquire_many(). A queryset must have been read before."""
        context = self._context()
        return await context.sender.arun(self._acquire_many(context, documents, pending, calling_place(), **options))

    def _acquire_many(
        self,
        context: Context,
        documents: Iterable[Any],
        pending: PendingState,
        place: str,
        *,
        owner: str | None = None,
        final: FinalState = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Steps[Batch[D]]:
        asks, sent = self._requests, clock.now()
        final, made = asks.check_final(final), asks.check_changes(changes)
        acquisition = asks.attempt(self.rules.check_owner(owner))
        requests = {request.id: request for request in (asks.make(each, pending, made) for each in documents)}
        outcome = yield from acquiring.acquire_many(context, acquisition, list(requests.values()))
        held = [
            HeldDocument[D](context, acquisition, document, final=final, sent=sent, place=place)
            for document in outcome.granted.values()
        ]
        return Batch(context, held, outcome.refused)

    # Who is at which document now

    def at_work(self) -> DocumentQuerySet:
        """The documents that have a holder and are pending: held or stale. See `DocumentQuerySet`."""
        return DocumentQuerySet(self.name, self._context)

    def held(self) -> DocumentQuerySet:
        """The documents that are held now, and are not stale."""
        return self.at_work().held()

    def stale(self, *, older_than: Seconds = 0.0, unheld: bool = False) -> DocumentQuerySet:
        """The documents that have been held for longer than `stale_after`.

        older_than: only those that have been stale for so many seconds. unheld: also those that are pending and have no
        holder, such as imported ones.
        """
        return self.at_work().stale(older_than=older_than, unheld=unheld)

    def damaged(self) -> DocumentQuerySet:
        """The pending documents that cannot be judged, since a field of the lock has an invalid value."""
        return self.at_work().damaged()

    def owned_by(self, owner: str) -> DocumentQuerySet:
        """The documents that *owner* holds, also if they are stale."""
        return self.at_work().owned_by(owner)

    def force_release(
        self, shown: Iterable[DocumentSnapshot], *, by: str = "", reason: str = ""
    ) -> list[DocumentSnapshot]:
        """Take these documents from their holders, before they are stale; return those that were released.

        Each gets the failed state of its work. shown: as they were read and confirmed: a document that has another
        holder by now is left as it is. What a holder writes afterwards through the lock is refused; its work is not
        stopped. by, reason: who does it and why, for the log.
        """
        context = self._context()
        return context.sender.run(forcing.force_release(context, self.name, shown, by, reason))

    async def aforce_release(
        self, shown: Iterable[DocumentSnapshot], *, by: str = "", reason: str = ""
    ) -> list[DocumentSnapshot]:
        """See force_release()."""
        context = self._context()
        return await context.sender.arun(forcing.force_release(context, self.name, shown, by, reason))

    # Stale documents

    def clear_stale(
        self,
        ids: Iterable[Any] | None = None,
        *,
        owner: str | None = None,
        older_than: Seconds = 0.0,
        unheld: bool = False,
        batch: int = sweep.SWEEP_BATCH,
    ) -> Swept:
        """Set stale documents to the failed state that belongs to their work, for a retry job, and release them. What
        their holders write afterwards, if they still live, is refused.

        The server decides in the update itself: a document that is finished or renewed in the same moment stays.
        ids: only these documents. The other arguments are those of stale().
        """
        return self._run(sweep.sweep(self.rules, self._stale_filter(ids, owner, older_than, unheld=unheld), batch))

    async def aclear_stale(
        self,
        ids: Iterable[Any] | None = None,
        *,
        owner: str | None = None,
        older_than: Seconds = 0.0,
        unheld: bool = False,
        batch: int = sweep.SWEEP_BATCH,
    ) -> Swept:
        """See clear_stale()."""
        which = self._stale_filter(ids, owner, older_than, unheld=unheld)
        return await self._arun(sweep.sweep(self.rules, which, batch))

    def has_index(self) -> bool:
        """Return whether an index finds stale documents. Without one, each sweep reads the whole collection."""
        return bool(self._run(send(lambda collection: sweep.has_index(collection, self.rules))))

    def missing_rights(self) -> tuple[str, ...]:
        """Return which rights on the documents this project's user of MongoDB lacks. Raises LockBackendFailed."""
        found: tuple[str, ...] = self._run(send(lambda collection: missing_rights(collection, DOCUMENT_RIGHTS)))
        return found

    # How

    def _run(self, what: Steps[T]) -> T:
        return self._sender().run(what)

    async def _arun(self, what: Steps[T]) -> T:
        return await self._sender().arun(what)

    def _sender(self) -> Sender:
        return Sender(self._source.collection(), self._timeout or get_settings().COMMAND_TIMEOUT)

    def _context(self) -> Context:
        return Context(self._source, self.rules, self._sender())

    def _stale_filter(
        self, ids: Iterable[Any] | None, owner: str | None, older_than: Seconds, *, unheld: bool
    ) -> StaleFilter:
        keys = None if ids is None else [self._source.key(id_) for id_ in ids]
        return StaleFilter(owner, check_age(older_than), keys, unheld)


def declare(lock: DocumentLock[Any]) -> None:
    """Note a lock. Raises ValueError if there is another one of its name.

    One that says the same is the same, in a module that was loaded again.
    """
    other = _declared.get(lock.name)
    if other is not None and other.rules != lock.rules:
        raise ValueError(f"there is a document lock {lock.name!r} already: give this one a name= of its own")
    _declared[lock.name] = lock


def declared() -> list[DocumentLock[Any]]:
    """Return all document locks that were declared so far, by name."""
    return [lock for _, lock in sorted(_declared.items())]


def find_lock(name: str) -> DocumentLock[Any]:
    """Return the document lock of that name. Raises LookupError, which names those that there are."""
    try:
        return _declared[name]
    except KeyError:
        names = ", ".join(sorted(_declared)) or "none"
        raise LookupError(f"no document lock {name!r} was declared: there are {names}") from None


def undeclare(lock: DocumentLock[Any]) -> None:
    """Forget a lock; for tests."""
    _declared.pop(lock.name, None)
