"""SQLite, PostgreSQL and MongoDB, each as an alias that is added to the running project for the tests of versions."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connections
from django.db.models import Model
from django.test import override_settings
from pymongo import MongoClient
from pytest_django import DjangoDbBlocker

from testproject.servers import Postgres
from tests.versioned import shapes

KINDS = ("sqlite", "postgres", "mongo")


@contextlib.contextmanager
def postgres_uri() -> Iterator[str]:
    """A PostgreSQL; skips where there is none."""
    pytest.importorskip("psycopg", reason="psycopg is in the dependency group testing")
    if reason := Postgres.missing():
        pytest.skip(reason)
    with Postgres() as server:
        yield server.uri


@contextlib.contextmanager
def added(kind: str, directory: Path) -> Iterator[str]:
    """Add the database to the project, with the tables of all shapes; yield its alias."""
    alias = f"versions_{kind}"
    with contextlib.ExitStack() as stack:
        name = f"versions_{uuid.uuid4().hex[:8]}"
        if kind == "sqlite":
            # Without its own wait for locks: the tests play two writers in one thread.
            config: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(directory / "db.sqlite3")}
        elif kind == "postgres":
            uri = stack.enter_context(postgres_uri())
            host, _, port = uri.partition("@")[2].partition("/")[0].partition(":")
            config = {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres"}
            config |= {"HOST": host, "PORT": port}
        else:
            uri = os.environ["MONGODB_URI"]
            config = {"ENGINE": "django_mongodb_backend", "HOST": uri, "NAME": name}
            stack.callback(_drop, uri, name)
        databases = {**connections.settings, alias: config}
        before = connections.settings
        connections.settings = connections.configure_settings(databases)
        stack.callback(_remove, alias, before)
        shapes.make_tables(alias)
        yield alias


def _remove(alias: str, before: dict[str, Any]) -> None:
    connection: Any = connections[alias]
    getattr(connection, "close_pool", connection.close)()
    connection.close()
    del connections[alias]
    connections.settings = before


def _drop(uri: str, name: str) -> None:
    with MongoClient[dict[str, Any]](uri) as client:
        client.drop_database(name)


@pytest.fixture(scope="session", params=KINDS)
def home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, django_db_blocker: DjangoDbBlocker
) -> Iterator[str]:
    """The alias of one database after the other."""
    with django_db_blocker.unblock(), added(request.param, tmp_path_factory.mktemp("versions")) as alias:
        yield alias


class ShapesRouter:
    """Sends the shapes to one database, as a project would."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        return self.alias if model._meta.app_label == "versioned" else None

    db_for_write = db_for_read


@pytest.fixture
def db(home: str, django_db_blocker: DjangoDbBlocker) -> Iterator[str]:
    """The same, for one test: its tables are empty afterwards, and nothing is wrapped in a transaction."""
    routers = [ShapesRouter(home), *settings.DATABASE_ROUTERS]
    with django_db_blocker.unblock(), override_settings(DATABASE_ROUTERS=routers):
        try:
            yield home
        finally:
            shapes.empty_tables(home)
