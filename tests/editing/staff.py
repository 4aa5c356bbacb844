"""Members of the staff, with Django's test client as their browser, and functions that read their pages."""

from __future__ import annotations

import html
import itertools
import re
from typing import Any

from django.contrib.auth.models import Permission, User
from django.db import transaction
from django.db.models import Model
from django.test import Client

from django_mongolock.backends import mongo_store
from django_mongolock.editing import edit_key

#: The permission to take over from another user.
TAKES = "take_over_edit_lock"

_numbers = itertools.count(1)


def staff(name: str = "", *permissions: str, superuser: bool = False) -> Client:
    """Return a browser with a logged-in member of the staff, who may change everything, but not take over."""
    with transaction.atomic():  # a caller that the database refuses starts again from here
        user, made = User.objects.get_or_create(
            username=name or f"user{next(_numbers)}", defaults={"is_staff": True, "is_superuser": superuser}
        )
        if made:
            labels = ("shop", "rates", "auth")
            user.user_permissions.set(Permission.objects.filter(content_type__app_label__in=labels))
        user.user_permissions.add(*Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def fields_of(page: Any) -> dict[str, str]:
    """Return the data that a browser would send back of the untouched form, from hidden fields, inputs, areas, and
    chosen options."""
    text = page.content.decode()
    body = re.search(r'<form[^>]*id="[a-z_-]+"[^>]*novalidate>(.*?)</form>', text, re.DOTALL) or re.search(
        r'<form method="post" id="order(?:-form)?">(.*?)</form>', text, re.DOTALL
    )
    assert body, text
    found: dict[str, str] = {}
    for tag in re.findall(r"<input[^>]*>", body[1]):
        attributes = dict(re.findall(r'([a-z-]+)="([^"]*)"', tag))
        kind = attributes.get("type", "text")
        if kind == "submit" or (kind in ("checkbox", "radio") and " checked" not in tag) or "name" not in attributes:
            continue
        found[attributes["name"]] = html.unescape(attributes.get("value", "on" if kind == "checkbox" else ""))
    for name, value in re.findall(r'<textarea[^>]*name="([^"]*)"[^>]*>\n?(.*?)</textarea>', body[1], re.DOTALL):
        found[name] = html.unescape(value)
    for name, options in re.findall(r'<select[^>]*name="([^"]*)"[^>]*>(.*?)</select>', body[1], re.DOTALL):
        if chosen := re.search(r'<option value="([^"]*)" selected', options):
            found[name] = html.unescape(chosen[1])
    return found


def text_of(page: Any) -> str:
    """Return the page as it is read."""
    body = re.sub(r"<(script|style|noscript).*?</\1>", "", page.content.decode(), flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", body)))


def state_of(page: Any) -> str:
    """Return the state that the panel shows, in a word."""
    found = re.search(r'data-mongolock-editing="([a-z]+)"', page.content.decode())
    return found[1] if found else ""


def tell(client: Client, address: str, action: str, fields: dict[str, str], **more: Any) -> Any:
    """Send the data of the page's script, and return the answer."""
    mark = "&" if "?" in address else "?"
    names = ("edit_lock_tab", "version_read")
    data = {**{name: fields[name] for name in names if name in fields}, **more}
    return client.post(f"{address}{mark}edit-lock={action}", data, headers={"Accept": "application/json"})


def holders(obj: Model | str) -> list[dict[str, Any]]:
    """Return the stored holders of the edit lock."""
    found = mongo_store().latest.find_one({"_id": edit_key(obj)}) or {}
    held: list[dict[str, Any]] = found.get("holders", [])
    return held


def token_of(obj: Model | str) -> str:
    """Return the fencing token of the editor."""
    (holder,) = holders(obj)
    return str(holder["token"])


def page_of(obj: Model) -> str:
    """Return the address of the page that changes *obj*."""
    return f"/admin/{obj._meta.app_label}/{obj._meta.model_name}/{obj.pk}/change/"


class Tab:
    """A tab in the browser of a member of the staff, and the page that it shows."""

    def __init__(self, who: str | Client, target: Model | str, *permissions: str) -> None:
        self.client = staff(who, *permissions) if isinstance(who, str) else who
        self.address = target if isinstance(target, str) else page_of(target)
        self.page = self.client.get(self.address)

    @property
    def state(self) -> str:
        """The state that the panel shows, in a word."""
        return state_of(self.page)

    @property
    def text(self) -> str:
        """The page as it is read."""
        return text_of(self.page)

    @property
    def html(self) -> str:
        """The page as it is sent."""
        html: str = self.page.content.decode()
        return html

    @property
    def fields(self) -> dict[str, str]:
        """The fields of the form."""
        return fields_of(self.page)

    def send(self, typed: dict[str, str] | None = None, **more: str) -> Any:
        """Send the form with *typed*, and return the answer. If the answer is a page, it is shown."""
        answer = self.client.post(self.address, self.fields | (typed or {}) | more)
        self.page = answer if answer.status_code == 200 else self.page
        return answer

    def tell(self, action: str, **more: Any) -> Any:
        """Send the data of the page's script, and return the answer."""
        return tell(self.client, self.address, action, self.fields, **more).json()

    def take_over(self, token: str, more: str = "") -> Any:
        """Take over from the editor with this token, by the button."""
        address, data = f"{self.address}?edit-lock=take-over{more}", {"edit_lock_take_over": token}
        self.page = self.client.post(address, data, follow=True)
        return self.page
