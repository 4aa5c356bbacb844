"""Who holds which document, and taking documents from their holders. The server decides, in the update itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from pymongo.collection import Collection

from ..backends.courier import Steps, send
from ..backends.field_paths import Document, get_path
from ..engine.logs import WARNING, log
from ..inspection.kinds import Choice, Counts, Swept
from ..inspection.snapshot import State
from .acquiring import Context
from .commands import Written, read_some, write_many
from .rules import Rules
from .snapshot import DocumentSnapshot, read_snapshot
from .updates import Statement, is_held, is_stale, is_taken, is_undated, is_whole, new_mark, taking_away

#: What can be asked for.
STATES: Final = ("all", "held", "stale", "damaged")
#: How many documents one update releases.
SWEEP_BATCH: Final = 500
#: How many documents are counted.
MAX_COUNTED: Final = 1_000


def query(rules: Rules, choice: Choice) -> Document:
    """Return which documents are meant, as MongoDB takes it."""
    fields, whole = rules.fields, is_whole(rules.fields)
    conditions: dict[str, Document] = {
        "all": {"$and": [whole, is_taken(rules)]},
        "held": {"$and": [whole, is_held(rules)]},
        "stale": stale(rules, choice),
        "undated": {"$and": [whole, is_undated(rules)]},
        "damaged": {"$not": [whole]},
    }
    # The plain condition is what an index narrows; the expression is what decides. Beside the pending states, only what
    # has a time can be held: an index of state and time leads to those among many free ones.
    pending = {fields.state: {"$in": list(rules.pending)}}
    others = {fields.state: {"$nin": [*rules.pending, *rules.ended]}, fields.time: {"$type": "date"}}
    narrowed = pending if choice.state in ("undated", "damaged") else {"$or": [pending, others]}
    found: Document = {**narrowed, "$expr": conditions[choice.state]}
    if choice.owner is not None:
        found[fields.holder] = {"$eq": choice.owner}
    if choice.ids is not None:
        found[fields.key] = {"$in": list(choice.ids)}
    return found


def stale(rules: Rules, choice: Choice) -> Document:
    """They can be judged, and are stale."""
    return {"$and": [is_whole(rules.fields), is_taken(rules), is_stale(rules, choice.older_than)]}


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


def sweep(context: Context, choice: Choice, batch: int = SWEEP_BATCH) -> Steps[Swept]:
    """Set stale documents to the failed state of their work, and empty the holder's field.

    One that MongoDB refuses to write stops no other: it is among the damaged ones.
    """
    rules, swept = context.rules, Swept()
    found = yield from find(context, replace(choice, state="stale"))
    swept.found = len(found)
    if choice.owner is None:
        swept.damaged = yield from find(context, replace(choice, state="damaged"))
    for start in range(0, len(found), batch):
        some = found[start : start + batch]
        done, written = yield from _take(context, some, stale(rules, choice), exact=True)
        # One that was acquired again in the same moment is counted, but not found any more.
        swept.count += max(written.matched, len(done))
        swept.cleared += done
        swept.damaged += _refused(some, written)
    undated = yield from find(context, replace(choice, state="undated"))
    for start in range(0, len(undated), batch):
        some = undated[start : start + batch]
        update = {"$currentDate": {rules.fields.time: True}}
        statements = [Statement(rules.fields.key, each.id, is_undated(rules), update) for each in some]
        written = yield from send(write_many(statements))
        swept.dated += written.matched
        swept.damaged += _refused(some, written)
    return swept


def force(
    context: Context, name: str, shown: Iterable[DocumentSnapshot], by: str, reason: str
) -> Steps[list[DocumentSnapshot]]:
    """Release these documents, if they still have the holders and states that were shown; return those that were
    released."""
    taken: list[DocumentSnapshot] = []
    meant = [each for each in shown if each.holder]
    for start in range(0, len(meant), SWEEP_BATCH):
        some = meant[start : start + SWEEP_BATCH]
        done, written = yield from _take(context, some, is_taken(context.rules), exact=False)
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
    rules, mark = context.rules, new_mark()
    written: Written = yield from send(
        write_many([taking_away(rules, mark, condition, each, exact=exact) for each in some])
    )
    # One whose answer was lost is known by its token; what was released cannot match a second time.
    found: dict[Any, Document] = yield from send(read_some(rules.fields, [each.id for each in some]))
    tokens = {id_: get_path(document, rules.fields.token) for id_, document in found.items()}
    done = [each for each in some if tokens.get(each.id) == mark.at(each.version + 1)]
    return [replace(each, version=read_snapshot(rules, found[each.id]).version) for each in done], written


def _refused(some: Iterable[DocumentSnapshot], written: Written) -> list[DocumentSnapshot]:
    by_id = {each.id: each for each in some}
    return [replace(by_id[id_], state=State.DAMAGED, damage=str(refusal)) for id_, refusal in written.refused.items()]


def counts(context: Context, name: str) -> Steps[Counts]:
    """Count the documents of a lock, up to a bound."""
    found = yield from find(context, Choice(), MAX_COUNTED)
    states = Counter(each.state for each in found)
    longest = max((each.seconds for each in found), default=0.0)
    held, stale_ones, damaged = (states[each] for each in (State.HELD, State.STALE, State.DAMAGED))
    return Counts(name, held, stale_ones, damaged, longest, more=len(found) >= MAX_COUNTED)


def has_index(collection: Collection[Document], rules: Rules) -> bool:
    """Return whether an index that begins with the state or the time finds stale documents, if there are any yet."""
    indexes = collection.index_information()
    for index in indexes.values():
        first = next(iter(index["key"]), ("", 0))
        whole = not ({"partialFilterExpression", "hidden"} & index.keys())
        if whole and first[0] in (rules.fields.state, rules.fields.time) and first[1] in (1, -1):
            return True
    return not indexes  # there is no collection: `migrate`, which checks first, makes it
