"""Document locks under virtual time: no promise is broken, defects are found, the collection is like MongoDB's."""

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson.int64 import Int64
from pymongo import MongoClient

from django_mongolock.documents import steps, updates
from django_mongolock.documents.rules import Fields, Rules
from django_mongolock.documents.updates import Own, Request, token_of
from django_mongolock.inspection.kinds import Choice
from tests.support.lock_fixtures import WITH_MONGO
from verify.simulation.documents.collection import SimCollection
from verify.simulation.documents.defects import DEFECTS
from verify.simulation.documents.run import simulate
from verify.simulation.expressions import evaluate, is_true

RULES = Rules(
    Fields("lockedBy", "exportStatus", "documentVersion", "lockTimestamp"), {"exporting": "failed"}, ("exported",), 60.0
)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 13))
def test_no_promise_is_broken(seed: int) -> None:
    """Four minutes of flows, lost and late commands, kills, stops, cancellations, sweeps, forced releases."""
    world = simulate(seed)
    assert world.violations == []
    assert world.counts["grants"] > 3


@pytest.mark.long
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str) -> None:
    """With a defence taken out, one of the first seeds shows what it is for."""
    words, patch = DEFECTS[name]
    for seed in range(1, 60):
        with patch():
            world = simulate(seed, minutes=3)
        if any(words in each for each in world.violations):
            return
    pytest.fail(f"{name}: not found")


@pytest.mark.long
def test_a_seed_is_always_the_same_run() -> None:
    """So a violation can be looked at."""
    one, other = simulate(5), simulate(5)
    assert (one.counts, one.documents) == (other.counts, other.documents)


def documents(count: int) -> list[dict[str, Any]]:
    """All kinds of documents, whole and damaged."""
    dice, now = random.Random(count), datetime.now(UTC).replace(microsecond=0)
    values: dict[str, list[Any]] = {
        "lockedBy": ["a", "b", "", None, 5, ["a"]],
        "exportStatus": ["exporting", "exported", "failed", None, 1],
        "documentVersion": [0, 1, Int64(2), 2**62, 1.0, None, "1"],
        "lockTimestamp": [now, now - timedelta(seconds=90), now - timedelta(seconds=900), None, 7],
        "lockedByToken": [token_of("one p", 1), token_of("one p", 2), None],
    }
    return [
        {"_id": number, **{name: dice.choice(some) for name, some in values.items() if dice.random() < 0.9}}
        for number in range(count)
    ]


@pytest.mark.long
@WITH_MONGO
def test_the_collection_is_like_mongodb(mongo: MongoClient[dict[str, Any]]) -> None:
    """Each condition matches the same documents, and an acquisition leaves the same ones."""
    made = documents(400)
    collection = mongo.get_database("mongolock_simulation").get_collection("documents")
    collection.drop()
    collection.insert_many(made)
    own = Own(0, "a", "one p", 1, 2, "failed")
    conditions = [
        updates.is_whole(RULES.fields), updates.is_taken(RULES), updates.is_stale(RULES), updates.is_held(RULES),
        updates.is_undated(RULES), own.is_as_left(RULES.fields),
        steps.condition(RULES, Choice("stale", older_than=300)),
    ]  # fmt: skip
    now = datetime.now(UTC)
    for condition in conditions:
        real = {each["_id"] for each in collection.find({"$expr": condition})}
        mine = {each["_id"] for each in made if is_true(evaluate(condition, each, now))}
        assert real == mine, condition
        assert 0 < len(real) < len(made)
    simulated: Any = SimCollection({each["_id"]: each for each in made}, now, lambda *_: None)
    granted = 0
    for number in range(len(made)):
        statement = updates.acquiring(
            RULES,
            Own(number, "a", "3 p", number % 3 + 1, number % 3 + 1, "failed"),
            Request(number, number % 3, "exporting"),
            token_of("one p", 1),
        )
        real_one = collection.find_one_and_update(statement.query, statement.update, return_document=True)
        mine_one = simulated.find_one_and_update(statement.query, statement.update, return_document=True)
        for each in (real_one, mine_one):
            if each is not None:
                del each["lockTimestamp"]
        assert real_one == mine_one
        granted += real_one is not None
    assert granted > 20
    collection.drop()
