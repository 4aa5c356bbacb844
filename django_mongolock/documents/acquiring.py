"""Acquiring one document or many: the steps, and why a document was refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pymongo import ReturnDocument
from pymongo.collection import Collection

from ..exceptions import DocumentChanged, DocumentDamaged, DocumentHeld, DocumentNotFound, LockError
from . import updates
from .lock_context import Context
from .rules import Rules
from .steps import Command, Steps, read_state, read_states, send
from .updates import Acquisition, Document

#: How often a refused acquisition asks again, if the reason was gone when it looked.
ROUNDS: Final = 3
#: How many documents one command is about.
ACQUIRE_BATCH: Final = 500


def acquire(context: Context, acquisition: Acquisition, id_: Any, version: int) -> Steps[Document]:
    """Acquire one document; return it as it is then.

    Raises DocumentNotFound, DocumentChanged, DocumentHeld, DocumentDamaged, LockBackendFailed.
    """
    rules = context.rules
    query, update = acquisition.query(rules, {id_: version}), acquisition.update(rules)

    def command(collection: Collection[Document]) -> Any:
        return collection.find_one_and_update(query, update, return_document=ReturnDocument.AFTER)

    release = partial(context.sender.send_in_background, _releasing(rules, acquisition, [id_]))
    for rest in reversed(range(ROUNDS)):
        granted: Document | None = yield from send(command, if_unknown=release)
        if granted is not None:
            return granted
        found: dict[Any, Document] = yield from send(read_states(rules, [id_]))
        refusal = why_not(context, id_, version, found.get(id_))
        # The holder may have finished just now: ask again, rather than name a holder that is gone.
        if not rest or not (isinstance(refusal, DocumentHeld) and is_available(rules, acquisition.owner, found[id_])):
            raise refusal
    raise AssertionError("not reached")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The documents that were granted, as they are now; and why others were not, by their ids."""

    granted: list[Document]
    refused: dict[Any, LockError]


def acquire_many(context: Context, acquisition: Acquisition, versions: Mapping[Any, int]) -> Steps[Outcome]:
    """Acquire those of many documents that are available, in three commands for each `ACQUIRE_BATCH`."""
    outcome = Outcome([], {})
    items = list(versions.items())
    for start in range(0, len(items), ACQUIRE_BATCH):
        yield from _acquire_batch(context, acquisition, dict(items[start : start + ACQUIRE_BATCH]), outcome)
    return outcome


def _acquire_batch(
    context: Context, acquisition: Acquisition, versions: dict[Any, int], outcome: Outcome
) -> Steps[None]:
    rules = context.rules
    query, update = acquisition.query(rules, versions), acquisition.update(rules)
    got = {"_id": {"$in": list(versions)}, "$expr": acquisition.is_granted(rules)}

    def command(collection: Collection[Document]) -> list[Document]:
        collection.update_many(query, update)
        return list(collection.find(got))

    # If this fails, the caller does not learn either which documents the earlier batches were granted.
    ids = [*(document["_id"] for document in outcome.granted), *versions]
    release = partial(context.sender.send_in_background, _releasing(rules, acquisition, ids))
    granted = yield from send(command, if_unknown=release)
    outcome.granted.extend(granted)
    missed = list(versions.keys() - {document["_id"] for document in granted})
    if missed:
        found = yield from send(read_states(rules, missed))
        outcome.refused.update({id_: why_not(context, id_, versions[id_], found.get(id_)) for id_ in missed})


def _releasing(rules: Rules, acquisition: Acquisition, ids: Sequence[Any]) -> Command:
    """Set the documents that were granted to their failed state."""
    query = {"_id": {"$in": list(ids)}, "$expr": acquisition.is_granted(rules)}
    update = [{"$set": updates.releasing(rules, updates.failed_state(rules))}]

    def command(collection: Collection[Document]) -> bool:
        return collection.update_many(query, update).matched_count > 0

    return command


def why_not(context: Context, id_: Any, version: int, document: Document | None) -> LockError:
    """Return why a document was refused, according to what it looked like right afterwards."""
    if document is None:
        return DocumentNotFound(context.name, id_)
    seen = read_state(context.rules, document)
    if seen.damage:
        return DocumentDamaged(context.name, id_, seen.damage)
    if seen.version != version:
        return DocumentChanged(context.name, id_, version, seen.version)
    # An estimate by the server's clock: what is asked for then is judged by the server again.
    after = max(0.0, context.rules.stale_after - seen.age) if seen.since else 0.0
    holder = seen.holder or "another flow that was quicker"
    return DocumentHeld(context.name, id_, holder, seen.state, seen.since, after)


def is_available(rules: Rules, owner: str, document: Document) -> bool:
    """Return whether *owner* would be granted a document that looks like this."""
    seen = read_state(rules, document)
    return not seen.holder or seen.holder == owner or seen.state in rules.ended
