"""ATOMIC_REQUESTS: Django opens its transaction around a view, outside of any decorator.

A lock on the view would be given back before the commit. So a locked view tells Django that it wants no transaction,
and opens it inside of the lock: acquire, commit, release.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db import connections, transaction
from django.http import HttpRequest


class Deferred(set[str]):
    """What Django finds as ``_non_atomic_requests`` on a locked view: with it, Django opens no transaction around
    the lock, and *owner* opens it inside. As a set, it has the aliases that the view itself wants no transaction on;
    ``@non_atomic_requests`` above the lock adds to them.
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
        """Where several locks are on one view, the innermost opens the transactions: leave its own there."""
        declined = getattr(view, "_non_atomic_requests", ())
        if not isinstance(declined, cls):
            view._non_atomic_requests = cls(owner, declined)


def _aliases() -> list[str]:
    return [alias for alias, settings in connections.settings.items() if settings["ATOMIC_REQUESTS"]]


def deferred_aliases(request: HttpRequest | None, owner: object) -> Sequence[str]:
    """The aliases on which Django has left the transaction of this *request* to *owner*."""
    match = request.resolver_match if request is not None else None
    deferred = getattr(match.func, "_non_atomic_requests", None) if match is not None else None
    return deferred.wanted() if isinstance(deferred, Deferred) and deferred.owner is owner else ()


@contextmanager
def atomic(aliases: Sequence[str]) -> Iterator[None]:
    """A transaction on each of *aliases*."""
    with ExitStack() as stack:
        for alias in aliases:
            stack.enter_context(transaction.atomic(using=alias))
        yield
