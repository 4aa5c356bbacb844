"""Databases for tests of transactions, each in a real file, with the view of a second connection."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import SyncToAsync
from django.db import connections
from pytest_django import DjangoDbBlocker


class Rows:
    """The file of one alias, seen through a second connection, with committed rows only."""

    def __init__(self, alias: str, file: Path) -> None:
        self.alias = alias
        self._second = sqlite3.connect(file, check_same_thread=False)
        self._second.execute("PRAGMA journal_mode=WAL")
        self._second.execute("CREATE TABLE rows (name TEXT, fencing_token BIGINT)")
        self._second.commit()

    def __call__(self) -> list[str]:
        return [name for (name,) in self._second.execute("SELECT name FROM rows ORDER BY rowid")]

    def write(self, name: str) -> None:
        """Write one row through Django's connection of this thread."""
        write_row(self.alias, name)

    def close(self) -> None:
        self._second.close()


def write_row(alias: str, name: str) -> None:
    """See Rows.write()."""
    with connections[alias].cursor() as cursor:
        cursor.execute("INSERT INTO rows (name) VALUES (%s)", [name])


@contextmanager
def row_file(alias: str, file: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Rows]:
    """A DATABASES alias of its own for the length of a test."""
    rows = Rows(alias, file)
    default = connections.settings["default"]
    monkeypatch.setitem(connections.settings, alias, {**default, "NAME": str(file), **options})
    try:
        yield rows
    finally:
        forget_connection(alias)
        # `sync_to_async` has one thread for all event loops. A connection that stays there leads to this file for ever.
        SyncToAsync.single_thread_executor.submit(forget_connection, alias).result()
        rows.close()


def atomic_rows(tmp_path: Path, django_db_blocker: DjangoDbBlocker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rows]:
    """The alias "file" with ATOMIC_REQUESTS. Make a fixture of it."""
    file = tmp_path / "rows.sqlite3"
    with django_db_blocker.unblock(), row_file("file", file, monkeypatch, ATOMIC_REQUESTS=True) as made:
        yield made


def forget_connection(alias: str) -> None:
    """Close this thread's connection, and have it make a new one when it next needs one."""
    connections[alias].close()
    del connections[alias]
