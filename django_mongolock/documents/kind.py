"""Document locks as a kind of locks, for lists, pages, commands and checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from bson import ObjectId
from django.core.checks import CheckMessage, register
from django.core.exceptions import ImproperlyConfigured
from pymongo.collection import Collection

from ..backends import database_settings
from ..conf import error, get_settings, warning
from ..exceptions import LockBackendFailed
from ..inspection.kinds import Choice, Counts, LockKind, Swept
from ..inspection.server import DOCUMENT_RIGHTS, missing_rights
from ..inspection.snapshot import ShownState
from ..other_collections.courier import send
from ..other_collections.field_paths import Document
from . import steps
from .document_lock import DocumentLock, declared
from .rules import DocumentSnapshot

#: The most documents that are counted.
MAX_COUNTED: Final = 1_000


class DocumentKind:
    """The documents of one `DocumentLock`. See `LockKind`."""

    taken = (ShownState.HELD, ShownState.STALE)

    def __init__(self, lock: DocumentLock[Any]) -> None:
        self._lock = lock
        self.name, self.title, self.model, self.alias = lock.name, f"documents of {lock.name}", lock.model, lock.alias

    def rows(self, choice: Choice, limit: int = 0) -> list[DocumentSnapshot]:
        if choice.state not in steps.STATES:
            return []
        return self._lock._run(steps.find(self._lock.context(), choice, limit))

    def again(self, shown: Sequence[tuple[Any, Any]]) -> list[DocumentSnapshot]:
        holders = {self._lock._source.checked_key(id_): holder for id_, holder in shown}
        for holder in holders.values():
            str.encode(holder)  # any text: another program wrote it
        return [row for row in self.rows(Choice(ids=list(holders))) if row.holder and row.holder == holders[row.id]]

    def ids(self, text: str) -> list[Any]:
        given, ids = list[Any]([text]), list[Any]()
        if self.model is None and ObjectId.is_valid(text):
            given.append(ObjectId(text))
        if self.model is None and text.removeprefix("-").isdecimal() and text.isascii():
            given.append(int(text))
        for each in given:
            with suppress(ValueError):
                ids.append(self._lock._source.checked_key(each))
        return ids

    def counts(self) -> Counts:
        found = self.rows(Choice(), MAX_COUNTED)
        states = Counter(row.state.value for row in found)
        longest, more = max((row.seconds for row in found), default=0.0), len(found) >= MAX_COUNTED
        return Counts(self.name, states["held"], states["stale"], states["damaged"], longest, more=more)

    def clear(self, choice: Choice, *, dry_run: bool = False) -> Iterator[Swept]:
        yield self._lock._run(steps.sweep(self._lock.context(), choice, dry_run=dry_run))

    def force(self, shown: Iterable[DocumentSnapshot], *, by: str, reason: str) -> list[DocumentSnapshot]:
        return self._lock.force_release(shown, by=by, reason=reason)

    def checks(self, databases: Sequence[str]) -> Iterator[CheckMessage]:
        if (self.alias or get_settings().DATABASE) not in databases:
            return

        def command(collection: Collection[Document]) -> tuple[tuple[str, ...], bool]:
            missing = missing_rights(collection, DOCUMENT_RIGHTS)
            return missing, bool(missing) or steps.has_index(collection, self._lock.rules)

        try:
            missing, indexed = self._lock._run(send(command))
        except (LockBackendFailed, ImproperlyConfigured):  # other checks report it, or the user may not list indexes
            return
        fields = self._lock.rules.fields
        if missing:
            yield error(
                "E103",
                f"The user of MongoDB lacks rights on the documents of {self.name!r}: {', '.join(missing)}.",
                "Grant find and update on their collection.",
            )
        elif not indexed:
            yield warning(
                "W105",
                f"No index serves the sweep of the document lock {self.name!r}: it reads the whole collection.",
                f"Make one that begins with {fields.state!r}, best with {fields.time!r} after it: "
                "Meta.indexes of the model, or create_index of the collection.",
            )


def kinds(using: str | None = None) -> list[LockKind]:
    """Return the kinds of the declared document locks, of all databases or of this one."""
    return [DocumentKind(lock) for lock in declared() if using in (None, lock.alias)]


@register()
def check_document_places(**kwargs: Any) -> list[CheckMessage]:
    """Check that the models of the declared document locks are in MongoDB. A router decides that late."""
    found: list[CheckMessage] = []
    for lock in declared():
        try:
            if lock.alias is not None:
                database_settings(lock.alias)
        except ImproperlyConfigured as problem:
            message = f"The document lock {lock.name!r} is declared on a model that is not in MongoDB: {problem}."
            cure = "Have a router send the model to MongoDB, or name the alias by using=."
            found.append(error("E016", message, cure))
    return found
