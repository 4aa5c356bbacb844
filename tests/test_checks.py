"""System checks report each wrong setting with an id and a hint with the cure. The server is checked as well."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.core.checks import CheckMessage
from django.core.checks.registry import registry
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from pymongo import MongoClient
from pymongo.database import Database
from pytest_django import Settings

from django_mongolock import LockBackendFailed, mongo_lock
from django_mongolock.backends import load_backends
from django_mongolock.conf import VALUES, LockSettings
from django_mongolock.engine.store.layout import INDEXES
from django_mongolock.inspection import server
from django_mongolock.inspection.named_locks import NamedLocks
from django_mongolock.inspection.server import ServerFacts, server_rules
from django_mongolock.management import checks, make_indexes_after_migrate
from testproject.servers import ReplicaSet
from tests.support.failpoints import failpoint
from tests.support.lock_documents import Locks
from tests.support.lock_fixtures import WITH_MONGO

PASSWORD = "hunter2"


def ids(found: list[CheckMessage]) -> list[str]:
    return [str(message.id).removeprefix("mongolock.") for message in found]


def check(settings: Settings, **changes: Any) -> list[CheckMessage]:
    """Return the messages about MONGOLOCK with *changes*."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, **changes}
    return checks.check_settings(app_configs=None)


class TestValues:
    """Every setting, with every kind of wrong value."""

    def test_right(self, settings: Settings) -> None:
        """The defaults, written out, are right. The test project is right, too."""
        defaults = {name: getattr(LockSettings(), name) for name in LockSettings.__dataclass_fields__}
        assert check(settings, **{**defaults, "DATABASE": "mongo"}) == []

    def test_every_setting_is_checked(self) -> None:
        assert {"DATABASE", *VALUES} == set(LockSettings.__dataclass_fields__)

    @pytest.mark.parametrize(
        ("name", "code", "wrong"),
        [
            ("LEASE", "E005", [0, -1, "30", None, True, float("nan"), float("inf"), 1e12, [30]]),
            ("WAIT", "E006", [-1, "10", True, False, float("nan"), float("inf"), {}]),
            ("KEY_PREFIX", "E007", [None, 7, b"x", "a\nb", "x" * 513, "\ud800", "shop", "a:b:", "é"]),
            ("CLOCK_MARGIN", "E008", [-0.1, 1.5, "0.1", None, True, float("nan")]),
            ("WAITER_LEASE", "E009", [0, -1, "10", None]),
            ("MAX_WAITERS", "E010", [0, -1, 5_001, 1.5, "1000", None, True]),
            ("RETENTION", "E011", [0, 60, "week", None, float("inf")]),
            ("COMMAND_TIMEOUT", "E012", [0, -5, "5", None]),
            ("BACKEND", "E013", [None, 7, "", "nothing", "no.such.module", "django_mongolock.backends.Nothing"]),
            ("EDIT_LEASE", "E080", [0, -1, "120", None, True, float("nan")]),
            ("EDIT_BEAT", "E081", [0, -1, "5", None, True]),
            ("EDIT_IDLE", "E082", [0, -1, "1800", True, float("inf")]),
            ("EDIT_FAIL_CLOSED", "E083", [None, 1, "yes"]),
            ("HISTORY", "E020", [True, -1, 1.5, "100", None, 10_000_000]),
            ("CONTENTION_STATUS", "E014", [None, "423", 200, 399, 600, True, 423.0]),
        ],
    )
    def test_wrong(self, settings: Settings, name: str, code: str, wrong: list[Any]) -> None:
        for value in wrong:
            found = check(settings, **{name: value})
            assert ids(found) == [code], value
            assert f'["{name}"]' in found[0].msg
            assert str(found[0].hint).startswith("Give ")

    @pytest.mark.parametrize(
        ("name", "right"),
        [
            ("LEASE", [0.5, 30, 3_600]),
            ("WAIT", [0, None, 10, 0.5]),
            ("KEY_PREFIX", ["", "shop:", "a/b:", "é|"]),
            ("CLOCK_MARGIN", [0, 1, 0.1]),
            ("MAX_WAITERS", [1, 5_000]),
            ("RETENTION", [3_600, 1e7]),
            ("CONTENTION_STATUS", [400, 409, 599]),
        ],
    )
    def test_limits(self, settings: Settings, name: str, right: list[Any]) -> None:
        for value in right:
            assert check(settings, **{"COMMAND_TIMEOUT": 0.1, name: value}) == []

    def test_unknown(self, settings: Settings) -> None:
        """An unknown setting is named, with the existing ones. Keys of any type are accepted."""
        found = check(settings, TTL=5)
        assert ids(found) == ["E004"]
        assert "'TTL'" in found[0].msg
        assert "LEASE" in str(found[0].hint)
        settings.MONGOLOCK = {**settings.MONGOLOCK, 7: 1, None: 2, "TTL": 3, ("a",): 4}
        assert ids(checks.check_settings(app_configs=None)) == ["E004"] * 4

    def test_a_slip_of_the_pen(self, settings: Settings) -> None:
        """The hint names the intended setting. For a setting of other libraries, it lists all settings."""
        assert check(settings, lease=5)[0].hint == "Write 'LEASE'."
        assert check(settings, KEYPREFIX="a:")[0].hint == "Write 'KEY_PREFIX'."
        for name in ("BEAT", "COLLECTION", "TTL"):
            assert str(check(settings, **{name: 5})[0].hint).startswith("Known: BACKEND, ")

    @pytest.mark.parametrize("value", [None, 7, ["DATABASE"], ("DATABASE", "mongo")])
    def test_no_dictionary(self, settings: Settings, value: Any) -> None:
        """MONGOLOCK itself may have a wrong type."""
        settings.MONGOLOCK = value
        assert ids(checks.check_settings(app_configs=None)) == ["E001"]
        assert checks.check_deployment(app_configs=None) == []


@pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")
class TestDatabase:
    @pytest.mark.parametrize(
        ("alias", "code"),
        [(None, "E001"), ("", "E001"), ("nothing", "E002"), (7, "E002"), (["mongo"], "E002"), ("default", "E003")],
    )
    def test_alias(self, settings: Settings, alias: Any, code: str) -> None:
        """The alias must exist and be MongoDB. The hint names the possible ones. Django starts all the same."""
        found = check(settings, DATABASE=alias)
        assert ids(found) == [code]
        assert "mongo" in str(found[0].hint)
        load_backends()

    @pytest.mark.parametrize(
        ("forget", "code"),
        [
            (lambda settings: setattr(settings, "DATABASE_ROUTERS", []), "E027"),
            (lambda settings: delattr(settings, "MONGOLOCK"), "E001"),
        ],
        ids=["router", "setting"],
    )
    def test_forgotten(self, settings: Settings, forget: Callable[[Settings], None], code: str) -> None:
        """F152: A missing router, or missing MONGOLOCK, is reported first. Without it, the router does nothing, and all
        other models cause errors because they do not fit into MongoDB."""
        forget(settings)
        with pytest.raises(SystemCheckError) as told:
            call_command("check", databases=["mongo"])
        first, _, _rest = str(told.value).partition("(mongodb.E")  # of Django's newest backend there are none
        assert 0 < first.index(f"mongolock.{code}") < first.index("below come from this")

    def test_default_needs_no_router(self, settings: Settings) -> None:
        """If MongoDB is the default database, no router is needed."""
        settings.DATABASES = {"default": {"ENGINE": "django_mongodb_backend", "NAME": "x"}}
        settings.DATABASE_ROUTERS = []
        assert check(settings, DATABASE="default") == []


@pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")
class TestDeployment:
    def deploy(self, settings: Settings, host: str, prefix: str = "shop:") -> list[CheckMessage]:
        settings.MONGOLOCK = {**settings.MONGOLOCK, "KEY_PREFIX": prefix}
        settings.DATABASES = {
            **settings.DATABASES,
            "mongo": {"ENGINE": "django_mongodb_backend", "NAME": "x", "HOST": host},
        }
        return checks.check_deployment(app_configs=None)

    def test_prefix(self, settings: Settings) -> None:
        """F59: Without a prefix, two stages in one database would share their locks."""
        assert ids(self.deploy(settings, "mongodb://h", prefix="")) == ["W002"]
        assert self.deploy(settings, "mongodb://h") == []

    @pytest.mark.parametrize(
        ("host", "expected"),
        [
            (f"mongodb://user:{PASSWORD}@h/", ["W003"]),
            (f"mongodb+srv://user:{PASSWORD}@h.example/?x=1", ["W003"]),
            (f"mongodb://user:{PASSWORD}@a:1,b:2/x", ["W003"]),
            (f"mongodb://user:{PASSWORD}[@h/", ["W003"]),
            (f"mongodb://u%40x:{PASSWORD}%2F@[::1]:27017/", ["W003"]),
            ("mongodb://user@h/", []),
            ("mongodb://h:27017/", []),
            ("h", []),
            ("", []),
        ],
    )
    def test_password_in_the_address(self, settings: Settings, host: str, expected: list[str]) -> None:
        """The check names a password inside HOST, and does not repeat it."""
        found = self.deploy(settings, host)
        assert ids(found) == expected
        assert PASSWORD not in str(found)


Connect = Callable[..., None]


def ask() -> list[CheckMessage]:
    return list(NamedLocks().checks(["mongo"]))


Failing = Callable[[list[str], int], dict[str, Any]]


@pytest.fixture
def failing(connect: Callable[..., None]) -> Failing:
    """Return a function that makes the setting of a fault for the clients of this test alone, because other processes
    share the server."""
    name = f"failing-{os.getpid()}"
    connect(appname=name)
    return lambda commands, code: {"failCommands": commands, "errorCode": code, "appName": name}


@WITH_MONGO
class TestServer:
    """check --database reports the properties of the server and the rights of the user."""

    def test_other_databases(self, away: None) -> None:
        """If the lock database is not among the given databases, the check sends nothing."""
        assert checks.check_kinds(app_configs=None, databases=["default"]) == []
        assert checks.check_kinds(app_configs=None, databases=None) == []

    def test_wrong_settings_first(self, away: None, settings: Settings) -> None:
        """The other check reports a wrong setting. No command is sent to the server."""
        settings.MONGOLOCK = {**settings.MONGOLOCK, "LEASE": 0}
        assert checks.check_kinds(app_configs=None, databases=["mongo"]) == []

    @pytest.mark.long
    def test_a_majority_without_journals(self, connect: Connect) -> None:
        """F68: Without journals, writes confirmed by the majority are lost when all members crash. This is an error."""
        with ReplicaSet() as servers:
            client = servers.members[0].client()
            config = client.admin.command("replSetGetConfig")["config"]
            config |= {"version": config["version"] + 1, "writeConcernMajorityJournalDefault": False}
            client.admin.command("replSetReconfig", config)
            client["mongolock_tests"]["x"].insert_one({})  # there is nothing to read before the first write
            connect(servers.uri)
            assert ids(ask()) == ["E104", "W103"]  # nothing is migrated here
            connect()

    @pytest.mark.long
    def test_lease_shorter_than_a_failover(self, connect: Connect, settings: Settings) -> None:
        """If the server can fail over, the lease must outlive the failover."""
        with ReplicaSet(members=2) as servers:
            connect(servers.uri)
            assert ids(ask()) == ["W103"]  # nothing is migrated here
            settings.MONGOLOCK = {**settings.MONGOLOCK, "LEASE": 5}
            connect(servers.uri)
            found = ask()
            assert ids(found) == ["W102", "W103"]
            assert "20 s" in found[0].msg
            connect()

    def test_sharded_cluster(self, monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
        """Two mongos with different clocks may let two holders in. There is no mongos here, and the server pretends to
        be one."""
        command = Database.command

        def as_mongos(database: Database[Any], name: Any, *args: Any, **options: Any) -> Any:
            reply = command(database, name, *args, **options)
            if name == "hello":
                reply = {"msg": "isdbgrid", **{key: value for key, value in reply.items() if key != "setName"}}
            return reply

        monkeypatch.setattr(Database, "command", as_mongos)
        (found,) = ask()
        assert found.id == "mongolock.E105"
        assert "mongos" in found.msg
        assert found.is_serious()
        settings.SILENCED_SYSTEM_CHECKS = ["mongolock.E105"]  # it is understood
        assert found.is_silenced()

    def test_a_new_database(self, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
        """The check names the command that makes the collections. Before that command itself, the check is silent."""
        locks.collection.drop()
        (found,) = ask()
        assert (found.id, found.hint) == ("mongolock.W103", "Run manage.py migrate --database mongo.")
        monkeypatch.setattr(sys, "argv", ["manage.py", "migrate", "--database", "mongo"])
        assert ask() == []
        mongo_lock("k").acquire().release()
        assert ids(ask()) == ["W103"]
        call_command("migrate", database="mongo", verbosity=0)
        assert ask() == []

    @pytest.mark.usefixtures("history")
    @pytest.mark.parametrize("refused", ["create", "createIndexes"])
    def test_what_migrate_may_not_make(
        self,
        locks: Locks,
        mongo: MongoClient[Any],
        failing: Failing,
        refused: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """F223: Each step fails by itself, for example where Atlas refuses capped collections. The other objects are
        made."""
        database = locks.collection.database
        for name in database.list_collection_names():
            database.drop_collection(name)
        with failpoint(mongo, "failCommand", failing([refused], 8000)), caplog.at_level(logging.WARNING):
            make_indexes_after_migrate(using="mongo")
        made = set(database.list_collection_names())
        bells = [name for name in made if "_bells_" in name]
        if refused == "create":
            assert locks.collection.index_information().keys() >= set(INDEXES)
            assert not bells
            assert caplog.text.count("what=bells") == 8
            assert "what=history" in caplog.text
        else:
            assert len(bells) == 8
            assert f"{locks.collection.name}_history" in made
            assert "what=indexes" in caplog.text

    @pytest.mark.long
    def test_migrate_goes_on_without_mongodb(self, away: None, caplog: pytest.LogCaptureFixture) -> None:
        """A deployment does not stop if MongoDB is away. A warning names the missing steps."""
        with caplog.at_level(logging.WARNING, "django_mongolock"):
            call_command("migrate", verbosity=0)
        assert "not made by migrate" in caplog.text
        assert "hunter2" not in caplog.text

    def test_the_facts_are_shown(self, locks: Locks, settings: Settings) -> None:
        """`check --deploy` says which server answered, and the versions of all that works together."""
        settings.MONGOLOCK = {**settings.MONGOLOCK, "KEY_PREFIX": "shop:"}
        output = io.StringIO()
        call_command("check", "--deploy", "--database", "mongo", tag=["database"], stderr=output)
        (told,) = [line for line in output.getvalue().splitlines() if "mongolock.I101" in line]
        for fact in (" answers", "members: 1; the collections", "the collections are there"):
            assert fact in told
        for name in ("MongoDB 6.", "Python 3.", "Django ", "django-mongodb-backend ", "PyMongo "):
            assert name in told

    @pytest.mark.long
    def test_the_facts_disturb_nothing_else(self, locks: Locks, away: None) -> None:
        """The facts are no part of the checks of migrate and of a test run. A server that is away has no facts."""
        assert checks.check_server_facts not in registry.get_checks()
        assert checks.check_server_facts(app_configs=None, databases=["mongo"]) == []

    @pytest.mark.parametrize(("moved", "said"), [(-100, "100 s ahead of"), (100, "100 s behind")])
    def test_clocks_that_differ(self, monkeypatch: pytest.MonkeyPatch, locks: Locks, moved: int, said: str) -> None:
        """Different clocks endanger no lock, but people compare times."""
        real = time.time
        monkeypatch.setattr(server, "time", type("Moved", (), {"time": staticmethod(lambda: real() + moved)}))
        (found,) = ask()
        assert found.id == "mongolock.W108"
        assert said in found.msg

    @pytest.mark.parametrize(
        ("version", "expected"), [("5.0.9", ["mongolock.W109"]), ("6.0.0", []), ("8.2.1-rc0", []), ("", [])]
    )
    def test_versions_of_the_server(self, version: str, expected: list[str]) -> None:
        found = server_rules(ServerFacts(version=version), "locks")
        assert [message.id for message in found] == expected

    @pytest.mark.parametrize(
        ("code", "name"), [(17276, "Location17276"), (59, "CommandNotFound"), (9, "FailedToParse")]
    )
    def test_a_server_that_lacks_the_update(
        self, locks: Locks, mongo: MongoClient[Any], failing: Failing, code: int, name: str
    ) -> None:
        """F228: Servers of other vendors may lack the update. The check tries the update, and the error of a lock leads
        to the check."""
        with failpoint(mongo, "failCommand", failing(["findAndModify"], code)):
            (found,) = ask()
            assert (found.id, f"(code {code}, {name})" in found.msg) == ("mongolock.E107", True)
            with pytest.raises(LockBackendFailed, match=r"manage\.py check --database says what this server lacks"):
                mongo_lock("k").acquire()

    @pytest.mark.parametrize("code", [13, 59, 8000])
    def test_a_server_that_does_not_tell_rights(
        self, locks: Locks, mongo: MongoClient[Any], failing: Failing, code: int
    ) -> None:
        """F228: The rights of a user may be refused. The update is tried all the same."""
        with failpoint(mongo, "failCommand", failing(["connectionStatus"], code)):
            assert ask() == []
        with failpoint(mongo, "failCommand", failing(["connectionStatus", "findAndModify"], 13)):
            assert "needs find, insert and update" in ask()[0].msg
