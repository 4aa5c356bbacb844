"""The export of ads with the lock in the ad itself (`models.ad_exports`).

An event is a change that a flow requests. The update that locks the ad also accepts the change, so an ad always has the
state of its last accepted event. A flow is refused if the ad has changed since it was read, or while another flow calls
the external service. If a flow dies, the sweep sets the ad to the failed state of its work, and the retry job sends the
ad's present state to the service.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from django.conf import settings

from django_mongolock import DocumentChanged, DocumentHeld, DocumentLockLost
from django_mongolock.documents import HeldDocument
from testproject.shop import client, services
from testproject.shop.models import Ad, ad_exports

logger = logging.getLogger(__name__)

Status = Ad.ExportStatus
#: How often an event is tried again if another flow has the ad, and the seconds between.
TRIES, PAUSE = 5, 0.02


def change(ad_id: str, **changes: Any) -> str | None:
    """One event: change an ad and export it. Returns its state then; None if the event was not accepted."""
    if not settings.SHOP_LOCKING:
        return change_unlocked(ad_id, **changes)
    for _ in range(TRIES):
        ad = Ad.objects.get(pk=ad_id)
        if ad.deleted:
            return None
        try:
            return _export(ad_exports.acquire(ad, pending_of(ad, changes), changes=changes))
        except DocumentChanged:
            continue  # read again, decide again
        except DocumentHeld:
            time.sleep(PAUSE)
    return None


def _export(held: HeldDocument[Ad]) -> str:
    try:
        with held:
            held.finish(services.tell(held.instance))
    except (client.ExportError, DocumentLockLost) as error:
        logger.info("export failed ad=%s error=%s", held.id, error)
    return str(held.ended)


def pending_of(ad: Ad, changes: Mapping[str, Any] | None = None) -> Status:
    """Return the pending state for an ad with these changes."""
    for name, value in (changes or {}).items():
        setattr(ad, name, value)
    return Status.WITHDRAWING if services.wanted(ad) is None else Status.EXPORTING


def switch_all(user_id: str, *, opted_in: bool) -> dict[str, str]:
    """One event for all ads of a user. Returns the state of each, or why it was refused."""
    ads = Ad.objects.alive().filter(user_id=user_id)
    if not settings.SHOP_LOCKING:
        return {str(ad.pk): change_unlocked(str(ad.pk), opted_in=opted_in) for ad in ads}
    pending = Status.EXPORTING if opted_in else Status.WITHDRAWING
    with ad_exports.acquire_many(ads, pending, changes={"opted_in": opted_in}) as batch:
        exported = {str(held.id): _export(held) for held in batch}
    return exported | {str(ad_id): str(error) for ad_id, error in batch.refused.items()}


def retry_failed() -> dict[str, str]:
    """Scheduled: export failed ads, and those that the sweep has freed, in their present state."""
    failed = Ad.objects.filter(export_status__in=ad_exports.rules.failed)
    exported: dict[str, str] = {}
    for ad in failed:
        try:
            exported[str(ad.pk)] = _export(ad_exports.acquire(ad, pending_of(ad)))
        except (DocumentChanged, DocumentHeld):
            continue  # another flow has it already
    return exported


def change_unlocked(ad_id: str, **changes: Any) -> str:
    """The same without a lock, to show what goes wrong."""
    Ad.objects.alive().filter(pk=ad_id).change(**changes)
    ad = Ad.objects.get(pk=ad_id)
    try:
        status = services.tell(ad)
    except client.ExportError:
        status = Status.FAILED
    return services.write_status(ad, status)
