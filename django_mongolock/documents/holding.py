"""A document that a flow holds: as it is under the lock, and what may be done to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from ..backends.transactions import open_transactions
from ..engine import clock
from ..engine.logs import WARNING, log
from ..exceptions import (
    DocumentLockLost,
    DocumentNotFound,
    DocumentRefused,
    LockBackendFailed,
    LockError,
    LockMisused,
)
from . import updates
from .acquiring import put_back
from .commands import Refusal, read_whole, write_one
from .lock_context import Context
from .open_transactions import warn_of_open
from .own_writes import OwnWrites
from .sender import Sender
from .steps import Steps, aware, get_path, send
from .updates import Acquisition, Document

D = TypeVar("D")

#: The state in which work ends: one, or a function that chooses it for the document. None: the only one there is.
FinalState = str | Callable[[Any], str] | None

#: How the work on a document ended that was lost.
LOST: Final = "lost"
#: Why a forked child has lost what its parent holds.
FORKED: Final = "a forked child does not hold its parent's documents"


class Block:
    """What ends with its block: `leave` has the steps of the end."""

    _sender: Sender

    def warn(self) -> None:
        """Warn if the block ends inside a transaction of another database."""

    def leave(self, error: BaseException | None) -> Steps[None]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.warn()
        self._sender.run(self.leave(error))

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._sender.arun(self.leave(error))


class HeldDocument(Block, Generic[D]):
    """A document that this flow holds, until the flow says how the work ended; the end of a block says so by itself.

    No other flow that uses the lock starts work on the document meanwhile, unless it is lost: it becomes stale
    `stale_after` seconds after the acquisition (see `remaining` and `renew`). Then a sweep releases it, or the same
    `owner` takes it over. A holder that has lost it may not know yet; what it then writes through this object is
    refused. The document belongs to the process that acquired it: in a forked child it is lost, and leaving the block
    does nothing.
    """

    def __init__(
        self,
        context: Context,
        acquisition: Acquisition,
        document: Document,
        *,
        final: FinalState = None,
        sent: float,
        place: str = "",
    ) -> None:
        #: Its writes, and how they left it.
        self.writes = OwnWrites(context, acquisition, document)
        #: Since when it is held, for people: by the server's clock.
        self.since = aware(get_path(document, context.rules.fields.time))
        #: The state in which the block ends if nothing goes wrong; or a function that chooses it for the document.
        self.final = final
        self._ended: str | None = None
        self._read: Document | None = None
        self._instance: Any = None
        self._context = context
        self._sender = context.sender
        self._place = place
        # By the local clock, counted from before the command was sent that is known, by its id, to have set the time.
        self._deadline = sent + context.rules.stale_after

    @property
    def document(self) -> Document:
        """The document as it was granted, or after the last `update`; raw, as MongoDB has it."""
        return self.writes.document

    @property
    def id(self) -> Any:
        """Its `_id`."""
        return self.writes.id

    @property
    def owner(self) -> str:
        """Who holds it, as the document says."""
        return self.writes.owner

    @property
    def pending(self) -> str:
        """The state that the document has while it is held."""
        return self.writes.pending

    @property
    def version(self) -> int:
        """Grows with every acquisition and every change; an external service can compare it."""
        return self.writes.version

    def __repr__(self) -> str:
        how = self.ended or f"{self.pending}, {self.remaining:.1f} s left"
        return f"<HeldDocument {self._context.name} {self.id!r}, version {self.version}, {how}>"

    @property
    def instance(self) -> D:
        """The document as an instance of the model, made of what the server returned with the grant.

        Use `update` to change it: `save()` would write the fields of the lock as well.
        """
        if self._read is not self.document:
            self._read, self._instance = self.document, self._context.source.instance(self.document)
        made: D = self._instance
        return made

    @property
    def ended(self) -> str | None:
        """How it ended; None while it is held."""
        return LOST if self._sender.forked else self._ended

    @property
    def remaining(self) -> float:
        """Seconds until it may be stale; 0 when it has ended. By the local clock, counted from before the command was
        sent. The server judges by its own clock, which must not be set forward meanwhile."""
        return 0.0 if self.ended is not None else max(0.0, self._deadline - clock.now())

    # What may be done to it

    def finish(self, final: FinalState = None, changes: Mapping[str, Any] | None = None) -> None:
        """Set the final state, write *changes*, and release the document, in one update.

        final: None: the one that was named before, or the only one there is. Raises DocumentLockLost, which says
        whether something may have been written. Or DocumentChanged, if a writer without the lock raised the version,
        and DocumentRefused: nothing was written, and it is still held, so `fail` it, or let the block do so.
        """
        self._sender.run(self._finish(final, changes or {}))

    async def afinish(self, final: FinalState = None, changes: Mapping[str, Any] | None = None) -> None:
        """See finish()."""
        await self._sender.arun(self._finish(final, changes or {}))

    def fail(self) -> bool:
        """Set the failed state that belongs to the pending one, and release the document, whatever its version is.

        Returns whether it was still held.
        """
        return self._sender.run(self._fail())

    async def afail(self) -> bool:
        """See fail()."""
        return await self._sender.arun(self._fail())

    def update(self, changes: Mapping[str, Any] | None = None, /, **more: Any) -> D:
        """Write changes to the document and raise its version, if it is still held; return it as it is then.

        The changes mean what they mean to MongoDB's `$set`. Raises DocumentLockLost, DocumentChanged, DocumentRefused,
        LockBackendFailed. After the last of these they may have been written; the next write, or the end of the block,
        takes that into account.
        """
        return self._sender.run(self._update({**(changes or {}), **more}))

    async def aupdate(self, changes: Mapping[str, Any] | None = None, /, **more: Any) -> D:
        """See update()."""
        return await self._sender.arun(self._update({**(changes or {}), **more}))

    def renew(self) -> None:
        """Count `stale_after` from now. Raises DocumentLockLost, DocumentChanged."""
        self._sender.run(self._renew())

    async def arenew(self) -> None:
        """See renew()."""
        await self._sender.arun(self._renew())

    # As a block

    def __enter__(self) -> Self:
        self._check()
        if self.remaining == 0:
            reason = "it was held for longer than stale_after before its block began: renew() it, or hold fewer at once"
            raise DocumentLockLost(self._context.name, self.id, self.version, reason=reason)
        return self

    def warn(self) -> None:
        if self.ended is None and (opened := open_transactions()):
            warn_of_open(opened, f"{self._context.name} {self.id!r}", self._place)

    def leave(self, error: BaseException | None) -> Steps[None]:
        """End the block: final, or failed after an error, which is never hidden by one of ours."""
        if self.ended is not None:
            return
        if error is not None:
            yield from self._fail_quietly()
            return
        try:
            yield from self._finish(None, {})
        except BaseException as problem:
            if self.ended is None:
                if isinstance(problem, LockBackendFailed) or not isinstance(problem, Exception):
                    self.abandon()
                else:
                    yield from self._fail_quietly()
            raise

    def abandon(self) -> None:
        """Have the document released in the background, in its failed state, if it is still held. Never waits."""
        put_back(self._context, [self.writes.failing()])
        self.ended_in(self.writes.failed)

    def ended_in(self, state: str) -> None:
        """Note how the work ended."""
        self._ended = state

    def _fail_quietly(self) -> Steps[None]:
        if self.writes.in_doubt:
            self.abandon()  # MongoDB did not answer just now: one wait is enough
            return
        try:
            if not (yield from self._fail()):
                log(WARNING, "document lost before its work failed", document=self.id, place=self._context.name)
        except LockError as problem:
            facts = {"document": self.id, "place": self._context.name, "error": problem}
            log(WARNING, "document not released", **facts)

    # How

    def final_state(self, final: FinalState) -> str:
        """Return the final state that is meant. Raises TypeError, ValueError, and what the function raises."""
        chosen = final if final is not None else self.final
        return self._context.rules.check_final(chosen(self.instance) if callable(chosen) else chosen)

    def _finish(self, final: FinalState, changes: Mapping[str, Any]) -> Steps[None]:
        self._check()
        state = self.final_state(final)
        made = self._context.check_changes(changes)
        yield from self._write(made, updates.releasing(self._context.rules, state))
        self._ended = state

    def _update(self, changes: Mapping[str, Any]) -> Steps[D]:
        self._check()
        made = self._context.check_changes(changes)
        if not made:
            raise TypeError("update() needs something to write")
        yield from self._write(made, {})
        return self.instance

    def _renew(self) -> Steps[None]:
        self._check()
        sent = clock.now()
        yield from self._write({}, {}, renew=True)
        self._deadline = sent + self._context.rules.stale_after  # _write has checked that this very write was done

    def _write(self, changes: Mapping[str, Any], more: Document, *, renew: bool = False) -> Steps[None]:
        try:
            yield from self.writes.write(changes, more, renew=renew)
        except LockError as problem:
            self.refused(problem)
            raise

    def refused(self, problem: LockError) -> None:
        """Note why a write was not done: it may say that the document is lost."""
        if isinstance(problem, (DocumentLockLost, DocumentNotFound)):
            self._ended = LOST

    def _fail(self) -> Steps[bool]:
        if self._sender.forked:
            return False
        self._check()
        attempt = updates.new_attempt()
        statement = self.writes.failing(attempt)
        try:
            answer = yield write_one(statement)
        except BaseException:
            put_back(self._context, [statement])
            raise
        if isinstance(answer, Refusal):
            raise DocumentRefused(self._context.name, self.id, str(answer))
        self._ended = self.writes.failed
        if answer is not None:
            return True
        found = yield from send(read_whole(self.id))  # the driver may have sent it twice
        return found is not None and get_path(found, self._context.rules.fields.attempt) == attempt

    def _check(self) -> None:
        if self._sender.forked:
            raise DocumentLockLost(self._context.name, self.id, self.version, reason=FORKED)
        if self.ended is not None:
            raise LockMisused(f"the work on document {self.id!r} has ended: its state is {self.ended!r}")
