from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DocumentLocksConfig(AppConfig):
    """The app that shows the document locks in lists, pages, commands and checks."""

    name = "django_mongolock.documents"
    label = "mongolock_documents"
    verbose_name = _("Document locks")

    def ready(self) -> None:
        from ..inspection.kinds import sources
        from .kind import kinds

        sources.append(kinds)
