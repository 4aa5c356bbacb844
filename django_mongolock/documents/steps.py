"""The steps of document locks: acquiring a document, looking at documents, and taking them from their holders.

The server decides each time, in the update itself.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from pymongo.collection import Collection

from ..engine.logs import WARNING, log
from ..engine.protocol.processes import fate
from ..exceptions import DocumentChanged, DocumentDamaged, DocumentHeld, DocumentNotFound, DocumentRefused, LockError
from ..inspection.kinds import Choice, Swept
from ..inspection.snapshot import ShownState
from ..other_collections.courier import Courier, Steps, send
from ..other_collections.field_paths import Document, get_path, is_type
from ..other_collections.places import Source
from . import updates
from .rules import DocumentSnapshot, Rules, read_snapshot
from .updates import Own, Refusal, Request, Statement, Written

T = TypeVar("T")

#: The number of tries of a refused acquisition if the reason was gone when it looked.
ROUNDS: Final = 3
#: The number of documents in one command.
BATCH: Final = 500
#: The bounds of `DocumentHeld.retry_after`, in seconds.
RETRY_AFTER: Final = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class Context:
    """The facts that the steps need: the place of the documents, the rules of the lock, and the sender of commands."""

    source: Source
    rules: Rules
    courier: Courier


def acquire(context: Context, own: Own, request: Request) -> Steps[Document]:
    """Acquire one document. Return the document as acquired.

    Raises DocumentNotFound, DocumentChanged, DocumentHeld, DocumentDamaged, DocumentRefused, LockBackendFailed.
    """
    rules, id_, dead, unanswered = context.rules, request.id, None, list[BaseException]()
    try:
        for rest in reversed(range(ROUNDS)):
            statement = updates.acquiring(rules, own, request, dead)
            answer = yield from send(updates.write_one(statement), unanswered)
            if isinstance(answer, Refusal):
                raise DocumentRefused(context.source.name, id_, str(answer))
            if answer is not None:
                return answer  # type: ignore[no-any-return]
            found: dict[Any, Document] = yield from send(updates.read_some(rules.fields, [id_]))
            seen = None if id_ not in found else read_snapshot(rules, found[id_])
            if seen is not None and seen.token in own.tokens:  # granted by the copy without an answer
                return (yield from send(updates.read_one(rules.fields, id_)))  # type: ignore[no-any-return]
            refusal = why_not(context, request, seen)
            # The holder may have finished just now. Ask again instead of naming a holder that is gone.
            if seen is None or not (rest and isinstance(refusal, DocumentHeld)):
                raise refusal
            dead = dead_run(seen, own.owner)
            if dead is None and seen.holder and seen.work not in rules.ended:
                raise refusal
    except BaseException:
        if unanswered:  # a copy may have been granted, or may be yet
            put_back(context, [own])
        raise
    raise AssertionError("not reached")


def put_back(context: Context, several: Sequence[Own]) -> None:
    """Release documents in their failed states in the background, many with one command. Never waits."""
    for some in in_batches([own.failing(context.rules, own.last_token()) for own in several], BATCH):
        context.courier.send_in_background(partial(_put_back, context.source.name, some))


def in_batches(several: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Return *several* in parts, each for one command."""
    return (several[start : start + size] for start in range(0, len(several), size))


def _put_back(name: str, statements: Sequence[Statement], collection: Collection[Document]) -> bool:
    written: Written = updates.write_many(statements)(collection)
    for id_, refusal in written.refused.items():
        log(WARNING, "document not released", document=id_, place=name, error=refusal)
    return written.matched == len(statements)


def why_not(context: Context, request: Request, seen: DocumentSnapshot | None) -> LockError:
    """Return why a document was refused, by its state right afterwards."""
    if seen is None:
        return DocumentNotFound(context.source.name, request.id)
    if seen.damage:
        return DocumentDamaged(context.source.name, request.id, seen.damage)
    if seen.version != request.version:
        return DocumentChanged(context.source.name, request.id, request.version, seen.version)
    holder = seen.holder or "another flow that was quicker"
    stale_in = None if seen.left is None else max(0.0, seen.left)
    least, most = RETRY_AFTER
    # Wait as long again as the document has been held, within bounds, and not long after it is stale.
    after = max(least, min(seen.seconds, most, most if stale_in is None else stale_in))
    return DocumentHeld(context.source.name, request.id, holder, seen.work, seen.since, after, stale_in)


def dead_run(seen: DocumentSnapshot, owner: str) -> str | None:
    """Return the token by which a former run of *owner* holds the document, if its process has certainly ended."""
    token = str(seen.token)
    return token if seen.holder == owner and fate(token.partition(" ")[2]) == "gone" else None


#: The states that a caller can ask for.
STATES: Final = ("all", "held", "stale", "damaged")


def query(rules: Rules, choice: Choice) -> Document:
    """Return the query for the chosen documents."""
    fields = rules.fields
    # The plain condition lets an index narrow the search, and the expression decides. Apart from the pending states,
    # only a document with a time can be held. An index of state and time finds those among many free ones.
    pending = {fields.state: {"$in": list(rules.pending)}}
    others = {fields.state: {"$nin": [*rules.pending, *rules.ended]}, fields.time: {"$type": "date"}}
    narrowed = pending if choice.state in ("undated", "damaged") else {"$or": [pending, others]}
    found: Document = {**narrowed, "$expr": condition(rules, choice)}
    if choice.owner is not None:
        found[fields.holder] = {"$eq": choice.owner}
    if choice.ids is not None:
        found[fields.key] = {"$in": list(choice.ids)}
    return found


def condition(rules: Rules, choice: Choice) -> Document:
    """Return the condition by which the server selects documents that can be judged and are in that state."""
    whole = updates.is_whole(rules.fields)
    states: dict[str, list[Document]] = {
        "all": [whole, updates.is_taken(rules)],
        "held": [whole, updates.is_held(rules)],
        "stale": [whole, updates.is_taken(rules), updates.is_stale(rules, choice.older_than)],
        "undated": [whole, updates.is_taken(rules), {"$not": [is_type(rules.fields.time, "date")]}],
        "damaged": [{"$not": [whole]}],
    }
    return {"$and": states[choice.state]}


def find(context: Context, choice: Choice, limit: int = 0) -> Steps[list[DocumentSnapshot]]:
    """Find documents, the longest hold first. For "all", documents that cannot be judged follow. limit 0: all."""
    rules = context.rules
    everything = choice.state == "all" and choice.owner is None
    several = [choice, replace(choice, state="damaged")] if everything else [choice]

    def command(collection: Collection[Document]) -> list[Document]:
        fields = rules.fields
        cursors = (collection.find(query(rules, each), fields.projection()).sort(fields.time, 1) for each in several)
        return list(islice(chain.from_iterable(cursor.limit(limit) for cursor in cursors), limit or None))

    documents: list[Document] = yield from send(command)
    return [read_snapshot(rules, document) for document in documents]


def sweep(context: Context, choice: Choice, batch: int = BATCH, *, dry_run: bool = False) -> Steps[Swept]:
    """Set stale documents to the failed state of their work, and empty the holder's field.

    With *dry_run*, only find them.

    A document that MongoDB refuses to write stops no other, and is listed among the damaged ones.
    """
    rules, swept, choice = context.rules, Swept(), replace(choice, state="stale")
    found = yield from find(context, choice)
    swept.found = len(found)
    swept.damaged = [each for each in found if each.damage]  # only this side cannot read these
    if choice.owner is None:
        swept.damaged += yield from find(context, replace(choice, state="damaged"))
    if dry_run:
        swept.cleared = found
        return swept
    for some in in_batches(found, batch):
        done, written = yield from _take(context, some, condition(rules, choice), exact=True)
        # A document that was acquired again in the same moment is counted, but no longer found.
        swept.count += max(written.matched, len(done))
        swept.cleared += done
        swept.damaged += _refused(some, written)
    undated = replace(choice, state="undated")
    for some in in_batches((yield from find(context, undated)), batch):
        update = {"$currentDate": {rules.fields.time: True}}
        statements = [Statement(rules.fields.key, each.id, condition(rules, undated), update) for each in some]
        written = yield from send(updates.write_many(statements))
        swept.dated += written.matched
        swept.damaged += _refused(some, written)
    return swept


def force(
    context: Context, name: str, shown: Iterable[DocumentSnapshot], by: str, reason: str
) -> Steps[list[DocumentSnapshot]]:
    """Release these documents, if they still have the holders and states that were shown.

    Return the released documents.
    """
    taken: list[DocumentSnapshot] = []
    for some in in_batches([each for each in shown if each.holder], BATCH):
        done, written = yield from _take(context, some, updates.is_taken(context.rules), exact=False)
        for id_, refusal in written.refused.items():
            log(WARNING, "document not released", document=id_, lock=name, error=refusal)
        taken += done
    for each in taken:
        log(WARNING, "document release forced", document=each.id, lock=name, holder=each.holder, by=by, reason=reason)
    return taken


def _take(
    context: Context, some: Sequence[DocumentSnapshot], condition: Document, *, exact: bool
) -> Steps[tuple[list[DocumentSnapshot], Written]]:
    """Release documents. Return them as released, and the result of the write."""
    rules, writer = context.rules, updates.new_writer()
    written: Written = yield from send(
        updates.write_many([updates.taking_away(rules, writer, condition, each, exact=exact) for each in some])
    )
    # After a lost answer, the token identifies a released document. A released document cannot match a second time.
    found: dict[Any, Document] = yield from send(updates.read_some(rules.fields, [each.id for each in some]))
    tokens = {id_: get_path(document, rules.fields.token) for id_, document in found.items()}
    done = [each for each in some if tokens.get(each.id) == updates.token_of(writer, each.version + 1)]
    return [replace(each, version=read_snapshot(rules, found[each.id]).version) for each in done], written


def _refused(some: Iterable[DocumentSnapshot], written: Written) -> list[DocumentSnapshot]:
    refused = [(each, written.refused[each.id]) for each in some if each.id in written.refused]
    return [replace(each, state=ShownState.DAMAGED, damage=str(refusal)) for each, refusal in refused]


def has_index(collection: Collection[Document], rules: Rules) -> bool:
    """Return whether an index that begins with the state or the time finds stale documents.

    Return True if there is no collection yet.
    """
    indexes = collection.index_information()  # none if there is no collection yet: `migrate` checks first, and makes it
    whole = [each["key"][0] for each in indexes.values() if not {"partialFilterExpression", "hidden"} & each.keys()]
    return not indexes or any(name in (rules.fields.state, rules.fields.time) and way in (1, -1) for name, way in whole)


class Block:
    """An object whose work ends with its block. `_leave` has the steps of the end."""

    _context: Context

    def _run(self, steps: Steps[T]) -> T:
        return self._context.courier.run(steps)

    def _arun(self, steps: Steps[T]) -> Coroutine[Any, Any, T]:
        return self._context.courier.arun(steps)

    def _leave(self, error: BaseException | None) -> Steps[Any]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._run(self._leave(error))

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._arun(self._leave(error))
