"""The one place where the shop's locks are switched on and off.

``SHOP_LOCKING=off`` in the environment runs every flow without a lock, to show the faults. ``SHOP_DOCUMENT_LOCKS=on``
keeps the locks of ads in the ads (see `ad_events`). A real project would call `mongo_lock` and `mongo_locked` directly.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from django.conf import settings

from django_mongolock import mongo_lock, mongo_locked

F = TypeVar("F", bound=Callable[..., Any])


def ad_lock(ad_id: str, *, wait: float) -> AbstractContextManager[Any]:
    """Hold the ad while its state is read, exported and written back."""
    if not settings.SHOP_LOCKING:
        return nullcontext()
    return mongo_lock(f"ad:{ad_id}", wait=wait)


def locked(key: str, **options: Any) -> Callable[[F], F]:
    """`mongo_locked`, or the function as it is. Decided once, when the function is defined."""
    in_the_ad = settings.SHOP_DOCUMENT_LOCKS and not key.startswith("order:")
    if not settings.SHOP_LOCKING or in_the_ad:
        return lambda function: function
    return mongo_locked(key, **options)
