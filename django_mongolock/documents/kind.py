"""Document locks as a kind of locks, for lists, pages, commands and checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from bson import ObjectId
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured, ValidationError
from pymongo.collection import Collection

from ..backends.courier import send
from ..backends.field_paths import Document
from ..checks.messages import error, warning
from ..exceptions import LockBackendFailed
from ..inspection.kinds import Choice, Counts, LockKind, Swept
from ..inspection.server_facts import DOCUMENT_RIGHTS, missing_rights
from . import sweep
from .document_lock import DocumentLock, declared
from .snapshot import DocumentSnapshot


class DocumentKind:
    """The documents of one `DocumentLock`. See `LockKind`."""

    def __init__(self, lock: DocumentLock[Any]) -> None:
        self._lock = lock
        self.name, self.model, self.check_id = lock.name, lock.model, lock._source.checked_key

    @property
    def alias(self) -> str | None:
        return self._lock.alias

    def rows(self, choice: Choice, limit: int = 0) -> list[DocumentSnapshot]:
        return self._lock._run(sweep.find(self._lock.context(), choice, limit))

    def counts(self) -> Counts:
        return self._lock._run(sweep.counts(self._lock.context(), self.name))

    def clear(self, choice: Choice, *, batch: int) -> Swept:
        return self._lock._run(sweep.sweep(self._lock.context(), choice, batch))

    def force(self, shown: Iterable[DocumentSnapshot], *, by: str, reason: str) -> list[DocumentSnapshot]:
        return self._lock.force_release(shown, by=by, reason=reason)

    def ids(self, text: str) -> list[Any]:
        if self.model is not None:
            try:
                return [self._lock._source.key(self.model._meta.pk.to_python(text))]
            except ValidationError:
                return []
        ids: list[Any] = [text]
        if ObjectId.is_valid(text):
            ids.append(ObjectId(text))
        if text.removeprefix("-").isdecimal() and text.isascii():
            ids.append(int(text))
        return ids

    def checks(self) -> Iterator[CheckMessage]:
        def command(collection: Collection[Document]) -> tuple[tuple[str, ...], bool]:
            missing = missing_rights(collection, DOCUMENT_RIGHTS)
            return missing, bool(missing) or sweep.has_index(collection, self._lock.rules)

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


def kinds() -> list[LockKind]:
    """Return the kinds of all declared document locks."""
    return [DocumentKind(lock) for lock in declared()]
