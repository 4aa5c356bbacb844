"""A document that a flow holds, for the flow: each of its methods, blocking and awaited, and the block."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from ..backends.courier import Courier, Steps
from ..backends.field_paths import Document
from ..backends.transactions import open_transactions, warn_once
from ..exceptions import DocumentLockLost
from .holding import FinalState, Holding, forgotten

D = TypeVar("D")


class Block:
    """What ends with its block: `_leave` has the steps of the end."""

    _courier: Courier

    def _warn(self) -> None:
        """Warn if the block ends inside a transaction of another database."""

    def _leave(self, error: BaseException | None) -> Steps[Any]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._warn()
        self._courier.run(self._leave(error))

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._courier.arun(self._leave(error))


class HeldDocument(Block, Generic[D]):
    """A document that this flow holds, until the flow says how the work ended; the end of a block says so by itself.

    No other flow that uses the lock starts work on the document meanwhile, unless it is lost: it becomes stale
    `stale_after` seconds after the acquisition (see `remaining` and `renew`), and then is for whoever asks. A holder
    that has lost it may not know yet; what it then writes through this object is refused. The document belongs to the
    process that acquired it: in a forked child it is lost, and leaving the block does nothing.
    """

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self._courier = holding.context.courier
        weakref.finalize(self, forgotten, holding).atexit = False

    def __repr__(self) -> str:
        how = self.ended or f"{self.pending}, {self.remaining:.1f} s left"
        return f"<HeldDocument {self._holding.context.name} {self.id!r}, version {self.version}, {how}>"

    @property
    def document(self) -> Document:
        """The document as it was granted, or after the last `update`; raw, as MongoDB has it."""
        return self._holding.document

    @property
    def instance(self) -> D:
        """The document as an instance of the model, made of what the server returned with the grant.

        Its `save()` writes what is not the lock's, if the document is still held, as `update` does.
        """
        made: D = self._holding.instance
        return made

    @property
    def id(self) -> Any:
        """Its key."""
        return self._holding.id

    @property
    def owner(self) -> str:
        """Who holds it, as the document says."""
        return self._holding.owner

    @property
    def pending(self) -> str:
        """The state that the document has while it is held."""
        return self._holding.pending

    @property
    def since(self) -> datetime | None:
        """Since when it is held, for people: by the server's clock."""
        return self._holding.since

    @property
    def version(self) -> int:
        """Grows with all that the lock writes; an external service can compare it."""
        return self._holding.version

    @property
    def ended(self) -> str | None:
        """How it ended; None while it is held."""
        return self._holding.ended

    @property
    def remaining(self) -> float:
        """Seconds until it may be stale; 0 when it has ended. By the local clock, counted from before the command was
        sent. The server judges by its own clock, which must not be set forward meanwhile."""
        return self._holding.remaining

    def finish(self, final: FinalState = None, changes: Mapping[str, Any] | None = None) -> None:
        """Set the final state, write *changes*, and release the document, in one update.

        final: None: the one that was named before, or the only one there is. Raises DocumentLockLost, which says
        whether something may have been written. Or DocumentChanged, if a writer without the lock raised the version,
        and DocumentRefused: nothing was written, and it is still held, so `fail` it, or let the block do so.
        """
        self._courier.run(self._holding.finish(final, changes or {}))

    async def afinish(self, final: FinalState = None, changes: Mapping[str, Any] | None = None) -> None:
        """See finish()."""
        await self._courier.arun(self._holding.finish(final, changes or {}))

    def fail(self) -> bool:
        """Set the failed state that belongs to the pending one, and release the document, whatever its version is.

        Returns whether it was still held.
        """
        return self._courier.run(self._holding.fail())

    async def afail(self) -> bool:
        """See fail()."""
        return await self._courier.arun(self._holding.fail())

    def update(self, changes: Mapping[str, Any] | None = None, /, **more: Any) -> D:
        """Write changes to the document and raise its version, if it is still held; return it as it is then.

        The changes mean what they mean to MongoDB's `$set`. Raises DocumentLockLost, DocumentChanged, DocumentRefused,
        LockBackendFailed. After the last of these they may have been written; the next write, or the end of the block,
        takes that into account.
        """
        self._courier.run(self._holding.update({**(changes or {}), **more}))
        return self.instance

    async def aupdate(self, changes: Mapping[str, Any] | None = None, /, **more: Any) -> D:
        """See update()."""
        await self._courier.arun(self._holding.update({**(changes or {}), **more}))
        return self.instance

    def renew(self) -> None:
        """Count `stale_after` from now. Raises DocumentLockLost, DocumentChanged."""
        self._courier.run(self._holding.renew())

    async def arenew(self) -> None:
        """See renew()."""
        await self._courier.arun(self._holding.renew())

    def __enter__(self) -> Self:
        self._holding.check()
        if self.remaining == 0:
            reason = "it was held for longer than stale_after before its block began: renew() it, or hold fewer at once"
            raise DocumentLockLost(self._holding.context.name, self.id, self.version, reason=reason)
        return self

    def _warn(self) -> None:
        if self.ended is None and (opened := open_transactions()):
            warn_once(
                self._holding.place,
                f"the document {self._holding.context.name} {self.id!r} was released inside the transaction that is "
                f"open on {opened[0].alias!r}: the next flow does not yet see what was written under the lock. Open "
                "the transaction inside the block",
            )

    def _leave(self, error: BaseException | None) -> Steps[Any]:
        return self._holding.leave(error)
