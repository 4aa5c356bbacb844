"""Which documents are held just now, by whom and since when: to list, to count, to take from their holders."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, overload

from pymongo.collection import Collection

from ..engine.options import Seconds
from . import forcing
from .lock_context import Context
from .rules import check_age
from .snapshot import DocumentSnapshot, read_snapshot
from .steps import Steps, send
from .updates import Document, StaleFilter

T = TypeVar("T")
#: at_work: held or stale.
Which = Literal["at_work", "held", "stale", "damaged"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which documents are meant."""

    which: Which = "at_work"
    owner: str | None = None
    older_than: float = 0.0
    unheld: bool = False
    ids: tuple[Any, ...] | None = None
    states: tuple[str, ...] = ()
    skip: int = 0
    limit: int = 0

    def query(self, context: Context) -> Document:
        """The condition, which the server judges by its own clock."""
        ids = None if self.ids is None else [context.source.key(id_) for id_ in self.ids]
        chosen = StaleFilter(self.owner, self.older_than, ids, self.unheld)
        query = {
            "at_work": chosen.at_work,
            "held": chosen.held,
            "stale": chosen.query,
            "damaged": chosen.damaged,
        }[self.which](context.rules)
        return {"$and": [query, {context.rules.fields.state: {"$in": list(self.states)}}]} if self.states else query


class DocumentQuerySet:
    """Documents under a `DocumentLock`, as they are when they are read: chainable like Django's querysets, and as lazy.

    The document that has been held for longest comes first. It yields `DocumentSnapshot`; these may be outdated at
    once, so do not use them to decide whether you may work: acquire the document. Every reading may raise
    LockBackendFailed.
    """

    def __init__(self, name: str, context: Callable[[], Context], selection: Selection = Selection()) -> None:
        self._name = name
        self._context = context
        self._selection = selection
        self._found: list[DocumentSnapshot] | None = None

    def __repr__(self) -> str:
        return f"<DocumentQuerySet {self._name!r}: {self._selection.which}>"

    # Which

    def held(self) -> DocumentQuerySet:
        """Documents that are held and not stale."""
        return self._chosen(which="held")

    def stale(self, *, older_than: Seconds = 0.0, unheld: bool = False) -> DocumentQuerySet:
        """Documents that have been held for longer than `stale_after`, and have been stale for *older_than* seconds.

        unheld: also those that are pending and have no holder, unless they have a time that is not stale.
        """
        return self._chosen(which="stale", older_than=check_age(older_than), unheld=unheld)

    def damaged(self) -> DocumentQuerySet:
        """Pending documents that cannot be judged, since a field of the lock has an invalid value."""
        return self._chosen(which="damaged")

    def owned_by(self, owner: str) -> DocumentQuerySet:
        """Documents that this owner holds."""
        return self._chosen(owner=owner)

    def with_ids(self, ids: Iterable[Any]) -> DocumentQuerySet:
        """Only these documents, by their ids or as you have read them."""
        return self._chosen(ids=tuple(ids))

    def in_state(self, *states: str) -> DocumentQuerySet:
        """Only documents in one of these pending states."""
        rules = self._context().rules
        return self._chosen(states=tuple(rules.check_pending(state) for state in states))

    # Reading

    def __iter__(self) -> Iterator[DocumentSnapshot]:
        return iter(self._read())

    async def __aiter__(self) -> AsyncIterator[DocumentSnapshot]:
        if self._found is None:
            self._found = await self._context().sender.arun(self._find())
        for each in self._found:
            yield each

    def __len__(self) -> int:
        return len(self._read())

    def __bool__(self) -> bool:
        return bool(self._read())

    @overload
    def __getitem__(self, index: int) -> DocumentSnapshot: ...
    @overload
    def __getitem__(self, index: slice) -> DocumentQuerySet: ...
    def __getitem__(self, index: int | slice) -> DocumentSnapshot | DocumentQuerySet:
        if isinstance(index, int):
            return self._read()[index]
        start, stop = index.start or 0, index.stop
        if index.step is not None or start < 0 or (stop is not None and stop < start) or self._selection.limit:
            raise ValueError("a slice of documents is [:stop] or [start:stop], and taken once")
        if stop == start:
            return self._chosen(ids=())
        return self._chosen(skip=start, limit=0 if stop is None else stop - start)

    def first(self) -> DocumentSnapshot | None:
        """The document that has been held for longest; None if there is none."""
        return next(iter(self[:1]), None)

    async def afirst(self) -> DocumentSnapshot | None:
        """See first()."""
        return await anext(aiter(self[:1]), None)

    def count(self) -> int:
        """How many documents there are."""
        return self._run(self._count())

    async def acount(self) -> int:
        """See count()."""
        return await self._context().sender.arun(self._count())

    # Acting

    def force_release(self, *, by: str = "", reason: str = "") -> int:
        """Set each of these documents to the failed state of its work and release it; return how many were released.

        What their holders write afterwards through the lock is refused; but their work is not stopped, so make sure
        that they are dead, or that the service compares versions. by, reason: who does it and why, for the log.
        """
        return len(self._run(self._force(by, reason)))

    async def aforce_release(self, *, by: str = "", reason: str = "") -> int:
        """See force_release()."""
        return len(await self._context().sender.arun(self._force(by, reason)))

    # How

    def _chosen(self, **changes: Any) -> DocumentQuerySet:
        if self._selection.limit or self._selection.skip:
            raise TypeError("filter the documents before you take a slice of them")
        return DocumentQuerySet(self._name, self._context, replace(self._selection, **changes))

    def _run(self, steps: Steps[T]) -> T:
        return self._context().sender.run(steps)

    def _read(self) -> list[DocumentSnapshot]:
        if self._found is None:
            self._found = self._run(self._find())
        return self._found

    def _find(self) -> Steps[list[DocumentSnapshot]]:
        context, chosen = self._context(), self._selection
        query, fields = chosen.query(context), context.rules.fields

        def command(collection: Collection[Document]) -> list[Document]:
            found = collection.find(query, fields.projection()).sort(fields.time, 1)
            return list(found.skip(chosen.skip).limit(chosen.limit))

        found: list[Document] = yield from send(command)
        return [read_snapshot(context.rules, document) for document in found]

    def _count(self) -> Steps[int]:
        chosen = self._selection
        query = chosen.query(self._context())
        limits: dict[str, Any] = {"skip": chosen.skip} | ({"limit": chosen.limit} if chosen.limit else {})
        count: int = yield from send(lambda collection: collection.count_documents(query, **limits))
        return count

    def _force(self, by: str, reason: str) -> Steps[list[DocumentSnapshot]]:
        shown = yield from self._find()
        return (yield from forcing.force_release(self._context(), self._name, shown, by, reason))
