from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.translation import gettext_lazy as _


class MongoLockConfig(AppConfig):
    """The app that registers the kind of the named locks, the checks and `contrib`, and has ``migrate`` make the
    indexes.
    """

    name = "django_mongolock"
    verbose_name = _("Locks")
    default_auto_field = "django_mongodb_backend.fields.ObjectIdAutoField"

    def ready(self) -> None:
        from .backends import load_backends
        from .contrib import register
        from .inspection.kinds import sources
        from .inspection.named_locks import named_locks
        from .management import (
            checks,  # noqa: F401 - they register themselves
            make_indexes_after_migrate,
        )
        from .owners import watch_sessions
        from .router import add_router

        if named_locks not in sources:
            sources.insert(0, named_locks)
        add_router()
        watch_sessions()
        register()
        load_backends()
        post_migrate.connect(make_indexes_after_migrate, sender=self, dispatch_uid="django_mongolock.management")
