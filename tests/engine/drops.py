"""A process that drops locks while signals strike: `python -m tests.engine.drops COLLECTION CYCLES SEED`.

Each lock is acquired in peace. Then a timer is set that goes off within the few microseconds which it takes for the
lock object to die, and its owner token with it; if Python runs there, it swallows what the signal's handler raises. At
the end it says how often that was, and what the session still knows of.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from types import FrameType

from django_mongolock.engine.document import Terms
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.mongo_store import MongoStore, StoreConfig
from django_mongolock.engine.options import Options
from django_mongolock.engine.session.session import Session
from tests.support import DATABASE

#: Much longer than all of this takes.
TERMS = Terms(lease=600, margin=1, waiter_lease=600)


class Struck(BaseException):
    """What the signal handler raises."""


class Storm:
    """Signals, a few microseconds apart, whose handler raises."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.swallowed = 0
        self._blows = False
        sys.unraisablehook = self._count
        signal.signal(signal.SIGALRM, self._strike)

    def over(self, things: list[MongoLock]) -> None:
        """Let them die in the storm."""
        end = time.perf_counter() + 0.000_3
        self._blows = True
        try:
            between = self.chance.uniform(0.000_004, 0.000_03)
            signal.setitimer(signal.ITIMER_REAL, self.chance.uniform(0.000_001, 0.000_04), between)
            things.clear()
            while time.perf_counter() < end:
                pass
        finally:
            self._blows = False

    def end(self) -> None:
        """No more signals."""
        self._blows = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _strike(self, number: int, frame: FrameType | None) -> None:
        if self._blows:
            raise Struck

    def _count(self, _: object) -> None:
        self.swallowed += 1


def main(collection: str, cycles: str, seed: str) -> None:
    """Drop so many locks."""
    session = Session(MongoStore(StoreConfig({"host": os.environ["MONGODB_URI"]}, DATABASE, collection)))
    storm = Storm(int(seed))
    for number in range(int(cycles)):
        mine = [MongoLock(lambda: session, (f"k{number}",), Options(TERMS, 20))]
        mine[0].acquire()
        calm = False
        while not calm:  # struck again at any of these lines
            with contextlib.suppress(Struck):
                if mine:
                    storm.over(mine)
                storm.end()
                calm = True
    end = time.monotonic() + 30
    while session.known and time.monotonic() < end:
        time.sleep(0.02)
    known = session.known
    sys.stdout.write(json.dumps({"swallowed": storm.swallowed, "known": known}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # what is left would be given back now


if __name__ == "__main__":
    main(*sys.argv[1:])
