"""What a flow has of a document that it holds: the document as it is under the lock, and what may be done to it."""

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
from .rules import LAST_VERSION, Rules
from .sender import Sender
from .source import Source
from .steps import Later, Send, Steps, Target, aware, dig, look_at, send
from .updates import Claim, Document

D = TypeVar("D")

#: How the work on a document ended that was taken away.
LOST: Final = "lost"
#: Why a child has lost what its parent held when it was forked.
FORKED: Final = "a forked child does not hold its parent's documents"


class Desk:
    """What a held document needs of its lock: where it is, by which rules, and who sends the commands."""

    def __init__(self, source: Source, rules: Rules, sender: Sender) -> None:
        self.source = source
        self.rules = rules
        self.sender = sender
        self.target = Target(source.name, rules)


class HeldDocument(Generic[D]):
    """A document that this flow holds, until it says how the work ended. As a block it says so by itself.

    Nobody else who goes by the same lock starts work on the document meanwhile, unless it is taken away: it gets stale
    `stale_after` seconds after the acquisition (see `remaining` and `renew`), and the same `owner` may take it over.
    Whoever lost it may still believe to have it; what it then writes through this object is refused. It belongs to the
    process that acquired it: in a forked child it is lost, and leaving the block does nothing.
    """

    def __init__(self, desk: Desk, claim: Claim, document: Document, final: str | None, sent: float) -> None:
        fields = desk.rules.fields
        #: The document as it was when it was granted, or after the last `update`; raw, as MongoDB has it.
        self.document = document
        self.id: Any = document["_id"]
        self.owner = claim.owner
        self.pending: str = dig(document, fields.state)
        #: Grows with every acquisition and every change: what an external service can compare.
        self.version: int = int(dig(document, fields.version))
        #: Since when, by the server's clock: for people.
        self.since = aware(dig(document, fields.time))
        #: The state in which the block ends if nothing goes wrong.
        self.final = final
        self._ended: str | None = None
        self._read: Document | None = None
        self._instance: Any = None
        self._desk = desk
        #: The ids that may stand in the document: the one that is known to, and those whose fate is not known.
        self._attempts = [claim.attempt]
        # By the local clock: from before the command was sent that is known, by its id, to have set the time.
        self._deadline = sent + desk.rules.stale_after

    def __repr__(self) -> str:
        how = self.ended or f"{self.pending}, {self.remaining:.1f} s left"
        return f"<HeldDocument {self._desk.source.name} {self.id!r}, version {self.version}, {how}>"

    @property
    def instance(self) -> D:
        """The document as an instance of the model, made of what the server returned with the grant.

        Do not `save()` all of it: that writes the lock's own fields as well. See `update`.
        """
        if self._read is not self.document:
            self._read, self._instance = self.document, self._desk.source.instance(self.document)
        made: D = self._instance
        return made

    @property
    def ended(self) -> str | None:
        """How it ended; None while it is held."""
        return LOST if self._desk.sender.forked else self._ended

    @property
    def remaining(self) -> float:
        """Seconds for which it is not stale at any rate; 0 when it has ended. By the local clock, counted from before
        the command was sent; what judges it is the server's, which must not be set forward meanwhile."""
        return 0.0 if self.ended is not None else max(0.0, self._deadline - clock.now())

    # What may be done to it

    def finish(self, final: str | None = None, changes: Mapping[str, Any] | None = None) -> None:
        """Set the final state, write *changes*, and let go, in one update.

        final: None: the one that was named before, or the only one there is. Raises DocumentLockLost if it was taken
        away; DocumentChanged if somebody raised the version meanwhile: it is still held then, so `fail` it, or have
        the block do so. Nothing is written in both cases.
        """
        self._desk.sender.run(self._finish(final, changes or {}))

    async def afinish(self, final: str | None = None, changes: Mapping[str, Any] | None = None) -> None:
        """See finish()."""
        await self._desk.sender.arun(self._finish(final, changes or {}))

    def fail(self) -> bool:
        """Set the failed state that belongs to the pending one, and let go, also where somebody raised the version.

        Returns whether it was still ours.
        """
        return self._desk.sender.run(self._fail())

    async def afail(self) -> bool:
        """See fail()."""
        return await self._desk.sender.arun(self._fail())

    def update(self, changes: Mapping[str, Any] | None = None, /, **more: Any) -> D:
        """Write changes to the document and raise its version, if it is still ours; return it as it is then.

        Raises DocumentLockLost, DocumentChanged, LockBackendFailed.
        """
        return self._desk.sender.run(self._update({**(changes or {}), **more}))

    async def aupdate(self, changes: Mapping[str, Any] | None = None, /, **more: Any) -> D:
        """See update()."""
        return await self._desk.sender.arun(self._update({**(changes or {}), **more}))

    def renew(self) -> None:
        """Start the time anew after which the document is stale. Raises DocumentLockLost, DocumentChanged."""
        self._desk.sender.run(self._renew())

    async def arenew(self) -> None:
        """See renew()."""
        await self._desk.sender.arun(self._renew())

    # As a block

    def __enter__(self) -> Self:
        self._check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._desk.sender.run(self.leave(error))

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._desk.sender.arun(self.leave(error))

    def leave(self, error: BaseException | None) -> Steps[None]:
        """The end of the block: final, or failed after an error, which is never hidden by one of ours."""
        if self.ended is not None:
            return
        if error is None:
            try:
                yield from self._finish(None, {})
            except BaseException:
                if self.ended is None:
                    yield from self._give_up()
                raise
        else:
            yield from self._give_up()

    def _give_up(self) -> Steps[None]:
        try:
            if not (yield from self._fail()):
                log(WARNING, "document lost before its work failed", document=self.id, place=self._desk.source.name)
        except LockError as problem:
            facts = {"document": self.id, "place": self._desk.source.name, "error": problem}
            log(WARNING, "document not let go", **facts)

    # How

    def _finish(self, final: str | None, changes: Mapping[str, Any]) -> Steps[None]:
        self._check()
        state = self._desk.rules.check_final(final if final is not None else self.final)
        made = self._changes(changes)
        let_go = updates.letting_go(self._desk.rules, updates.literal(state))
        yield from self._write(made, let_go)
        self._ended = state

    def _update(self, changes: Mapping[str, Any]) -> Steps[D]:
        self._check()
        made = self._changes(changes)
        if not made:
            raise TypeError("update() needs something to write")
        yield from self._write(made, {})
        return self.instance

    def _renew(self) -> Steps[None]:
        self._check()
        sent = clock.now()
        yield from self._write({}, {self._desk.rules.fields.time: "$$NOW"})
        self._deadline = sent + self._desk.rules.stale_after  # see __init__: _write has made sure that it was our write

    def _write(self, changes: Mapping[str, Any], more: Document) -> Steps[None]:
        """Write, if the document is still as we left it. By the id of this very write it is found out whether it was
        done where the answer was lost, and a late copy of an earlier one is refused."""
        rules, attempt = self._desk.rules, updates.new_attempt()
        query = updates.mine(rules, self.id, self.owner, self._attempts, self.version)
        update = [{"$set": {**updates.changing(rules, attempt, changes), **more}}]
        self._attempts = [*self._attempts, attempt]

        def call(collection: Collection[Document]) -> Any:
            return collection.find_one_and_update(query, update, return_document=ReturnDocument.AFTER)

        def look(collection: Collection[Document]) -> Any:
            return collection.find_one({"_id": {"$eq": self.id}})

        document: Document | None = yield from send(call)
        if document is None:
            found: Document | None = yield from send(look)
            if found is None or dig(found, rules.fields.attempt) != attempt:
                problem = self._why_not(found)
                self._ended = LOST if isinstance(problem, (DocumentLockLost, DocumentNotFound)) else None
                raise problem
            document = found
        self._attempts = [attempt]
        self.document = document
        self.version += bool(changes)

    def _why_not(self, found: Document | None) -> LockError:
        name = self._desk.source.name
        if found is None:
            return DocumentNotFound(name, self.id)
        seen = look_at(self._desk.rules, found)
        if seen.damage:
            return DocumentDamaged(name, self.id, seen.damage)
        if seen.holder == self.owner and seen.attempt in self._attempts and seen.version != self.version:
            return DocumentChanged(name, self.id, self.version, seen.version)
        return DocumentLockLost(name, self.id, self.version, seen.holder, seen.state)

    def _fail(self) -> Steps[bool]:
        if self._desk.sender.forked:
            return False
        self._check()
        rules, attempt = self._desk.rules, updates.new_attempt()
        query = updates.mine(rules, self.id, self.owner, self._attempts)
        let_go = updates.letting_go(rules, updates.literal(rules.pending[self.pending]))
        update = [{"$set": {**let_go, rules.fields.attempt: attempt}}]

        def call(collection: Collection[Document]) -> bool:
            if collection.update_one(query, update).matched_count:
                return True
            found = collection.find_one({"_id": {"$eq": self.id}}, {rules.fields.attempt: 1})
            return found is not None and dig(found, rules.fields.attempt) == attempt

        ours: bool = yield from _for_sure(call)
        self._ended = rules.pending[self.pending]
        return ours

    def _check(self) -> None:
        if self._desk.sender.forked:
            raise DocumentLockLost(self._desk.source.name, self.id, self.version, reason=FORKED)
        if self.ended is not None:
            raise LockMisused(f"the work on document {self.id!r} has ended: its state is {self.ended!r}")

    def _changes(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        if self.version >= LAST_VERSION - 1:
            raise DocumentDamaged(self._desk.source.name, self.id, "its version is too large")
        return self._desk.rules.check_changes(self._desk.source.changes(changes))


def _for_sure(call: Any) -> Steps[Any]:
    """Send what is to be done at any rate: if nobody waits for it any more, in the background."""
    attempt = Send(call)
    try:
        return (yield attempt)
    except BaseException:
        yield Later(attempt, call)
        raise


class Batch(Generic[D]):
    """Several documents at once: those that were granted, and why the others were not.

    held: those of them that this flow has. refused: the error of each other one, by its id. Leave each by a block of
    its own (``for held in batch: with held: …``); what is left at the end of the batch's block ends with it.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._sender.run(self.leave(error))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._sender.arun(self.leave(error))

    def leave(self, error: BaseException | None) -> Steps[None]:
        """End all that are left. What cannot be finished is told of when all have been tried: the first error is
        raised, with the others as its notes."""
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
