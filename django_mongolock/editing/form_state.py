"""What a page was made of, signed into it; and what differs when it comes back.

It is the version of a model that has one, and a digest of each value that the form and its inlines show. It reveals no
value, and cannot be forged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from django.core import signing
from django.core.exceptions import ValidationError
from django.core.files.uploadedfile import UploadedFile
from django.db.models import Model
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from ..versions.forms import (
    Fields,
    Page,
    columns,
    digest,
    digest_left_alone,
    display,
    in_words,
    is_current,
    page_of,
    show,
    unsign,
    was_left_alone,
)

SALT: Final = "django_mongolock.editing.form_state"


class Rows(TypedDict):
    """The page of the object itself, and those of its rows by the prefix of their formset and by their keys."""

    page: Page
    rows: dict[str, dict[str, Page]]


@dataclass(frozen=True, slots=True)
class Difference:
    """What a form would change of what is stored now, for people. verdict: who changed it since the page was made."""

    label: str
    stored: str
    typed: str
    verdict: str


#: The rows of one formset: each an object, and the fields that the form has for it.
Shown = Mapping[str, Iterable[tuple[Model, Fields]]]


def seal(obj: Model, fields: Fields, rows: Shown | None = None) -> str:
    """Return what a page of *obj* with these fields and rows is made of, for its hidden field."""
    pages = {prefix: {str(row.pk): page_of(row, its) for row, its in shown} for prefix, shown in (rows or {}).items()}
    return signing.dumps({"page": page_of(obj, fields), "rows": pages}, salt=SALT, compress=True)


def unseal(sealed: str | None) -> Rows | None:
    """Return what seal() has sealed; None for anything else."""
    found: Rows | None = unsign(sealed, SALT)
    return found


def is_unchanged(sealed: str | None, obj: Model, fields: Fields, rows: Shown | None = None) -> bool:
    """Return whether all that the page showed is as it was. It counts as changed if the page does not say."""
    had = unseal(sealed)
    if had is None:
        return False
    now = {prefix: {str(row.pk): (row, its) for row, its in shown} for prefix, shown in (rows or {}).items()}
    if any(had["rows"].get(prefix, {}).keys() != now.get(prefix, {}).keys() for prefix in had["rows"].keys() | now):
        return False
    there = ((had["rows"][prefix][pk], *each) for prefix, found in now.items() for pk, each in found.items())
    return all(is_current(*each) for each in ((had["page"], obj, fields), *there))


def merge(form: Any, stored: Model, had: Page | None, label: str = "") -> list[Difference]:
    """Return what a bound form would change. A field that was not changed in it then shows what is stored."""
    found = []
    for field in columns(stored, form.fields):
        now = field.value_from_object(stored)
        value = _typed(form, field.name)
        typed = None if value is _INVALID else digest(field, value)
        if typed in (digest(field, now), digest_left_alone(field, form.fields[field.name], now)):
            continue
        theirs = had is None or had["fields"].get(field.name) != digest(field, now)
        mine = not was_left_alone(had, field, typed)
        name = capfirst(form.fields[field.name].label or field.verbose_name)
        words = str(form[field.name].value() or "") if value is _INVALID else in_words(field, value)
        verdict = _verdict(theirs=theirs, mine=mine)
        if isinstance(value, UploadedFile):
            verdict = "; ".join((verdict, _("choose the file again")))  # no page can keep it
        found.append(Difference(f"{label}{name}", display(field, stored), words, verdict))
        if theirs and not mine:
            show(form.fields[field.name], now)
    return found


def _verdict(*, theirs: bool, mine: bool) -> str:
    if theirs and mine:
        return _("both of you")
    return _("someone else; you had not changed it") if theirs else _("only you")


def merge_rows(had: Mapping[str, Page], there: Mapping[str, Model], title: str) -> list[Difference]:
    """Return the rows that only the page has (*had*), or only the database (*there*)."""
    added = [
        Difference(title, str(row), "", _("added meanwhile; it stays")) for pk, row in there.items() if pk not in had
    ]
    gone = [
        Difference(f"{title} {pk}", "", _("in the form, as a new one"), _("deleted meanwhile"))
        for pk in had
        if pk not in there
    ]
    return added + gone


_INVALID: Final = object()


def _typed(form: Any, name: str) -> Any:
    """Return the value that was typed into a field, also if the form refused it for another reason."""
    if name in (cleaned := getattr(form, "cleaned_data", {})):
        return cleaned[name]
    try:
        return form.fields[name].clean(form[name].data)
    except (ValidationError, TypeError):
        return _INVALID


def without_gone(data: Any, prefix: str, pk_name: str, gone: set[int]) -> None:
    """Change the data of a formset so that the rows with these numbers, which were deleted meanwhile, are new ones.

    A formset expects the rows of its page to exist. Those that do come first, as it expects; what was typed into the
    others follows, to be added again.
    """
    initial = int(data[f"{prefix}-INITIAL_FORMS"])
    old = {place: data.pop(name) for name in list(data) if (place := _place(name, prefix)) is not None}
    order = sorted({number for number, _ in old}, key=lambda number: (number >= initial or number in gone, number))
    new = {number: place for place, number in enumerate(order)}
    for (number, field), values in old.items():
        data.setlist(f"{prefix}-{new[number]}-{field}", [""] if field == pk_name and number in gone else values)
    data[f"{prefix}-INITIAL_FORMS"] = str(initial - len(gone))


def _place(name: str, prefix: str) -> tuple[int, str] | None:
    """Return the number of the row and the field that a name of the data stands for."""
    rest = name.removeprefix(f"{prefix}-")
    number, dash, field = rest.partition("-")
    return (int(number), field) if rest != name and dash and number.isdecimal() else None
