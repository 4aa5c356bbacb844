"""Every page, endpoint and command of the package. A new one must be added here, because `test_surfaces` compares."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from django.contrib import admin
from django.core.management import CommandError, call_command
from django.test import Client

import django_mongolock
from django_mongolock.admin import LockAdmin
from django_mongolock.admin.dashboard import LockDashboardAdmin
from django_mongolock.documents.admin import DocumentLockAdminMixin
from django_mongolock.editing import EditLockViewMixin
from django_mongolock.editing.admin import EditLockMixin
from django_mongolock.history.admin import LockEventAdmin
from django_mongolock.history.models import LockEvent
from django_mongolock.inspection.display import quote_key
from django_mongolock.models import Lock
from django_mongolock.models.lock_model import LockDashboard
from django_mongolock.versions.admin import VersionedAdmin
from tests.test_admin import DASHBOARD, LIST, browser

EVENTS: Final = "/admin/mongolock_history/lockevent/"
#: Each page of the admin by the name of its address, with the addresses at which it shows a lock.
PAGES: Final[dict[str, list[str]]] = {
    "lock_changelist": [
        LIST, f"{LIST}?state=all", f"{LIST}?state=waited", f"{LIST}?state=stale", f"{LIST}?state=free", f"{LIST}?q=k",
        f"{LIST}?state=kept",
    ],
    "lock_change": [f"{LIST}{{key}}/change/"],
    "lock_history": [f"{LIST}{{key}}/history/"],
    "lock_force_release": [f"{LIST}force-release/"],
    "lock_ask_to_release": [f"{LIST}ask-to-release/"],
    "lock_others": [f"{LIST}others/"],
    "lockdashboard_changelist": [DASHBOARD, f"{DASHBOARD}?part=live"],
    "lock_status": [f"{LIST}status/"],
    "lockevent_changelist": [EVENTS, f"{EVENTS}?q=k"],
}  # fmt: skip
#: The actions of the list, each of which has a page that asks for a confirmation, or acts at once.
ACTIONS: Final = {"ask_to_release", "force_release", "clear_stale"}
#: Each command, with arguments for which it shows a lock. {key} is the key of a held lock.
COMMANDS: Final[dict[str, list[list[str]]]] = {
    "list_locks": [
        [], ["--all"], ["--stale"], ["--waiting"], ["--deadlocks"], ["--json", "--all"], ["--json", "--deadlocks"],
        ["--key", "{key}*"], ["--owner", "{owner}"],
    ],
    "clear_stale_locks": [["--dry-run"], ["--dry-run", "--json"], ["--no-input"]],
    "release_lock": [
        ["--owner", "{owner}", "--no-input"],
        ["{key}", "--ask"], ["{key}", "--ask", "--by", "{owner}"], ["no such {key}", "--no-input"],
        ["{key}", "--no-input", "--token", "1"], ["{key}", "--no-input"], ["{key}"],
    ],
    "run_leader": [["{key} other", "--", "true"], ["{key} other", "--", "/nowhere/{key}"]],
    "run_locked": [
        ["{key}", "--wait", "0", "--", "true"], ["{key}", "--wait", "0", "--on-contention", "skip", "--", "true"],
        ["{key} other", "--", "/nowhere/{key}"],
    ],
}  # fmt: skip
#: The addresses at which an object is edited under an edit lock, in an admin and in a project's own views.
EDITED: Final[dict[str, str]] = {
    "change": "/admin/shop/order/{}/change/",
    "delete": "/admin/shop/order/{}/delete/",
    "list": "/admin/shop/order/?q={}",
    "own": "/own/{}/",
    "async": "/async/{}/",
}
#: The classes of the package for a project's own addresses, with the methods that answer requests.
MIXINS: Final[dict[str, set[str]]] = {
    "EditLockMixin": {"changeform_view", "changelist_view", "delete_view", "history_form_view"},
    "EditLockViewMixin": {"get", "post"},
    "DocumentLockAdminMixin": {"clear_stale_documents", "force_release_documents"},
    "VersionedAdmin": {"changeform_view", "changelist_view", "delete_view", "history_form_view"},
}
#: The addresses at which the other two are used in the admins of the test project. {} is the id of an object.
OWN_ADMINS: Final[dict[str, str]] = {
    "a versioned object": "/admin/rates/rate/{rate}/change/",
    "a document with a lock": "/admin/shop/ad/{ad}/change/",
    "documents with locks": "/admin/shop/ad/?q={ad}",
}
EVERYTHING: Final = (
    "view_lock", "force_release_lock", "ask_release_lock", "clear_document_lock", "view_lock_status", "view_lockevent",
    "take_over_edit_lock",
)  # fmt: skip


def known_pages() -> set[str]:
    """The names of all addresses that the package adds to an admin."""
    pages = (
        LockAdmin(Lock, admin.site),
        LockDashboardAdmin(LockDashboard, admin.site),
        LockEventAdmin(LockEvent, admin.site),
    )
    return {
        str(url.name).removeprefix("django_mongolock_").removeprefix("mongolock_history_")
        for each in pages
        for url in each.get_urls()
    }


def known_commands() -> set[str]:
    """The names of all commands of the package."""
    folder = Path(django_mongolock.__file__).parent / "management" / "commands"
    return {path.stem for path in folder.glob("[!_]*.py")}


def addresses(key: str) -> Iterator[tuple[str, str]]:
    """Every address at which something about the lock *key* is shown, with the name of its page."""
    for name, paths in PAGES.items():
        for path in paths:
            yield name, path.format(key=quote_key(key))


def operator(*permissions: str, **fields: Any) -> Client:
    """A browser of a member of the staff with these permissions, or with all that there are."""
    client = browser(*(permissions or EVERYTHING), **fields)
    client.raise_request_exception = False
    return client


def said(*command: str) -> str:
    """Return the output of a command, also if it is an error."""
    out = io.StringIO()
    try:
        call_command(*command, stdout=out, stderr=out)
    except CommandError as error:
        out.write(str(error))
    return out.getvalue()


def known_mixins() -> dict[str, set[str]]:
    """The classes for the addresses of a project, with their methods that answer requests."""
    classes = (EditLockMixin, EditLockViewMixin, DocumentLockAdminMixin, VersionedAdmin)
    return {
        each.__name__: {
            name.removeprefix("_guard_")
            for base in each.__mro__
            if base.__module__.startswith("django_mongolock.")
            for name, member in vars(base).items()
            if _answers(name, member)
        }
        for each in classes
    }


def _answers(name: str, member: object) -> bool:
    return name in ("get", "post") or name.endswith("_view") or hasattr(member, "allowed_permissions")


def known_actions() -> set[str]:
    """The actions of the list of locks."""
    return set(LockAdmin.actions)


def leaves(response: Any) -> bool:
    """Return whether a response sends the browser to another site."""
    address = response.get("Location", "/").replace("\\", "/")
    return not re.match(r"/(?!/)|\?|\.|http://testserver/", address)


def clean(fields: dict[str, str]) -> dict[str, str]:
    """Return the fields as a client can encode them."""
    return {k.encode(errors="replace").decode(): v.encode(errors="replace").decode() for k, v in fields.items()}
