"""A document that a flow holds: as it is under the lock, and what may be done to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from pymongo import ReturnDocument
from pymongo.collection import Collection

from ..engine import clock
from ..engine.logs import WARNING, log
from ..exceptions import (
    DocumentChanged,
    DocumentDamaged,
    DocumentLockLost,
    DocumentNotFound,
    LockError,
    LockMisused,
)
from . import updates
from .lock_context import Context
from .rules import LAST_VERSION
from .sender import Sender
from .steps import Steps, aware, get_path, read_state, send
from .updates import Acquisition, Document

D = TypeVar("D")

#: How the work on a document ended that was lost.
LOST: Final = "lost"
#: Why a forked child has lost what its parent holds.
FORKED: Final = "a forked child does not hold its parent's documents"


class Block:
    """What ends with its block: `leave` has the steps of the end."""

    _sender: Sender

    def leave(self, error: BaseException | None) -> Steps[None]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
    `stale_after` seconds after the acquisition (see `remaining` and `renew`), and the same `owner` may take it over.
    A holder that has lost it may not know yet; what it then writes through this object is refused. The document
    belongs to the process that acquired it: in a forked child it is lost, and leaving the block does nothing.
    """

    def __init__(
        self, context: Context, acquisition: Acquisition, document: Document, final: str | None, sent: float
    ) -> None:
        fields = context.rules.fields
        #: The document as it was granted, or after the last `update`; raw, as MongoDB has it.
        self.document = document
        self.id: Any = document["_id"]
        self.owner = acquisition.owner
        self.pending: str = get_path(document, fields.state)
        #: Grows with every acquisition and every change; an external service can compare it.
        self.version: int = int(get_path(document, fields.version))
        #: Since when it is held, for people: by the server's clock.
        self.since = aware(get_path(document, fields.time))
        #: The state in which the block ends if nothing goes wrong.
        self.final = final
        self._ended: str | None = None
        self._read: Document | None = None
        self._instance: Any = None
        self._context = context
        self._sender = context.sender
        #: The ids that may stand in the document: the last one known, and those of writes whose outcome is unknown.
        self._attempts = [acquisition.attempt]
        # By the local clock, counted from before the command was sent that is known, by its id, to have set the time.
        self._deadline = sent + context.rules.stale_after

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

    def finish(self, final: str | None = None, changes: Mapping[str, Any] | None = None) -> None:
        """Set the final state, write *changes*, and release the document, in one update.

        final: None: the one that was named before, or the only one there is. Raises DocumentLockLost; or
        DocumentChanged if a writer without the lock raised the version: it is still held then, so `fail` it, or let
        the block do so. Nothing is written in both cases.
        """
        self._sender.run(self._finish(final, changes or {}))

    async def afinish(self, final: str | None = None, changes: Mapping[str, Any] | None = None) -> None:
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

        Raises DocumentLockLost, DocumentChanged, LockBackendFailed.
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
        return self

    def leave(self, error: BaseException | None) -> Steps[None]:
        """End the block: final, or failed after an error, which is never hidden by one of ours."""
        if self.ended is not None:
            return
        if error is None:
            try:
                yield from self._finish(None, {})
            except BaseException:
                if self.ended is None:
                    yield from self._fail_quietly()
                raise
        else:
            yield from self._fail_quietly()

    def _fail_quietly(self) -> Steps[None]:
        try:
            if not (yield from self._fail()):
                log(WARNING, "document lost before its work failed", document=self.id, place=self._context.name)
        except LockError as problem:
            facts = {"document": self.id, "place": self._context.name, "error": problem}
            log(WARNING, "document not released", **facts)

    # How

    def _finish(self, final: str | None, changes: Mapping[str, Any]) -> Steps[None]:
        self._check()
        state = self._context.rules.check_final(final if final is not None else self.final)
        made = self._context.check_changes(changes)
        release = updates.releasing(self._context.rules, updates.literal(state))
        yield from self._write(made, release)
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
        yield from self._write({}, {self._context.rules.fields.time: "$$NOW"})
        self._deadline = sent + self._context.rules.stale_after  # _write has checked that this very write was done

    def _write(self, changes: Mapping[str, Any], more: Document) -> Steps[None]:
        """Write, if the document is still as we left it.

        The id of this very write shows whether it was done where the answer was lost, and refuses late copies of
        earlier writes.
        """
        if changes and self.version >= LAST_VERSION - 1:
            raise DocumentDamaged(self._context.name, self.id, "its version is too large")
        rules, attempt = self._context.rules, updates.new_attempt()
        query = updates.mine(rules, self.id, self.owner, self._attempts, self.version)
        update = [{"$set": {**updates.changing(rules, attempt, changes), **more}}]
        self._attempts = [*self._attempts, attempt]

        def write(collection: Collection[Document]) -> Any:
            return collection.find_one_and_update(query, update, return_document=ReturnDocument.AFTER)

        def read(collection: Collection[Document]) -> Any:
            return collection.find_one({"_id": {"$eq": self.id}})

        document: Document | None = yield from send(write)
        if document is None:
            found: Document | None = yield from send(read)
            if found is None or get_path(found, rules.fields.attempt) != attempt:
                problem = _why_not(self, found)
                self._ended = LOST if isinstance(problem, (DocumentLockLost, DocumentNotFound)) else None
                raise problem
            document = found
        self._attempts = [attempt]
        self.document = document
        self.version += bool(changes)

    def _fail(self) -> Steps[bool]:
        if self._sender.forked:
            return False
        self._check()
        rules, attempt = self._context.rules, updates.new_attempt()
        query = updates.mine(rules, self.id, self.owner, self._attempts)
        release = updates.releasing(rules, updates.literal(rules.pending[self.pending]))
        update = [{"$set": {**release, rules.fields.attempt: attempt}}]

        def command(collection: Collection[Document]) -> bool:
            if collection.update_one(query, update).matched_count:
                return True
            found = collection.find_one({"_id": {"$eq": self.id}}, {rules.fields.attempt: 1})
            return found is not None and get_path(found, rules.fields.attempt) == attempt

        try:
            was_held: bool = yield command
        except BaseException:
            self._sender.send_in_background(command)
            raise
        self._ended = rules.pending[self.pending]
        return was_held

    def _check(self) -> None:
        if self._sender.forked:
            raise DocumentLockLost(self._context.name, self.id, self.version, reason=FORKED)
        if self.ended is not None:
            raise LockMisused(f"the work on document {self.id!r} has ended: its state is {self.ended!r}")


def _why_not(held: HeldDocument[Any], found: Document | None) -> LockError:
    """Return why a write was refused, according to what the document looked like afterwards."""
    context = held._context
    if found is None:
        return DocumentNotFound(context.name, held.id)
    seen = read_state(context.rules, found)
    if seen.damage:
        return DocumentDamaged(context.name, held.id, seen.damage)
    if seen.holder == held.owner and seen.attempt in held._attempts and seen.version != held.version:
        return DocumentChanged(context.name, held.id, held.version, seen.version)
    return DocumentLockLost(context.name, held.id, held.version, seen.holder, seen.state)


class Batch(Block, Generic[D]):
    """Several documents at once: those that were granted, and why the others were not.

    held: the documents that this flow holds. refused: the error of each other one, by its id. End each in a block of
    its own (``for held in batch: with held: …``); the end of the batch's block ends those that are left.
    """

    def __init__(self, held: list[HeldDocument[D]], refused: Mapping[Any, LockError], sender: Sender) -> None:
        self.held = held
        self.refused = dict(refused)
        self._sender = sender

    def __repr__(self) -> str:
        return f"<Batch: {len(self.held)} held, {len(self.refused)} refused>"

    def __iter__(self) -> Iterator[HeldDocument[D]]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def leave(self, error: BaseException | None) -> Steps[None]:
        """End all that are left. The first error is raised when all have been tried, with the others as its notes."""
        problems: list[LockError] = []
        for held in self.held:
            try:
                yield from held.leave(error)
            except LockError as problem:
                problems.append(problem)
        if problems:
            first, *others = problems
            for other in others:
                first.add_note(f"also: {other}")
            raise first
