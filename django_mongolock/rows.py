"""Locked rows: acquire the lock of a row, then read the row, so that you see the writes of the previous holder."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

from asgiref.sync import sync_to_async
from django.db import models, router
from django.db.models import Model
from django.db.models.query import ModelIterable

from .engine.lock.lock import MongoLock
from .engine.rule.options import UNSET, Seconds, Unset
from .exceptions import LockMisused
from .keys import LockKey, row_key, row_template
from .locks import LockKeywords, mongo_lock

__all__ = ["LockedQuerySet", "LockedRow", "locked"]

M = TypeVar("M", bound=Model)

#: The number of times that a row may turn out to have another primary key than the requested one.
_SPELLINGS = 3


class LockedQuerySet(models.QuerySet[M, M]):
    """A queryset that locks rows: ``objects = LockedQuerySet.as_manager()``, or a base of your own queryset."""

    def locked(
        self,
        *,
        wait: Seconds | Unset | None = UNSET,
        lease: Seconds | None = None,
        lock_options: LockKeywords | None = None,
        **lookup: Any,
    ) -> LockedRow[M]:
        """See `locked`."""
        return locked(self, wait=wait, lease=lease, lock_options=lock_options, **lookup)


def locked(
    source: type[M] | models.Manager[M] | models.QuerySet[M, M],
    *,
    wait: Seconds | Unset | None = UNSET,
    lease: Seconds | None = None,
    lock_options: LockKeywords | None = None,
    **lookup: Any,
) -> LockedRow[M]:
    """Lock and then read the row that ``get(**lookup)`` finds: ``with locked(User, pk=5) as user:``.

    - source: model, manager or queryset, with its filters and its `select_related`.
    - wait, lease, lock_options: as in `mongo_lock`. To look a row up by a field of one of these names, use
      ``filter()``.

    ``with`` and ``async with`` give a fresh instance, read from the database for writing. The lock is the same as
    ``mongo_lock(instance)``, and available as `LockedRow.lock`. If the row does not exist, or does not match any more,
    the model's DoesNotExist is raised and the lock is released.

    Only code that locks the row as well is kept out. Open a transaction inside the block, not around it. Otherwise the
    lock is released before the commit, and an older snapshot may be read.
    """
    given: Any = source
    if not (
        isinstance(given, (models.Manager, models.QuerySet)) or (isinstance(given, type) and issubclass(given, Model))
    ):
        raise TypeError(
            "locked() takes a model, a manager or a queryset, and a lookup of the row: locked(Order, pk=5). "
            f"This is a {type(given).__name__}"
        )
    queryset = source._default_manager.all() if isinstance(source, type) else source.all()
    return LockedRow(queryset, lookup, {"wait": wait, "lease": lease, **(lock_options or {})})


class LockedRow(Generic[M]):
    """A row to be locked and read. Make a new one for every use."""

    def __init__(self, queryset: models.QuerySet[M, M], lookup: dict[str, Any], options: LockKeywords) -> None:
        if not issubclass(queryset._iterable_class, ModelIterable):
            raise TypeError("only whole instances can be locked: remove values() and values_list()")
        # A replica may not have the writes of the previous holder yet.
        inner: Any = queryset
        self._rows = queryset.using(inner._db or router.db_for_write(queryset.model, **inner._hints))
        self._lookup = lookup
        self._options = options
        self._lock: MongoLock | None = None

    @property
    def lock(self) -> MongoLock:
        """The acquired lock, with `fencing_token`, `ensure_held()` and the rest. Raises LockMisused before."""
        if self._lock is None:
            raise LockMisused("this row is not locked: use it with `with` or `async with`")
        return self._lock

    def __enter__(self) -> M:
        pk = self._find()
        for _ in range(_SPELLINGS):
            lock = self._new_lock(pk).acquire()
            try:
                row = self._read(pk)
                if self._fits(lock, row):
                    return row
            except BaseException:
                self._lock = None
                lock.release()
                raise
            pk = row.pk
            lock.release()
        raise LockMisused(f"the row cannot be locked, since its primary key {pk!r} keeps changing: try again")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        return self.lock.__exit__(kind, error, traceback)

    async def __aenter__(self) -> M:
        pk = await sync_to_async(self._find)()
        for _ in range(_SPELLINGS):
            lock = await self._new_lock(pk).aacquire()
            try:
                row = await sync_to_async(self._read)(pk)
                if self._fits(lock, row):
                    return row
            except BaseException:
                self._lock = None
                await lock.arelease()
                raise
            pk = row.pk
            await lock.arelease()
        raise LockMisused(f"the row cannot be locked, since its primary key {pk!r} keeps changing: try again")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        return await self.lock.__aexit__(kind, error, traceback)

    def _find(self) -> Any:
        """Return the primary key, as given or of the row that matches. Raises the errors of the model's `get`."""
        if set(self._lookup) == {"pk"} or set(self._lookup) == {self._rows.model._meta.pk.name}:
            (value,) = self._lookup.values()
            return _as_pk(self._rows.model, value)
        return self._rows.values_list("pk", flat=True).get(**self._lookup)

    def _new_lock(self, pk: Any) -> MongoLock:
        model, using = self._rows.model, self._rows.db
        return mongo_lock(LockKey(row_key(model, pk, using), row_template(model, using)), **self._options)

    def _read(self, pk: Any) -> M:
        return self._rows.get(**{**self._lookup, "pk": pk})

    def _fits(self, lock: MongoLock, row: M) -> bool:
        """Return whether *lock* is the lock of this row. A database may find a key in another spelling."""
        if not lock.key.endswith(row_key(self._rows.model, row.pk, self._rows.db)):
            return False
        self._lock = lock
        return True


def _as_pk(model: type[Model], value: Any) -> Any:
    """Return a primary key in the model's type. "5" for an integer becomes 5, text for a UUID becomes a UUID."""
    if isinstance(value, Model):
        return value.pk
    key = model._meta.pk
    fields = getattr(key, "fields", None)
    if fields is not None and isinstance(value, (tuple, list)):
        return tuple(field.to_python(part) for field, part in zip(fields, value, strict=True))
    return key.to_python(value)
