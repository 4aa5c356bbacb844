"""Acquiring one document or many: the steps, and why a document was refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pymongo.collection import Collection

from ..engine.logs import WARNING, log
from ..engine.protocol.processes import fate
from ..exceptions import DocumentChanged, DocumentDamaged, DocumentHeld, DocumentNotFound, DocumentRefused, LockError
from ..other_collections.courier import Command, Courier, Steps, send
from ..other_collections.field_paths import Document
from ..other_collections.places import Source
from . import updates
from .rules import Rules
from .snapshot import DocumentSnapshot, read_snapshot
from .updates import Own, Refusal, Request, Statement, Written

T = TypeVar("T")

#: How often a refused acquisition asks again, if the reason was gone when it looked.
ROUNDS: Final = 3
#: How many documents one command is about.
BATCH: Final = 500
#: Between which seconds `DocumentHeld.retry_after` lies.
RETRY_AFTER: Final = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class Context:
    """What the steps need of a lock: where its documents are, by which rules, and who sends the commands."""

    source: Source
    rules: Rules
    courier: Courier

    @property
    def name(self) -> str:
        """The collection, for people."""
        return self.source.name


def acquire(context: Context, own: Own, request: Request) -> Steps[Document]:
    """Acquire one document; return it as it is then.

    Raises DocumentNotFound, DocumentChanged, DocumentHeld, DocumentDamaged, DocumentRefused, LockBackendFailed.
    """
    unanswered: list[BaseException] = []
    try:
        return (yield from _acquire(context, own, request, unanswered))
    except BaseException:
        if unanswered:  # a copy may have been granted, or may be yet
            put_back(context, [own])
        raise


def _acquire(context: Context, own: Own, request: Request, unanswered: list[BaseException]) -> Steps[Document]:
    rules, id_, dead = context.rules, request.id, None
    for rest in reversed(range(ROUNDS)):
        statement = updates.acquiring(rules, own, request, dead)
        answer = yield from send(updates.write_one(statement), unanswered)
        if isinstance(answer, Refusal):
            raise DocumentRefused(context.name, id_, str(answer))
        if answer is not None:
            return answer  # type: ignore[no-any-return]
        found: dict[Any, Document] = yield from send(updates.read_some(rules.fields, [id_]))
        seen = None if id_ not in found else read_snapshot(rules, found[id_])
        if seen is not None and seen.token in own.tokens:  # by the copy that was not answered
            return (yield from send(updates.read_one(rules.fields, id_)))  # type: ignore[no-any-return]
        refusal = why_not(context, request, seen)
        # The holder may have finished just now: ask again, rather than name a holder that is gone.
        if seen is None or not (rest and isinstance(refusal, DocumentHeld)):
            raise refusal
        dead = dead_run(seen, own.owner)
        if dead is None and seen.holder and seen.work not in rules.ended:
            raise refusal
    raise AssertionError("not reached")


def put_back(context: Context, several: Sequence[Own]) -> None:
    """Have documents released in their failed states in the background, many with one command. Never waits."""
    for some in in_batches([own.failing(context.rules, own.last_token()) for own in several], BATCH):
        context.courier.send_in_background(_putting_back(context, some))


def in_batches(several: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield them in parts, each for one command."""
    return (several[start : start + size] for start in range(0, len(several), size))


def _putting_back(context: Context, statements: Sequence[Statement]) -> Command:
    def command(collection: Collection[Document]) -> bool:
        written: Written = updates.write_many(statements)(collection)
        for id_, refusal in written.refused.items():
            log(WARNING, "document not released", document=id_, place=context.name, error=refusal)
        return written.matched == len(statements)

    return command


def why_not(context: Context, request: Request, seen: DocumentSnapshot | None) -> LockError:
    """Return why a document was refused, according to what it looked like right afterwards."""
    if seen is None:
        return DocumentNotFound(context.name, request.id)
    if seen.damage:
        return DocumentDamaged(context.name, request.id, seen.damage)
    if seen.version != request.version:
        return DocumentChanged(context.name, request.id, request.version, seen.version)
    holder = seen.holder or "another flow that was quicker"
    stale_in = None if seen.left is None else max(0.0, seen.left)
    least, most = RETRY_AFTER
    # As long again as it has been held, within bounds, and not long after it is stale.
    after = max(least, min(seen.seconds, most, most if stale_in is None else stale_in))
    return DocumentHeld(context.name, request.id, holder, seen.work, seen.since, after, stale_in)


def dead_run(seen: DocumentSnapshot, owner: str) -> str | None:
    """Return the token by which a former run of *owner* holds the document, if its process has certainly ended."""
    if seen.holder != owner or fate(updates.process_of(seen.token)) != "gone":
        return None
    return str(seen.token)
