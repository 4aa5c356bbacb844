# ruff: noqa: E402 - the settings come first
# mypy: disable-error-code="import-not-found,import-untyped,attr-defined"
"""Use the admin of a project with one package of other people. Print each fault on a line, by page."""

from __future__ import annotations

import html
import os
import re
import sys
import traceback
from typing import Any

import django
from django.conf import settings

PACKAGE = os.environ["PLATFORM_ADMIN"]
#: The database of this run, because users and objects of another run have the same keys.
DATABASE = f"mongolock_admins_{os.getpid()}"
CONTRIB = ["admin", "auth", "contenttypes", "messages", "sessions", "staticfiles"]
APPS = ["import_export"] if PACKAGE == "import_export" else [PACKAGE] if PACKAGE else []
settings.configure(
    SECRET_KEY="tests",
    ALLOWED_HOSTS=["*"],
    USE_TZ=True,
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    DATABASES={
        "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
        "locks": {"ENGINE": "django_mongodb_backend", "HOST": os.environ["MONGODB_URI"], "NAME": DATABASE},
    },
    DATABASE_ROUTERS=["django_mongolock.router.MongoLockRouter"],
    MONGOLOCK={"DATABASE": "locks"},
    INSTALLED_APPS=[
        *APPS,  # themes come first
        *(f"django.contrib.{name}" for name in CONTRIB),
        "django_mongolock",
        "django_mongolock.versions",
        "django_mongolock.editing",
        "tests.platforms.articles",
    ],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    TEMPLATES=[
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "APP_DIRS": True,
            "OPTIONS": {
                "context_processors": [
                    "django.template.context_processors.request",
                    "django.contrib.auth.context_processors.auth",
                    "django.contrib.messages.context_processors.messages",
                ]
            },
        }
    ],
    STATIC_URL="/static/",
    ROOT_URLCONF="tests.platforms.admin_urls",
)
django.setup()

from django.contrib.auth.models import User
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import connections
from django.test import Client

from tests.platforms.articles.models import Article, Note


def fields(page: Any, form: str) -> dict[str, str]:
    """Return the data that a browser sends of the inputs of a form."""
    text = page.content.decode()
    body = re.search(rf'<form[^>]*id="{form}"[^>]*>(.*?)</form>', text, re.DOTALL) or re.search("(.*)", text, re.DOTALL)
    assert body
    found: dict[str, str] = {}
    for tag in re.findall(r"<input[^>]*>", body[1]):
        attributes = dict(re.findall(r'([a-z-]+)="([^"]*)"', tag))
        if "name" in attributes and attributes.get("type") not in ("submit", "checkbox", "file"):
            found[attributes["name"]] = html.unescape(attributes.get("value", ""))
    return found


def browser(name: str) -> Client:
    user, _made = User.objects.get_or_create(username=name, defaults={"is_staff": True, "is_superuser": True})
    client = Client()
    client.force_login(user)
    return client


class Pages:
    """The pages of one model."""

    def __init__(self, model: Any) -> None:
        self.model, self.name = model, model._meta.model_name
        self.list = f"/admin/articles/{self.name}/"
        self.anna, self.ben = browser("anna"), browser("ben")

    def new(self) -> Any:
        """An object that was saved by the admin, so that the package knows it."""
        self.model.objects.all().delete()
        self.anna.post(f"{self.list}add/", {"title": "old"})
        return self.model.objects.get()

    def page(self, client: Client, pk: int) -> tuple[str, dict[str, str]]:
        address = f"{self.list}{pk}/change/"
        return address, fields(client.get(address), f"{self.name}_form")

    def change(self) -> None:
        made = self.new()
        address, sent = self.page(self.anna, made.pk)
        assert sent["version_read"], "a seal"
        assert self.anna.post(address, sent | {"title": "new"}).status_code == 302
        assert self.model.objects.get().title == "new"

    def refused(self) -> None:
        made = self.new()
        address, sent = self.page(self.anna, made.pk)
        made.title = "theirs"
        made.save()
        answer = self.anna.post(address, sent | {"title": "mine"})
        assert "Not saved: this was changed" in answer.content.decode()
        assert self.model.objects.get().title == "theirs"

    def row(self) -> None:
        self.new()
        sent = fields(self.anna.get(self.list), "changelist-form")
        assert self.anna.post(self.list, sent | {"form-0-title": "row", "_save": "Save"}).status_code == 302
        assert self.model.objects.get().title == "row"
        self.model.objects.update(title="theirs")
        answer = self.anna.post(self.list, sent | {"form-0-title": "mine", "_save": "Save"})
        if PACKAGE != "jazzmin":  # whose list shows no errors of rows
            assert "Not saved: this was changed" in answer.content.decode()
        assert self.model.objects.get().title == "theirs"

    def delete(self) -> None:
        made = self.new()
        asked = self.anna.get(f"{self.list}{made.pk}/delete/")["Location"]
        assert self.anna.get(asked).status_code == 200
        made.title = "theirs"
        made.save()
        self.anna.post(asked, {"post": "yes"})
        assert self.model.objects.exists(), "it was changed since the page was shown"
        asked = self.anna.get(f"{self.list}{made.pk}/delete/")["Location"]
        assert self.anna.post(asked, {"post": "yes"}).status_code == 302
        assert not self.model.objects.exists()

    def panel(self) -> None:
        if self.model is Article:
            return
        made = self.new()
        page = self.anna.get(f"{self.list}{made.pk}/change/").content.decode()
        assert page.count("data-mongolock-editing=") == 1
        assert 'name="edit_lock_tab"' in page
        assert "editing.js" in page
        shown = self.ben.get(f"{self.list}{made.pk}/change/").content.decode()
        assert "This is being edited by anna." in shown
        assert 'name="title"' not in shown

    def revert(self) -> None:
        if PACKAGE not in ("simple_history", "reversion"):
            return
        made = self.new()
        address, sent = self.page(self.anna, made.pk)
        assert self.anna.post(address, sent | {"title": "new"}).status_code == 302
        before = self.model.objects.get()
        old = f"{self.list}{made.pk}/history/{self.oldest(made)}/"
        if self.model is Note:  # while ben edits it, nothing is reverted
            self.ben = browser("ben")
            self.ben.get(address)
            assert self.anna.get(old).status_code == 200
            assert self.anna.post(old, {"title": "old"}).status_code < 400
            assert self.model.objects.get().title == "new"
            self.ben.post("/admin/logout/")
        page = self.anna.get(old)
        assert page.status_code == 200
        sent = fields(page, f"{self.name}_form")
        answer = self.anna.post(old, sent)
        assert answer.status_code == 302, answer.content.decode()
        after = self.model.objects.get()
        assert after.title == "old"
        if self.model is Article:
            assert after.version > before.version, "a new version"

    def oldest(self, made: Any) -> int:
        if PACKAGE == "simple_history":
            return int(made.history.earliest().pk)
        from reversion.models import Version

        return int(Version.objects.get_for_object(made).last().pk)

    def imported(self) -> None:
        if PACKAGE != "import_export":
            return
        from import_export.exceptions import ImportError  # noqa: A004 - its name
        from import_export.resources import modelresource_factory

        self.new()
        assert self.anna.get(f"{self.list}import/").status_code == 200
        resource = modelresource_factory(self.model)()
        rows = resource.export()
        row = list(rows.pop())
        row[rows.headers.index("title")] = "imported"
        rows.append(row)
        resource.import_data(rows, raise_errors=True)
        assert self.model.objects.get().title == "imported"
        if self.model is Article:  # the file has the version that was exported
            try:
                resource.import_data(rows, raise_errors=True)
            except ImportError:
                return
            raise AssertionError("an outdated file was imported")


def main() -> int:
    """Run each page, and return how many failed."""
    call_command("migrate", run_syncdb=True, verbosity=0)
    ours = [f"check: {found}" for found in run_checks() if (found.id or "").startswith("mongolock")]
    failed = [line for line in ours if "W002" not in line]
    for model in (Article, Note):
        pages = Pages(model)
        for name in ("change", "refused", "row", "delete", "panel", "revert", "imported"):
            try:
                getattr(pages, name)()
            except Exception:  # noqa: BLE001 - it is told
                failed.append(f"{model.__name__} {name}: {traceback.format_exc(limit=-3)}")
    locks: Any = connections["locks"]
    locks.database.client.drop_database(DATABASE)
    print("\n".join(failed))  # noqa: T201
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
