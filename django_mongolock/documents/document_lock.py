"""`DocumentLock`: a lock inside a business document, in fields that the document has already."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from collections.abc import Collection as SizedCollection
from typing import Any, Final, Generic, TypedDict, TypeVar, Unpack

from django.db.models import BooleanField, Func, Model
from pymongo.collection import Collection

from ..conf import used_apps
from ..engine.lock.grants import calling_line
from ..engine.protocol.actions import twins
from ..engine.rule.options import Seconds, check_age, check_wait
from ..inspection.kinds import Choice, Swept
from ..other_collections.courier import Steps
from ..other_collections.field_paths import meets
from ..other_collections.places import make_source
from . import steps
from .held_document import FinalState, HeldDocument
from .hold import Batch, BatchOptions, Hold, HoldOptions, PendingState, Plan, acquire_many
from .rules import DocumentSnapshot, Rules
from .saving import protect
from .steps import BATCH, Context

D = TypeVar("D")
T = TypeVar("T")

#: The document locks of this project by name, for the commands, the admin and the checks.
_declared: Final[dict[str, DocumentLock[Any]]] = {}


class Which(TypedDict, total=False):
    """The choice of documents.

    - owner: only documents that this owner holds.
    - older_than: only documents that have been stale for this many seconds.
    """

    owner: str | None
    older_than: Seconds


class DocumentLock(Generic[D]):
    """The lock of each document of a model or a collection, kept in the document itself.

    Declare it once, beside the model. One update grants a document to one flow at a time. MongoDB's primary decides by
    its own clock. The document must still have the version that the caller has read, and must not be held. A document
    is held while it has a holder, the holder's work has not ended, and the document is not stale. A document that a
    former run of the same owner holds is available to that owner if the run's process has certainly ended. There is no
    queue. A refusal is an error that says why.

    No lease is renewed. If the holder dies, the document stays pending until it is stale. After that, the next flow
    that asks gets the document. `clear_stale` (``manage.py clear_stale_locks``) sets documents that no flow asks for to
    their failed state. Only code that uses the lock is kept out.
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
        name: str | None = None,
        using: str | None = None,
    ) -> None:
        """Declare the lock. Raises TypeError and ValueError that name the cure.

        - place: model on MongoDB, PyMongo collection, or function that returns one.
        - state: field for the state of the work.
        - holder: field for the holder of the document (text).
        - version: field for the version of the document (a whole number, in a model a VersionField).
        - time: field for the time since when the document is held (a date).
        - pending: states of work under way, each with its failed state.
        - final: states in which work ends.
        - stale_after: seconds after which a document is stale. Choose far more than the longest work takes, or call
          `HeldDocument.renew`.
        - name: name of this lock in commands and pages. Default: collection and state.
        - using: DATABASES alias of a model.

        The four fields of a model are given by their names in the model or in the documents. The fields belong to the
        lock alone. `save()` of a model leaves them unchanged. The lock uses a further field, named as the holder's with
        "Token" behind it. A model need not declare the further field.
        """
        self._source = source = make_source(place, using)
        #: The model of the documents, None for a collection.
        self.model: type[Model] | None = source.model
        fields = {"holder": holder, "state": state, "version": version, "time": time}
        self.rules = Rules.declare(source, fields, pending, final, stale_after)
        self.name = name or f"{source.name}.{self.rules.fields.state}"
        declare(self)
        if source.model is not None:
            protect(source.model, self.rules)

    def __repr__(self) -> str:
        return f"<DocumentLock {self.name!r}>"

    @property
    def alias(self) -> str | None:
        """The DATABASES alias of its model, None for a collection."""
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
        """Prepare to hold a document. Use the result with ``with`` or ``async with``.

        The document is pending inside the block, final after it, and failed after an error. See `HeldDocument`.

        - document: document as you have read it (its version counts), or (id, version).
        - pending: pending state of the work, needed if there are several. A function chooses it for the document as
          changed.
        - owner: name of the flow. The flow may resume the work of a former run if the process of that run has certainly
          ended. None: unique name.
        - final: state in which the work ends, needed if there are several and the block does not call
          `HeldDocument.finish`. A function chooses it for the document as it is at the end.
        - changes: changes to write in the update that grants the document, with the meaning of MongoDB's `$set`.
        - wait: seconds to wait while another flow holds the document. 0: single try, only in the version that was read.
          None: without end. If the document has changed during the wait, it is read again. Decide inside the block
          then, or in *pending*.
        """
        plan = self._plan(pending, owner=owner, final=final, changes=changes)
        return Hold(self.context, plan, plan.request(document), check_wait(wait))

    def _acquire(
        self, document: Any, pending: PendingState = None, **options: Unpack[HoldOptions]
    ) -> Steps[HeldDocument[D]]:
        """Acquire a document. The arguments are those of hold().

        Raises DocumentNotFound, DocumentChanged, DocumentHeld, DocumentDamaged, DocumentRefused, LockBackendFailed.
        """
        return self.hold(document, pending, **options)._acquire()

    acquire, aacquire = twins(_acquire)

    # Several documents

    def _acquire_many(
        self, documents: Iterable[Any], pending: PendingState = None, **options: Unpack[BatchOptions]
    ) -> Steps[Batch[D]]:
        """Acquire those of many documents that are available, see `Batch`. The arguments are those of hold().

        500 documents need three commands, however many of them are refused. With ``await``, a queryset must have been
        read before. Raises LockBackendFailed.
        """
        return acquire_many(self.context(), self._plan(pending, **options), documents)

    acquire_many, aacquire_many = twins(_acquire_many)

    # Holders and documents at present

    def held(self) -> Any:
        """Return the condition that a document is held now, for `filter()` of a model's queryset or `find()` of a
        collection.

        The server decides by its own clock.
        """
        return self._condition("held")

    def stale(self) -> Any:
        """Return the condition that a document was held for longer than `stale_after`. See held()."""
        return self._condition("stale")

    def _snapshots(
        self, state: str = "all", *, ids: Iterable[Any] | None = None, limit: int = 0, **which: Unpack[Which]
    ) -> Steps[list[DocumentSnapshot]]:
        """Read the holders of documents, the longest hold first. The snapshots may be outdated at once.

        - state: "held", "stale", "damaged" (a field of the lock has an invalid value), or "all" of these.
        - owner: only documents that this owner holds.
        - older_than: only documents that have been stale for this many seconds.
        - ids: only these documents, by their ids or as you have read them.
        - limit: most documents to read. 0: all.
        """
        return steps.find(self.context(), self._choice(state, ids, **which), limit)

    snapshots, asnapshots = twins(_snapshots)

    def _force_release(
        self, shown: Iterable[DocumentSnapshot], *, by: str = "", reason: str = ""
    ) -> Steps[list[DocumentSnapshot]]:
        """Take these documents from their holders before they are stale. Return the released documents.

        Each document gets the failed state of its work. A holder's later writes through the lock are refused. The
        holder's work is not stopped. Make sure that the holder is dead, or that the service compares versions.

        - shown: documents as they were read and confirmed. A document with another holder by now is left unchanged.
        - by, reason: facts for the log.
        """
        return steps.force(self.context(), self.name, shown, by, reason)

    force_release, aforce_release = twins(_force_release)

    def _clear_stale(
        self, ids: Iterable[Any] | None = None, *, batch: int = BATCH, **which: Unpack[Which]
    ) -> Steps[Swept]:
        """Set stale documents to the failed state of their work, for a retry job, and release them.

        The server decides in the update itself. A document that is finished or renewed in the same moment stays. Later
        writes of former holders are refused. The arguments are those of snapshots().

        - batch: number of documents that one update releases.
        """
        return steps.sweep(self.context(), self._choice("stale", ids, **which), batch)

    clear_stale, aclear_stale = twins(_clear_stale)

    # The parts of the lock

    def context(self) -> Context:
        """Return the context of the steps, in this process."""
        known, courier = len(self._source.places), self._source.courier()
        if len(self._source.places) > known:  # the result of a function or a router is known only now
            check_apart(self)
        return Context(self._source, self.rules, courier)

    def _run(self, steps: Steps[T]) -> T:
        return self.context().courier.run(steps)

    def _arun(self, steps: Steps[T]) -> Coroutine[Any, Any, T]:
        return self.context().courier.arun(steps)

    def _plan(self, pending: PendingState, **options: Unpack[BatchOptions]) -> Plan:
        return Plan(self._source, self.rules, calling_line(), pending, **options)

    def _choice(
        self, state: str, ids: Iterable[Any] | None, owner: str | None = None, older_than: Seconds = 0.0
    ) -> Choice:
        if state not in steps.STATES:
            raise ValueError(f'state is "all", "held", "stale" or "damaged", not {state!r}')
        keys = None if ids is None else [self._source.key(id_) for id_ in ids]
        return Choice(state, owner, check_age(older_than), keys)

    def _condition(self, state: str) -> Any:
        query = steps.query(self.rules, Choice(state))
        return query if self.model is None else _OnServer(query["$expr"])


class _OnServer(Func):
    """An expression of MongoDB in a queryset."""

    output_field = BooleanField()

    def __init__(self, expression: Any = None) -> None:
        super().__init__()
        self.expression = expression

    def as_mql(self, compiler: Any, connection: Any, as_expr: bool = False) -> Any:
        return self.expression if as_expr else {"$expr": self.expression}


def declare(lock: DocumentLock[Any]) -> None:
    """Register a lock. Raises ValueError if another lock has its name, or shares a field with it.

    A lock with the same declaration counts as the same lock, because a module may be loaded again.
    """
    other = _declared.get(lock.name)
    if other is not None and (other.rules, other._source.identity) != (lock.rules, lock._source.identity):
        raise ValueError(f"there is a document lock {lock.name!r} already: give this one a name= of its own")
    check_apart(lock)
    _declared[lock.name] = lock
    used_apps.setdefault("django_mongolock.documents", f"The document lock {lock.name!r}")


def check_apart(lock: DocumentLock[Any]) -> None:
    """Raise ValueError if another lock of the same documents has a field of this one, because each would break the
    other.
    """
    mine = lock.rules.fields.names().values()
    for other in _declared.values():
        if other.name == lock.name or other._source.places.isdisjoint(lock._source.places):
            continue
        theirs = other.rules.fields.names().values()
        if shared := [name for name in mine if any(meets(name, another) for another in theirs)]:
            raise ValueError(
                f"the document locks {lock.name!r} and {other.name!r} share {', '.join(shared)} of the same documents: "
                "give each its own holder=, state=, version= and time="
            )


def declared() -> list[DocumentLock[Any]]:
    """Return all document locks that were declared so far, by name."""
    return [lock for _, lock in sorted(_declared.items())]


def undeclare(lock: DocumentLock[Any]) -> None:
    """Forget a lock, for tests."""
    _declared.pop(lock.name, None)
