"""A process that is copied while it runs, as a machine that goes on twice: `python -m tests.engine.clone COLLECTION`.

It makes a session and nothing else, so that it has one thread when it is copied. The copies take twenty locks each and
say the ids of their grants, in a line of JSON.
"""

import ctypes
import json
import os
import random
import sys

from django_mongolock.engine.document import Terms
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.mongo_store import MongoStore, StoreConfig
from django_mongolock.engine.options import Options
from django_mongolock.engine.session.session import Session
from tests.support import DATABASE

KEYS = 20


def main(collection: str) -> int:
    """Copy this process twice, one after the other; return how the copies ended."""
    store = MongoStore(StoreConfig({"host": os.environ["MONGODB_URI"]}, DATABASE, collection))
    session, pid = Session(store), os.getpid()
    status = 0
    for name in ("one", "two"):
        # os.fork() tells everybody who wants to know, as a machine that is paused and copied does not.
        child = ctypes.PyDLL(None).fork()
        if child == 0:
            os.getpid = lambda: pid
            sys.stdout.write(json.dumps(take(session, store, name)) + "\n")
            sys.stdout.flush()
            os._exit(0)
        status |= os.waitpid(child, 0)[1]
    return status


def take(session: Session, store: MongoStore, name: str) -> dict[str, list[str]]:
    """Take locks; return the ids of the grants, and what `random` gives."""
    grants = []
    for number in range(KEYS):
        key = f"{name}{number}"
        with MongoLock(lambda: session, (key,), Options(Terms(lease=60, margin=1, waiter_lease=60))):
            grants += [holder["grant"] for holder in (store.collection.find_one({"_id": key}) or {})["holders"]]
    return {"grants": grants, "random": [random.random().hex()]}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
