"""Settings, the router, and their effects on ``migrate``."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS
from pymongo import MongoClient
from pytest_django import Settings

from django_mongolock.backends import close_backends, get_backend, mongo_store
from django_mongolock.conf import get_settings
from django_mongolock.history.models import LockEvent
from django_mongolock.management import make_indexes_after_migrate
from django_mongolock.models import Lock
from django_mongolock.router import MongoLockRouter
from tests.support.failpoints import failpoint
from tests.support.programs import python

HISTORY = "mongolock_history"
INDEXES = {"_id_", "mongolock_expires_at", "mongolock_purge_at", "mongolock_contended"}


class TestSettings:
    def test_missing(self, settings: Settings) -> None:
        """Without the setting, the error shows an example."""
        del settings.MONGOLOCK
        get_settings.cache_clear()  # Django tells nothing of a setting that is deleted
        with pytest.raises(ImproperlyConfigured, match=r'for example MONGOLOCK = {"DATABASE": "locks"}'):
            get_settings()

    def test_one_backend_for_an_alias(self) -> None:
        """All locks of a process share one session. After closing there is a new one."""
        backend = get_backend()
        assert get_backend("mongo") is backend
        session = backend.session()
        close_backends()
        assert get_backend() is not backend
        assert get_backend().session() is not session


class TestRouter:
    @pytest.fixture(params=["mongo", DEFAULT_DB_ALIAS])
    def home(self, request: pytest.FixtureRequest, settings: Settings) -> Iterator[str]:
        """Return the alias of the locks. The alias is one of their own or the default one."""
        settings.MONGOLOCK = {"DATABASE": request.param}
        yield request.param
        close_backends()

    def test_lock_model(self, home: str) -> None:
        """The lock model lives in the alias of the locks, and is migrated there and nowhere else."""
        router = MongoLockRouter()
        assert router.db_for_read(Lock) == router.db_for_write(Lock) == router.db_for_read(LockEvent) == home
        assert router.allow_migrate(home, "django_mongolock") is router.allow_migrate(home, HISTORY) is True
        assert router.allow_migrate("elsewhere", "django_mongolock") is False
        for label, model in (("django_mongolock", "lock"), ("django_mongolock", "entry"), (HISTORY, "lockevent")):
            assert router.allow_migrate(home, label, model_name=model) is False, "nothing to make or to dump"

    def test_other_models(self, home: str) -> None:
        """The router has no opinion about other models, except that their migrations do not run in a secondary
        MongoDB."""
        router = MongoLockRouter()
        assert router.db_for_read(User) is None
        assert router.db_for_write(User) is None
        assert router.allow_migrate("elsewhere", "auth") is None
        assert router.allow_migrate(home, "auth") is (None if home == DEFAULT_DB_ALIAS else False)


def manage(*arguments: str, **environment: str) -> str:
    """Return the output of a command of the test project."""
    return python("-m", "testproject.manage", *arguments, folder=None, **environment)


@pytest.fixture
def fresh(mongo: MongoClient[dict[str, Any]], tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return the environment of a project with empty databases."""
    name = f"mongolock_fresh_{uuid.uuid4().hex[:8]}"
    yield {"MONGODB_NAME": name, "SQLITE_PATH": str(tmp_path / "db.sqlite3")}
    mongo.drop_database(name)


class TestMigrate:
    @pytest.mark.long
    def test_both(self, fresh: dict[str, str], mongo: MongoClient[dict[str, Any]]) -> None:
        """The default alias alone makes the indexes of the locks. The other alias can be migrated, too."""
        database = mongo[fresh["MONGODB_NAME"]]
        manage("migrate", "--verbosity=0", **fresh)
        indexes = database["mongolock_locks"].index_information()
        assert set(indexes) == INDEXES
        assert indexes["mongolock_purge_at"]["expireAfterSeconds"] == 0
        manage("migrate", "--verbosity=0", "--database=mongo", **fresh)
        assert set(database["mongolock_locks"].index_information()) == INDEXES
        assert not {"auth_user", "auth_permission", "django_content_type"} & set(database.list_collection_names())

    @pytest.mark.long
    def test_four_at_once(self, fresh: dict[str, str]) -> None:
        """F229: Pods that start together migrate one after the other, under a lock that needs no migration."""
        migrate = [sys.executable, "-m", "testproject.manage", "migrate", "--verbosity=0", "--database=mongo"]
        guarded = ("run_locked", "migrate", "--wait=2m", "--", *migrate)
        with ThreadPoolExecutor(4) as pods:
            list(pods.map(lambda _: manage(*guarded, **fresh), range(4)))

    def test_no_right_to_index(self, mongo: MongoClient[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
        """F60: A user who may not create indexes gets a warning, and the deployment goes on."""
        locks = mongo_store().collection.full_name
        failing = {"failCommands": ["createIndexes"], "errorCode": 13, "namespace": locks}
        with (
            failpoint(mongo, "failCommand", failing, {"times": 1}),
            caplog.at_level(logging.WARNING, "django_mongolock"),
        ):
            make_indexes_after_migrate(using="mongo")
        assert "not made by migrate what=indexes database=mongo error=OperationFailure" in caplog.text


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
    """F92: A project on MongoDB alone can be migrated, checked and dumped, locks its own instances, and its admin shows
    the holders."""
    name = f"mongolock_default_{uuid.uuid4().hex[:8]}"
    environment = {"MONGODB_NAME": name, "DJANGO_SETTINGS_MODULE": "testproject.settings_mongo"}
    try:
        said = python("-c", SCRIPT, folder=None, **environment)
    finally:
        mongo.drop_database(name)
    assert said.endswith("all is well\n")
