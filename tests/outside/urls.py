"""The admin, and a view under a lock."""

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.urls import path

from django_mongolock import mongo_locked


@mongo_locked("pay:{order_id}", wait=0, on_contention="respond")
def pay(request: HttpRequest, order_id: int) -> HttpResponse:
    """Answer, unless another request does so at the moment."""
    return HttpResponse("paid")


urlpatterns = [path("admin/", admin.site.urls), path("pay/<int:order_id>/", pay)]
