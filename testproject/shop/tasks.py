"""The flows that run in Celery workers."""

import logging
import time
from contextlib import ExitStack
from typing import Any

from celery import shared_task
from django.conf import settings

from django_mongolock import mongo_lock
from testproject.shop import ad_events, services
from testproject.shop.locking import locked

logger = logging.getLogger(__name__)


@shared_task
@locked("ad:{ad_id}", wait=5, on_contention="retry")
def ad_changed(ad_id: str, event: str, changes: dict[str, Any] | None = None) -> str | None:
    """Bring the external service up to date after an ad was created, updated or deleted (*event*).

    - changes: the changes still to be made, with the lock in the ad itself.
    """
    logger.debug("ad %s ad=%s", event, ad_id)
    if settings.SHOP_DOCUMENT_LOCKS:
        return ad_events.change(ad_id, **(changes or {}))
    return services.export_ad(ad_id)


@shared_task
def seller_changed(user_id: str) -> dict[str, str]:
    """A seller switched the exports of all his ads."""
    if settings.SHOP_DOCUMENT_LOCKS:
        return ad_events.switch_all(user_id)
    return services.export_ads_of(user_id)


@shared_task
@locked("shop:retry-exports", wait=0, on_contention="skip")
def retry_exports() -> dict[str, str]:
    """Try failed exports again. This is scheduled. A run does nothing if the last one is still busy. With the lock in
    the ad itself, it leaves only the ads that the other one has."""
    if settings.SHOP_DOCUMENT_LOCKS:
        return ad_events.retry_failed()
    return services.retry_exports()


@shared_task
def hold(lease: float, keys: list[str], seconds: float) -> None:
    """Hold locks and do nothing else. The demo kills the worker meanwhile."""
    with ExitStack() as held:
        for key in keys:
            held.enter_context(mongo_lock(key, lease=lease, label="about to be killed"))
        time.sleep(seconds)
