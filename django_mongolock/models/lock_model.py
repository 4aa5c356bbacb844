"""`Lock`: the engine's documents as a Django model, for reading and for forced releases, never for locking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Unpack

from django.core.exceptions import FieldError
from django.db import models
from django.utils.translation import gettext_lazy as _

from ..backends import mongo_store
from ..engine.logs import WARNING, log
from ..exceptions import LockDocumentDamaged, printable
from ..inspection import operations, queries
from ..inspection.kinds import KeyMatch
from ..inspection.named_locks import LockRow, row_of
from ..inspection.snapshot import LockSnapshot, Party
from ..signals import lock_forced, send
from .reading import Condition, Entry, Number, Parties, ReadOnlyModel, ReadOnlyQuerySet, ServerTime


class LockQuerySet(ReadOnlyQuerySet):
    """Locks to read. The server's clock decides in the query which of them are held."""

    #: The owner whose grants `force_release` takes. None for all owners.
    _owner: str | None = None

    def held(self) -> LockQuerySet:
        """Return the locks that are held now."""
        return self._in_state("held")

    def kept(self) -> LockQuerySet:
        """Return the released locks that stay locked until their minimum hold is over, as after `once_per`."""
        return self._in_state("kept")

    def stale(self) -> LockQuerySet:
        """Return the locks whose lease has ended without a release. The next process that asks gets them."""
        return self._in_state("stale")

    def free(self) -> LockQuerySet:
        """Return the locks without a holder whose documents are still kept."""
        return self._in_state("free")

    def waited_for(self) -> LockQuerySet:
        """Return the locks with waiters."""
        return self._in_state("waited")

    def _filter_or_exclude(self, *args: Any) -> Any:
        try:
            return super()._filter_or_exclude(*args)  # type: ignore[misc]
        except FieldError as error:
            raise FieldError(f"{error}. States are methods: held(), stale(), free(), owned_by(owner), …") from None

    def _in_state(self, state: str) -> LockQuerySet:
        return self.filter(Condition(queries.in_state(state)))

    def owned_by(self, owner: str) -> LockQuerySet:
        """Return the locks that *owner* holds (`owner=`). `force_release` takes them from this owner only."""
        found = self._in_state("leased").filter(holders__owner=owner)
        found._owner = owner
        return found

    def _clone(self) -> LockQuerySet:
        clone: LockQuerySet = super()._clone()
        clone._owner = self._owner
        return clone

    def matching(self, match: KeyMatch) -> LockQuerySet:
        """Return the locks whose keys match. See `inspection.kinds.KeyMatch`."""
        return self.filter(Condition(match.query()))

    def snapshots(self, **bounds: Unpack[queries.Bounds]) -> Iterator[LockSnapshot]:
        """Yield a snapshot of each lock from the server, bounded in size. Raises LockBackendFailed."""
        if (query := self.as_query()) is not None:
            yield from queries.snapshots(mongo_store(self.db), *query, **bounds)

    def count_up_to(self, limit: int, timeout: float) -> int:
        """Count these locks, up to *limit*. Raises LockBackendFailed."""
        query = self.as_query()
        return 0 if query is None else queries.count(mongo_store(self.db), query[0], limit, timeout)

    def force_release(self, *, by: str = "", reason: str = "") -> int:
        """Take each of these locks from its holders. Return the number of locks taken.

        Each holder learns of the loss at its next renewal. Until then, only a comparison of fencing tokens stops its
        work. A lock with a damaged document stays as it is, and a warning is logged.

        - by, reason: person and reason for the log, the history and the signal `lock_forced`.
        """
        return sum(_each(self._chosen(), lambda lock: lock.force_release(self._owner, by=by, reason=reason)))

    def ask_to_release(self, requested_by: str) -> int:
        """Ask the holders of each of these locks to release it. Return the number of holders asked.

        The holders learn of the request at their next renewal (`MongoLock.release_requested`), and decide by
        themselves. The holders of a lock with a damaged document are not asked, and a warning is logged.

        - requested_by: name shown to the holders.
        """
        return sum(_each(self._chosen(), lambda lock: lock.ask_to_release(requested_by) if lock.expires_at else 0))

    def _chosen(self) -> LockQuerySet:
        """Return these locks. Raise TypeError without a condition, because other sites may lock in this database."""
        if not (self.query.where or self.query.is_sliced):
            raise TypeError("this means every lock of the database: choose some with filter(), or say held()")
        return self


def _each(locks: LockQuerySet, act: Callable[[Lock], int]) -> Iterator[int]:
    """Call *act* on each of these locks except the damaged ones."""
    for lock in locks.iterator():
        try:
            yield act(lock)
        except LockDocumentDamaged as error:
            log(WARNING, "not released", key=error.key, error=error.problem)


class Lock(ReadOnlyModel):
    """One key and the facts known of it. The counters run for as long as the document lives.

    In a damaged document, a value of the wrong type is read as None, or as [] for a list.
    """

    not_deleted = "locks are not deleted: use force_release(), or manage.py clear_stale_locks"
    not_written = "locks change only by the engine's own rule: use mongo_lock() and force_release()"

    key = models.CharField(_("key"), primary_key=True, db_column="_id", max_length=512)
    holders = Parties(Entry, verbose_name=_("holders"))
    waiters = Parties(Entry, verbose_name=_("waiters"))
    token = Number(_("last fencing token"))
    expires_at = ServerTime(_("lease ends"), null=True, help_text=_("the end of its last lease; empty if it is free"))
    purge_at = ServerTime(_("kept until"), help_text=_("when the document may be deleted if nothing uses it"))
    acquisitions = Number(_("acquisitions"))
    contended = Number(_("contended"), help_text=_("acquisitions after a wait"))
    expired = Number(_("expired"), help_text=_("leases that ended without a release"))
    waited_ms = Number(_("waited"), help_text=_("milliseconds, all acquisitions together"))
    held_ms = Number(_("held"), help_text=_("milliseconds, all grants together"))
    longest_wait_ms = Number(_("longest wait"), help_text=_("milliseconds"))
    longest_hold_ms = Number(_("longest hold"), help_text=_("milliseconds"))

    objects = models.Manager.from_queryset(LockQuerySet)()

    #: The lock as the server saw it, for objects from `from_snapshot`.
    row: LockRow

    class Meta(ReadOnlyModel.Meta):
        db_table = "mongolock_locks"
        ordering = ("key",)
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        permissions = (
            ("ask_release_lock", _("Can ask for the release of a lock")),
            ("force_release_lock", _("Can force the release of a lock")),
            ("clear_document_lock", _("Can clear stale locks in documents")),
            ("take_over_edit_lock", _("Can take over a form that another user is editing")),
            ("view_lock_status", _("Can read the status of the locks, for monitoring")),
        )

    def __str__(self) -> str:
        return printable(self.key)

    @classmethod
    def from_snapshot(cls, snapshot: LockSnapshot, using: str) -> Lock:
        """Return a lock with its key and its row, but no other field."""
        lock: Lock = cls.from_db(using, ["key"], [snapshot.key])
        lock.row = row_of(snapshot)
        return lock

    def force_release(
        self, owner: str | None = None, *, token: int | None = None, by: str = "", reason: str = ""
    ) -> bool:
        """Take the lock from the holders at the time when this object was read. Return whether the lock was taken.

        Later grants stay. Raises LockDocumentDamaged, LockBackendFailed.

        - owner: only owner whose grants are taken.
        - token: only fencing token whose grant is taken.
        - by, reason: person and reason for the log, the history and the signal `lock_forced`.
        """
        grants = self._grants(lambda holder: owner in (None, holder.owner) and token in (None, holder.token))
        using = self._state.db
        taken = bool(grants and operations.force_release(mongo_store(using), self.key, grants, by=by, reason=reason))
        if taken:
            send(lock_forced, key=self.key, using=using, by=by, reason=reason)
        return taken

    def ask_to_release(self, requested_by: str, *, token: int | None = None) -> int:
        """Ask the holders to release this lock. Return the number of holders asked.

        Raises LockDocumentDamaged, LockBackendFailed.

        - requested_by: name shown to the holders.
        - token: fencing token of the only holder to ask, as of the time when this object was read.
        """
        grants = None if token is None else self._grants(lambda holder: holder.token == token)
        return operations.ask_to_release(mongo_store(self._state.db), self.key, requested_by, grants=grants)

    def _grants(self, chosen: Callable[[Party], bool]) -> list[str]:
        return [holder.grant for holder in self.holders if holder.grant and chosen(holder)]


class LockDashboard(Lock):
    """The line of the dashboard in the admin's index. The line links to the dashboard. The model has no objects."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = verbose_name_plural = _("lock dashboard")
