"""`check_locks`: line by line what locks need, by the rules of the system checks."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import call_command, load_command_class
from pytest_django import Settings

from django_mongolock import checks
from django_mongolock.backends.base import mongo_store
from django_mongolock.checks.server import server_rules
from django_mongolock.inspection import server_facts
from django_mongolock.inspection.server_facts import ServerFacts
from django_mongolock.testing import MemoryLocks
from testproject.servers import ReplicaSet
from tests.support.lock_documents import Locks
from tests.support.lock_fixtures import WITH_MONGO

pytestmark = WITH_MONGO

PROJECT = ["settings", "apps", "database", "router"]
SERVER = ["server", "rights", "replica set", "bells", "failover", "clock", "collections", "versions"]


def look() -> dict[str, dict[str, Any]]:
    """The lines, by name."""
    out = io.StringIO()
    call_command("check_locks", "--json", stdout=out)
    return {line["name"]: line for line in json.loads(out.getvalue())["lines"]}


def states() -> dict[str, str]:
    """The lines that are not in order."""
    return {name: line["state"] for name, line in look().items() if line["state"] != "ok"}


def shell(*arguments: str) -> tuple[int, str]:
    """What a shell gets: the exit code and the output."""
    command: Any = load_command_class("django_mongolock", "check_locks")
    command.stdout._out = out = io.StringIO()
    try:
        command.run_from_argv(["manage.py", "check_locks", *arguments])
    except SystemExit as end:
        return int(str(end.code)), out.getvalue()
    return 0, out.getvalue()


def test_all_in_order(locks: Locks) -> None:
    """Every line has a fact, that of the versions all of them; exit code 0."""
    lines = look()
    assert list(lines) == [*PROJECT, *SERVER]
    assert states() == {}
    assert all(line["fact"] for line in lines.values())
    assert lines["server"]["fact"].endswith(" answers")
    versions = lines["versions"]["fact"]
    assert all(
        name in versions for name in ("MongoDB 6.", "Python 3.", "Django ", "PyMongo ", "django-mongodb-backend ")
    )
    code, text = shell()
    assert (code, len(text.splitlines())) == (0, len(lines))
    assert all(line.startswith("ok  ") for line in text.splitlines())


@pytest.mark.long
def test_no_server(away: None) -> None:
    """The server, its cure, no password; what could not be asked says so. Exit code 1."""
    assert states() == {"server": "error", **dict.fromkeys(SERVER[1:], "not asked")}
    code, text = shell()
    assert code == 1
    assert "127.0.0.1:9 (Connection refused)" in text
    assert "Compare HOST, USER, PASSWORD" in text
    assert "hunter2" not in text
    assert text.count("not asked: first correct what is reported as wrong") == len(SERVER) - 1
    assert json.loads(shell("--json")[1])["ok"] is False


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"DATABASE": "mongo", "LEASE": 0}, {"settings": "error", "database": "not asked", "router": "not asked"}),
        ({"DATABASE": "nowhere"}, {"database": "error", "router": "not asked"}),
        ([], {"settings": "error", "database": "not asked", "router": "not asked"}),
        ("locks", {"settings": "error", "database": "not asked", "router": "not asked"}),
        ({}, {"database": "error", "router": "not asked"}),
        (
            {"DATABASE": "nowhere", "COMMAND_TIMEOUT": 40},
            {"settings": "warning", "database": "error", "router": "not asked"},
        ),
    ],
)
def test_wrong_settings(settings: Settings, wrong: Any, found: dict[str, str]) -> None:
    """What does not depend on what is wrong is asked all the same, each line in its place; the server is not."""
    settings.MONGOLOCK = wrong
    assert list(look()) == [*PROJECT, *SERVER]
    assert states() == {**found, **dict.fromkeys(SERVER, "not asked")}
    assert shell()[0] == 1


def test_a_new_database(locks: Locks) -> None:
    """`check` is silent about what `migrate` will make; here it is something to do. Exit code 3."""
    locks.collection.drop()
    assert checks.check_server(app_configs=None, databases=["mongo"]) == []
    assert states() == {"collections": "warning"}
    code, text = shell()
    assert code == 3
    assert "manage.py migrate --database mongo" in text
    call_command("migrate", database="mongo", verbosity=0)
    assert shell()[0] == 0


def test_the_rules_are_those_of_the_checks(settings: Settings, locks: Locks) -> None:
    """The same findings; one that is silenced there is here."""
    settings.DATABASE_ROUTERS = [path for path in settings.DATABASE_ROUTERS if "MongoLockRouter" not in path]
    settings.MONGOLOCK = {**settings.MONGOLOCK, "COMMAND_TIMEOUT": 40}
    locks.collection.drop_indexes()
    checked = [
        *checks.check_settings(app_configs=None),
        *checks.check_server(app_configs=None, databases=["mongo"]),
    ]
    shown = [problem["id"] for line in look().values() for problem in line["problems"]]
    assert shown == [found.id for found in checked] == ["mongolock.W006", "mongolock.W001", "mongolock.W103"]
    settings.SILENCED_SYSTEM_CHECKS = shown
    assert states() == {}


def test_locks_in_memory(mongolock: MemoryLocks) -> None:
    """There is no server to ask."""
    assert list(look()) == PROJECT
    assert look()["database"]["fact"] == "in memory"


@pytest.mark.long
def test_a_replica_set(connect: Callable[..., None], locks: Locks) -> None:
    """Its name, its members, and how long a failover takes."""
    with ReplicaSet(members=2) as servers:
        connect(servers.uri)
        lines = look()
        assert "members: 2" in lines["replica set"]["fact"]
        assert lines["failover"]["fact"] == "takes up to 20 s, LEASE is longer"
        connect()


@pytest.mark.parametrize(("moved", "said"), [(-100, "100 s ahead of"), (100, "100 s behind")])
def test_clocks_that_differ(monkeypatch: pytest.MonkeyPatch, locks: Locks, moved: int, said: str) -> None:
    """No lock is in danger; but people compare times. `check --database` says so as well."""
    real = time.time
    monkeypatch.setattr(server_facts, "time", type("Moved", (), {"time": staticmethod(lambda: real() + moved)}))
    (found,) = checks.check_server(app_configs=None, databases=["mongo"])
    assert found.id == "mongolock.W108"
    assert said in found.msg
    assert states() == {"clock": "warning"}


@pytest.mark.parametrize("zone", ["America/Chicago", "Asia/Tokyo"])
def test_the_zone_of_this_machine_is_no_difference(monkeypatch: pytest.MonkeyPatch, locks: Locks, zone: str) -> None:
    """The driver gives the server's time without a zone."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert abs(server_facts.inspect_server(mongo_store()).ahead) < 600
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("version", "ids"), [("5.0.9", ["mongolock.W109"]), ("6.0.0", []), ("8.2.1-rc0", []), ("", [])]
)
def test_versions_of_the_server(version: str, ids: list[str]) -> None:
    """Before 6.0, nothing was tested."""
    found = server_rules(ServerFacts(version=version), "locks")["versions"]
    assert [message.id for message in found] == ids
