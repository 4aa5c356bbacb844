"""The floor of a hand-over between two processes in MongoDB.

No design can be faster that changes one document, waits for the majority, and then tells another process: one
`findAndModify` with write concern majority, and one insert into a capped collection that the other process reads.
"""

import time
from statistics import median
from typing import Any, Final, NamedTuple

from pymongo import CursorType, MongoClient, WriteConcern

from bench.workers import State, workers
from bench.world import World
from django_mongolock.engine import clock

DATABASE: Final = "floor"
#: Seconds between two hand-overs, enough for the other process to sleep again.
PAUSE: Final = 0.005


class Floor(NamedTuple):
    """The medians of some hand-overs and of their parts, in milliseconds."""

    total: float
    write: float
    message: float
    heard: float


def floor(world: World, number: int) -> Floor:
    """Hand over *number* times."""
    with workers(1) as (listener,), MongoClient[dict[str, Any]](world.uri("mongo")) as client:
        database = client[DATABASE]
        database.drop_collection("bells")
        bells = database.create_collection("bells", capped=True, size=1 << 20)
        bells.insert_one({"number": -1})
        unconfirmed = bells.with_options(write_concern=WriteConcern(w=0))
        listener.call(listen, world.uri("mongo"))
        listener.begin(hear, number)
        moments = []
        for each in range(number):
            time.sleep(PAUSE)
            began = clock.now()
            change = {"findAndModify": "keys", "query": {"_id": 1}, "update": {"$inc": {"n": 1}}, "upsert": True}
            database.command({**change, "new": True, "writeConcern": {"w": "majority"}})
            written = clock.now()
            unconfirmed.insert_one({"number": each})
            moments.append((began, written, clock.now()))
        heard: list[float] = listener.result()
        client.drop_database(DATABASE)
    times = [(*before, after) for before, after in zip(moments, heard, strict=True)]
    parts = [(0, 3), (0, 1), (1, 2), (2, 3)]
    return Floor(*(median(each[last] - each[first] for each in times) * 1000 for first, last in parts))


def listen(state: State, uri: str) -> None:
    """Open a cursor at the end of the collection."""
    state["bells"] = MongoClient(uri)[DATABASE].bells.find({}, cursor_type=CursorType.TAILABLE_AWAIT)
    next(state["bells"])


def hear(state: State, number: int) -> list[float]:
    """Return the times at which the messages came."""
    times: list[float] = []
    while len(times) < number:
        if next(state["bells"], None) is not None:
            times.append(clock.now())
    return times
