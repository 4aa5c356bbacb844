"""The contenders of the comparisons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from bench import ours, peers, recipes
from bench.peers import Peer


@dataclass(frozen=True, slots=True)
class Contender:
    """A lock under its name in the tables.

    - needs: server on which it runs.
    """

    name: str
    make: type[Peer]
    needs: str

    def at(self, needs: str) -> Contender:
        """Return the same lock on another server."""
        return replace(self, needs=needs)


def _contender(name: str, make: type[Peer]) -> Contender:
    return Contender(name, make, make.needs)


OURS: Final = _contender("django_mongolock", ours.Ours)
IN_THREAD: Final = _contender("django_mongolock, in a thread", ours.OursInThread)
ASYNC: Final = _contender("django_mongolock, async with", ours.OursAsync)
POLLING: Final = _contender("django_mongolock, no bells", ours.OursPolling)
BARE: Final = _contender("two bare majority writes", recipes.BareWrites)

#: The other contenders, packages first.
OTHERS: Final = (
    _contender("redis-py", peers.RedisPy),
    _contender("redis-py, appendfsync always", peers.RedisPyDurable),
    _contender("python-redis-lock", peers.PythonRedisLock),
    _contender("python-redis-lock, appendfsync always", peers.PythonRedisLockDurable),
    _contender("kazoo (ZooKeeper)", peers.Kazoo),
    _contender("django-pglock (PostgreSQL)", peers.PgLock),
    _contender("filelock (one machine)", peers.FileLock),
    _contender("mongoelector", peers.MongoElector),
    _contender("recipe: insert, delete, TTL", recipes.InsertDelete),
    _contender("recipe: upsert, TTL", recipes.Upsert),
    _contender("recipe: lease, backoff", recipes.Lease),
    _contender("recipe: lockedBy", recipes.LockedBy),
)
#: One contender of each kind, for slow comparisons with a crowd.
FEW: Final = tuple(
    contender
    for contender in OTHERS
    if contender.make
    in {peers.RedisPy, peers.PythonRedisLock, peers.Kazoo, peers.PgLock, peers.FileLock, recipes.InsertDelete}
)
#: Further contenders, for faster comparisons.
MAIN: Final = (*FEW, *(contender for contender in OTHERS if contender.make in {peers.MongoElector, recipes.Lease}))
#: The contenders of a quick look.
QUICK: Final = tuple(contender for contender in OTHERS if contender.make in {peers.RedisPy, recipes.InsertDelete})
