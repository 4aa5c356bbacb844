from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class HistoryConfig(AppConfig):
    """Has what happens to locks written, where MONGOLOCK["HISTORY"] says how much is kept."""

    name = "django_mongolock.history"
    label = "mongolock_history"
    verbose_name = _("lock events")

    def ready(self) -> None:
        from ..backends.mongo import observers
        from .writer import observe

        if observe not in observers:
            observers.append(observe)
