"""The two implementations of the rule, MongoDB and Python, behind one interface with a key, its steps, and its
document."""

from collections.abc import Callable
from typing import Any

from pymongo.read_concern import ReadConcern

from django_mongolock.engine.rule.document import Limits, Step, Terms, entry
from django_mongolock.engine.rule.replies import Reply
from django_mongolock.engine.store.base import Store
from django_mongolock.engine.store.mongo import MongoStore
from django_mongolock.testing.memory_server import MemoryServer, MemoryStore

Document = dict[str, Any]

#: Terms under which nothing is renewed or ends by itself during a test, so that commands can be counted.
CALM = Terms(lease=60, margin=1, waiter_lease=60)
TIMEOUT = 20.0


class Twin:
    """The key "k" in one of the two.

    - read: function that returns its document.
    - write: function that replaces its document. None removes it.
    """

    def __init__(self, store: Store, read: Callable[[], Document], write: Callable[[Document | None], object]) -> None:
        self.store, self.read, self.write = store, read, write

    def apply(self, **step: Any) -> Reply:
        return self.store.apply("k", Step(**step), TIMEOUT)

    def add(self, grant: str, terms: Terms = CALM, *, new: Document | None = None, **step: Any) -> Reply:
        """Ask for a grant.

        - new: further fields of its entry.
        """
        return self.apply(ask=grant, add={**entry(grant, "s", terms, {}), **(new or {})}, **step)

    def take_free(self, grant: str, *, new: Document | None = None) -> Reply | None:
        """Ask for a grant in the short form."""
        add = {**entry(grant, "s", CALM, {}), **(new or {})}
        return self.store.take_free("k", Step(ask=grant, add=add), TIMEOUT)

    def release(self, *grants: str) -> bool:
        return self.apply(remove=grants, given=grants[0]).found

    def renew(self, *grants: str, **step: Any) -> Any:
        """Renew in bulk. Return the result for the key."""
        return self.store.renew(["k"], Step(renew=grants, **step), TIMEOUT).get("k")


def in_mongodb(store: MongoStore) -> Twin:
    # Releases are not confirmed by the majority, but the tests read them.
    locks = store.collection.with_options(read_concern=ReadConcern("local"))

    def write(document: Document | None) -> None:
        locks.delete_one({"_id": "k"})
        if document is not None:
            locks.insert_one(document)

    return Twin(store, lambda: dict(locks.find_one({"_id": "k"}) or {}), write)


def in_memory() -> Twin:
    documents = (server := MemoryServer()).documents

    def write(document: Document | None) -> None:
        documents.pop("k", None)
        if document is not None:
            documents["k"] = document

    return Twin(MemoryStore(server, Limits()), lambda: dict(documents["k"]), write)
