"""The start page and the API."""

from django.core.exceptions import ValidationError
from django.urls import path, register_converter
from django.urls.converters import StringConverter

from testproject.shop import views
from testproject.shop.models import Order


class ObjectIdConverter(StringConverter):
    """The hex form of an ObjectId."""

    regex = "[0-9a-f]{24}"


class OrderKeyConverter(StringConverter):
    """The primary key of an order, as a number in SQL or an ObjectId in MongoDB. "007" is "7"."""

    regex = "[0-9a-f]{1,24}"

    def to_python(self, value: str) -> str:
        """Return the one way to write this key, so that it also names one lock."""
        try:
            return str(Order._meta.pk.to_python(value))
        except ValidationError as error:
            raise ValueError(value) from error


register_converter(ObjectIdConverter, "objectid")
register_converter(OrderKeyConverter, "order")

urlpatterns = [
    path("", views.start, name="start"),
    path("incidents/", views.incidents, name="incidents"),
    path("incidents/<slug:name>/", views.incident, name="incident"),
    path("api/ads/", views.AdsView.as_view(), name="ads"),
    path("api/ads/<objectid:ad_id>/", views.AdView.as_view(), name="ad"),
    path("api/ads/<objectid:ad_id>/opt/", views.opt, name="ad-opt"),
    path("api/seller/", views.seller, name="seller"),
    path("api/orders/", views.create_order, name="orders"),
    path("api/orders/<order:order_id>/pay/", views.pay, name="order-pay"),
    path("api/orders/<order:order_id>/ship/", views.ship, name="order-ship"),
]
