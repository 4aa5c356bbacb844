"""PUT shows an ad, DELETE withdraws it. Both are slow, and sometimes fail."""

import json
import random
import time
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils import timezone
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from pymongo import ReturnDocument

from testproject.external.models import Call, ShownAd
from testproject.mongo import database


def delay() -> float:
    """Return the seconds that a call takes. Most answers are quick, and some are slow."""
    quickest, slowest = settings.EXTERNAL_DELAY
    return float(quickest + (slowest - quickest) * random.random() ** 3)


@method_decorator(csrf_exempt, name="dispatch")
class AdView(View):
    """One ad of the service, at ``/external/ads/<id>/?version=<n>``.

    The service believes its callers. The last call wins, whatever version it names.
    """

    def put(self, request: HttpRequest, ad_id: str) -> HttpResponse:
        """Show the ad with this content."""
        return _answer(request, ad_id, Call.Kind.EXPORT, json.loads(request.body))

    def delete(self, request: HttpRequest, ad_id: str) -> HttpResponse:
        """Withdraw the ad. An ad that was never shown is fine too."""
        return _answer(request, ad_id, Call.Kind.WITHDRAW, {})


def _answer(request: HttpRequest, ad_id: str, kind: Call.Kind, content: dict[str, Any]) -> HttpResponse:
    call = Call(ad_id=ad_id, kind=kind, version=int(request.GET["version"]))
    call.started_at = timezone.now()
    time.sleep(delay())
    if random.random() >= settings.EXTERNAL_FAILURES:
        call.sequence = _apply(call, content)
    call.ended_at = timezone.now()
    call.save(force_insert=True)
    if call.sequence is None:
        return JsonResponse({"error": "try again later"}, status=503)
    return JsonResponse({"ad": ad_id, "sequence": call.sequence})


def _apply(call: Call, content: dict[str, Any]) -> int:
    """Apply the call to the service's state, and return the number of this call of the ad.

    One update gives the number and the state. The numbers are therefore the order of the effects.
    """
    ads = database()[ShownAd._meta.db_table]
    now = {"shown": call.kind == Call.Kind.EXPORT, "version": call.version, "content": content}
    after: Any = ads.find_one_and_update(
        {"_id": call.ad_id},
        {"$set": now, "$inc": {"sequence": 1}},
        upsert=True,
        return_document=ReturnDocument.AFTER,
    )
    return int(after["sequence"])
