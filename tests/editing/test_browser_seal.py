"""The data that a real browser sends back, on the form, in the list and on the page that deletes (F91)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect
from pytest_django import Settings

from tests.editing import notes
from tests.editing.notes import MOMENT, Note, Row, new_note
from tests.editing.test_browser import Person, _quick, chromium, patiently, people, requests, save, says

__all__ = ["_quick", "chromium", "people", "requests"]

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "mongo"]),
    pytest.mark.long,
]
LIST = "/admin/rates/note/"


@pytest.fixture
def note(settings: Settings) -> Note:
    """Return a note in the admin of a site with another time zone than that of the database."""
    settings.TIME_ZONE = "Asia/Kolkata"
    notes.make_tables()
    return new_note()


def rows_of(note: Note) -> list[dict[str, Any]]:
    """Return the note and its rows as they are stored, without the title."""
    names = [field.attname for field in Note._meta.concrete_fields if field.name != "title"]
    others = {"others": list(note.others.values_list("pk", flat=True))}
    return [others, *patiently(lambda: [*Note.objects.values(*names), *Row.objects.order_by("pk").values()])]


def test_left_alone(people: Callable[..., Person], note: Note) -> None:
    """Only the typed text is written. Other fields and rows keep another writer's changes."""
    tab = people("root", superuser=True).open(f"{LIST}{note.pk}/change/")
    says(tab, "You are editing this.")
    tab.fill("[name=title]", "mine")
    patiently(lambda: Note.objects.update(line="theirs", moment="2026-02-03T04:05:06.000007Z"))
    row = Row.objects.order_by("pk").first()
    patiently(lambda: Row.objects.filter(pk=row.pk).update(text="their\nrow"))
    there = rows_of(note)
    save(tab, f"**{LIST}")
    assert patiently(Note.objects.get).title == "mine"
    assert rows_of(note) == there, "nothing was typed there"


@pytest.mark.parametrize("name", ["one.txt", "two.txt"])
def test_file(people: Callable[..., Person], note: Note, name: str) -> None:
    """F91: A page cannot keep a chosen file, and says so, even if the file has the name of the stored one."""
    tab = people("root", superuser=True).open(f"{LIST}{note.pk}/change/")
    says(tab, "You are editing this.")
    tab.set_input_files("[name=file]", {"name": name, "mimeType": "text/plain", "buffer": b"new"})
    tab.fill("[name=title]", "mine")
    patiently(lambda: Note.objects.update(title="theirs", line="theirs"))
    tab.click("[name=_save]")
    expect(tab.locator(".errorlist.nonfield")).to_contain_text("Not saved: this was changed while you were editing it.")
    expect(tab.locator(".errorlist.nonfield")).to_contain_text("Choose the file again")
    tab.set_input_files("[name=file]", {"name": name, "mimeType": "text/plain", "buffer": b"new"})
    save(tab, f"**{LIST}")
    saved = patiently(Note.objects.get)
    assert (saved.file.read(), saved.line) == (b"new", "theirs")


def test_list(people: Callable[..., Person], note: Note) -> None:
    """A list that was open while another writer saved overwrites nothing. The second send saves."""
    tab = people("root", superuser=True).open(LIST)
    tab.fill("[name=form-0-title]", "mine")
    patiently(lambda: Note.objects.update(title="theirs", line="theirs"))
    tab.click("[name=_save]")
    expect(tab.locator("#result_list")).to_contain_text("Changed meanwhile: Line, Title.")
    assert tab.input_value("[name=form-0-title]") == "mine"
    assert patiently(Note.objects.values_list("line", "title").get) == ("theirs", "theirs")
    tab.click("[name=_save]")
    expect(tab.locator(".success")).to_be_visible()
    moment = patiently(lambda: Note.objects.get().moment)
    assert patiently(Note.objects.values_list("line", "title").get) == ("theirs", "mine")
    assert moment == MOMENT, "nothing was typed there"


def test_delete(people: Callable[..., Person], note: Note) -> None:
    """An old confirmation deletes no object that was saved since."""
    tab = people("root", superuser=True).open(f"{LIST}{note.pk}/delete/")
    patiently(lambda: Note.objects.update(text="theirs"))
    tab.click("input[type=submit]")
    expect(tab.locator(".error")).to_contain_text("This was changed meanwhile. Look again before you delete it.")
    assert patiently(Note.objects.exists)
    tab.click("input[type=submit]")
    tab.wait_for_url(f"**{LIST}")
    assert not patiently(Note.objects.exists)
