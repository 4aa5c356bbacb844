"""The floor of a hand-over between two processes in MongoDB.

No design can be faster that changes one document, waits for the majority, and then tells another process: one
`findAndModify` with write concern majority, and one insert into a capped collection that the other process reads.
"""

import time
from statistics import median
from typing import Any, Final

from pymongo import CursorType, MongoClient, WriteConcern

from bench.workers import State, workers
from bench.world import World
from django_mongolock.engine import clock

DATABASE: Final = "floor"
#: Seconds between two hand-overs, enough for the other process to sleep again.
PAUSE: Final = 0.005


def floor(world: World, number: int) -> float:
    """Return the median of *number* hand-overs, in milliseconds."""
    with workers(1) as (listener,), MongoClient[dict[str, Any]](world.uri("mongo")) as client:
        database = client[DATABASE]
        database.drop_collection("bells")
        bells = database.create_collection("bells", capped=True, size=1 << 20)
        bells.insert_one({"number": -1})
        unconfirmed = bells.with_options(write_concern=WriteConcern(w=0))
        listener.call(listen, world.uri("mongo"))
        listener.begin(hear, number)
        sent = []
        for each in range(number):
            time.sleep(PAUSE)
            sent.append(clock.now())
            change = {"findAndModify": "keys", "query": {"_id": 1}, "update": {"$inc": {"n": 1}}, "upsert": True}
            database.command({**change, "new": True, "writeConcern": {"w": "majority"}})
            unconfirmed.insert_one({"number": each})
        heard = listener.result()
        client.drop_database(DATABASE)
    times: list[float] = [after - before for before, after in zip(sent, heard, strict=True)]
    return median(times) * 1000


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
