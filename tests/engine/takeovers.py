"""Take a lock over at a random moment of its holder's work: does anything that the holder writes come after that?

Each trial: a holder reads a counter and writes it back one higher; meanwhile another one takes the lock over, in
one of two ways, and looks at the counter as soon as it has the lock. A write of the former holder that turns up after
that look is wrong. Once with `lock.atomic()`, once with plain writes after `lock.ensure_held()`.
"""

import random
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from pymongo import MongoClient
from pymongo.collection import Collection

from django_mongolock.engine.document import Terms
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.mongo_store import MongoStore, StoreConfig
from django_mongolock.engine.options import Options
from django_mongolock.engine.session.session import Session
from django_mongolock.exceptions import LockLost, LockTransactionAborted
from tests.support import DATABASE

TERMS: Final = Terms(lease=30.0)
PAST: Final = datetime(2020, 1, 1, tzinfo=UTC)
#: The holder works, and the other one strikes, within so many seconds; at least as many as a take-over takes.
WORK: Final = 0.006
LONGEST_WORK: Final = 0.25

Document = dict[str, Any]


@dataclass
class Tally:
    """How the trials of one kind ended."""

    trials: int = 0
    written: int = 0
    lost: int = 0
    aborted: int = 0
    wrong: int = 0


class Trials:
    """Holders and those who take over, as two processes would be, over collections of their own."""

    def __init__(self, uri: str) -> None:
        self.client: MongoClient[Document] = MongoClient(uri)
        name = f"takeovers_{uuid.uuid4().hex}"
        config = StoreConfig({"host": uri}, DATABASE, name)
        self.holders, self.others = Session(MongoStore(config)), Session(MongoStore(config))
        self.locks: Collection[Document] = self.client[DATABASE][name]
        self.data: Collection[Document] = self.client[DATABASE][f"{name}_data"]
        self._work = WORK

    def close(self) -> None:
        self.holders.close()
        self.others.close()
        self.locks.drop()
        self.data.drop()
        self.client.close()

    def run(
        self, trials: int, *, fenced: bool, most: int | None = None, until: Callable[[Tally], bool] = bool
    ) -> Tally:
        """So many take-overs of holders that write in a fenced transaction, or plainly.

        most: go on, up to so many, *until* the tally is as it is said to be.
        """
        tally = Tally()
        while tally.trials < trials or (tally.trials < (most or 0) and not until(tally)):
            self._trial(tally, fenced)
        return tally

    def _trial(self, tally: Tally, fenced: bool) -> None:
        key = uuid.uuid4().hex
        self.data.insert_one({"_id": key, "n": 0})
        lock = MongoLock(lambda: self.holders, (key,), Options(terms=TERMS)).acquire()
        outcome: list[str] = []
        holder = threading.Thread(target=lambda: outcome.append(self._hold(lock, key, fenced)))
        holder.start()
        # A transaction takes longer than plain writes: some of both are to be over when the other one strikes.
        time.sleep(random.uniform(0, self._work * (2 if fenced else 1)))
        started = time.monotonic()
        seen = self._take_over(key)
        # Were the work much shorter than a take-over, as it is on a busy machine, nobody would ever be struck in it.
        self._work = min(LONGEST_WORK, max(WORK, time.monotonic() - started))
        holder.join()
        found = self._read(key)
        tally.trials += 1
        tally.written += outcome == ["written"]
        tally.lost += outcome == ["lost"]
        tally.aborted += outcome == ["aborted"]
        # What it had written by then is to be seen; what it says it has not written must not be there.
        tally.wrong += found != seen or found != (outcome == ["written"])

    def _hold(self, lock: MongoLock, key: str, fenced: bool) -> str:
        try:
            if fenced:
                with lock.atomic(self.client) as session:
                    self._count(key, session)
            else:
                lock.ensure_held()
                self._count(key, None)
        except LockLost:
            return "lost"
        except LockTransactionAborted:
            return "aborted"
        finally:
            lock.release()
        return "written"

    def _count(self, key: str, session: Any) -> None:
        found = self._read(key, session)
        time.sleep(random.uniform(0, self._work))
        self.data.update_one({"_id": key}, {"$set": {"n": found + 1}}, session=session)
        time.sleep(random.uniform(0, self._work))

    def _take_over(self, key: str) -> int:
        """Take the lock over; return what the counter says then."""
        # As a force release does; or as if the lease had ended, so that the next command prunes the holder.
        ended: Document = {"$set": {"holders": []}} if random.random() < 0.5 else {"$set": {"holders.0.until": PAST}}
        self.locks.update_one({"_id": key, "holders.0": {"$exists": True}}, ended)
        lock = MongoLock(lambda: self.others, (key,), Options(terms=TERMS)).acquire()
        found = self._read(key)
        lock.release()
        return found

    def _read(self, key: str, session: Any = None) -> int:
        return int((self.data.find_one({"_id": key}, session=session) or {})["n"])
