"""Servers with authentication and with TLS, with the least rights and with various certificates."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import trustme
from django.core.checks import CheckMessage
from django.db import connections
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from django_mongolock import mongo_lock
from django_mongolock.backends import mongo_store
from django_mongolock.engine.store import bells
from django_mongolock.engine.store.layout import ensure_indexes
from django_mongolock.exceptions import LockBackendFailed
from django_mongolock.inspection.named_locks import NamedLocks
from testproject.servers import Access, Mongod, ReplicaSet
from tests.support.lock_documents import Document
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.waiting import eventually
from tests.test_checks import ids

PASSWORD = "hunter2"
DATABASE = "myproject"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "howto/security.md"

Connect = Callable[..., None]


def documented_roles() -> dict[str, Document]:
    """Return the roles of the documentation, as its script makes them."""
    client = MagicMock()
    script, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(script, {"client": client})  # noqa: S102 - our own page
    made = client.myproject.command.call_args_list
    return {call.args[1]: {"createRole": call.args[1], **call.kwargs} for call in made}


def documented_settings(monkeypatch: pytest.MonkeyPatch) -> tuple[Document, Document]:
    """Return the documented alias of the locks without and with encryption, for the user `mongolock`."""
    monkeypatch.setenv("LOCKS_USER", "mongolock")
    monkeypatch.setenv("LOCKS_PASSWORD", PASSWORD)
    names: dict[str, Any] = {"DATABASES": {}, "os": os}
    _, user, encryption = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(user, names)  # noqa: S102 - our own page
    plain = copy.deepcopy(names["DATABASES"]["locks"])
    exec(encryption, names)  # noqa: S102
    return plain, names["DATABASES"]["locks"]


def role(name: str, *actions: str) -> Document:
    privilege = {"resource": {"db": DATABASE, "collection": "mongolock_locks"}, "actions": list(actions)}
    return {"createRole": name, "privileges": [privilege], "roles": []}


def history_roles() -> list[Document]:
    """Return the roles that a history needs beside the documented roles. One is for a process, and one is for the user
    that migrates."""
    history = {"db": DATABASE, "collection": "mongolock_locks_history"}
    actions = {
        "keeper": ("find", "insert"),
        "keeperDeploy": ("find", "insert", "createCollection", "convertToCapped", "createIndex", "collMod"),
    }
    base = {"keeper": "mongolock", "keeperDeploy": "mongolockDeploy"}
    return [
        {
            "createRole": name,
            "privileges": [{"resource": history, "actions": list(rights)}],
            "roles": [{"role": base[name], "db": DATABASE}],
        }
        for name, rights in actions.items()
    ]


def ask() -> list[CheckMessage]:
    return list(NamedLocks().checks(["mongo"]))


@pytest.fixture(scope="module")
def guarded() -> Iterator[ReplicaSet]:
    """Start a replica set with a user for each documented role, and with users of fewer rights.

    These are `least` (find, insert, update), `reader` (find), and `nothing`.
    """
    with ReplicaSet(access=Access(users=True)) as servers:
        with servers.members[0].client() as client:
            client.admin.command("createUser", "root", pwd=PASSWORD, roles=["root"])
        with MongoClient[Document](servers.uri, username="root", password=PASSWORD) as client:
            least = role("least", "find", "insert", "update")
            for command in (*documented_roles().values(), least, role("reader", "find"), *history_roles()):
                name = command["createRole"]
                client[DATABASE].command(command)
                client[DATABASE].command("createUser", name, pwd=PASSWORD, roles=[name])
            client[DATABASE].command("createUser", "nothing", pwd=PASSWORD, roles=[])
        yield servers


@pytest.fixture
def root(guarded: ReplicaSet) -> Iterator[Any]:
    """Return the locks collection with all rights. It is empty, with its indexes and its bells."""
    with MongoClient[Document](guarded.uri, username="root", password=PASSWORD) as client:
        collection = client[DATABASE].mongolock_locks
        collection.drop()
        ensure_indexes(collection)
        for bell in bells.Bells(collection).collections:
            bells.make(bell)
        yield collection


@pytest.fixture
def login(guarded: ReplicaSet, root: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> Connect:
    def login(user: str, password: str = PASSWORD, **options: Any) -> None:
        monkeypatch.setitem(connections["mongo"].settings_dict, "NAME", DATABASE)
        connect(guarded.uri, username=user, password=password, authSource=DATABASE, **options)

    return login


@WITH_MONGO
@pytest.mark.long
class TestRights:
    """F14, F60: Each missing right is named, and everything else works."""

    def test_the_roles_are_as_small_as_they_can_be(self, login: Connect, root: Any) -> None:
        """The user may not delete, drop, or look at any other collection."""
        root.database.orders.insert_one({"total": 5})
        with mongo_lock("k"):
            pass
        login("mongolock")
        client = mongo_store().client
        locks = client[DATABASE].mongolock_locks
        for forbidden in (
            lambda: locks.delete_one({}),
            locks.drop,
            client[DATABASE].orders.find_one,
            lambda: client.admin.command("replSetGetConfig"),
        ):
            with pytest.raises(OperationFailure) as refusal:
                forbidden()
            assert refusal.value.code == 13

    def test_the_error_names_what_a_reader_lacks(self, login: Connect) -> None:
        """F14: The error of the lock names the rights, at once, and quotes neither command nor password."""
        login("reader")
        with pytest.raises(LockBackendFailed, match="needs find, insert and update on the collection") as refusal:
            mongo_lock("k", wait=30).acquire()
        assert not refusal.value.passing
        assert PASSWORD not in str(refusal.value)

    @pytest.mark.parametrize(("user", "password"), [("mongolock", "wrong"), ("stranger", PASSWORD)])
    def test_a_wrong_password(self, login: Connect, user: str, password: str) -> None:
        """F14: A wrong password is an error at once, and the error says so."""
        login(user, password)
        with pytest.raises(LockBackendFailed, match="authentication failed") as refusal:
            mongo_lock("k", wait=30).acquire()
        assert not refusal.value.passing
        assert password not in str(refusal.value)

    def test_rights_that_are_taken_away(self, login: Connect, root: Any) -> None:
        """F14: A lock whose rights are revoked is in danger and then lost. The lock never claims to be still held."""
        login("least")
        with contextlib.ExitStack() as stack:
            lock = mongo_lock("k", lease=2).acquire()
            root.database.command("revokeRolesFromUser", "least", roles=["least"])
            stack.callback(root.database.command, "grantRolesToUser", "least", roles=["least"])
            assert eventually(lambda: lock.in_danger or lock.lost, 10)
            assert eventually(lambda: lock.lost, 10)


@WITH_MONGO
class TestChecks:
    """`check --database` reports the same, before the first lock fails."""

    @pytest.mark.parametrize(("user", "missing"), [("reader", "insert, update"), ("nothing", "find, insert, update")])
    def test_too_few(self, login: Connect, user: str, missing: str) -> None:
        login(user)
        found = ask()
        assert ids(found) == ["E102", "W104"]
        assert found[0].msg.endswith(f": {missing}.")
        assert "lacks find and insert on the collection mongolock_locks_bells_0" in found[1].msg

    @pytest.mark.parametrize(("user", "password"), [("mongolock", "wrong"), ("stranger", PASSWORD)])
    def test_not_let_in(self, login: Connect, user: str, password: str) -> None:
        """A wrong password is reported, but not shown."""
        login(user, password)
        [found] = ask()
        assert ids([found]) == ["E101"]
        assert password not in found.msg

    def test_nobody(self, guarded: ReplicaSet, connect: Connect) -> None:
        """Without a login there are no rights. The check does not take this for a server without access control."""
        connect(guarded.uri)
        [found] = ask()
        assert ids([found]) == ["E101"]
        assert "the user of this connection may not do this" in found.msg


class Authority:
    """A CA of the test, and files with certificates."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca, self.stranger = trustme.CA(), trustme.CA()

    def file(self, name: str, *blobs: Any) -> Path:
        path = self.directory / name
        path.write_bytes(b"".join(blob.bytes() for blob in blobs))
        return path

    def access(self, host: str, *others: str) -> Access:
        made = self.ca.issue_cert(host, *others)
        return Access(
            certificate=self.file(f"{host}.pem", made.private_key_pem, *made.cert_chain_pems),
            authority=self.file("ca.pem", self.ca.cert_pem),
        )


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def encrypted(authority: Authority) -> Iterator[ReplicaSet]:
    """Start a replica set with TLS only, and with a right certificate."""
    with ReplicaSet(access=authority.access("127.0.0.1")) as servers:
        yield servers


@WITH_MONGO
@pytest.mark.long
class TestTLS:
    """The engine's client encrypts as the alias says, and accepts no wrong certificate."""

    @pytest.fixture(autouse=True)
    def soon(self, settings: Any) -> None:
        settings.MONGOLOCK = {**settings.MONGOLOCK, "COMMAND_TIMEOUT": 3}

    def test_the_documented_settings(
        self, encrypted: ReplicaSet, authority: Authority, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With the file of this CA, the documented settings are enough. The earlier settings are kept."""
        plain, found = documented_settings(monkeypatch)
        assert found["OPTIONS"].items() > plain["OPTIONS"].items()
        added = found["OPTIONS"].keys() - plain["OPTIONS"].keys()
        ours = {"/etc/ssl/mongodb-ca.pem": str(authority.file("documented.pem", authority.ca.cert_pem))}
        encryption = {name: ours.get(found["OPTIONS"][name], found["OPTIONS"][name]) for name in added}
        connect(encrypted.uri.partition("&tls=")[0], **encryption)
        with mongo_lock("k") as lock:
            assert lock.held

    def test_unknown_authority(self, encrypted: ReplicaSet, authority: Authority, connect: Connect) -> None:
        """F14: A certificate of an unknown CA is refused, and the error and the check say why."""
        other = authority.file("stranger.pem", authority.stranger.cert_pem)
        self.assert_refused(f"{encrypted.uri.partition('&tls=')[0]}&tls=true&tlsCAFile={other}", connect)

    def test_another_host(self, authority: Authority, connect: Connect) -> None:
        """F14: A certificate of another host is refused, although the right CA signed it."""

        class Elsewhere(Mongod):
            def hello(self) -> Document:  # no client can connect here (the point of the test)
                return {"ok": 1}

        with Elsewhere(access=authority.access("db.example.org")) as server:
            self.assert_refused(server.uri, connect)

    def assert_refused(self, uri: str, connect: Connect) -> None:
        connect(uri)
        with pytest.raises(LockBackendFailed, match=r"no TLS connection.*CERTIFICATE_VERIFY_FAILED") as refusal:
            mongo_lock("k", wait=30).acquire()
        assert not refusal.value.passing
        [found] = ask()
        assert ids([found]) == ["E101"]
        assert "CERTIFICATE_VERIFY_FAILED" in found.msg
