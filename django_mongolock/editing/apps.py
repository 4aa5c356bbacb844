from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class EditingConfig(AppConfig):
    """The app with the templates, the script and the checks of edit locks."""

    name = "django_mongolock.editing"
    label = "mongolock_editing"
    verbose_name = _("Edit locks")

    def ready(self) -> None:
        from . import checks  # noqa: F401 - they register themselves
