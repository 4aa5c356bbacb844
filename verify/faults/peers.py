"""The locks of a run in the form of the harness."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Mode, Terms
from django_mongolock.engine.rule.options import LockOptions
from django_mongolock.engine.session.session import Session, Sessions
from django_mongolock.engine.store.mongo import MongoStore, StoreConfig
from django_mongolock.exceptions import LockError
from verify.faults.documents import STALE, Documents, OurDocument

DATABASE: Final = "faults"
COLLECTION: Final = "mongolock_locks"
#: The application name of the workers' clients. Failpoints aim at it.
APPNAME: Final = "faults-worker"
#: The seconds for which a lease lives longer on the server than its holder believes.
MARGIN: Final = 0.3
#: The seconds of one command at most. Most leases are shorter, so that an answer can come after the lease that it
#: grants.
TIMEOUT: Final = 4.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One attempt: its request and its work. Times are in seconds.

    - document: whether it asks for a document.
    - work: time for which to hold it.
    - manner: end by the program: "release", "extend" in the middle, "die" (its thread ends), "forget" (its object is
      collected), "cancel", "fail" (its block ends in an error), "fork" in the middle.
    """

    keys: tuple[str, ...]
    mode: Mode = "exclusive"
    capacity: int = 1
    wait: float | None = 5.0
    lease: float = 1.5
    waiter_lease: float = 1.5
    min_hold: float = 0.0
    owner: str | None = None
    renew: bool = True
    reentrant: bool = False
    work: float = 0.1
    manner: str = "release"
    document: bool = False
    weight: int = 1

    @property
    def terms(self) -> Terms:
        waiter_lease = min(self.waiter_lease, self.lease)
        terms = Terms(self.mode, self.capacity, self.lease, MARGIN, waiter_lease, self.min_hold, self.owner)
        return replace(terms, weight=self.weight)

    def facts(self) -> dict[str, Any]:
        """Return the facts for the checker."""
        server_lease = STALE if self.document else max(self.terms.server_lease, self.min_hold)
        names = ("keys", "mode", "capacity", "weight", "wait", "owner", "renew")
        kind = "document" if self.document else "lock"
        return {name: getattr(self, name) for name in names} | {"server_lease": server_lease, "kind": kind}


class Ours:
    """django_mongolock's engine, without Django."""

    def __init__(self, uri: str) -> None:
        client = {"host": uri, "appname": APPNAME, "heartbeatFrequencyMS": 1000}
        self.config = StoreConfig(client, DATABASE, COLLECTION)
        self.sessions = Sessions(lambda: Session(MongoStore(self.config), command_timeout=TIMEOUT))
        self.documents = Documents(DATABASE, client, TIMEOUT)

    def lock(self, plan: Plan, on_lost: Callable[[], None], label: str) -> "OurLock | OurDocument":
        """Return a lock for one attempt. Its entry in the document shows the *label* and its process."""
        if plan.document:
            return OurDocument(self.documents, plan.keys[0], plan.owner)
        options = LockOptions(
            wait=plan.wait, reentrant=plan.reentrant, auto_renew=plan.renew, on_lost=lambda _: on_lost()
        )
        return OurLock(
            self.sessions.current, plan.keys, plan.terms, options, lambda: {"pid": os.getpid(), "label": label}
        )

    def close(self) -> None:
        self.sessions.close()


class OurLock(MongoLock):
    """A MongoLock with the interface of the harness."""

    def look(self) -> tuple[bool, float]:
        return self.held, self.remaining

    @property
    def tokens(self) -> Mapping[str, int | None]:
        return self.fencing_tokens

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the block, as `with` does."""
        self.__exit__(type(error) if error else None, error, None)


#: The errors that a worker may meet without a fault of its own.
ERRORS: Final = (LockError,)
