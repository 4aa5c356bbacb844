"""What a flow may do with a document that it holds: the steps, and the end of its block."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ..backends.courier import Steps, send
from ..backends.field_paths import LAST_VERSION, Document, aware, get_path
from ..engine import clock
from ..engine.logs import WARNING, log
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
from .acquiring import Context, put_back
from .commands import Refusal, read_one, write_one
from .snapshot import read_snapshot
from .updates import Own, Statement, new_mark, releasing

#: The state in which work ends: one, or a function that chooses it for the document. None: the only one there is.
FinalState = str | Callable[[Any], str] | None

#: How the work on a document ended that was lost.
LOST: Final = "lost"
#: Why a forked child has lost what its parent holds.
FORKED: Final = "a forked child does not hold its parent's documents"

_PACKAGE: Final = str(Path(__file__).resolve().parents[1])


def calling_place() -> str:
    """Return the line of the program that called the package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Holding:
    """A document that a flow holds. document: as the flow has left it; raw. final: in which state its block ends.

    sent: when the command was sent that acquired it, by the local clock. place: the line of the program that did.
    """

    def __init__(
        self, context: Context, own: Own, document: Document, *, final: FinalState, sent: float, place: str
    ) -> None:
        self.context = context
        self.rules = context.rules
        self.document = document
        self.pending: str = get_path(document, self.rules.fields.state)
        #: Since when it is held, for people: by the server's clock.
        self.since = aware(get_path(document, self.rules.fields.time))
        self.place = place
        self._own = own
        self._final = final
        self._ended: str | None = None
        # By the local clock, counted from before the command was sent that is known to have set the time.
        self._deadline = sent + self.rules.stale_after
        self._made: tuple[Document, Any] | None = None

    def __reduce__(self) -> Any:
        """Make None of a copy: an instance that goes elsewhere holds nothing there."""
        return type(None), ()

    @property
    def id(self) -> Any:
        return self._own.id

    @property
    def owner(self) -> str:
        return self._own.owner

    @property
    def version(self) -> int:
        return self._own.known

    @property
    def failed(self) -> str:
        """The failed state that belongs to the pending one."""
        return self.rules.pending[self.pending]

    @property
    def ended(self) -> str | None:
        """How it ended; None while it is held."""
        return LOST if self.context.courier.forked else self._ended

    @property
    def remaining(self) -> float:
        """Seconds until it may be stale; 0 when it has ended."""
        return 0.0 if self.ended is not None else max(0.0, self._deadline - clock.now())

    @property
    def instance(self) -> Any:
        """The document as the caller's own kind of object; of a model, one whose save() goes through the lock."""
        if self._made is None or self._made[0] is not self.document:
            made = self.context.source.instance(self.document)
            if self.context.source.model is not None:
                made._document_held = self
            self._made = self.document, made
        return self._made[1]

    # Writing

    def update(self, changes: Mapping[str, Any]) -> Steps[None]:
        """Write changes, and raise the version."""
        self.check()
        made = self._check_changes(changes)
        if not made:
            raise TypeError("update() needs something to write")
        yield from self._write(made)

    def renew(self) -> Steps[None]:
        """Count `stale_after` from now."""
        self.check()
        sent = clock.now()
        yield from self._write({}, renew=True)
        self._deadline = sent + self.rules.stale_after  # _write has seen that this very write was done

    def finish(self, final: FinalState, changes: Mapping[str, Any]) -> Steps[None]:
        """Set the final state, write changes, and release the document."""
        self.check()
        state, made = self.final_state(final, changes), self._check_changes(changes)
        yield from self._write(made, ends=state)
        self.ended_in(state)

    def fail(self) -> Steps[bool]:
        """Set the failed state, and release the document; return whether it was still held."""
        if self.context.courier.forked:
            return False
        self.check()
        statement, token = self.failing()
        try:
            answer = yield write_one(statement)
        except BaseException:
            put_back(self.context, [statement])
            raise
        if isinstance(answer, Refusal):
            raise DocumentRefused(self.context.name, self.id, str(answer))
        self.ended_in(self.failed)
        if answer is not None:
            return True
        found = yield from send(read_one(self.rules.fields, self.id))  # the driver may have sent it twice
        return found is not None and get_path(found, self.rules.fields.token) == token

    def failing(self) -> tuple[Statement, str]:
        """Return the update that sets the failed state, in whatever version, and its token."""
        token = new_mark().at(self._own.sent + 1)
        return self._own.failing(self.rules, self.failed, token), token

    def _write(self, changes: Document, *, ends: str | None = None, renew: bool = False) -> Steps[None]:
        """Write, if the document is still as this flow left it. One look at its token tells whether that was done where
        the answer was lost; late copies of earlier writes are refused by their version."""
        rules, unanswered = self.rules, list[BaseException]()
        if self._own.sent >= LAST_VERSION - 1:
            raise DocumentDamaged(self.context.name, self.id, "its version is too large")
        before = self._own
        token = (before.mark if ends is None else new_mark()).at(before.sent + 1)
        values = changes if ends is None else {**changes, **releasing(rules, ends, token)}
        statement = before.writing(rules, values, token, renew=renew)
        self._own = replace(before, sent=before.sent + 1)  # it may have been done from now on
        answer = yield from send(write_one(statement), unanswered)
        if isinstance(answer, Refusal):
            self._own = before  # it was certainly not done
            raise DocumentRefused(self.context.name, self.id, str(answer))
        if answer is None:
            answer = yield from send(read_one(rules.fields, self.id))
            if answer is None or get_path(answer, rules.fields.token) != token:
                why = self.why_not(answer, maybe_written=bool(unanswered) or before.sent > before.known)
                if not unanswered:
                    self._own = before
                if isinstance(why, (DocumentLockLost, DocumentNotFound)):
                    self._ended = LOST
                raise why
        self.document = answer
        self._own = replace(self._own, known=self._own.sent)

    def why_not(self, found: Document | None, *, maybe_written: bool = False) -> LockError:
        """Return why a write was not done to the document, which was *found* like this afterwards."""
        name, seen = self.context.name, read_snapshot(self.rules, found) if found is not None else None
        if seen is None:
            return DocumentNotFound(name, self.id)
        if seen.damage:
            return DocumentDamaged(name, self.id, seen.damage)
        if seen.holder == self.owner and seen.token in self._own.tokens:
            return DocumentChanged(name, self.id, self.version, seen.version)
        return DocumentLockLost(name, self.id, self.version, seen.holder, seen.work, maybe_written=maybe_written)

    def final_state(self, final: FinalState, changes: Mapping[str, Any]) -> str:
        """Return the final state that is meant for the document as it will be. Raises TypeError, ValueError, and what
        the function raises."""
        chosen = final if final is not None else self._final
        if callable(chosen):
            chosen = chosen(self.context.source.changed(self.instance, changes))
        return self.rules.check_final(chosen)

    def _check_changes(self, changes: Mapping[str, Any]) -> Document:
        return self.rules.check_changes(self.context.source.changes(changes))

    # The end

    def check(self) -> None:
        """Raise DocumentLockLost in a forked child, and LockMisused when the work has ended."""
        if self.context.courier.forked:
            raise DocumentLockLost(self.context.name, self.id, self.version, reason=FORKED)
        if self.ended is not None:
            raise LockMisused(f"the work on document {self.id!r} has ended: its state is {self.ended!r}")

    def ended_in(self, state: str) -> None:
        """Note that the work has ended in this state."""
        self._ended = state

    def abandon(self) -> None:
        """Have the document released in the background."""
        put_back(self.context, [self.failing()[0]])
        self.ended_in(self.failed)

    def leave(self, error: BaseException | None) -> Steps[bool]:
        """End the block: final, or failed after an error, which is never hidden by one of ours. Return whether MongoDB
        answered."""
        if self.ended is not None:
            return True
        if error is not None:
            return (yield from self._fail_quietly())
        try:
            yield from self.finish(None, {})
        except BaseException as problem:
            if self.ended is None:
                if isinstance(problem, LockBackendFailed) or not isinstance(problem, Exception):
                    self.abandon()
                else:
                    yield from self._fail_quietly()
            raise
        return True

    def _fail_quietly(self) -> Steps[bool]:
        if self._own.sent > self._own.known:
            self.abandon()  # MongoDB did not answer just now: one wait is enough
            return False
        facts = {"document": self.id, "place": self.context.name}
        try:
            if not (yield from self.fail()):
                log(WARNING, "document lost before its work failed", **facts)
        except LockError as problem:
            log(WARNING, "document not released", **facts, error=problem)
            if isinstance(problem, LockBackendFailed):  # it is released in the background
                self.ended_in(self.failed)
                return False
        return True


def forgotten(holding: Holding) -> None:
    """Release a document whose object is gone, so that no code can end its work. Called when it was collected."""
    if holding.ended is None:
        log(WARNING, "document forgotten", document=holding.id, place=holding.context.name, acquired=holding.place)
        holding.abandon()
        what = f"the document {holding.id!r} of {holding.context.name}, acquired at {holding.place},"
        warnings.warn(f"{what} was not ended, and no code can now", ResourceWarning, stacklevel=2)
