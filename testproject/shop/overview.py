"""The data of the start page, with each ad and its state at the external service."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.utils import timezone

from django_mongolock.models import Lock
from testproject.external.models import ShownAd
from testproject.shop import audit
from testproject.shop.models import Ad, Order, Seller

ADS, ORDERS = 20, 6
JUDGED_MINUTES = 5


@dataclass(frozen=True)
class Row:
    """One ad, its seller, and the service's side of it."""

    ad: Ad
    seller: Seller | None
    shown: ShownAd | None
    locked: bool


def collect() -> dict[str, Any]:
    """Return the context of the start page."""
    since = timezone.now() - timedelta(minutes=JUDGED_MINUTES)
    held = [str(lock.pk) for lock in Lock.objects.held()[:500]]
    return {
        "rows": list(_rows(list(Ad.objects.all()[:ADS]), set(held))),
        "orders": Order.objects.all()[:ORDERS],
        "verdict": audit.judge(since),
        "minutes": JUDGED_MINUTES,
        "held": len(held),
        "locking": settings.SHOP_LOCKING,
    }


def _rows(ads: list[Ad], held: set[str]) -> Iterable[Row]:
    sellers = Seller.objects.in_bulk({ad.user_id for ad in ads})
    shown = ShownAd.objects.in_bulk([str(ad.pk) for ad in ads])
    for ad in ads:
        key = str(ad.pk)
        yield Row(ad, sellers.get(ad.user_id), shown.get(key), f"ad:{key}" in held)
