from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.translation import gettext_lazy as _


class IdempotencyConfig(AppConfig):
    """Has ``migrate`` make the index of the results, and ``clear_stale_locks`` remove those whose time is over."""

    name = "django_mongolock.idempotency"
    label = "mongolock_idempotency"
    verbose_name = _("Results that are kept")

    def ready(self) -> None:
        from ..inspection.operations import leftovers
        from .results import make_index_after_migrate, remove_old

        if remove_old not in leftovers:
            leftovers.append(remove_old)
        post_migrate.connect(make_index_after_migrate, sender=self, dispatch_uid="django_mongolock.idempotency.migrate")
