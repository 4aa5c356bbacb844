"""`Lock`: the engine's documents as a Django model, for reading and for force release; never for locking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Unpack

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
    """Locks to read. The server's clock decides, in the query, which of them are held."""

    #: The owner whose grants `force_release` takes; None for all.
    _owner: str | None = None

    def held(self) -> LockQuerySet:
        """Locks that are held now."""
        return self._in_state("held")

    def kept(self) -> LockQuerySet:
        """Locks that were released, but are not free before their minimum hold is over, as after `once_per`."""
        return self._in_state("kept")

    def stale(self) -> LockQuerySet:
        """Locks whose lease has ended without a release. The next process that asks gets them."""
        return self._in_state("stale")

    def free(self) -> LockQuerySet:
        """Locks without a holder whose documents are still kept."""
        return self._in_state("free")

    def waited_for(self) -> LockQuerySet:
        """Locks with waiters."""
        return self._in_state("waited")

    def _in_state(self, state: str) -> LockQuerySet:
        return self.filter(Condition(queries.in_state(state)))

    def owned_by(self, owner: str) -> LockQuerySet:
        """Locks that *owner* holds (`owner=`). `force_release` then takes them from this owner only."""
        found = self._in_state("leased").filter(holders__owner=owner)
        found._owner = owner
        return found

    def _clone(self) -> LockQuerySet:
        clone: LockQuerySet = super()._clone()
        clone._owner = self._owner
        return clone

    def matching(self, match: KeyMatch) -> LockQuerySet:
        """Locks whose keys match: see `inspection.kinds.KeyMatch`."""
        return self.filter(Condition(match.query()))

    def snapshots(self, **bounds: Unpack[queries.Bounds]) -> Iterator[LockSnapshot]:
        """These locks as the server sees them just now, bounded in size. Raises LockBackendFailed."""
        if (query := self.as_query()) is not None:
            yield from queries.snapshots(mongo_store(self.db), *query, **bounds)

    def count_up_to(self, limit: int, timeout: float) -> int:
        """Count these locks, up to *limit*. Raises LockBackendFailed."""
        query = self.as_query()
        return 0 if query is None else queries.count(mongo_store(self.db), query[0], limit, timeout)

    def force_release(self, *, by: str = "", reason: str = "") -> int:
        """Take each of these locks from its holders; return how many were taken.

        Each holder learns of the loss at its next renewal. What it does until then is only stopped where its fencing
        token is compared. A lock whose document is damaged stays as it is, and a warning is logged. by, reason: who
        does it and why, for the log, the history and the signal `lock_forced`.
        """
        return sum(_each(self, lambda lock: lock.force_release(self._owner, by=by, reason=reason)))

    def ask_to_release(self, requested_by: str) -> int:
        """Ask the holders of each of these locks to release it; return how many holders were asked.

        They learn of it at their next renewal (`MongoLock.release_requested`), and decide by themselves. Of a lock
        whose document is damaged nobody is asked, and a warning is logged. requested_by: who asks, for the holders.
        """
        return sum(_each(self, lambda lock: lock.ask_to_release(requested_by) if lock.expires_at else 0))


def _each(locks: LockQuerySet, act: Callable[[Lock], int]) -> Iterator[int]:
    """Act on each of these locks but the damaged ones."""
    for lock in locks.iterator():
        try:
            yield act(lock)
        except LockDocumentDamaged as error:
            log(WARNING, "not released", key=error.key, error=error.problem)


class Lock(ReadOnlyModel):
    """One key and what is known of it. The counters run for as long as the document lives.

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

    #: How the server saw the lock, for objects that come from `from_snapshot`.
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
        """Return the lock with its key and no other field."""
        lock: Lock = cls.from_db(using, ["key"], [snapshot.key])
        lock.row = row_of(snapshot)
        return lock

    def force_release(
        self, owner: str | None = None, *, token: int | None = None, by: str = "", reason: str = ""
    ) -> bool:
        """Take the lock from those who held it when this object was read; return whether it was taken.

        owner, token: only from the holders with this one. Later grants stay. by, reason: who does it and why, for the
        log, the history and the signal `lock_forced`. Raises LockDocumentDamaged, LockBackendFailed.
        """
        grants = self._grants(lambda holder: owner in (None, holder.owner) and token in (None, holder.token))
        using = self._state.db
        taken = bool(grants and operations.force_release(mongo_store(using), self.key, grants, by=by, reason=reason))
        if taken:
            send(lock_forced, key=self.key, using=using, by=by, reason=reason)
        return taken

    def ask_to_release(self, requested_by: str, *, token: int | None = None) -> int:
        """Ask its holders to release this lock; return how many were asked.

        requested_by: who asks, for the holders. token: only the holder that had this fencing token when this object was
        read. Raises LockDocumentDamaged, LockBackendFailed.
        """
        grants = None if token is None else self._grants(lambda holder: holder.token == token)
        return operations.ask_to_release(mongo_store(self._state.db), self.key, requested_by, grants=grants)

    def _grants(self, chosen: Callable[[Party], bool]) -> list[str]:
        return [holder.grant for holder in self.holders if holder.grant and chosen(holder)]


class LockDashboard(Lock):
    """The line of the dashboard in the admin's index: it leads there with one click, and has no objects of its own."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = verbose_name_plural = _("lock dashboard")
