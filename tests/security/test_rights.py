"""The documented roles run exactly the documented commands: with login, key file and TLS, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from testproject.servers import Access, ReplicaSet
from tests.lock_documents import Document
from tests.test_authentication import DATABASE, PASSWORD, Authority, documented_roles, role

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
#: What a site runs, and what it must not print.
COMMANDS = [
    ["check"], ["check", "--database", "locks"], ["locks"], ["admin"], ["list_locks", "--all"],
    ["list_locks", "--deadlocks"], ["clear_stale_locks", "--no-input"], ["release_lock", "handed", "--no-input"],
    ["run_locked", "k", "--", "true"],
]  # fmt: skip


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A replica set that asks for a login and encrypts, with a user for each documented role; its URI."""
    access = Authority(tmp_path_factory.mktemp("rights")).access("127.0.0.1")
    with ReplicaSet(access=Access(True, access.certificate, access.authority)) as servers:
        with servers.members[0].client() as client:
            client.admin.command("createUser", "root", pwd=PASSWORD, roles=["root"])
        with MongoClient[Document](servers.uri, username="root", password=PASSWORD) as client:
            for command in (*documented_roles().values(), role("blind", "insert", "update")):
                client[DATABASE].command(command)
                name = command["createRole"]
                client[DATABASE].command("createUser", name, pwd=PASSWORD, roles=[name])
        yield servers.uri


def run(uri: str, user: str, *tasks: list[str]) -> dict[str, dict[str, Any]]:
    """Let a project that logs in as *user* carry out these tasks; return the reports by their words."""
    environment = os.environ | {
        "MONGODB_URI": uri,
        "MONGODB_NAME": DATABASE,
        "LOCKS_USER": user,
        "LOCKS_PASSWORD": PASSWORD,
        "DJANGO_SETTINGS_MODULE": "tests.security.user_settings",
    }
    command = [sys.executable, "-m", "tests.security.as_user"]
    done = subprocess.run(
        command, input=json.dumps(tasks), env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert PASSWORD not in done.stdout + done.stderr
    return {" ".join(report["task"]): report for report in json.loads(done.stdout.rpartition("\n")[2])}


def test_the_documented_commands(guarded: str) -> None:
    """F74: the deploy role migrates, the other one does everything else, and check finds nothing to complain about."""
    deployed = run(guarded, "mongolockDeploy", ["migrate", "--database", "locks"], ["migrate"], *COMMANDS[:2])
    assert {name: report["error"] for name, report in deployed.items() if report["error"]} == {}
    reports = run(guarded, "mongolock", *COMMANDS)
    errors = {name: report["error"] for name, report in reports.items() if report["error"]}
    assert "is not held now" in str(errors.pop("release_lock handed --no-input"))
    assert errors == {}
    assert reports["locks"]["out"] == "handed over: True, by change stream: True"
    assert reports["admin"]["out"].startswith("[200, 200, 200, 200, 200, 200, 302")
    for name in ("check", "check --database locks"):
        assert "no issues" in deployed[name]["out"] + reports[name]["out"]


def test_a_missing_right_is_named(guarded: str) -> None:
    """F74: every command and the check say which right is missing, in a line, without the server's words."""
    tasks = [["check", "--database", "locks"], *COMMANDS[4:8]]
    for name, report in run(guarded, "blind", *tasks).items():
        said = str(report["error"])
        assert said.startswith(("CommandError", "SystemCheckError")), (name, said)
        assert "find" in said, (name, said)
        assert "clusterTime" not in said
        assert "lsid" not in said
