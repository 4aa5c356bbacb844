"""A model, without a version, of every field that a browser sends back in another form, with rows of the same.

The classes are in a registry of their own. No migration and no other test sees them.
"""

# ruff: noqa: DJ008 - they are never shown

from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from django import forms
from django.apps.registry import Apps
from django.contrib import admin
from django.core.files.storage import InMemoryStorage
from django.db import connection, models

from django_mongolock.editing.admin import EditLockMixin

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
    TabularInline = admin.TabularInline[Any, Any]
else:
    ModelAdmin, TabularInline = admin.ModelAdmin, admin.TabularInline

registry = Apps(["django.contrib.contenttypes", "testproject.rates"])
MOMENT = datetime(2026, 1, 2, 23, 4, 5, 678, tzinfo=UTC)
TEXT = "one\ntwo \n\n three "


class Author(models.Model):
    """Pointed to by its name."""

    objects: Any = models.Manager()

    name = models.CharField(max_length=50, unique=True)

    class Meta:
        apps = registry
        app_label = "rates"


class Written(models.Model):
    """The common fields of a note and its rows."""

    objects: Any = models.Manager()

    line = models.CharField(max_length=50, default=" a  b ")
    text = models.TextField(default=TEXT)
    moment = models.DateTimeField(default=MOMENT)

    class Meta:
        abstract = True


class Note(Written):
    """The object."""

    title = models.CharField(max_length=50, default="title")
    day = models.DateField(default=date(2026, 1, 2))
    clock = models.TimeField(default=time(1, 2, 3, 456))
    amount = models.DecimalField(max_digits=9, decimal_places=2, default=Decimal("1234.50"))
    ratio = models.FloatField(default=0.1)
    data = models.JSONField(default=dict)
    file = models.FileField(storage=InMemoryStorage(), blank=True, default="one.txt")
    author = models.ForeignKey(Author, models.CASCADE, to_field="name", db_constraint=False)
    others = models.ManyToManyField(Author, related_name="+", blank=True)

    class Meta:
        apps = registry
        app_label = "rates"


class Row(Written):
    """A row of it."""

    note = models.ForeignKey(Note, models.CASCADE)

    class Meta:
        apps = registry
        app_label = "rates"


class Rows(TabularInline):
    """The rows of a note."""

    model = Row
    extra = 0
    formfield_overrides = {models.TextField: {"widget": forms.Textarea}}  # noqa: RUF012 - as Django wants it


class NoteAdmin(EditLockMixin, ModelAdmin):
    """The page and the list."""

    inlines = (Rows,)
    list_display = ("id", "title", "line", "moment")
    list_editable = ("title", "line", "moment")


def make_tables() -> None:
    """Make a table for each, once in a process."""
    if Note._meta.db_table in connection.introspection.table_names():
        return
    with connection.schema_editor() as editor:
        for model in (Author, Note, Row):
            editor.create_model(model)


def new_note() -> Note:
    """A note with two rows, and nothing else."""
    for model in (Row, Note.others.through, Note, Author):
        model._base_manager.all().delete()
    author = Author.objects.create(name="x")
    note: Note = Note.objects.create(author=author, data={"b": [1.0], "a": "x "})
    note.others.set([author])
    Row.objects.create(note=note)
    Row.objects.create(note=note)
    return note
