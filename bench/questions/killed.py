"""The time until another process gets the lock of a killed one."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from bench.bench import Bench, fresh_key
from bench.contenders import OTHERS, OURS, QUICK, Contender
from bench.measure import Piece, Spread, Table
from bench.peers import DATABASE
from bench.workers import State, WorkerError, workers
from django_mongolock.engine import clock

#: The lease of each contender, in seconds. Our server waits a margin longer.
LEASE: Final = 2.0
#: Contenders with a lease, counted from the grant. The locks of the others end with a session or a connection.
LEASED: Final = {"redis", "redis-always", "mongo"}
#: MongoDB removes expired documents once a minute.
LONGEST: Final = 75.0


@dataclass(frozen=True, slots=True)
class Takeover:
    """Seconds from the kill, and from the end of the lease, until another process had the lock. None means that no
    process had it."""

    after_kill: float | None
    after_lease: float | None = None


def killed(bench: Bench) -> Iterator[Piece]:
    """The holder is killed (SIGKILL) while another process waits: how long until that one has the lock?"""
    ready = bench.ready([OURS, *(QUICK[:1] if bench.quick else OTHERS)])
    found: dict[str, list[Takeover]] = {name: [] for name in ready}
    ends = clock.now() + (1 if bench.quick else LONGEST - 15)

    def tries(name: str) -> None:
        try:
            while True:
                found[name].append(trial(bench, ready[name]))
                if clock.now() > ends:
                    return
        except Exception as error:  # noqa: BLE001 - the others go on
            bench.failed(name, error)

    # All contenders wait at the same time, because they do nothing else.
    threads = [threading.Thread(target=tries, args=(name,), daemon=True) for name in ready]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    made = Table(
        "The holder is killed",
        ["lock", "trials", "s after the kill", "s after the lease's end"],
        note=f"Each with a lease of {LEASE:.0f} s, if it has one; ZooKeeper's session is 4 s. A lock of PostgreSQL "
        f"or of the file system ends with the connection or the process. 'never': not within {LONGEST:.0f} s.",
    )
    for name, takeovers in found.items():
        kills = [t.after_kill for t in takeovers if t.after_kill is not None]
        leases = [t.after_lease for t in takeovers if t.after_lease is not None]
        late = Spread.of(leases) if leases else None
        made.rows.append([name, len(takeovers), Spread.of(kills) if kills else "never", late])
    yield made


def trial(bench: Bench, contender: Contender) -> Takeover:
    """One holder, one waiter, one kill."""
    key = fresh_key("killed")
    with workers(2) as (holder, waiter):
        bench.open([holder, waiter], contender, LEASE)
        granted = float(holder.call(take, key))
        waiter.begin(take, key)
        time.sleep(0.8)
        at = clock.now()
        os.kill(holder.pid, signal.SIGKILL)
        end = granted + LEASE if contender.needs in LEASED else math.nan
        if contender is OURS:
            end = lease_end(bench, key)
        try:
            got = float(waiter.result(LONGEST))
        except WorkerError:
            if waiter.alive:
                return Takeover(None)
            raise
    return Takeover(got - at, None if math.isnan(end) else got - end)


def take(state: State, key: str) -> float:
    """Acquire in the worker, and return the time of the grant."""
    state["peer"].acquire(key)
    return clock.now()


def lease_end(bench: Bench, key: str) -> float:
    """When the lease ends by the server's clock, as our clock shows it."""
    with bench.world.client() as client:
        left = {"$subtract": ["$expires_at", "$$NOW"]}
        pipeline: list[dict[str, Any]] = [{"$match": {"_id": key}}, {"$project": {"left": left}}]
        found = next(iter(client[DATABASE]["mongolock_locks"].aggregate(pipeline)))
        return clock.now() + float(found["left"]) / 1000
