"""Targets of faults: holders of locks that another process waits for, according to the documents."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import bson
from bson.errors import BSONError
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from testproject.servers import ServerError
from verify.faults.cluster import Cluster
from verify.faults.peers import COLLECTION, DATABASE

#: The bytes before the document in a server's message: header, flags, and kind of the only section.
_BEFORE = 21


@dataclass(frozen=True, slots=True)
class Target:
    """A process group that holds *key* with this *token*, while a process of another group waits.

    - lease: seconds for which the server lets the lock live.
    """

    group: int
    key: str
    token: int
    lease: float


def contested(cluster: Cluster) -> list[Target]:
    """Return every lock with waiters, with each of its holders. Return nothing while there is no primary."""
    found: list[Target] = []
    with contextlib.suppress(PyMongoError, ServerError), _locks(cluster) as locks:
        for document in locks.find({"holders.0": {"$exists": True}, "waiters.0": {"$exists": True}}):
            rivals = {_group(waiter["pid"]) for waiter in document["waiters"]}
            for holder in document["holders"]:
                group = _group(holder["pid"])
                if rivals - {group} and not holder.get("released"):
                    found.append(Target(group, document["_id"], holder["token"], holder["server_lease"] / 1000))
    return found


def holder_tokens(cluster: Cluster, key: str) -> set[int] | None:
    """Return the tokens of the holders of *key*, or None while there is no primary."""
    with contextlib.suppress(PyMongoError, ServerError), _locks(cluster) as locks:
        document = locks.find_one({"_id": key}) or {"holders": []}
        return {holder["token"] for holder in document["holders"]}
    return None


@contextlib.contextmanager
def _locks(cluster: Cluster) -> Iterator[Collection[dict[str, Any]]]:
    with cluster.replica_set.primary(1.0).client(1.0) as client:
        yield client[DATABASE][COLLECTION]


def _group(pid: int) -> int:
    """Return the group of a process, or 0 if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return 0


def held_at(cluster: Cluster, member: int, **where: Any) -> set[str]:
    """Return the attempts that hold a lock according to one member, whether or not the others know of it.

    - where: condition for the documents to look at.
    """
    with contextlib.suppress(PyMongoError), cluster.members[member].client(1.0) as client:
        documents = client[DATABASE][COLLECTION].find(where, {"holders": 1})
        return {h["label"] for document in documents for h in document["holders"] if not h.get("released")}
    return set()


def granted_by(reply: bytes) -> str | None:
    """Return the attempt that learns from this message of a server that it holds a lock, or None."""
    if b"mine" not in reply:
        return None
    with contextlib.suppress(BSONError, KeyError, TypeError):
        label: str = bson.decode(reply[_BEFORE:])["value"]["mine"]["label"]
        return label
    return None
