"""The admin of the articles, with our class before that of the package."""

# mypy: disable-error-code="misc"
from __future__ import annotations

from importlib import import_module
from typing import Any

from django.contrib import admin

from django_mongolock.editing.admin import EditLockMixin
from django_mongolock.versions.admin import VersionedAdmin
from tests.platforms.articles.models import PACKAGE, Article, Note

#: The admin class of each package.
CLASSES = {
    "simple_history": ("simple_history.admin", "SimpleHistoryAdmin"),
    "reversion": ("reversion.admin", "VersionAdmin"),
    "import_export": ("import_export.admin", "ImportExportModelAdmin"),
    "unfold": ("unfold.admin", "ModelAdmin"),
}
module, name = CLASSES.get(PACKAGE, ("django.contrib.admin", "ModelAdmin"))
Other: Any = getattr(import_module(module), name)


class Listed:
    """Both have a list that is edited."""

    list_display = ("id", "title")
    list_editable = ("title",)


@admin.register(Article)
class ArticleAdmin(Listed, VersionedAdmin, Other):
    """With the versions of ours, and the pages of the package."""


@admin.register(Note)
class NoteAdmin(Listed, EditLockMixin, Other):
    """With edit locks."""
