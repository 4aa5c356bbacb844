"""The parts of a hand-over between two processes, by times that both take from one clock."""

import functools
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any, Final

from bench.bench import Bench, fresh_key
from bench.contenders import OURS
from bench.floor import Floor
from bench.measure import Table
from bench.workers import State, workers
from django_mongolock.engine import clock
from django_mongolock.engine.session.waits import Waits
from django_mongolock.engine.store.bells import Bells
from django_mongolock.engine.store.mongo import MongoStore

#: Seconds for which the first holder keeps the lock, so that the other process waits for certain.
PAUSE: Final = 0.05
#: Hand-overs at the beginning that do not count, because the first ones open connections.
FIRST: Final = 3


def timeline(bench: Bench, least: Floor) -> Table:
    """Return the parts of a hand-over, beside the same parts of the floor."""
    key, number = fresh_key("timeline"), FIRST + bench.some(3, 60)
    parts: list[list[float]] = []
    with workers(2) as (holder, waiter):
        bench.open((holder, waiter), OURS)
        for worker in (holder, waiter):
            worker.call(watch)
        for _ in range(number):
            holder.call(take, key)
            waiter.begin(take, key)
            time.sleep(PAUSE)
            marks = holder.call(let_go, key) | waiter.result()
            waiter.call(let_go, key)
            moments = [marks[name] for name in ("called", "sent", "answered", "rung", "heard", "taken")]
            parts.append([(after - before) * 1000 for before, after in pairwise(moments)])
    medians = [median(part) for part in zip(*parts[FIRST:], strict=True)]
    table = Table(
        "2 processes: where the time of a hand-over goes",
        ["part", "ms", "floor, ms"],
        note="The main thread of one process releases, and that of the other waits. The floor writes one number "
        "instead of the rule.",
    )
    names = [
        ("release() to the thread that sends", None),
        ("command, confirmed by the majority", least.write),
        ("answer read, bell sent", least.message),
        ("bell to the listener of the other process", least.heard),
        ("listener to the return of acquire()", None),
    ]
    table.rows = [[name, ms, bare] for (name, bare), ms in zip(names, medians, strict=True)]
    table.rows.append(["all", sum(medians), least.total])
    return table


def watch(state: State) -> None:
    """Note the times at which this process sends a hand-over, has its answer, rings, and hears a bell."""
    marks: dict[str, float] = {}
    state["marks"] = marks

    def mark(owner: type, name: str, before: str, after: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(method)
        def marked(*arguments: Any, **options: Any) -> Any:
            marks[before] = clock.now()
            try:
                return method(*arguments, **options)
            finally:
                marks[after] = clock.now()

        setattr(owner, name, marked)

    mark(MongoStore, "_find_and_modify", "sent", "answered")
    mark(Bells, "ring", "rings", "rung")
    mark(Waits, "on_bell", "heard", "told")


def take(state: State, key: str) -> dict[str, float]:
    """Take the lock, and return the times of that."""
    state["peer"].acquire(key)
    return {"taken": clock.now(), "heard": state["marks"].get("heard", 0.0)}


def let_go(state: State, key: str) -> dict[str, float]:
    """Release the lock, and return the times of that."""
    called = clock.now()
    state["peer"].release(key)
    return {**state["marks"], "called": called}
