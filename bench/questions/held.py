"""The cost of locks that are held for long."""

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from bench.bench import Bench, fresh_key
from bench.contenders import OURS
from bench.load import memory
from bench.measure import Piece, Spread, Table
from bench.ours import ALIAS
from bench.workers import State, workers
from django_mongolock.backends import get_backend, mongo_store
from django_mongolock.engine import clock
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.protocol.actions import Granted
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.session.grant import Grant
from django_mongolock.engine.session.session import Session
from tests.support.grants import new_grant


def held(bench: Bench) -> Iterator[Piece]:
    """One process that holds 1, 1,000 or 10,000 locks: what a renewal of all of them costs, and their memory."""
    made = Table(
        "Renewal",
        ["locks held", "commands per beat", "seconds a beat", "client CPU, %", "server CPU, %", "KB a lock"],
        note="With a lease of 30 s there is a beat every 10 s. CPU: of a core. KB: memory in the process.",
    )
    terms = Terms(lease=30, margin=3)
    for count in (1, 1_000, bench.some(2_000, 10_000)):
        with workers(1) as (worker,):
            bench.open([worker], OURS)
            kilobytes = worker.call(hold, fresh_key("held"), count, terms)
            figures = []
            for _ in range(bench.some(1, 4)):
                before, cpu = bench.world.commands("mongo"), bench.world.cpu("mongo")
                used, took = worker.call(beat)
                after, server = bench.world.commands("mongo"), bench.world.cpu("mongo") - cpu
                commands = sum(after[name] - before[name] for name in after)
                share = 100 / (terms.lease / 3)
                figures.append((commands, took, used * share, server * share))
            columns = [Spread.of(column) for column in zip(*figures, strict=True)]
            worker.call(forget)
        made.rows.append([f"{count:,}", *columns, kilobytes if count > 1 else None])
    yield made


def hold(state: State, key: str, count: int, terms: Terms) -> float:
    """Hold *count* locks in the worker, and return the KB of each. The locks are written at once, because to acquire
    each would take minutes."""
    session: Session = get_backend(ALIAS).session()
    collection = mongo_store(ALIAS).collection
    # In another session, because a session that has released a lock soon checks whether that was undone, and renews on
    # that occasion.
    another = Session(mongo_store(ALIAS))
    with MongoLock(lambda: another, (key,), terms):
        pattern = collection.find_one({"_id": key}) or {}
    (holder,) = pattern["holders"]
    bytes_, grants, documents = memory(), [], []
    for number in range(count):
        lock = MongoLock(lambda: session, (f"{key}:{number:06}",), terms)
        grant = new_grant(session, lock, threading.main_thread())
        grant.mark_held(Granted(holder["token"], datetime.now(UTC), clock.now() + terms.lease, clock.now()))
        grants.append(grant)
        documents.append({**pattern, "_id": grant.key, "holders": [{**holder, "grant": grant.id}]})
    collection.insert_many(documents)
    documents.clear()
    session.registry.grants |= {grant.id: grant for grant in grants}
    state["held"] = session, grants
    return (memory() - bytes_) / count / 1024


def beat(state: State) -> tuple[float, float]:
    """Renew all locks in the worker. Return the seconds of CPU, and the seconds."""
    session, grants = _known(state)
    ends = [grant.lease.until for grant in grants]
    for grant in grants:
        grant.lease.renew_at = 0.0
    cpu, started = time.process_time(), clock.now()
    session.heartbeat.do_due()
    for grant, end in zip(grants, ends, strict=True):
        while grant.held and grant.lease.until <= end:  # other threads send the commands
            time.sleep(0.001)
    used = time.process_time() - cpu, clock.now() - started
    if lost := sum(not grant.held for grant in grants):
        raise RuntimeError(f"{lost} of {len(grants)} locks were lost")
    return used


def forget(state: State) -> None:
    """Drop all locks in the worker, without a command for each."""
    session, grants = _known(state)
    for grant in grants:
        grant.mark_lost("the benchmark is over")
        session.ending.forget(grant)
    mongo_store(ALIAS).collection.delete_many({"_id": {"$in": [grant.key for grant in grants]}})


def _known(state: State) -> tuple[Session, list[Grant]]:
    """Return the session and the grants that `hold` has made."""
    made: tuple[Session, list[Grant]] = state["held"]
    return made
