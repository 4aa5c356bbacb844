"""A process in which many ask for one lock: `python -m tests.engine.arrivals COLLECTION`.

It is told who is to ask, `thread NAME` or `task NAME`, and says in lines of JSON who asks and who has the lock, with
its token. The lock is given back after a moment.
"""

import asyncio
import json
import os
import sys
import threading
import time

from django_mongolock.engine.document import Terms
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.mongo_store import MongoStore, StoreConfig
from django_mongolock.engine.options import Options
from django_mongolock.engine.session.session import Session
from tests.support import DATABASE

TERMS = Terms(lease=60, margin=1, waiter_lease=60)
#: For how many seconds each keeps the lock.
HOLD = 0.01


class Crowd:
    """The threads and tasks of this process."""

    def __init__(self, collection: str) -> None:
        self.session = Session(MongoStore(StoreConfig({"host": os.environ["MONGODB_URI"]}, DATABASE, collection)))
        self.loop = asyncio.new_event_loop()
        self._mutex = threading.Lock()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def say(self, **facts: object) -> None:
        with self._mutex:
            sys.stdout.write(json.dumps(facts) + "\n")
            sys.stdout.flush()

    def lock(self) -> MongoLock:
        return MongoLock(lambda: self.session, ("k",), Options(TERMS, 60))

    def ask(self, kind: str, name: str) -> None:
        """Have somebody ask for the lock."""
        if kind == "task":
            asyncio.run_coroutine_threadsafe(self.work_in_task(name), self.loop)
        else:
            threading.Thread(target=self.work, args=[name], daemon=True).start()

    def work(self, name: str) -> None:
        self.say(asks=name)
        with self.lock() as lock:
            self.say(got=name, token=lock.fencing_token)
            time.sleep(HOLD)

    async def work_in_task(self, name: str) -> None:
        self.say(asks=name)
        async with self.lock() as lock:
            self.say(got=name, token=lock.fencing_token)
            await asyncio.sleep(HOLD)


def main(collection: str) -> None:
    """Do what is said until nothing more is."""
    crowd = Crowd(collection)
    crowd.lock().acquire().release()
    crowd.say(ready=True)
    for line in sys.stdin:
        crowd.ask(*line.split())
    crowd.session.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
