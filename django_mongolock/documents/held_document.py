"""A document that a flow holds, the flow's operations on it, and the end of its block."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, Generic, Self, TypeVar

from bson.int64 import Int64

from ..engine import clock
from ..engine.logs import WARNING, log
from ..engine.protocol.actions import twins
from ..exceptions import (
    DocumentChanged,
    DocumentDamaged,
    DocumentLockLost,
    DocumentNotFound,
    DocumentRefused,
    LockBackendFailed,
    LockError,
    LockMisused,
)
from ..other_collections.courier import Sleep, Steps, send
from ..other_collections.field_paths import LAST_VERSION, Document, aware, get_path
from ..transactions import open_transactions, warn_once
from .rules import read_snapshot
from .steps import Block, Context, put_back
from .updates import Own, Refusal, delete_one, read_one, releasing, token_of, write_one

D = TypeVar("D")

#: The state in which work ends, or a function that chooses it for the document. None: the only state there is.
FinalState = str | Callable[[Any], str] | None

#: The end of the work on a lost document.
LOST: Final = "lost"
#: The end of the work on a document that the flow has deleted.
DELETED: Final = "deleted"
#: Seconds between two looks of a write that waits for another write of the same document.
TURN: Final = 0.01


class HeldDocument(Block, Generic[D]):
    """A document that this flow holds until the flow says how the work ended. The end of a block says so by itself.

    No other flow that uses the lock starts work on the document meanwhile, unless the document is lost. `stale_after`
    seconds after the acquisition, the document becomes stale (see `remaining` and `renew`). The next flow that asks
    then gets it. A holder that has lost the document may not know yet. Every later write of that holder through this
    object is refused.

    Threads and tasks may share the object. Their writes are done one by one. The document belongs to the process that
    acquired it. In a forked child it is lost, and leaving the block does nothing.
    """

    #: The document as it was granted, or after the last `update`. Raw, as MongoDB has it.
    document: Document
    #: The state of the document while it is held.
    pending: str
    #: The time since when it is held, for people, by the server's clock.
    since: datetime | None

    def __init__(
        self, context: Context, own: Own, document: Document, *, final: FinalState, sent: float, place: str
    ) -> None:
        """Store the granted document.

        - own: state in which the flow's writes left the document.
        - final: state in which the block ends.
        - sent: time when the acquiring command was sent, by the local clock.
        - place: line of the program that acquired it.
        """
        self.document = document
        self.pending = get_path(document, context.rules.fields.state)
        self.since = aware(get_path(document, context.rules.fields.time))
        self._context = context
        self._own = own
        own.kind = Int64 if isinstance(get_path(document, context.rules.fields.version), Int64) else int
        self._final = final
        self._place = place
        # By the local clock, counted from before the command was sent that is known to have set the time.
        self._deadline = sent + context.rules.stale_after
        self._made: tuple[Document, D] | None = None
        #: The write that is under way. This is no Lock, because a signal may strike between its acquire() and the `try`
        #: that ends it.
        self._turn: dict[None, object] = {}
        weakref.finalize(self, forgotten, context, own, place).atexit = False

    def __repr__(self) -> str:
        how = self.ended or f"{self.pending}, {self.remaining:.1f} s left"
        return f"<HeldDocument {self._context.source.name} {self.id!r}, version {self.version}, {how}>"

    @property
    def instance(self) -> D:
        """The document as an instance of the model, made from the server's answer to the acquisition.

        If the document is still held, `save()` of the instance writes the fields that are not the lock's, as `update`
        does.
        """
        if self._made is None or self._made[0] is not self.document:
            made: Any = self._context.source.instance(self.document)
            if self._context.source.model is not None:
                made._document_held = Holder(self)
            self._made = self.document, made
        return self._made[1]

    @property
    def id(self) -> Any:
        """The key of the document."""
        return self._own.id

    @property
    def owner(self) -> str:
        """The holder that the document names."""
        return self._own.owner

    @property
    def version(self) -> int:
        """The version, raised by every write of the lock. An external service can compare it."""
        return self._own.known

    @property
    def ended(self) -> str | None:
        """The end of the work. None while the document is held."""
        return LOST if self._context.courier.forked else self._own.ended

    @property
    def remaining(self) -> float:
        """Seconds until the document may be stale, 0 when the work has ended.

        The seconds are counted by the local clock, from before the command was sent. The server decides by its own
        clock, so the server's clock must not be set forward meanwhile.
        """
        return 0.0 if self.ended is not None else max(0.0, self._deadline - clock.now())

    def _finish(self, final: FinalState = None, changes: Mapping[str, Any] | None = None) -> Steps[None]:
        """Set the final state, write *changes*, and release the document, in one update.

        - final: final state. Default: state named before, or the only one.

        Raises DocumentLockLost, with the fact whether a write may have taken effect. Raises DocumentChanged if a writer
        without the lock raised the version, and DocumentRefused if MongoDB refuses the write. In these two cases
        nothing was written and the document is still held. Call `fail`, or let the block do so.
        """
        self._check()
        chosen = final if final is not None else self._final
        if callable(chosen):  # the function sees the document as changed
            chosen = chosen(self._context.source.changed(self.instance, changes or {}))
        state = self._context.rules.check_final(chosen)
        yield from self._in_turn(self._write_now(self._stored(changes or {}), ends=state))

    finish, afinish = twins(_finish)

    def _fail(self) -> Steps[bool]:
        """Set the failed state that belongs to the pending one, and release the document, whatever its version is.

        Returns whether it was still held.
        """
        if self._context.courier.forked:
            return False
        self._check()
        own, rules, token = self._own, self._context.rules, self._own.last_token()
        try:
            own.ended = own.failed  # set this first: no write begins now, so the tokens include all writes under way
            answer = yield write_one(own.failing(rules, token))
        except BaseException:
            put_back(self._context, [own])
            raise
        if isinstance(answer, Refusal):
            own.ended = None
            raise DocumentRefused(self._context.source.name, self.id, str(answer))
        if answer is not None:
            return True
        found = yield from send(read_one(rules.fields, self.id))  # the driver may have sent it twice
        if found is None or get_path(found, rules.fields.token) != token:
            own.ended = LOST
        return own.ended != LOST

    fail, afail = twins(_fail)

    def _update(self, changes: Mapping[str, Any] | None = None, /, **more: Any) -> Steps[D]:
        """Write changes to the document and raise its version, if it is still held.

        Return the document after the write.

        The changes have the meaning of MongoDB's `$set`. Raises DocumentLockLost, DocumentChanged, DocumentRefused,
        LockBackendFailed. After LockBackendFailed the changes may have been written. The next write, or the end of the
        block, takes that into account.
        """
        made = self._stored({**(changes or {}), **more})
        if not made:
            raise TypeError("update() needs something to write")
        yield from self._in_turn(self._write_now(made))
        return self.instance

    update, aupdate = twins(_update)

    def _delete(self) -> Steps[None]:
        """Delete the document, if it is still held, and end the work. Raises the errors of `update`."""
        yield from self._in_turn(self._delete_now())

    delete, adelete = twins(_delete)

    def _delete_now(self) -> Steps[None]:
        unanswered, in_doubt = list[BaseException](), self._own.in_doubt
        if (yield from send(delete_one(self._own.writing(self._context.rules, {}, "")), unanswered)) is None:
            found = yield from send(read_one(self._context.rules.fields, self.id))
            if found is not None or not unanswered:
                why = self._why_not(found, maybe_written=in_doubt)
                self._own.ended = LOST if isinstance(why, (DocumentLockLost, DocumentNotFound)) else None
                raise why
        self._own.ended = DELETED

    def _renew(self) -> Steps[None]:
        """Restart the count of `stale_after`. Raises DocumentLockLost, DocumentChanged."""
        yield from self._in_turn(self._write_now({}, renew=True))

    renew, arenew = twins(_renew)

    # Writing

    def _in_turn(self, write: Steps[None]) -> Steps[None]:
        """Write when no other write is under way. Another thread or task of the flow may be renewing the document."""
        self._check()
        turn, end = object(), clock.now() + 2 * self._context.courier.timeout
        try:
            while self._turn.setdefault(None, turn) is not turn:
                if clock.now() > end:
                    raise LockBackendFailed("an earlier write of this document has no answer yet")
                yield Sleep(TURN)
            yield from write
        finally:
            if self._turn.get(None) is turn:
                del self._turn[None]

    def _write_now(self, changes: Document, *, ends: str | None = None, renew: bool = False) -> Steps[None]:
        """Write, if the document is still as this flow left it.

        After a lost answer, one look at the token shows whether the write was done. Late copies of earlier writes are
        refused by their version.
        """
        sent = clock.now()
        own, rules, unanswered = self._own, self._context.rules, list[BaseException]()
        if own.sent >= LAST_VERSION - 1:
            raise DocumentDamaged(self._context.source.name, self.id, "its version is too large")
        token = token_of(own.writer, own.sent + 1) if ends is None else own.last_token()
        values = changes if ends is None else {**changes, **releasing(rules, ends, token)}
        statement, in_doubt = own.writing(rules, values, token, renew=renew), own.in_doubt
        own.sent += 1  # the write may have been done from now on
        self._check()  # check again, because a thread that ends the work must know of this write or forbid it
        answer = yield from send(write_one(statement), unanswered)
        if isinstance(answer, Refusal):
            own.sent -= 1  # the write was certainly not done
            raise DocumentRefused(self._context.source.name, self.id, str(answer))
        if answer is None:
            answer = yield from send(read_one(rules.fields, self.id))
            if answer is None or get_path(answer, rules.fields.token) != token:
                why = self._why_not(answer, maybe_written=bool(unanswered) or in_doubt)
                own.sent -= not unanswered
                self._check()  # another thread may have ended the work meanwhile
                if isinstance(why, (DocumentLockLost, DocumentNotFound)):
                    own.ended = LOST
                raise why
        self.document = answer
        own.known, own.ended = own.sent, own.ended or ends
        if renew:
            self._deadline = sent + rules.stale_after

    def _why_not(self, found: Document | None, *, maybe_written: bool = False) -> LockError:
        """Return why the document refused a write. The document was *found* like this afterwards."""
        name = self._context.source.name
        if found is None:
            return DocumentNotFound(name, self.id)
        seen = read_snapshot(self._context.rules, found)
        if seen.damage:
            return DocumentDamaged(name, self.id, seen.damage)
        if seen.holder == self.owner and seen.token in self._own.tokens:
            return DocumentChanged(name, self.id, self.version, seen.version)
        return DocumentLockLost(name, self.id, self.version, seen.holder, seen.work, maybe_written=maybe_written)

    def _stored(self, changes: Mapping[str, Any]) -> Document:
        return self._context.rules.check_changes(self._context.source.changes(changes))

    def _check(self) -> None:
        """Raise DocumentLockLost in a forked child or after a loss, and LockMisused when the work has ended."""
        if self.ended == LOST:
            reason = "an earlier write has found that"
            if self._context.courier.forked:
                reason = "a forked child does not hold its parent's documents"
            raise DocumentLockLost(self._context.source.name, self.id, self.version, reason=reason)
        if self.ended is not None:
            raise LockMisused(f"the work on document {self.id!r} has ended: its state is {self.ended!r}")

    # The block

    def __enter__(self) -> Self:
        self._check()
        if self.remaining == 0:
            abandon(self._context, [self._own])
            why = "it was held for longer than stale_after before its block began: renew() it earlier, or hold fewer"
            raise DocumentLockLost(self._context.source.name, self.id, self.version, reason=why)
        return self

    def _leave(self, error: BaseException | None) -> Steps[bool]:
        """End the block. The state is final, or failed after an error.

        The end of the block never hides that error by another one. Return whether MongoDB answered.
        """
        if self.ended == DELETED and error is not None:
            self._own.ended = None  # the transaction that deleted it may be rolled back
        if self.ended is not None:
            if self.ended == LOST and error is None and not self._context.courier.forked:
                self._check()  # perhaps only another thread was told
            return True
        opened = open_transactions()
        try:
            return (yield from self._end(error))
        finally:
            if opened:
                warn_once(
                    self._place,
                    f"the document {self._context.source.name} {self.id!r} was released inside the transaction that is "
                    f"open on {opened[0].alias!r}: the next flow does not yet see what was written under the lock. "
                    "Open the transaction inside the block",
                )

    def _end(self, error: BaseException | None) -> Steps[bool]:
        if error is not None:
            return (yield from self._fail_quietly())
        try:
            yield from self._finish()
        except BaseException as problem:
            if self.ended is None:
                if isinstance(problem, LockBackendFailed) or not isinstance(problem, Exception):
                    abandon(self._context, [self._own])
                else:
                    yield from self._fail_quietly()
            raise
        return True

    def _fail_quietly(self) -> Steps[bool]:
        own, facts = self._own, {"document": self.id, "place": self._context.source.name}
        if own.in_doubt:
            abandon(self._context, [own])  # MongoDB did not answer just now: one wait is enough
            return False
        try:
            if not (yield from self._fail()):
                log(WARNING, "document lost before its work failed", **facts)
        except LockError as problem:
            log(WARNING, "document not released", **facts, error=problem)
            return not isinstance(problem, LockBackendFailed)  # the document is released in the background
        return True


class Holder(weakref.ref[HeldDocument[Any]]):
    """The link from an instance to its held document. A copy that goes elsewhere has no link."""

    def __reduce__(self) -> Any:
        return type(None), ()


def abandon(context: Context, several: list[Own]) -> None:
    """Release documents in the background."""
    try:
        for own in several:
            own.ended = own.failed  # set this first, as in fail()
    finally:
        put_back(context, several)


def forgotten(context: Context, own: Own, place: str) -> None:
    """Release a document whose object was garbage-collected, so that no code can end its work."""
    if own.ended is None and not context.courier.forked:
        log(WARNING, "document forgotten", document=own.id, place=context.source.name, acquired=place)
        abandon(context, [own])
        what = f"the document {own.id!r} of {context.source.name}, acquired at {place},"
        warnings.warn(f"{what} was not ended, and no code can now", ResourceWarning, stacklevel=2)
