from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class HistoryConfig(AppConfig):
    """The app that records what happens to locks, up to the size in MONGOLOCK["HISTORY"]."""

    name = "django_mongolock.history"
    label = "mongolock_history"
    verbose_name = _("Lock history")
    default_auto_field = "django_mongodb_backend.fields.ObjectIdAutoField"

    def ready(self) -> None:
        from ..backends import observers
        from ..inspection.pictures import panels, pasts
        from ..router import LABELS
        from .past import panel, told
        from .writer import observe

        LABELS.add(self.label)
        if observe not in observers:
            observers.append(observe)
            pasts.append(told)
            panels.append(panel)
