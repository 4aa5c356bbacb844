"""The state of a lock object: its grants, and the times of their leases."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

from ...exceptions import LockError, LockLost, LockMisused
from ..session.grant import Grant
from ..session.session import Session
from .grants import LockGrants

T = TypeVar("T")


class LockState:
    """The part of a lock object that answers questions without a command to the server."""

    keys: tuple[str, ...]
    _own: LockGrants
    _current_session: Callable[[], Session]

    @property
    def key(self) -> str:
        """The key as it is stored. Raises LockMisused for a lock on several keys: see `keys`."""
        return _only(self.keys)

    @property
    def held(self) -> bool:
        """Whether this object holds every key. This process sees a lease end no later than the server does."""
        return self._own.all_held(self._own.grants)

    @property
    def lost(self) -> bool:
        """Whether this object acquired the lock and then lost it, rather than released it.

        False after the block or release(), because these report the loss.
        """
        return self._has_lost(self._own.grants)

    @property
    def in_danger(self) -> bool:
        """Whether the lock is still held while its renewals fail. Do not begin work now that cannot be undone."""
        grants = self._own.grants
        return self._own.all_held(grants) and any(grant.lease.failures for grant in grants)

    @property
    def release_requested(self) -> str | None:
        """Text about the requester of a release of this lock, or None without a request.

        The request is known within a third of a lease, if the lease is renewed.
        """
        requests = (grant.reporting.release_requested_by for grant in self._own.grants)
        return next((requested_by for requested_by in requests if requested_by is not None), None)

    @property
    def remaining(self) -> float:
        """Seconds until the lease ends if it is not renewed. 0 if the lock is not held."""
        grants = self._own.grants
        return min(grant.remaining for grant in grants) if self._own.all_held(grants) else 0.0

    @property
    def fencing_token(self) -> int:
        """A number larger than that of every earlier grant of this key, also known after the release.

        Raises LockMisused if the lock was never acquired.
        """
        return _only(self._acquired()).token

    @property
    def fencing_tokens(self) -> dict[str, int]:
        """The fencing token of each key, also after the release. Raises LockMisused if the lock was never acquired."""
        return {grant.key: grant.token for grant in self._acquired()}

    @property
    def acquired_at(self) -> datetime:
        """The moment when the last key was granted, by the server's clock. Raises LockMisused if none was granted."""
        return max(grant.acquired_at for grant in self._acquired() if grant.acquired_at is not None)

    @property
    def waited(self) -> float:
        """Seconds that it took to acquire the lock."""
        return sum(grant.reporting.waited for grant in self._acquired())  # the keys are acquired one after the other

    def ensure_held(self) -> None:
        """Raise LockLost unless the lock is held. Send nothing to the server.

        Your next act may still take longer than the rest of the lease (`remaining`).
        """
        grants = self._own.grants
        if not self._own.all_held(grants):
            raise self._loss(grants)

    def __repr__(self) -> str:
        name, grants = self._names, self._own.grants
        if not grants:
            return f"<MongoLock {name} not held>"
        token = "/".join(str(grant.token) for grant in grants)
        state = f"held, token {token}, {self.remaining:.1f} s left" if self.held else f"lost, token {token}"
        return f"<MongoLock {name} {state}>"

    @property
    def _names(self) -> str:
        return ", ".join(repr(key) for key in self.keys)

    def _not_acquired(self) -> LockMisused:
        if self._own.last:
            return LockMisused(f"the lock {self._names} was released: do this inside its block, or before release()")
        return LockMisused(f"the lock {self._names} is not acquired by this object: use `with`, or call its acquire()")

    def _session(self) -> Session:
        """Return the session of this object's grants. Without grants, return that of this process."""
        own = self._own
        if own.grants and own.session is not None and own.is_ours:
            return own.session
        return self._current_session()

    def _acquired(self) -> tuple[Grant, ...]:
        """Return the grants that were acquired last."""
        grants = self._own.last
        if not grants:
            raise self._not_acquired()
        return grants

    def _has_lost(self, grants: tuple[Grant, ...]) -> bool:
        """Return whether one of *grants* is lost, rather than released. A forked child has lost its parent's grants."""
        return bool(grants) and (not self._own.is_ours or any(grant.lost for grant in grants))

    def _loss(self, grants: tuple[Grant, ...]) -> LockError:
        """Return the error that says why one of *grants* is not held."""
        if not self._has_lost(grants):
            return self._not_acquired()
        if not self._own.is_ours:
            return LockLost(grants[0].key, grants[0].token, "a forked child does not hold its parent's locks")
        lost = next(grant for grant in grants if grant.lost)
        return LockLost(lost.key, lost.token, lost.reason)

    def _report_loss(self, grants: tuple[Grant, ...], error: BaseException | None) -> None:
        """Report on leaving the block that the lock was lost, without hiding an error of the block itself."""
        if not self._own.is_ours or not self._has_lost(grants):
            return
        if error is None:
            raise self._loss(grants)
        error.add_note(str(self._loss(grants)))


def _only(items: tuple[T, ...]) -> T:
    if len(items) != 1:
        raise LockMisused("this lock is on several keys: use `keys` and `fencing_tokens`")
    return items[0]
