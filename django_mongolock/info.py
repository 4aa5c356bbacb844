"""`lock_info`: what is known of a lock, without taking it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from asgiref.sync import sync_to_async

from .backends import get_backend, mongo_store
from .conf import get_settings
from .engine.rule.document import weight
from .engine.text_checks import check_key
from .inspection.queries import snapshots
from .inspection.snapshot import LockSnapshot, read_snapshot
from .keys import as_key
from .locks import Key

__all__ = ["alock_info", "lock_info"]

#: How many holders and waiters are read.
SHOWN: Final = 100


def lock_info(key: Key, *, using: str | None = None) -> LockSnapshot:
    """Return what is known of the lock on *key* at this moment: its state, who holds it, and who waits.

    Nothing is locked, and the answer may be out of date when it arrives: to find out whether a lock can be had, try to
    acquire it. A key that nothing has used is free. using: the DATABASES alias, if not MONGOLOCK["DATABASE"]. Raises
    LockBackendFailed.
    """
    name: Any = as_key(key)
    settings = get_settings()
    stored = check_key(name, settings.KEY_PREFIX)
    if (here := get_backend(using).read_here(stored)) is not None:
        return _read(stored, *here)
    found = snapshots(
        mongo_store(using), {"_id": {"$eq": stored}}, limit=1, holders=SHOWN, waiters=SHOWN,
        timeout=settings.COMMAND_TIMEOUT,
    )  # fmt: skip
    return next(found, None) or _read(stored, None, datetime.now(UTC))


async def alock_info(key: Key, *, using: str | None = None) -> LockSnapshot:
    """See lock_info()."""
    return await sync_to_async(lock_info, thread_sensitive=False)(key, using=using)


def _read(key: str, document: Mapping[str, Any] | None, now: datetime) -> LockSnapshot:
    """The snapshot of a document in memory, as `queries.projection` has it of one in MongoDB."""
    document = document or {}
    holders = document.get("holders", [])
    queue = [waiter for waiter in document.get("waiters", []) if waiter["until"] > now]
    since = min((waiter["since"] for waiter in queue), default=None)
    return read_snapshot(
        {
            **document,
            "_id": key,
            "now": now,
            "whole": True,
            "released": bool(holders) and all("released" in holder for holder in holders),
            "waiters": queue[:SHOWN],
            "holding": len(holders),
            "more_permits": sum(map(weight, holders)) - len(holders),
            "queue": {"waiting": sum(1 + waiter.get("behind", 0) for waiter in queue), "since": since},
        }
    )
