"""Filters of the admin's templates: see `words`."""

from datetime import datetime

from django import template
from django.utils.safestring import SafeString

from django_mongolock import words
from django_mongolock.admin.columns import time_ago as show_time_ago

register = template.Library()
for function in (words.who, words.where, words.mode):
    register.filter(function.__name__, function)


@register.filter
def time_ago(value: datetime | None, now: datetime) -> SafeString | str:
    """A moment, relative and absolute; "?" where the document does not tell."""
    return "?" if value is None else show_time_ago(value, now)


@register.filter
def time_left(value: datetime | None, now: datetime) -> str:
    """How long until then; "?" where the document does not tell."""
    return "?" if value is None else words.left(value, now)
