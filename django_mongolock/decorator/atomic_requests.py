"""ATOMIC_REQUESTS: Django opens its transaction around a view, outside of any decorator.

A lock on the view would be released before the commit. So a locked view declares to Django that it wants no
transaction, and opens it inside the lock: acquire, commit, release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db import connections, transaction
from django.http import HttpRequest


class Deferred(set[str]):
    """The ``_non_atomic_requests`` of a locked view: not Django opens its transactions, but *owner*, inside the lock.

    As a set, it contains the aliases on which the view itself wants no transaction; ``@non_atomic_requests`` above the
    lock adds to them.
    """

    def __init__(self, owner: object, declined: Iterable[str]) -> None:
        super().__init__(declined)
        self.owner = owner

    def __contains__(self, alias: object) -> bool:
        return True

    def wanted(self) -> list[str]:
        declined = super().__contains__
        return [alias for alias in _aliases() if not declined(alias)]

    @classmethod
    def put_on(cls, view: Any, owner: object) -> None:
        """Mark the view. With several locks on it, the innermost opens the transactions: its mark stays."""
        declined = getattr(view, "_non_atomic_requests", ())
        if not isinstance(declined, cls):
            view._non_atomic_requests = cls(owner, declined)


def _aliases() -> list[str]:
    return [alias for alias, settings in connections.settings.items() if settings["ATOMIC_REQUESTS"]]


def deferred_aliases(request: HttpRequest | None, owner: object) -> Sequence[str]:
    """The aliases on which Django leaves the transaction of this *request* to *owner*."""
    match = request.resolver_match if request is not None else None
    deferred = getattr(match.func, "_non_atomic_requests", None) if match is not None else None
    return deferred.wanted() if isinstance(deferred, Deferred) and deferred.owner is owner else ()


@contextmanager
def atomic(aliases: Sequence[str]) -> Iterator[None]:
    """Open a transaction on each of *aliases*."""
    with ExitStack() as stack:
        for alias in aliases:
            stack.enter_context(transaction.atomic(using=alias))
        yield


def first_after_commit(alias: str, function: Callable[[], object]) -> None:
    """Have *function* called after the commit on *alias*, before whatever was given to ``transaction.on_commit``."""
    connection = connections[alias]
    transaction.on_commit(function, using=alias)
    waiting = connection.run_on_commit
    if waiting and waiting[-1][1] is function:  # without a transaction, it was called at once
        waiting.insert(0, waiting.pop())
