"""The start page, and the API that sellers and buyers use. Answers are JSON."""

from __future__ import annotations

import json
from math import ceil
from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.core.exceptions import BadRequest, PermissionDenied
from django.forms import Form
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.http import require_GET, require_POST

from django_mongolock.exceptions import DocumentHeld
from testproject.shop import ad_events, night, overview, services, tasks
from testproject.shop.forms import AdForm, OptForm, OrderForm, SellerForm
from testproject.shop.locking import locked
from testproject.shop.models import Order


@require_GET
def start(request: HttpRequest) -> HttpResponse:
    """Show the ads, their state at the external service, the orders, and the judgement so far."""
    context = overview.collect()
    context["may_log_in"] = settings.SHOP_INCIDENTS
    context["incidents"] = night.status() if _may_begin(request) else None
    return render(request, "shop/start.html", context)


@require_GET
def incidents(request: HttpRequest) -> HttpResponse:
    """Return the progress of the incidents, at ``/incidents/``."""
    if not _may_begin(request):
        raise PermissionDenied
    return JsonResponse({"incidents": night.status()})


@require_POST
def incident(request: HttpRequest, name: str) -> HttpResponse:
    """Begin an incident, at ``/incidents/<name>/``."""
    if not _may_begin(request):
        raise PermissionDenied
    try:
        night.begin(name)
    except KeyError as error:
        raise Http404 from error
    return redirect(f"{reverse('start')}#{name}")


def _may_begin(request: HttpRequest) -> bool:
    return bool(settings.SHOP_INCIDENTS and request.user.is_staff)


@method_decorator(login_required, name="dispatch")
class AdsView(View):
    """The ads of a seller, at ``/api/ads/``."""

    def post(self, request: HttpRequest) -> HttpResponse:
        """Create one, and let a task export it."""
        ad = services.create_ad(_user_id(request), **_cleaned(AdForm(_body(request))))
        tasks.ad_changed.delay(str(ad.pk), "created")
        return JsonResponse({"ad": str(ad.pk)}, status=201)


@method_decorator(login_required, name="dispatch")
class AdView(View):
    """One ad of one's own, at ``/api/ads/<id>/``."""

    def patch(self, request: HttpRequest, ad_id: str) -> HttpResponse:
        """Change some fields, and let a task export the ad."""
        changes = _cleaned(AdForm(_body(request), partial=True))
        return _announce(ad_id, _user_id(request), "updated", changes)

    def delete(self, request: HttpRequest, ad_id: str) -> HttpResponse:
        """Delete it for good, and let a task withdraw it."""
        return _announce(ad_id, _user_id(request), "deleted", {"deleted": True})


@require_POST
@login_required
@locked("ad:{ad_id}", wait=2, on_contention="respond")
def opt(request: HttpRequest, ad_id: str) -> HttpResponse:
    """Opt one ad in or out, at ``/api/ads/<id>/opt/``. The answer says how the export ended."""
    choice = _cleaned(OptForm(_body(request)))
    try:
        status = _opt(ad_id, _user_id(request), choice)
    except DocumentHeld as error:
        return JsonResponse({"error": str(error)}, status=423, headers={"Retry-After": ceil(error.retry_after)})
    if status is None:
        return _no_such_ad(ad_id)
    return JsonResponse({"ad": ad_id, "export_status": status})


@require_POST
@login_required
def seller(request: HttpRequest) -> HttpResponse:
    """Switch the exports of all one's ads, at ``/api/seller/``. A task exports or withdraws them."""
    ads = services.change_seller(_user_id(request), **_cleaned(SellerForm(_body(request))))
    tasks.seller_changed.delay(_user_id(request))
    return JsonResponse({"ads": ads}, status=202)


@require_POST
@login_required
def create_order(request: HttpRequest) -> HttpResponse:
    """Order something, at ``/api/orders/``."""
    order = Order.objects.create(buyer_id=_user_key(request), **_cleaned(OrderForm(_body(request))))
    return _order(order, status=201)


@require_POST
@login_required
@locked("order:{order_id}", wait=0, on_contention="respond")
def pay(request: HttpRequest, order_id: str) -> HttpResponse:
    """Pay an order, at ``/api/orders/<id>/pay/``. A double click meets the lock, and a later click the order's
    state."""
    try:
        return _order(services.pay_order(order_id, _user_key(request)))
    except services.OrderStateError as error:
        return _not_ready(error)


@require_POST
@login_required
@locked("order:{order_id}", wait=2, on_contention="respond")
async def ship(request: HttpRequest, order_id: str) -> HttpResponse:
    """Ship an order in an async view under the same lock, at ``/api/orders/<id>/ship/``."""
    user = await request.auser()
    try:
        return _order(await services.ship_order(order_id, user.pk))
    except services.OrderStateError as error:
        return _not_ready(error)


def _user_key(request: HttpRequest) -> Any:
    return request.user.pk  # an int in SQL, an ObjectId in MongoDB


def _user_id(request: HttpRequest) -> str:
    return str(_user_key(request))


def _body(request: HttpRequest) -> dict[str, Any]:
    try:
        body = json.loads(request.body)
    except ValueError as error:
        raise BadRequest("the body is not JSON") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    return body


def _cleaned(form: Form) -> dict[str, Any]:
    if not form.is_valid():
        raise BadRequest(form.errors.as_json())
    return form.cleaned_data


def _opt(ad_id: str, user_id: str, choice: dict[str, Any]) -> str | None:
    if not settings.SHOP_DOCUMENT_LOCKS:
        return services.opt_ad(ad_id, user_id, **choice)
    return ad_events.change(ad_id, wait=2, **choice) if services.owns_ad(ad_id, user_id) else None


def _announce(ad_id: str, user_id: str, event: str, changes: dict[str, Any]) -> HttpResponse:
    """Change an ad, and let a task export it. With the lock in the ad itself, the task does both."""
    if settings.SHOP_DOCUMENT_LOCKS:
        done, rest = services.owns_ad(ad_id, user_id), [changes]
    else:
        done, rest = services.update_ad(ad_id, user_id, **changes), []
    if not done:
        return _no_such_ad(ad_id)
    tasks.ad_changed.delay(ad_id, event, *rest)
    return JsonResponse({"ad": ad_id}, status=202)


def _no_such_ad(ad_id: str) -> HttpResponse:
    return JsonResponse({"error": f"you have no ad {ad_id}"}, status=404)


def _order(order: Order, status: int = 200) -> HttpResponse:
    return JsonResponse({"order": str(order.pk), "state": order.state}, status=status)


def _not_ready(error: services.OrderStateError) -> HttpResponse:
    status = 409 if error.state else 404
    return JsonResponse({"order": error.order_id, "state": error.state}, status=status)
