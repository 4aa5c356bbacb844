"""The app's name."""

from django.apps import AppConfig


class ExternalConfig(AppConfig):
    """The external service; it shares nothing with the shop but the web server."""

    name = "testproject.external"
    label = "external"
    verbose_name = "External service"
