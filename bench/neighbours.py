"""The cost for other users of the database while processes wait for locks.

    python -m bench.neighbours 32          # 32 processes wait, each for a key of its own

Prints the server's processor time for an insert that has nothing to do with locks, single and in bulk, without and with
the waiters. Sessions of one process stand for the processes, because the server cannot tell them apart.
"""

import statistics
import sys
import threading
import time
from collections.abc import Callable

from bench.load import World, lock
from bench.world import cpu_of
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.session.session import Session
from testproject.servers import ReplicaSet

ROUNDS, BULK, SINGLE = 5, 4_000, 300


def microseconds(pid: int, count: int, insert: Callable[[], object]) -> float:
    """Return the server's processor time for each insert in microseconds."""
    before = cpu_of(pid)
    insert()
    return (cpu_of(pid) - before) / count * 1e6


def main(processes: int) -> None:
    """Measure by turns, and print the medians."""
    with ReplicaSet() as servers:
        (member,) = servers.members
        world = World(servers.uri, processes + 1)
        pid, orders = member.pid, world.client.shop.orders

        def of(number: int, session: Session) -> MongoLock:
            return lock(session, f"k{number}", 600, lease=600)

        def row() -> list[float]:
            many: list[dict[str, object]] = [{"text": "x" * 300} for _ in range(BULK)]
            bulk = microseconds(pid, BULK, lambda: orders.insert_many(many))
            single = microseconds(pid, SINGLE, lambda: [orders.insert_one({"text": "x"}) for _ in range(SINGLE)])
            return [bulk, single]

        without, waiting = [], []
        for _ in range(ROUNDS):
            without.append(row())
            held = [of(number, world.sessions[-1]).acquire() for number in range(processes)]
            threads = [
                threading.Thread(target=lambda number=number: of(number, world.sessions[number]).acquire().release())
                for number in range(processes)
            ]
            for thread in threads:
                thread.start()
            time.sleep(4.0)
            waiting.append(row())
            for each in held:
                each.release()
            for thread in threads:
                thread.join()
            time.sleep(4.0)
        for name, column in (("bulk", 0), ("single", 1)):
            one, other = (statistics.median(row[column] for row in rows) for rows in (without, waiting))
            print(f"{name}: {one:.0f} us, {other:.0f} us with {processes} that wait: {other / one:.2f} times")
        world.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 32)
