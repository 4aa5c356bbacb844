"""The interpreter of the sent pipelines does the same as MongoDB, on thousands of documents."""

import contextlib
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson.int64 import Int64
from bson.timestamp import Timestamp
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from django_mongolock.engine.rule.document import Limits, Mode, Step, Terms, entry
from django_mongolock.engine.rule.in_python import Moment, apply_rule
from django_mongolock.engine.rule.pipeline import pipeline
from django_mongolock.engine.rule.replies import REPLY, REPLY_TAKEN, REPLY_TO_OWNER
from django_mongolock.engine.rule.short_forms import RELEASE_UNCONTENDED, TAKE_FREE
from verify.simulation.expressions import bound, project, run

Document = dict[str, Any]

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
LIMITS = Limits(waiters=4, retention=60_000)
GRANTS = ("a", "b", "c", "d", "e", "f")


def steps(chance: random.Random) -> Step:
    """Any step, also such as no protocol sends."""
    mode: Mode = chance.choice(["exclusive", "exclusive", "shared", "semaphore"])
    terms = Terms(
        mode,
        1 if mode == "exclusive" else chance.choice([2, 3]),
        chance.choice([1.0, 20.0]),
        0.3,
        chance.choice([0.5, 5.0]),
        chance.choice([0.0, 0.0, 2.0]),
        chance.choice([None, "o"]),
        weight=chance.choice([1, 1, 2]) if mode == "semaphore" else 1,
    )
    asked = chance.choice(GRANTS)
    new = chance.random() < 0.6
    renew = tuple(chance.sample(GRANTS, chance.choice([0, 0, 1, 3])))
    return Step(
        ask=chance.choice(["", asked, asked]),
        add=entry(asked, "s", terms, {}, "w", process="p") if new else None,
        trial=new and chance.random() < 0.3,
        remove=tuple(chance.sample(GRANTS, chance.choice([0, 0, 1, 2]))),
        renew=renew,
        tombstone_ttl=chance.choice([0, 0, 3_000]),
        force=chance.random() < 0.3,
        server_lease=chance.choice([0, 0, 30_000]),
        beat=chance.randrange(100),
        request_release_of=chance.choice([(), (), ("b",)]),
        resumes=chance.random() < 0.2,
        waited=chance.choice([0, 0, 700]),
        behind=tuple(chance.randrange(3) for _ in renew) if chance.random() < 0.3 else (),
    )


def documents(chance: random.Random) -> Iterator[Document]:
    """Yield the documents of a key, as random steps leave them, one after the other. A clock may be set back."""
    document: Document | None = None
    now, ticks, clock = BEGIN, 1, "term-1"
    while True:
        now += timedelta(milliseconds=chance.choice([0, 1, 100, 900, 3_000, -300, -3_000]))
        ticks += chance.choice([0, 1, 1])
        clock = chance.choice([clock, clock, clock, "term-1", "term-2"])
        late = Timestamp(100, ticks - chance.choice([0, 0, 0, 1]))
        document = apply_rule(document, steps(chance), LIMITS, Moment(now, clock, late)) or document
        if document is not None:
            yield document


def damaged(chance: random.Random, document: Document) -> Document:
    """Return the document with a field that is missing, or of another type."""
    name = chance.choice(sorted(document))
    others = {key: value for key, value in document.items() if key != name}
    return others | chance.choice([{}, {name: None}, {name: "x"}, {name: 7}, {name: []}, {name: [{"grant": "a"}]}])


@pytest.mark.long
def test_the_interpreter_does_what_mongodb_does(mongo: MongoClient[Document]) -> None:
    """The interpreter equals MongoDB on thousands of sound and damaged documents, for every pipeline and every
    projection of a step."""
    chance, seen = random.Random(1), 0
    collection = mongo["expressions"]["documents"]
    collection.drop()
    for seed in range(25):
        made = documents(random.Random(seed))
        sound = [next(made) for _ in range(40)]
        several = [*sound, *(damaged(chance, each) for each in sound[::4]), {}]
        several = [{**each, "_id": place} for place, each in enumerate(several)]
        collection.delete_many({})
        collection.insert_many(several)
        several = list(collection.find())
        for _ in range(4):
            step = steps(chance)
            arguments = step.arguments(LIMITS, "term-1", Timestamp(100, chance.randrange(1, 40)))
            updates = [("rule", pipeline(step)), ("release", RELEASE_UNCONTENDED)]
            updates += [("take", TAKE_FREE)] if step.add is not None else []
            projections = [REPLY, REPLY_TAKEN] + ([REPLY_TO_OWNER] if step.owner is not None else [])
            stages = [list(update) for _, update in updates] + [[{"$project": fields}] for fields in projections]
            for place, stage in enumerate(stages):
                update = place < len(updates)
                seen += compare(mongo, several, stage, arguments, None if update else projections[place - len(updates)])
    assert seen > 8_000


def compare(
    mongo: MongoClient[Document], several: list[Document], stages: list[Any], arguments: Document, fields: Any
) -> int:
    """Compare both results for each document, and return the number of documents."""
    collection = mongo["expressions"]["documents"]
    known = bound(arguments)
    stages, found = [*stages, {"$set": {"at": "$$NOW"}}], {}
    try:
        found = dict(enumerate(collection.aggregate(stages, let=arguments)))
    except OperationFailure:  # an expression met a type that it cannot take, in one of them
        for place, each in enumerate(several):
            with contextlib.suppress(OperationFailure):
                (found[place],) = collection.aggregate([{"$match": {"_id": each["_id"]}}, *stages], let=arguments)
    for place, answer in found.items():
        now = answer.pop("at")
        mine = project(fields, several[place], known, now) if fields else run(stages[:-1], several[place], known, now)
        assert typed(mine) == typed(answer), (several[place], arguments)
    return len(found)


def typed(value: Any) -> Any:
    """Return the value with the types of its numbers."""
    if isinstance(value, dict):
        return {name: typed(item) for name, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return (Int64 if isinstance(value, Int64) else type(value), value)
