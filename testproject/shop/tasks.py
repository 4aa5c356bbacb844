"""The flows that run in Celery workers."""

import logging
import time
from contextlib import ExitStack

from celery import shared_task

from django_mongolock import mongo_lock
from testproject.shop import services
from testproject.shop.locking import locked

logger = logging.getLogger(__name__)


@shared_task
@locked("ad:{ad_id}", wait=5, on_contention="retry")
def ad_changed(ad_id: str, event: str) -> str:
    """An ad was created, updated or deleted (*event*): bring the external service up to date."""
    logger.debug("ad %s ad=%s", event, ad_id)
    return services.export_ad(ad_id)


@shared_task
def seller_changed(user_id: str) -> dict[str, str]:
    """A seller switched the exports of all his ads."""
    return services.export_ads_of(user_id)


@shared_task
@locked("shop:retry-exports", wait=0, on_contention="skip")
def retry_exports() -> dict[str, str]:
    """Scheduled: try failed exports again. A run that finds the last one still busy does nothing."""
    return services.retry_exports()


@shared_task
def hold(lease: float, keys: list[str], seconds: float) -> None:
    """Hold locks and do nothing else. The demo kills the worker meanwhile."""
    with ExitStack() as held:
        for key in keys:
            held.enter_context(mongo_lock(key, lease=lease, label="about to be killed"))
        time.sleep(seconds)
