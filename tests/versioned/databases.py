"""SQLite, PostgreSQL, MariaDB and MongoDB, each as an alias that is added to the project for the tests of versions."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from django.conf import settings
from django.db import connections, transaction
from django.db.models import Model
from django.db.models.signals import post_save
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from django_mongolock.exceptions import VersionConflict
from testproject.servers import MariaDB, Postgres
from tests import parts
from tests.versioned import shapes

KINDS = ("sqlite", "postgres", "mongo")
#: Databases for tests of transactions that meet.
ALL_KINDS = ("sqlite", "sqlite_journal", "postgres", "mariadb", "mongo")
#: Databases for tests of features that MongoDB lacks.
on_sql = pytest.mark.parametrize("home", ["sqlite", "postgres"], indirect=True)


@contextlib.contextmanager
def postgres_uri() -> Iterator[str]:
    """Yield the URI of a PostgreSQL, or skip the test."""
    parts.require("PostgreSQL")
    with Postgres() as server:
        yield server.uri


@contextlib.contextmanager
def added(kind: str, where: str, name: str = "versions") -> Iterator[str]:
    """Add the database to the project, with the tables of all shapes, and yield its alias."""
    alias, before = f"{name}_{kind}", connections.settings
    connections.settings = connections.configure_settings({**before, alias: config(kind, where)})
    try:
        if kind == "postgres":
            connections[alias].cursor().execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        if kind == "mariadb":
            for command in ("DROP DATABASE test", "CREATE DATABASE test", "USE test"):
                connections[alias].cursor().execute(command)
        shapes.make_tables(alias)
        yield alias
    finally:
        if kind == "mongo":
            cast("Any", connections[alias]).database.client.drop_database(connections[alias].settings_dict["NAME"])
        _remove(alias, before)


def config(kind: str, where: str) -> dict[str, Any]:
    """Return the entry in DATABASES for *kind*. *where* is its file or its URI."""
    if kind.startswith("sqlite"):
        mode = "DELETE" if kind == "sqlite_journal" else "WAL"
        options = {"init_command": f"PRAGMA journal_mode={mode}; PRAGMA synchronous=OFF;"}
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": where, "OPTIONS": options}
    if kind == "mongo":
        name = f"versions_{uuid.uuid4().hex[:8]}"
        return {"ENGINE": "django_mongodb_backend", "HOST": where, "NAME": name, "OPTIONS": {"appname": name}}
    found = urlsplit(where)
    home = {"HOST": found.hostname, "PORT": found.port, "USER": found.username, "NAME": found.path[1:]}
    return {"ENGINE": f"django.db.backends.{'mysql' if kind == 'mariadb' else 'postgresql'}", **home}


def _remove(alias: str, before: dict[str, Any]) -> None:
    connection: Any = connections[alias]
    getattr(connection, "close_pool", connection.close)()
    connection.close()
    del connections[alias]
    connections.settings = before


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Yield the URI of a PostgreSQL for the whole test run."""
    with postgres_uri() as uri:
        yield uri


@pytest.fixture(scope="session")
def mariadb() -> Iterator[str]:
    """Yield the URI of a MariaDB for the whole test run."""
    parts.require("MariaDB")
    import pymysql

    pymysql.install_as_MySQLdb()
    with MariaDB() as server:
        yield server.uri


@pytest.fixture(scope="module", params=KINDS)
def home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, django_db_blocker: DjangoDbBlocker
) -> Iterator[str]:
    """Yield the alias of one database after the other. The alias is removed after the module, because other tests must
    not know of it."""
    if request.param in ("postgres", "mariadb"):
        where = request.getfixturevalue(request.param)
    elif request.param == "mongo":
        where = os.environ["MONGODB_URI"]
    else:
        where = str(tmp_path_factory.mktemp("versions") / "db.sqlite3")
    with django_db_blocker.unblock(), added(request.param, where) as alias:
        yield alias


@contextlib.contextmanager
def failing_hook(model: type[Model], alias: str, signal: Any = post_save) -> Iterator[None]:
    """Let a function that is to run after the first commit raise a conflict of its own."""

    def fail() -> None:
        raise VersionConflict("mails.Mail", 1, 1)

    def later(**_: Any) -> None:
        signal.disconnect(later, sender=model)
        transaction.on_commit(fail, using=alias)

    signal.connect(later, sender=model)
    try:
        with pytest.raises(VersionConflict, match=r"mails\.Mail"):
            yield
    finally:
        signal.disconnect(later, sender=model)


class ShapesRouter:
    """Sends the shapes to one database, as a project would."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        return self.alias if model._meta.app_label == "versioned" else None

    db_for_write = db_for_read


@pytest.fixture
def db(home: str, django_db_blocker: DjangoDbBlocker) -> Iterator[str]:
    """Yield the same alias for one test, without a surrounding transaction. The tables are emptied afterwards."""
    routers = [ShapesRouter(home), *settings.DATABASE_ROUTERS]
    with django_db_blocker.unblock(), override_settings(DATABASE_ROUTERS=routers):
        try:
            yield home
        finally:
            shapes.empty_tables(home)
