"""What a session needs of a place that keeps lock documents: `store.mongo`, or `testing.memory_server` for tests."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from ..rule.deadlock import Cycle
from ..rule.document import Limits, Step
from ..rule.replies import Bell, Found, Reply


class Store(Protocol):
    """Carries out commands. Each is bounded by *timeout*, in seconds, and raises LockBackendFailed.

    hearers: what hears the bells for the sessions of this process, by their ids.
    """

    hearers: dict[str, Callable[[Bell], object]]

    @property
    def connections(self) -> int:
        """The most connections that it may open; 0 for no limit."""

    def apply(self, key: str, step: Step, timeout: float) -> Reply:
        """Apply *step* to the document of *key*, durably; return how its grant stands then. Whom it has granted the key
        besides is rung for.

        The command may be sent again, since steps are idempotent. Raises LockBackendFailed, after which the step may
        have taken effect or may still do so, and LockDocumentDamaged, after which it has not.
        """

    def take_free(self, key: str, step: Step, timeout: float) -> Reply | None:
        """Apply *step*, which only adds, if the key has no holder and no waiter; return None if it did nothing.

        Means the same as `apply`, and raises the same errors; the server has a fifth less to do.
        """

    def release_uncontended(self, keys: Sequence[str], grants: Sequence[str], timeout: float) -> set[str]:
        """Remove *grants*, which have no minimum hold, one of each key, where that is the only holder and there is no
        waiter.

        Returns the keys where it did not. Waits neither for the majority nor for the disk.
        """

    def read(self, key: str, grant: str, timeout: float, owner: str | None = None) -> Reply:
        """How *grant* stands, and which other grant of *owner* holds the key, as the majority has it."""

    def renew(self, keys: Sequence[str], step: Step, timeout: float) -> dict[str, Found]:
        """Renew or remove the grants of *step*, which are in the documents of *keys*. Return what was found under each
        key. The waiters to which the step has granted one hear a bell.

        A grant was renewed only if it carries the number of this step: then the update has been there, durably.
        """

    def deadlock(self, key: str, grant: str, timeout: float) -> Cycle | None:
        """The cycle of waits that the waiter *grant* of *key* is part of."""

    def ring(self, bells: Iterable[Bell]) -> None:
        """Tell sessions about grants of theirs. A bell may get lost, come late, or come twice."""

    def listen(self, session: str) -> Generator[Bell | None, None, None]:
        """Hear the bells for *session*; yield None at first, and when there is none for about a second.

        Ends when no more can be heard.
        """

    def sent_to(self) -> str:
        """The primary that this thread's last command went to: its name until the next election; empty if unknown."""

    def primary(self) -> str:
        """The present primary; empty if none is known. Sends nothing to the server."""

    @property
    def limits(self) -> Limits:
        """What is the same for every command."""

    def close(self) -> None:
        """Disconnect."""


class Notes(Protocol):
    """What writes the history of the locks: see `history.writer`."""

    def make(self, *, resize: bool = False) -> None: ...

    def note(self, key: str, what: str, entry: Mapping[str, Any], *, at: datetime | None = None, **facts: Any) -> None:
        """Note what happened to *key*, and to the holder with that *entry*."""

    def close(self) -> None:
        """Write what is left."""


def is_heard_here(store: Store, bell: Bell) -> bool:
    """Tell the session of this process that the bell is for; return whether it is for one."""
    hear = store.hearers.get(bell.session)
    if hear is not None:
        hear(bell)
    return hear is not None
