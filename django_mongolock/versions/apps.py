from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class VersionsConfig(AppConfig):
    """The app with the field, the forms and the admin of models with a version."""

    name = "django_mongolock.versions"
    label = "mongolock_versions"
    verbose_name = _("Versions")
