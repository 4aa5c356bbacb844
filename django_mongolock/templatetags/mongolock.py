"""What the templates of the admin use. Django imports this module in every project: it must not need the admin."""

import json
from datetime import datetime
from typing import Any

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..inspect import display
from ..inspect.snapshot import Entry

register = template.Library()
for function in (
    display.who,
    display.where,
    display.mode,
    display.what,
    display.details,
    display.moment,
    display.duration,
):
    register.filter(function.__name__, function)


@register.filter
def as_shown(holder: Entry, key: str) -> str:
    """What a form carries of one holder of the lock *key*."""
    return json.dumps([key, [holder.token]])


@register.filter
def time_ago(value: datetime | None, now: datetime) -> SafeString | str:
    """A moment, relative and absolute; "?" where the document does not tell."""
    if value is None:
        return "?"
    return format_html(
        '<time datetime="{}" class="mongolock-time">{} <small>{}</small></time>',
        value.isoformat(),
        display.ago(value, now),
        display.moment(value),
    )


@register.filter
def time_left(value: datetime | None, now: datetime) -> str:
    """How long until then; "?" where the document does not tell."""
    return "?" if value is None else display.left(value, now)


@register.inclusion_tag("django_mongolock/editing/panel.html", takes_context=True)
def edit_lock(context: template.Context, editing: Any, form_id: str = "") -> dict[str, Any]:
    """Who edits the page, above its form. form_id: the id of the form."""
    return {
        **editing.context,
        "form_id": form_id,
        "take_over_address": editing.action_address("take-over"),
        "csrf_token": context.get("csrf_token"),
    }


@register.inclusion_tag("django_mongolock/editing/fields.html")
def edit_lock_fields(editing: Any) -> dict[str, Any]:
    """The hidden fields, inside the form."""
    return {"editing": editing}


@register.filter
def milliseconds(value: float) -> str:
    """A length of time that the documents have in milliseconds."""
    return display.duration(value / 1000) if value else "–"


@register.simple_tag(takes_context=True)
def lock_address(context: dict[str, Any], key: str) -> str:
    """Where the admin has the page of one lock."""
    from ..admin.lock_admin import address_of

    return address_of(key, context["request"].current_app)
