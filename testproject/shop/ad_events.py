"""The export of ads with the lock in the ad itself (`models.ad_exports`); ``SHOP_DOCUMENT_LOCKS=on`` chooses it.

An event is a change that a flow requests. The update that locks the ad also accepts the change, so an ad always has the
state of its last accepted event. There are four flows: the consumers of two kinds of messages (`change`, `switch_all`),
the API (`change`), and the retry job (`retry_failed`). Each waits while another flow calls the external service. If a
flow dies, the sweep sets the ad to the failed state of its work, and the retry job sends the ad's present state to the
service. No flow names an owner, which would resume at once: the service may still work on the call of the dead run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from django.conf import settings

from django_mongolock.documents import HeldDocument
from django_mongolock.exceptions import DocumentChanged, DocumentHeld, DocumentLockLost
from testproject.shop import client, services
from testproject.shop.models import Ad, ad_exports

logger = logging.getLogger(__name__)

Status = Ad.ExportStatus
#: Seconds that a flow waits for an ad that another flow exports.
WAIT = 20.0


class AdDeletedError(Exception):
    """The error for a change of an ad that was deleted meanwhile."""


def change(ad_id: str, *, wait: float = WAIT, **changes: Any) -> str | None:
    """Change an ad and export it, as one event. Return its state then, or None if the event was not accepted.

    Raises DocumentHeld.
    """
    if not settings.SHOP_LOCKING:
        return change_unlocked(ad_id, **changes)
    try:
        ad = Ad.objects.get(pk=ad_id)
        return _export(ad_exports.acquire(ad, _choosing(changes), changes=changes, wait=wait))
    except AdDeletedError:
        return None


def _choosing(changes: Mapping[str, Any]) -> Callable[[Ad], Status]:
    """Return a function that chooses the work for an ad, however often the ad has to be read again."""

    def choose(ad: Ad) -> Status:
        if ad.deleted and not changes.get("deleted"):
            raise AdDeletedError
        return pending_of(ad)

    return choose


def pending_of(ad: Ad) -> Status:
    """Return the pending state for an ad, as it will be."""
    return Status.WITHDRAWING if services.wanted(ad) is None else Status.EXPORTING


def _export(held: HeldDocument[Ad]) -> str:
    try:
        with held:
            _tell(held)
    except (client.ExportError, DocumentLockLost) as error:
        logger.info("export failed ad=%s error=%s", held.id, error)
    return str(held.ended)


def _tell(held: HeldDocument[Ad]) -> None:
    status = services.tell(held.instance)
    held.finish(status, {"exported_version": held.version + 1})  # these changes raise the version once more


def switch_all(user_id: str, **changes: Any) -> dict[str, str]:
    """Send one event for all ads of a user, and return the state of each. The settings of the user may have changed as
    well.

    Ads that another flow has now are exported one by one, after it.
    """
    ads = Ad.objects.alive().filter(user_id=user_id)
    if not settings.SHOP_LOCKING:
        return {str(ad.pk): change_unlocked(str(ad.pk), **changes) for ad in ads}
    with ad_exports.acquire_many(ads, pending_of, changes=changes) as batch:
        for held in batch:
            with suppress(DocumentLockLost):
                held.renew()  # earlier ads took their time, and this one must not be stale by now
            _export(held)
    exported = {str(held.id): str(held.ended) for held in batch}
    return exported | {str(ad_id): str(change(str(ad_id), **changes)) for ad_id in batch.refused}


def retry_failed() -> dict[str, str]:
    """Export failed ads, and those that the sweep has freed, in their present state. This is scheduled. Two runs at
    once exclude each other on each ad."""
    ad_exports.clear_stale()
    exported: dict[str, str] = {}
    for ad in Ad.objects.due(services.LOST_EVENT_SECONDS):
        try:
            exported[str(ad.pk)] = _export(ad_exports.acquire(ad, pending_of))
        except (DocumentChanged, DocumentHeld):
            continue  # another flow has it already
    return exported


def change_unlocked(ad_id: str, **changes: Any) -> str:
    """Change an ad in the same way without a lock, to show the faults."""
    Ad.objects.alive().filter(pk=ad_id).change(**changes)
    ad = Ad.objects.get(pk=ad_id)
    try:
        status = services.tell(ad)
    except client.ExportError:
        status = Status.FAILED
    return services.write_status(ad, status)
