"""The services of the shop. Each export flow ends in `export_ad`.

An export reads the ad, decides what the external service must have, sends it (slowly), and stores what was sent. If two
flows do this for one ad at once, the one that read the older state may call last, and show an ad again that was deleted
or opted out. The caller therefore holds the ad's lock during the whole export.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from django.conf import settings
from django.db.models import F

from django_mongolock import LockNotAcquired
from testproject.shop import client
from testproject.shop.locking import ad_lock
from testproject.shop.models import Ad, Order, Seller

logger = logging.getLogger(__name__)

PAYMENT_SECONDS = 0.05
# The seconds after which a change that was not exported has lost its event. The retry job exports it.
LOST_EVENT_SECONDS = 15.0


class OrderStateError(Exception):
    """The order *order_id* is in *state* and cannot take this step. None means that the user has no such order."""

    def __init__(self, order_id: str, state: str | None) -> None:
        super().__init__(order_id, state)
        self.order_id, self.state = order_id, state


# Changes of ads. Each one increases the version, and needs no lock.


def create_ad(user_id: str, title: str, body: str, price: int) -> Ad:
    """Create an ad that its seller wants to export."""
    return Ad.objects.create(user_id=user_id, title=title, body=body, price=price)


def update_ad(ad_id: str, user_id: str, **changes: Any) -> bool:
    """Change an ad of this user, and return False if there is no such ad (any more)."""
    return bool(Ad.objects.alive().filter(pk=ad_id, user_id=user_id).change(**changes))


def delete_ad(ad_id: str, user_id: str) -> bool:
    """Mark an ad of this user as deleted, for good."""
    return update_ad(ad_id, user_id, deleted=True)


def owns_ad(ad_id: str, user_id: str) -> bool:
    """Return whether the user has this ad, and has not deleted it."""
    return Ad.objects.alive().filter(pk=ad_id, user_id=user_id).exists()


def change_seller(user_id: str, *, exports: bool) -> int:
    """Switch the exports of all ads of a user, and return the number of ads."""
    Seller.objects.update_or_create(pk=user_id, defaults={"exports": exports})
    ads = Ad.objects.alive().filter(user_id=user_id)
    # The ads come after the seller, because a flow that reads the new version must also read the new setting.
    return ads.count() if settings.SHOP_DOCUMENT_LOCKS else ads.change()


# Ads: exports. The caller holds the ad's lock.


def wanted(ad: Ad) -> client.Content | None:
    """Return the content that the external service must show of this ad, or None if it must not show the ad."""
    if ad.deleted or not ad.opted_in:
        return None
    if Seller.objects.filter(pk=ad.user_id, exports=False).exists():
        return None
    return client.Content(title=ad.title, body=ad.body, price=ad.price)


def export_ad(ad_id: str) -> str:
    """Read the ad, send its state to the external service, and store what was sent.

    Returns the new export status. The caller holds the ad's lock.
    """
    ad = Ad.objects.get(pk=ad_id)
    try:
        status = tell(ad)
    except client.ExportError as error:
        logger.info("export failed ad=%s status=%s", ad_id, error.status)
        return write_status(ad, Ad.ExportStatus.FAILED)
    return write_status(ad, status, exported_version=ad.document_version)


def tell(ad: Ad) -> Ad.ExportStatus:
    """Send this ad's state to the external service, and return the new export status. Raises ExportError."""
    content = wanted(ad)
    if content is None:
        client.withdraw_ad(str(ad.pk), ad.document_version)
        return Ad.ExportStatus.WITHDRAWN
    client.put_ad(str(ad.pk), ad.document_version, content)
    return Ad.ExportStatus.EXPORTED


def write_status(ad: Ad, status: Ad.ExportStatus, **changes: Any) -> str:
    """Store the exported status. The ad itself does not change, and its version stays."""
    Ad.objects.filter(pk=ad.pk).update(export_status=status, document_version=F("document_version"), **changes)
    return status.value


# The flows that are not one task for one ad.


def opt_ad(ad_id: str, user_id: str, *, opted_in: bool) -> str | None:
    """Opt one ad in or out and export it at once. Return None if the user has no such ad.

    The caller holds the ad's lock.
    """
    if not update_ad(ad_id, user_id, opted_in=opted_in):
        return None
    return export_ad(ad_id)


def export_ads_of(user_id: str) -> dict[str, str]:
    """Export or withdraw every ad of a user, one after the other, each under its lock."""
    ads = Ad.objects.alive().filter(user_id=user_id)
    return {str(pk): _export_or_leave(str(pk), wait=10) for pk in ads.values_list("pk", flat=True)}


def retry_exports() -> dict[str, str]:
    """Export failed and forgotten ads again, except ads that another flow has now."""
    ads = Ad.objects.due(LOST_EVENT_SECONDS)
    return {str(pk): _export_or_leave(str(pk), wait=0) for pk in ads.values_list("pk", flat=True)}


def _export_or_leave(ad_id: str, *, wait: float) -> str:
    try:
        with ad_lock(ad_id, wait=wait):
            return export_ad(ad_id)
    except LockNotAcquired:
        return "busy"  # an ad with a version ahead of its export is left to the retry job


# Orders. The caller holds the order's lock.


def pay_order(order_id: str, buyer_id: Any) -> Order:
    """Take the money for an order. Read it, ask the payment provider, and write it. Raises OrderStateError."""
    order = Order.objects.filter(pk=order_id, buyer_id=buyer_id).first()
    _demand(order_id, order, Order.State.NEW)
    time.sleep(PAYMENT_SECONDS)
    Order.objects.filter(pk=order_id).update(charges=F("charges") + 1, state=Order.State.PAID)
    return Order.objects.get(pk=order_id)


async def ship_order(order_id: str, buyer_id: Any) -> Order:
    """Ship a paid order. Raises OrderStateError."""
    order = await Order.objects.filter(pk=order_id, buyer_id=buyer_id).afirst()
    _demand(order_id, order, Order.State.PAID)
    await asyncio.sleep(PAYMENT_SECONDS)
    await Order.objects.filter(pk=order_id).aupdate(state=Order.State.SHIPPED)
    return await Order.objects.aget(pk=order_id)


def _demand(order_id: str, order: Order | None, state: Order.State) -> None:
    if order is None or order.state != state:
        raise OrderStateError(order_id, order.state if order else None)
