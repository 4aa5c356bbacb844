"""Who holds which document, and taking documents from their holders. The server decides, in the update itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from pymongo.collection import Collection

from ..engine.logs import WARNING, log
from ..inspection.kinds import Choice, Swept
from ..inspection.snapshot import ShownState
from ..other_collections.courier import Steps, send
from ..other_collections.field_paths import Document, get_path
from . import updates
from .acquiring import BATCH, Context, in_batches
from .rules import Rules
from .snapshot import DocumentSnapshot, read_snapshot
from .updates import Statement, Written

#: What can be asked for.
STATES: Final = ("all", "held", "stale", "damaged")


def query(rules: Rules, choice: Choice) -> Document:
    """Return which documents are meant, as MongoDB takes it."""
    fields = rules.fields
    # The plain condition is what an index narrows; the expression is what decides. Beside the pending states, only what
    # has a time can be held: an index of state and time leads to those among many free ones.
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
    """Return what the server decides by: whether a document can be judged, and is in that state."""
    whole = updates.is_whole(rules.fields)
    states: dict[str, list[Document]] = {
        "all": [whole, updates.is_taken(rules)],
        "held": [whole, updates.is_held(rules)],
        "stale": [whole, updates.is_taken(rules), updates.is_stale(rules, choice.older_than)],
        "undated": [whole, updates.is_undated(rules)],
        "damaged": [{"$not": [whole]}],
    }
    return {"$and": states[choice.state]}


def find(context: Context, choice: Choice, limit: int = 0) -> Steps[list[DocumentSnapshot]]:
    """Find documents, the one held for longest first; among "all", then those that cannot be judged. limit 0: all."""
    rules = context.rules
    several = [choice]
    if choice.state == "all" and choice.owner is None:
        several.append(replace(choice, state="damaged"))

    def command(collection: Collection[Document]) -> list[Document]:
        found: list[Document] = []
        for each in several:
            if limit and len(found) >= limit:
                break
            cursor = collection.find(query(rules, each), rules.fields.projection()).sort(rules.fields.time, 1)
            found += cursor.limit(max(0, limit - len(found)))
        return found

    documents: list[Document] = yield from send(command)
    return [read_snapshot(rules, document) for document in documents]


def sweep(context: Context, choice: Choice, batch: int = BATCH, *, dry_run: bool = False) -> Steps[Swept]:
    """Set stale documents to the failed state of their work, and empty the holder's field; or only find them.

    One that MongoDB refuses to write stops no other: it is among the damaged ones.
    """
    rules, swept, choice = context.rules, Swept(), replace(choice, state="stale")
    found = yield from find(context, choice)
    swept.found = len(found)
    if choice.owner is None:
        swept.damaged = yield from find(context, replace(choice, state="damaged"))
    if dry_run:
        swept.cleared = found
        return swept
    for some in in_batches(found, batch):
        done, written = yield from _take(context, some, condition(rules, choice), exact=True)
        # One that was acquired again in the same moment is counted, but not found any more.
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
    """Release these documents, if they still have the holders and states that were shown; return those that were
    released."""
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
    """Release documents; return them as they are then, and what MongoDB said."""
    rules, writer = context.rules, updates.new_writer()
    written: Written = yield from send(
        updates.write_many([updates.taking_away(rules, writer, condition, each, exact=exact) for each in some])
    )
    # One whose answer was lost is known by its token; what was released cannot match a second time.
    found: dict[Any, Document] = yield from send(updates.read_some(rules.fields, [each.id for each in some]))
    tokens = {id_: get_path(document, rules.fields.token) for id_, document in found.items()}
    done = [each for each in some if tokens.get(each.id) == updates.token_of(writer, each.version + 1)]
    return [replace(each, version=read_snapshot(rules, found[each.id]).version) for each in done], written


def _refused(some: Iterable[DocumentSnapshot], written: Written) -> list[DocumentSnapshot]:
    by_id = {each.id: each for each in some}
    return [
        replace(by_id[id_], state=ShownState.DAMAGED, damage=str(refusal)) for id_, refusal in written.refused.items()
    ]


def has_index(collection: Collection[Document], rules: Rules) -> bool:
    """Return whether an index that begins with the state or the time finds stale documents, if there are any yet."""
    indexes = collection.index_information()
    for index in indexes.values():
        first = next(iter(index["key"]), ("", 0))
        whole = not ({"partialFilterExpression", "hidden"} & index.keys())
        if whole and first[0] in (rules.fields.state, rules.fields.time) and first[1] in (1, -1):
            return True
    return not indexes  # there is no collection: `migrate`, which checks first, makes it
