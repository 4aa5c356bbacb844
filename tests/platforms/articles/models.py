"""Articles with a version and without, in the history that the package keeps."""

# ruff: noqa: DJ008 - they are shown by their numbers
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import os
from typing import Any

from django.db import models

from django_mongolock.versions import VersionedModel

PACKAGE = os.environ.get("PLATFORM_ADMIN", "")


def history() -> Any:
    """The field by which django-simple-history knows a model."""
    if PACKAGE != "simple_history":
        return None
    from simple_history.models import HistoricalRecords

    return HistoricalRecords()


class Article(VersionedModel):
    """An article with a version."""

    title = models.CharField(max_length=50)
    history = history()


class Note(models.Model):
    """Without."""

    title = models.CharField(max_length=50)
    history = history()


if PACKAGE == "auditlog":
    from auditlog.registry import auditlog

    auditlog.register(Article)
    auditlog.register(Note)
