"""The documented roles run exactly the documented commands, with login, key file and TLS, in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from testproject.servers import Access, ReplicaSet
from tests.support.lock_documents import Document
from tests.test_authentication import DATABASE, PASSWORD, Authority, documented_roles, history_roles, role

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
#: Commands of a site, and texts that they must not print.
COMMANDS = [
    ["check"], ["check", "--database", "locks"], ["locks"], ["admin"], ["list_locks", "--all"],
    ["list_locks", "--deadlocks"], ["clear_stale_locks", "--no-input"], ["release_lock", "handed", "--no-input"],
    ["run_locked", "k", "--", "true"],
]  # fmt: skip


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a replica set with login and TLS, with a user for each documented role, and yield its URI."""
    access = Authority(tmp_path_factory.mktemp("rights")).access("127.0.0.1")
    with ReplicaSet(access=Access(True, access.certificate, access.authority)) as servers:
        with servers.members[0].client() as client:
            client.admin.command("createUser", "root", pwd=PASSWORD, roles=["root"])
        with MongoClient[Document](servers.uri, username="root", password=PASSWORD) as client:
            database = client[DATABASE]
            for command in (*documented_roles().values(), role("blind", "insert", "update"), *history_roles()):
                database.command(command)
                name = command["createRole"]
                roles = [name, "mongolock"] if name == "mongolockDocuments" else [name]
                database.command("createUser", name, pwd=PASSWORD, roles=roles)
            left = {"state": "exporting", "lockedBy": "dead", "lockTimestamp": datetime(2020, 1, 1, tzinfo=UTC)}
            database.shop_ad.insert_many([{"_id": 1, "state": "new"}, {"_id": 2, "documentVersion": 1, **left}])
            database.shop_ad.create_index([("state", 1), ("lockTimestamp", 1)])
        yield servers.uri


@pytest.fixture
def root_of(guarded: str) -> Iterator[MongoClient[Document]]:
    """The server, for one who may do everything."""
    with MongoClient[Document](guarded, username="root", password=PASSWORD) as client:
        yield client


def run(uri: str, user: str, *tasks: list[str], history: int = 0) -> dict[str, dict[str, Any]]:
    """Let a project that logs in as *user* carry out these tasks, and return the reports by their words."""
    environment = os.environ | {
        "MONGODB_URI": uri,
        "MONGODB_NAME": DATABASE,
        "LOCKS_USER": user,
        "LOCKS_PASSWORD": PASSWORD,
        "LOCKS_HISTORY": str(history),
        "DJANGO_SETTINGS_MODULE": "tests.security.user_settings",
    }
    command = [sys.executable, "-m", "tests.security.as_user"]
    done = subprocess.run(
        command, input=json.dumps(tasks), env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert PASSWORD not in done.stdout + done.stderr
    return {" ".join(report["task"]): report for report in json.loads(done.stdout.rpartition("\n")[2])}


def test_the_documented_commands(guarded: str) -> None:
    """F60, F74: The deploy role migrates, the other one does everything else, and check finds nothing wrong."""
    deployed = run(guarded, "mongolockDeploy", ["migrate", "--database", "locks"], ["migrate"], *COMMANDS[:2])
    assert {name: report["error"] for name, report in deployed.items() if report["error"]} == {}
    reports = run(guarded, "mongolock", *COMMANDS)
    errors = {name: report["error"] for name, report in reports.items() if report["error"]}
    assert "is not held now" in str(errors.pop("release_lock handed --no-input"))
    assert errors == {}
    assert reports["locks"]["out"] == "handed over: True, by a bell: True"
    assert reports["admin"]["out"] == str([200] * 9)
    for name in ("check", "check --database locks"):
        assert "no issues" in deployed[name]["out"] + reports[name]["out"]


#: The check that `migrate` reports for each missing documented right, if it fails at all.
FAILS = {
    ("mongolock_locks", "find"): "E102",
    ("mongolock_locks", "insert"): "E102",
    ("mongolock_locks", "update"): "E102",
    ("shop_ad", "find"): "E103",
    ("shop_ad", "update"): "E103",
    ("", "listCollections"): "not authorized",
    ("django_migrations", "find"): "DatabaseError",  # it is Django that asks
    ("django_migrations", "insert"): "DatabaseError",
}


def test_each_right_of_a_deployment(guarded: str, root_of: MongoClient[Document]) -> None:
    """F143: With a document lock, too, the documented deploy roles run the documented `migrate`. Without one of their
    rights, it works all the same, or the error is about that right."""
    roles = documented_roles()
    rights = [*roles["mongolockDeploy"]["privileges"], *roles["mongolockDocuments"]["privileges"]]
    rights = [each for each in rights if not each["resource"]["collection"].endswith(tuple("1234567"))]
    database, task = root_of[DATABASE], ["migrate", "--database", "locks"]
    every = [(each["resource"]["collection"], action) for each in rights for action in each["actions"]]
    failed: dict[Any, str] = {}
    for taken in [None, *every]:
        left = [(name, action) for name, action in every if (name, action) != taken]
        left += [(f"mongolock_locks_bells_{n}", action) for n in range(1, 8) for action in ("find", "insert")]
        privileges = [{"resource": {"db": DATABASE, "collection": name}, "actions": [action]} for name, action in left]
        database.command("createRole", "some", privileges=privileges, roles=[])
        database.command("createUser", "some", pwd=PASSWORD, roles=["some"])
        database.django_migrations.drop()
        database.mongolock_locks_bells_0.drop()
        if error := run(guarded, "some", ["declare"], task)[" ".join(task)]["error"]:
            failed[taken] = error
        database.command("dropUser", "some")
        database.command("dropRole", "some")
    assert failed.keys() == FAILS.keys()
    assert {taken: error for taken, error in failed.items() if FAILS[taken] not in error} == {}


def test_a_missing_right_is_named(guarded: str) -> None:
    """F74: Every command and the check say which right is missing, in a line, without the server's words."""
    tasks = [["check", "--database", "locks"], *COMMANDS[4:8]]
    for name, report in run(guarded, "blind", *tasks).items():
        said = str(report["error"])
        assert said.startswith(("CommandError", "SystemCheckError")), (name, said)
        assert "find" in said, (name, said)
        assert "clusterTime" not in said
        assert "lsid" not in said


def test_documents(guarded: str) -> None:
    """F74: The documented role for documents holds, lists and clears them. Without it, the check and the errors name
    the missing rights and their collection."""
    tasks = [["documents"], ["check", "--database", "locks"], ["list_locks"], ["clear_stale_locks", "--no-input"]]
    may = run(guarded, "mongolockDocuments", *tasks)
    assert {name: report["error"] for name, report in may.items() if report["error"]} == {}
    assert may["documents"]["out"] == "held [1], cleared 1"
    for name, report in run(guarded, "mongolock", *tasks).items():
        said = str(report["error"]) + report["out"]
        if name.startswith("check"):
            assert "E103" in said
            assert "'ads': find, update" in said
        else:
            assert f"needs find and update on the collection {DATABASE}.shop_ad" in said, name
        assert "lsid" not in said


def test_history(guarded: str) -> None:
    """F74: With the documented rights, a history is written and shown. Without them, the check and the pages say which
    are missing, and the locks and the page of a lock are there all the same."""
    migrated = run(guarded, "keeperDeploy", ["migrate", "--database", "locks"], history=1)
    assert [report["error"] for report in migrated.values()] == [None]
    tasks = [["check", "--database", "locks"], ["locks"], ["admin"]]
    kept = run(guarded, "keeper", *tasks, history=1)
    assert [report["error"] for report in kept.values()] == [None] * 3
    assert "no issues" in kept["check --database locks"]["out"]
    assert kept["admin"]["out"] == str([200] * 9)
    less = run(guarded, "mongolock", *tasks, history=1)
    check = less["check --database locks"]
    assert "the user lacks find and insert on the collection mongolock_locks_history" in check["out"] + str(
        check["error"]
    )
    assert less["locks"]["out"] == "handed over: True, by a bell: True"
    statuses, _, said = less["admin"]["out"].partition("] ")
    assert f"{statuses}]" == str([200] * 7 + [503, 200])
    assert "find" in said, said
    assert "mongolock_locks_history" in said, said
