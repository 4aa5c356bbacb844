"""Forms, addresses and settings that neither a page nor a well-meaning person makes, found by reading the source."""

import json
import pickle
import re
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from bson import ObjectId
from django.contrib.auth.models import User
from django.db import connections
from django.http import QueryDict
from django.test import RequestFactory
from django.views.debug import SafeExceptionReporterFilter
from pymongo import MongoClient
from pytest_django import Settings

from django_mongolock.conf import database_from_url
from django_mongolock.context import own_address
from django_mongolock.contrib.celery.once_keys import call_key
from django_mongolock.documents import DocumentLock
from django_mongolock.documents.document_lock import undeclare
from django_mongolock.exceptions import DocumentRefused
from django_mongolock.versions.seal import digest
from testproject.shop.models import Order
from tests.editing.staff import fields_of, staff
from tests.security.surfaces import EDITED, PAGES, operator
from tests.support.lock_documents import Document, Locks
from tests.support.lock_fixtures import WITH_MONGO
from tests.test_admin import LIST

SECRET = "hunter2"

#: Values in extended JSON that are no `_id` of any document, or not for long.
IDS = [
    "9" * 30, "null", "NaN", "1e400", "[1]", "{}", "true", '""', '"\\ud800"', "x", "[" * 100_000,
    *(f'{{"${name}": {value}}}' for name, value in [
        ("oid", "5"), ("oid", '"x"'), ("numberDecimal", '"abc"'), ("numberLong", f'"{"9" * 30}"'),
        ("numberInt", '"x"'), ("numberDouble", '"x"'), ("timestamp", "5"), ("timestamp", '{"t": -1, "i": 0}'),
        ("date", '{"$numberLong": "99999999999999999999"}'), ("date", '"x"'), ("date", "1e400"),
        ("date", "-99999999999999"), ("date", '{"$numberLong": "253402300800000"}'), ("undefined", "true"),
        ("binary", '{"base64": "a", "subType": "zz"}'), ("binary", "5"), ("uuid", '"x"'), ("uuid", "5"),
        ("regularExpression", '{"pattern": ".*", "options": ""}'), ("code", '"x"'), ("minKey", "1"), ("symbol", '"a"'),
        ("gt", '""'), ("where", '"1"'),
    ]),
    '{"$regex": ".*", "$options": ""}', '{"$ref": "a", "$id": 1}', '{"$ref": "a", "$id": 1, "$where": "1"}',
    '{"$ref": "a", "$id": {"$gt": ""}}', '{"$code": "x", "$scope": {}}',
]  # fmt: skip


@pytest.fixture
def document_locks(mongo: MongoClient[Document]) -> Iterator[list[str]]:
    """Return the names of a document lock of a model, and of one of a collection with arbitrary ids."""
    collection = mongo[str(connections["mongo"].settings_dict["NAME"])]["hand_made"]
    collection.insert_many([{"_id": ObjectId(), "state": "busy", "lockedBy": "h"}, {"_id": "a", "state": "busy"}])
    lock: DocumentLock[Document] = DocumentLock(
        collection, state="state", pending={"busy": "failed"}, final=["done"], stale_after=60
    )
    yield ["ad exports", lock.name]
    undeclare(lock)
    collection.drop()


@pytest.mark.long
@WITH_MONGO
@pytest.mark.parametrize(("path", "more"), [("others/", {"force": "x"}), ("force-release/", {"reason": "x"})])
def test_ids_of_documents(locks: Locks, document_locks: list[str], path: str, more: dict[str, str]) -> None:
    """F75: An impossible id gets 400, an unknown one is not found, and an expression finds nothing."""
    client = operator()
    for name in ("locks", *document_locks):
        for id_ in IDS:
            for holder in ("h", "", None, "\ud800", 5):
                form = {"lock": f"[{json.dumps(name)}, {id_}, {json.dumps(holder)}]", **more}
                response = client.post(f"{LIST}{path}", form)
                assert response.status_code in (302, 400), (name, id_, holder)


@WITH_MONGO
@pytest.mark.parametrize(
    "path", [*(paths[0].format(key="k") for paths in PAGES.values()), EDITED["change"], EDITED["list"]]
)
@pytest.mark.parametrize(
    ("charset", "value"), [("raw_unicode_escape", r"\ud800"), ("utf-7", "%2B2AA-"), ("utf-16", "a")]
)
def test_another_encoding(locks: Locks, path: str, charset: str, value: str) -> None:
    """F75: A request in an encoding with lone surrogates, as Python has some, gets 400 on every page."""
    locks.held("k")
    client = operator()
    path = path.format(Order.objects.create(buyer=User.objects.create(username="buyer"), item="bike", price=100).pk)
    for field in ("q", "state", "owner", "lock", "_changelist_filters", "back", "edit-tab"):
        sent: dict[str, Any] = {"CONTENT_TYPE": f"text/plain; charset={charset}", "QUERY_STRING": f"{field}={value}"}
        assert client.get(path, **sent).status_code < 500, field
        part = f'--B\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n--B--\r\n'
        kind = f"multipart/form-data; boundary=B; charset={charset}"
        assert client.generic("POST", path, part, content_type=kind).status_code < 500, field


@WITH_MONGO
def test_a_billion_rows(locks: Locks, settings: Settings) -> None:
    """The number of rows in a form costs neither memory nor time, because Django's own limit holds here, too."""
    settings.ROOT_URLCONF = "tests.editing.site"
    buyer = User.objects.create(username="buyer")
    client = staff("anna")
    page = client.get(f"/admin/auth/user/{buyer.pk}/change/")
    fields = {**fields_of(page), "order_set-INITIAL_FORMS": "1000000000"}
    User.objects.update(first_name="changed meanwhile")  # so that rows are looked for that were deleted
    tracemalloc.start()
    started = time.monotonic()
    try:
        client.post(f"/admin/auth/user/{buyer.pk}/change/", fields)
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 20


class TestAddresses:
    """A page's own address stays on its site, however a browser reads it."""

    @pytest.mark.parametrize("path", ["//evil.example/a/", r"/\evil.example/a/", "/\t/evil.example/a/", r"/\/evil/",
                                      "/\n/evil.example/", "/a?b#c", "/a\u202eb", '/"><script>'])  # fmt: skip
    def test_own_address(self, rf: RequestFactory, path: str) -> None:
        """Slashes, backslashes and characters that a browser leaves out do not make the address the name of a host."""
        request = rf.get("/")
        request.path = path
        for address in (own_address(request), own_address(request, QueryDict("a=b"))):
            assert re.match(r"/[A-Za-z0-9%]", address), address
            assert not re.search(r'[\s\\"<>#]', address), address


class TestSecrets:
    """Secrets that are used are not shown."""

    @pytest.mark.parametrize("option", ["tlsCertificateKeyFilePassword", "TLSCERTIFICATEKEYFILEPASSWORD"])
    def test_options(self, option: str) -> None:
        """Options with secrets are in OPTIONS, under names that Django's debug page hides. MongoDB's driver takes them
        from there."""
        url = f"mongodb://h/db?tls=true&{option}={SECRET}%2F&authMechanismProperties=AWS_SESSION_TOKEN:{SECRET}"
        entry = database_from_url(url)
        assert entry["HOST"] == "mongodb://h/db?tls=true"
        assert entry["OPTIONS"] == {
            "tlsCertificateKeyFilePassword": f"{SECRET}/",
            "authMechanismProperties": f"AWS_SESSION_TOKEN:{SECRET}",
        }
        shown = SafeExceptionReporterFilter().cleanse_setting("DATABASES", {"locks": entry})
        assert SECRET not in repr(shown)

    def test_digests(self, settings: Settings) -> None:
        """A page carries a digest of a value that it does not show, such as a PIN. The digest cannot be compared with
        guesses. The same value has another digest in another field."""
        field, other = Order._meta.get_field("item"), Order._meta.get_field("state")
        first = digest(field, "1234")
        assert digest(field, "1234") == first != digest(other, "1234")
        settings.SECRET_KEY = "another"
        assert digest(field, "1234") != first


def test_a_refused_document_steers_no_terminal() -> None:
    """Like every other error, the server's text about a document goes through `printable`, also after pickling."""
    error = DocumentRefused("ads", "x\u202e", "a\x1b[2Jb\u202e")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301 - our own
    assert str(error).isprintable()


def test_names_of_tasks() -> None:
    """The name of a task may have separators, too. `sync:1` without arguments is not `sync` with 1."""
    assert call_key("sync:a=1", {}) != call_key("sync", {"a": 1})
    assert call_key("shop.tasks.export", {"ad_id": 1}) == "once:shop.tasks.export:ad_id=1"
