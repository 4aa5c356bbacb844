"""Code that both type checkers refuse. No ignore here may be unnecessary for mypy or for pyright."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar

from django_mongolock import mongo_lock, mongo_locked, mongo_semaphore, once_per
from django_mongolock.decorator.locked_command import LockedCommand
from django_mongolock.documents import DocumentLock
from django_mongolock.locks import LockKeywords
from django_mongolock.rows import locked
from django_mongolock.versions import retry_on_conflict
from testproject.shop.models import Order


def options() -> None:
    """Use an option that does not exist."""
    mongo_lock("key", leese=3)  # type: ignore[call-arg]
    mongo_semaphore("key", 3, leese=3)  # type: ignore[call-arg]
    mongo_locked("key", leese=3)  # type: ignore[call-arg]
    mongo_locked("key", on_contention="skip", leese=3)  # type: ignore[call-arg]
    mongo_locked("key", on_contention="skp")  # type: ignore[type-var]
    once_per(hour=3)  # type: ignore[arg-type]
    mongo_lock("key").acquire(timeout=3)  # type: ignore[arg-type]
    DocumentLock(Order, state="x", pendin={})  # type: ignore[call-arg]
    retry_on_conflict(atempts=3)  # type: ignore[call-overload]


def positions() -> None:
    """Use a time in place of a key."""
    mongo_lock("key", 10)  # type: ignore[arg-type]
    mongo_lock(5)  # type: ignore[arg-type]


class Command(LockedCommand):
    """An option in a declaration."""

    lock_options: ClassVar[LockKeywords] = {"leese": 3}  # type: ignore[typeddict-unknown-key]


def times(order: Order) -> None:
    """A timedelta is a time."""
    day = timedelta(days=1)
    mongo_lock("key", lease=day, wait=day, min_hold=day, max_hold=day).acquire(day).extend(day)
    locked(Order, pk=5, lease=day, wait=day)
    once_per(hours=1, lease=day)
