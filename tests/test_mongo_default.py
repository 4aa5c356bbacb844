"""A project whose only database is MongoDB: `testproject.settings_mongo`, in a process of its own."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from pymongo import MongoClient

from tests.support.programs import python

SCRIPT = """
import html
import json
import re
import tempfile

import django
from django.conf import settings
settings.DATABASE_ROUTERS = []  # none is needed
django.setup()

from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connection
from django.test import Client
from django_mongolock import mongo_lock
from django_mongolock.models import Lock
from testproject.shop.models import Order

call_command("check", "--fail-level", "WARNING")
call_command("migrate", verbosity=0)
call_command("check", "--fail-level", "WARNING", databases=["default"])
assert not call_command("makemigrations", "--check", "--dry-run", verbosity=0)

indexes = connection.database["mongolock_locks"].index_information()
assert indexes["mongolock_purge_at"]["expireAfterSeconds"] == 0, indexes
assert "mongolock_expires_at" in indexes, indexes

user = User.objects.create_superuser("root", password="x")
order = Order.objects.create(buyer=user, item="book", price=5)
client = Client()
client.force_login(user)
with mongo_lock(order, label="in the test") as lock:
    assert lock.key == f"shop.order:{order.pk}", lock.key
    assert [found.key for found in Lock.objects.held()] == [lock.key]
    with tempfile.NamedTemporaryFile(suffix=".json") as dump:
        call_command("dumpdata", exclude=["contenttypes", "auth.permission"], output=dump.name)
        assert {each["model"].split(".")[0] for each in json.load(dump)} == {"auth", "shop", "sessions"}
        Order.objects.update(item="another")
        call_command("loaddata", dump.name, verbosity=0)
        assert Order.objects.get().item == "book"
    page = client.get("/admin/django_mongolock/lock/", headers={"host": "localhost"})
    assert page.status_code == 200, page
    assert lock.key in page.content.decode()
assert not Lock.objects.held().exists()

forced = mongo_lock("forced").acquire()
listed = "/admin/django_mongolock/lock/"
chosen = {"action": "force_release", "index": 0, "_selected_action": ["forced"]}
asked = client.post(listed, chosen, headers={"host": "localhost"})
[shown] = re.findall('name="lock" value="([^"]*)"', asked.content.decode())
client.post(listed + "force-release/", {"lock": html.unescape(shown), "reason": "x"}, headers={"host": "localhost"})
assert LogEntry.objects.get().object_id == "forced"
assert not forced.release()
print("all is well")
"""


@pytest.mark.long
def test_mongo_default(mongo: MongoClient[dict[str, Any]]) -> None:
    """F92: it can be migrated, checked and dumped, it locks its own instances, and its admin shows who holds them."""
    name = f"mongolock_default_{uuid.uuid4().hex[:8]}"
    environment = {"MONGODB_NAME": name, "DJANGO_SETTINGS_MODULE": "testproject.settings_mongo"}
    try:
        said = python("-c", SCRIPT, **environment)
    finally:
        mongo.drop_database(name)
    assert said.endswith("all is well\n")
