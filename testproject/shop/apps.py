"""The app's name and title."""

from django.apps import AppConfig


class ShopConfig(AppConfig):
    """The shop. Its primary keys follow the project's DEFAULT_AUTO_FIELD."""

    name = "testproject.shop"
    label = "shop"
