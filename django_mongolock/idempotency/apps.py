from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class IdempotencyConfig(AppConfig):
    """Has ``migrate`` make the index of the results, and ``clear_stale_locks`` remove those that are over."""

    name = "django_mongolock.idempotency"
    label = "mongolock_idempotency"
    verbose_name = _("Results that are kept")

    def ready(self) -> None:
        from ..engine.store.layout import purged
        from .calls import results_beside

        if results_beside not in purged:
            purged.append(results_beside)
