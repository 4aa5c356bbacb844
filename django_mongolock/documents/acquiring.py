"""Acquiring one document or many: the steps, and why a document was refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pymongo.collection import Collection

from ..engine.logs import WARNING, log
from ..engine.processes import fate
from ..exceptions import DocumentChanged, DocumentDamaged, DocumentHeld, DocumentNotFound, DocumentRefused, LockError
from .commands import Refusal, Written, find_marked, read_states, write_many, write_one
from .lock_context import Context
from .rules import Rules
from .steps import Command, Doubt, LockState, Steps, read_state, send
from .updates import Acquisition, Document, Request, Statement, process_of

#: How often a refused acquisition asks again, if the reason was gone when it looked.
ROUNDS: Final = 3
#: How many documents one command is about.
BATCH: Final = 500
#: Between which seconds `DocumentHeld.retry_after` lies.
RETRY_AFTER: Final = 0.5, 30.0


def acquire(context: Context, acquisition: Acquisition, request: Request) -> Steps[Document]:
    """Acquire one document; return it as it is then.

    Raises DocumentNotFound, DocumentChanged, DocumentHeld, DocumentDamaged, DocumentRefused, LockBackendFailed.
    """
    doubt = Doubt()
    try:
        return (yield from _acquire(context, acquisition, request, doubt))
    except BaseException:
        if doubt.remains:
            put_back(context, [acquisition.putting_back(context.rules, request)])
        raise


def _acquire(context: Context, acquisition: Acquisition, request: Request, doubt: Doubt) -> Steps[Document]:
    rules, id_, former = context.rules, request.id, None
    for rest in reversed(range(ROUNDS)):
        answer = yield from send(write_one(acquisition.acquiring(rules, request, former)), doubt)
        if isinstance(answer, Refusal):
            raise DocumentRefused(context.name, id_, str(answer))
        if answer is None and doubt.remains:  # perhaps the copy that was not answered found it
            answer = (yield from send(find_marked([id_], acquisition.is_granted(rules)))).get(id_)
        if answer is not None:
            granted: Document = answer
            return granted
        found: dict[Any, Document] = yield from send(read_states(rules, [id_]))
        refusal = why_not(context, request, found.get(id_))
        # The holder may have finished just now: ask again, rather than name a holder that is gone.
        if not (rest and isinstance(refusal, DocumentHeld)):
            raise refusal
        seen = read_state(rules, found[id_])
        former = dead_run(seen, acquisition.owner)
        if former is None and not is_available(rules, seen):
            raise refusal
    raise AssertionError("not reached")


@dataclass(slots=True)
class Outcome:
    """The documents that were granted, as they are now; and why others were not, by their ids."""

    granted: dict[Any, Document] = field(default_factory=dict)
    refused: dict[Any, LockError] = field(default_factory=dict)


def acquire_many(context: Context, acquisition: Acquisition, requests: Sequence[Request]) -> Steps[Outcome]:
    """Acquire those of many documents that are available, in three commands for each `BATCH`."""
    outcome, doubt, asked = Outcome(), Doubt(), list[Request]()
    try:
        for start in range(0, len(requests), BATCH):
            some = requests[start : start + BATCH]
            asked += some
            yield from _acquire_some(context, acquisition, some, outcome, doubt)
    except BaseException:
        # The caller learns of none of them.
        put_back(context, [acquisition.putting_back(context.rules, request) for request in asked])
        raise
    if doubt.remains:
        left = [request for request in requests if request.id not in outcome.granted]
        put_back(context, [acquisition.putting_back(context.rules, request) for request in left])
    return outcome


def _acquire_some(
    context: Context, acquisition: Acquisition, requests: Sequence[Request], outcome: Outcome, doubt: Doubt
) -> Steps[None]:
    rules, formers = context.rules, dict[Any, str | None]()
    for rest in reversed(range(2)):
        statements = [acquisition.acquiring(rules, request, formers.get(request.id)) for request in requests]
        written: Written = yield from send(write_many(statements), doubt)
        ids = [request.id for request in requests]
        granted: dict[Any, Document] = yield from send(find_marked(ids, acquisition.is_granted(rules)))
        outcome.granted.update(granted)
        requests = [request for request in requests if request.id not in granted]
        if not requests:
            return
        found: dict[Any, Document] = yield from send(read_states(rules, [request.id for request in requests]))
        for request in requests:
            if (refusal := written.refused.get(request.id)) is not None:
                outcome.refused[request.id] = DocumentRefused(context.name, request.id, str(refusal))
            else:
                outcome.refused[request.id] = why_not(context, request, found.get(request.id))
        seen = {id_: read_state(rules, document) for id_, document in found.items()}
        formers = {id_: dead_run(state, acquisition.owner) for id_, state in seen.items()}
        requests = [request for request in requests if formers.get(request.id) is not None]
        if not (rest and requests):
            return


def put_back(context: Context, statements: Sequence[Statement]) -> None:
    """Have documents released in the background, many with one command. Never waits."""
    for start in range(0, len(statements), BATCH):
        context.sender.send_in_background(_putting_back(context, statements[start : start + BATCH]))


def _putting_back(context: Context, statements: Sequence[Statement]) -> Command:
    def command(collection: Collection[Document]) -> bool:
        written: Written = write_many(statements)(collection)
        for id_, refusal in written.refused.items():
            log(WARNING, "document not released", document=id_, place=context.name, error=refusal)
        return written.matched == len(statements)

    return command


def why_not(context: Context, request: Request, document: Document | None) -> LockError:
    """Return why a document was refused, according to what it looked like right afterwards."""
    if document is None:
        return DocumentNotFound(context.name, request.id)
    seen = read_state(context.rules, document)
    if seen.damage:
        return DocumentDamaged(context.name, request.id, seen.damage)
    if seen.version != request.version:
        return DocumentChanged(context.name, request.id, request.version, seen.version)
    holder = seen.holder or "another flow that was quicker"
    stale_in = max(0.0, context.rules.stale_after - seen.age) if seen.since else None
    after = retry_after(seen.age, stale_in)
    return DocumentHeld(context.name, request.id, holder, seen.state, seen.since, after, stale_in)


def retry_after(age: float, stale_in: float | None) -> float:
    """Return when to try again: as long again as it has been held, within bounds, and not long after it is stale."""
    least, most = RETRY_AFTER
    return max(least, min(age, most, most if stale_in is None else stale_in))


def dead_run(seen: LockState, owner: str) -> str | None:
    """Return the attempt by which a former run of *owner* holds the document, if its process has certainly ended."""
    if seen.holder != owner or fate(process_of(seen.attempt)) != "gone":
        return None
    return str(seen.attempt)


def is_available(rules: Rules, seen: LockState) -> bool:
    """Return whether a document that looks like this would be granted to another request."""
    return not seen.holder or seen.state in rules.ended
