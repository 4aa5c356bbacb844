from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class VersionsConfig(AppConfig):
    """Checks how transactions begin where models have a version."""

    name = "django_mongolock.versions"
    label = "mongolock_versions"
    verbose_name = _("Versions")

    def ready(self) -> None:
        from . import checks  # noqa: F401 - they register themselves
