"""The app's name."""

from django.apps import AppConfig


class ExternalConfig(AppConfig):
    """The external service. Only the web server is shared with the shop."""

    name = "testproject.external"
    label = "external"
    verbose_name = "External service"
