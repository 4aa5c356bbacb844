"""The needs of a session from a place that keeps lock documents, `store.mongo`, or `testing.memory_server` in tests."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from ..rule.deadlock import Cycle
from ..rule.document import Limits, Step
from ..rule.replies import Bell, Found, Reply


class Store(Protocol):
    """A place that carries out commands. Each command is limited to *timeout* seconds, and raises LockBackendFailed.

    - hearers: callbacks that hear the bells for the sessions of this process, by session id.
    """

    hearers: dict[str, Callable[[Bell], object]]

    @property
    def connections(self) -> int:
        """The largest number of connections that the store may open, or 0 for no limit."""

    def apply(self, key: str, step: Step, timeout: float) -> Reply:
        """Apply *step* to the document of *key*, durably. Return the state of its grant. Ring for other grants it made.

        The command may be sent again, since steps are idempotent. After LockBackendFailed, the step may have taken
        effect or may still do so. After LockDocumentDamaged, it has not.
        """

    def take_free(self, key: str, step: Step, timeout: float) -> Reply | None:
        """Apply *step*, which only adds, if the key has no holder and no waiter. Return None if nothing was done.

        The meaning and the errors are those of `apply`. The server has a fifth less to do.
        """

    def release_uncontended(self, keys: Sequence[str], grants: Sequence[str], timeout: float) -> set[str]:
        """Remove *grants*, one of each key. A grant is removed if it is the only holder and there is no waiter.

        The grants have no minimum hold. Return the keys where nothing was removed. Wait neither for the majority nor
        for the disk.
        """

    def read(self, key: str, grant: str, timeout: float, owner: str | None = None) -> Reply:
        """Return the state of *grant*, and the other grant of *owner* on the key, as the majority has them."""

    def renew(self, keys: Sequence[str], step: Step, timeout: float) -> dict[str, Found]:
        """Renew or remove the grants of *step* in the documents of *keys*. Return the findings under each key.

        Without grants, the documents are only read.

        Waiters that the step grants a lock hear a bell. A grant was renewed only if it carries the number of this step.
        The update is durable then.
        """

    def deadlock(self, key: str, grant: str, timeout: float) -> Cycle | None:
        """Return the cycle of waits that contains the waiter *grant* of *key*."""

    def ring(self, bells: Iterable[Bell]) -> None:
        """Tell sessions about grants of theirs. A bell may get lost, come late, or come twice."""

    def listen(self, session: str) -> Generator[Bell | None, None, None]:
        """Yield the bells for *session*. Yield None at first, and after about a second without a bell.

        The generator ends when no more bells can be heard.
        """

    def sent_to(self) -> str:
        """Return the name of the primary of this thread's last command.

        The name changes with each election, and is "" if unknown.
        """

    def primary(self) -> str:
        """Return the name of the present primary, or "" if none is known. Send nothing to the server."""

    @property
    def limits(self) -> Limits:
        """The limits that all commands have in common."""

    def close(self) -> None:
        """Disconnect."""


class Notes(Protocol):
    """A writer of the history of the locks: see `history.writer`."""

    def make(self, *, resize: bool = False) -> None: ...

    def note(self, key: str, what: str, entry: Mapping[str, Any], *, at: datetime | None = None, **facts: Any) -> None:
        """Note an event of *key*, and of the holder with that *entry*."""

    def close(self) -> None:
        """Write the rest."""


def is_heard_here(store: Store, bell: Bell) -> bool:
    """Tell the session that the bell is for, if it is in this process. Return whether it is."""
    hear = store.hearers.get(bell.session)
    if hear is not None:
        hear(bell)
    return hear is not None
