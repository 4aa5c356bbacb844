"""Finding stale documents, and releasing them. The server decides, by its own clock, in the update itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from pymongo.collection import Collection

from . import updates
from .commands import Written, find_marked, write_many
from .rules import Rules
from .snapshot import DocumentSnapshot, read_snapshot
from .steps import Steps, send
from .updates import Document, StaleFilter, Statement

#: How many documents one update releases.
SWEEP_BATCH: Final = 500


@dataclass(slots=True)
class Swept:
    """What a sweep found and did.

    cleared: the documents that were released; one that is acquired in the same moment is counted, but not listed.
    count: how many were released. found: how many were stale when they were looked for. dated: how many were held
    without a time; they become stale `stale_after` seconds from now. damaged: documents that cannot be judged, or that
    MongoDB refuses to write, and that were left as they are.
    """

    cleared: list[DocumentSnapshot] = field(default_factory=list)
    count: int = 0
    found: int = 0
    dated: int = 0
    damaged: list[DocumentSnapshot] = field(default_factory=list)


def find(rules: Rules, which: StaleFilter, limit: int = 0) -> Steps[list[DocumentSnapshot]]:
    """Find stale documents, the one held for longest first; then those that cannot be judged. limit 0: all."""
    fields = rules.fields

    def command(collection: Collection[Document]) -> list[Document]:
        found: list[Document] = []
        for query in (which.query(rules), which.damaged(rules)):
            rest = limit - len(found)
            if limit and not rest:
                break
            found += collection.find(query, fields.projection()).sort(fields.time, 1).limit(max(0, rest))
        return found

    documents: list[Document] = yield from send(command)
    return [read_snapshot(rules, document) for document in documents]


def sweep(rules: Rules, which: StaleFilter, batch: int = SWEEP_BATCH) -> Steps[Swept]:
    """Set stale documents to the failed state of their work, and empty the holder's field.

    One that MongoDB refuses to write stops no other: it is among the damaged ones.
    """
    swept = Swept()
    found = yield from find(rules, which)
    swept.damaged = [each for each in found if each.damage]
    stale = iter([each for each in found if not each.damage])
    swept.found = len(found) - len(swept.damaged)
    while some := list(islice(stale, batch)):
        yield from _clear(rules, which, some, swept)
    yield from _date(rules, which, batch, swept)
    return swept


def _clear(rules: Rules, which: StaleFilter, some: list[DocumentSnapshot], swept: Swept) -> Steps[None]:
    fields, attempt = rules.fields, f"sweep.{updates.new_attempt()}"
    statements = []
    for each in some:
        same = [updates.has(fields.state, [each.state])]
        same += [updates.has(fields.holder, [which.owner])] if which.owner is not None else []
        update = updates.writing(rules, attempt, {}, updates.releasing(rules, each.failed))
        statements.append(Statement(each.id, {"$and": [which.condition(rules), *same]}, update))
    written: Written = yield from send(write_many(statements))
    # A sweep whose answer was lost is counted by its id; what it released cannot match a second time.
    mark = updates.has(fields.attempt, [attempt])
    cleared = yield from send(find_marked([each.id for each in some], mark, whole=False))
    swept.count += max(written.matched, len(cleared))
    swept.cleared += [each for each in some if each.id in cleared]
    swept.damaged += _refused(some, written)


def _refused(some: list[DocumentSnapshot], written: Written) -> list[DocumentSnapshot]:
    by_id = {each.id: each for each in some}
    return [replace(by_id[id_], damage=str(refusal)) for id_, refusal in written.refused.items()]


def _date(rules: Rules, which: StaleFilter, batch: int, swept: Swept) -> Steps[None]:
    """Set the time of documents which were held before the field was added."""
    query = which.undated(rules)

    def command(collection: Collection[Document]) -> list[Document]:
        return list(collection.find(query, rules.fields.projection()))

    documents: list[Document] = yield from send(command)
    undated = iter([read_snapshot(rules, document) for document in documents])
    while some := list(islice(undated, batch)):
        update = {"$currentDate": {rules.fields.time: True}}
        statements = [Statement(each.id, which.dateless(rules), update) for each in some]
        written: Written = yield from send(write_many(statements))
        swept.dated += written.matched
        swept.damaged += _refused(some, written)


def has_index(collection: Collection[Document], rules: Rules) -> bool:
    """Return whether an index that begins with the state or the time finds stale documents, if there are any yet."""
    indexes = collection.index_information()
    for index in indexes.values():
        first = next(iter(index["key"]), ("", 0))
        whole = not ({"partialFilterExpression", "hidden"} & index.keys())
        if whole and first[0] in (rules.fields.state, rules.fields.time) and first[1] in (1, -1):
            return True
    return not indexes  # there is no collection: `migrate`, which checks first, makes it
