"""Tags and filters for the templates of the app. Django imports this module in every project, with or without the
admin.
"""

import json
from typing import Any

from django import template

from ..exceptions import printable
from ..inspection import display
from ..inspection.snapshot import Party

register = template.Library()
for function in (
    printable,
    display.who,
    display.details,
    display.look_at_process,
    display.where,
    display.mode,
    display.state_badge,
    display.moment,
    display.duration,
    display.time_ago,
    display.time_left,
):
    register.filter(function.__name__, function)


@register.filter
def as_shown(holder: Party, key: str) -> str:
    """Return the form's value for one holder of the lock *key*. See `admin.confirmation`."""
    return json.dumps(["locks", key, [holder.token]])


@register.simple_tag(takes_context=True)
def lock_address(context: dict[str, Any], key: str) -> str:
    """Return the address of the page of a lock in the admin."""
    return display.lock_address(key, context["request"].current_app)


@register.inclusion_tag("django_mongolock/editing/panel.html", takes_context=True)
def edit_lock(context: template.Context, editing: Any, form_id: str = "") -> dict[str, Any]:
    """Show the editor of the page, above its form.

    - form_id: id of the form.
    """
    return {
        **editing.context,
        "form_id": form_id,
        "csrf_token": context.get("csrf_token"),
    }


@register.inclusion_tag("django_mongolock/editing/fields.html")
def edit_lock_fields(editing: Any) -> dict[str, Any]:
    """Add the hidden fields, inside the form."""
    return {"editing": editing}
