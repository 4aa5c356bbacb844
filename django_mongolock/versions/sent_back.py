"""What a browser sends back of a field that a person leaves alone: not always what is stored.

A text area gets other line ends, a text field loses them, a date its microseconds; and the form strips what it gets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.http import QueryDict

#: Fields whose value is a key or a file, which come back as they are; to clean them, the database would be asked.
_UNCHANGED = (forms.FileField, forms.ModelChoiceField)
_NAME = "field"


def sent_back(field: forms.Field, value: Any) -> Any:
    """Return what the form makes of *value* after a browser has shown it; *value* itself if that is not valid."""
    if isinstance(field, _UNCHANGED):
        return value
    widget: Any = getattr(field.widget, "widget", field.widget)  # the admin wraps some
    try:
        shown = widget.get_context(_NAME, field.prepare_value(value), {})["widget"]
        data = QueryDict(mutable=True)
        _send(shown, data)
        return field.clean(widget.value_from_datadict(data, {}, _NAME))
    except (ValidationError, TypeError, ValueError, KeyError, AttributeError):  # a widget may be of any kind
        return value


def _send(shown: Mapping[str, Any], data: QueryDict) -> None:
    """Put into *data* what a browser sends of a widget, and of those that it consists of."""
    for part in shown.get("subwidgets", ()):
        _send(part, data)
    value = shown.get("value")
    if shown.get("type") == "checkbox" and "optgroups" not in shown:
        value = (value or "on") if shown["attrs"].get("checked") else None
    if "subwidgets" in shown or value is None:
        return
    values = value if isinstance(value, (list, tuple)) else [value]
    data.setlist(shown["name"], [_as_text(each, in_line="type" in shown) for each in values])


def _as_text(value: Any, *, in_line: bool) -> str:
    """Return the text as browsers send it: an input has no line ends, a text area those of the network."""
    return re.sub(r"\r\n|\r|\n", "" if in_line else "\r\n", str(value))
