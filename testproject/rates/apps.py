"""The app's name and title."""

from django.apps import AppConfig


class RatesConfig(AppConfig):
    """Rates, on any database."""

    name = "testproject.rates"
    label = "rates"
