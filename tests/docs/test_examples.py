"""The examples of every page are run, in the order of reading, and do as the page says."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from django.core.management import load_command_class
from django.db import connections, models, router
from django.test import RequestFactory
from django.test.utils import isolate_apps
from pymongo import MongoClient
from pytest_django import Settings

from testproject.celery import app as shop
from tests.docs.pages import ELSEWHERE, ROOT, Page, pages
from tests.documents.conftest import forget
from tests.support.looking import document, held_elsewhere, holder, holders, new_key
from tests.support.waiting import eventually

__all__ = ["forget"]
RUN = [page for page in pages() if "```py" in page.text and page.name not in ELSEWHERE]
#: The names that examples and their checks may use, from a settings file and from the tests.
NAMES = {
    "document": document,
    "eventually": eventually,
    "held_elsewhere": held_elsewhere,
    "holder": holder,
    "holders": holders,
    "new_key": new_key,
    "os": os,
    "raises": pytest.raises,
    "rf": RequestFactory(),
}


@pytest.fixture
def app() -> Iterator[Celery]:
    """Return the Celery application of shared tasks, with a broker in memory. Afterwards the tasks belong to the shop
    again."""
    app = Celery("docs", broker="memory://", backend="cache+memory://")
    app.set_current()
    app.set_default()
    yield app
    shop.set_current()
    shop.set_default()


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return a function that returns the output since its last call."""
    return lambda: capsys.readouterr().out


@pytest.fixture
def client(mongo: MongoClient[dict[str, Any]]) -> Iterator[MongoClient[dict[str, Any]]]:
    """PyMongo, with an account in the database "shop"."""
    mongo.drop_database("shop")
    mongo.shop.accounts.insert_one({"_id": 5, "balance": 100})
    yield mongo
    mongo.drop_database("shop")


@pytest.fixture
def locks_alias() -> Iterator[None]:
    """The connection of the locks, also under the name that it has in the docs, with a collection "log"."""
    mongo: Any = connections["mongo"]
    mongo.database.create_collection("log")  # not every server makes one in a transaction
    connections["locks"] = mongo
    yield
    del connections["locks"]
    mongo.database.drop_collection("log")


@pytest.fixture
def tables() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Make the tables of the models that a page has defined by now, and drop them at the end."""
    made: list[tuple[Any, type[models.Model]]] = []

    def make(names: dict[str, Any]) -> None:
        for model in list(names.values()):
            if not (isinstance(model, type) and issubclass(model, models.Model)):
                continue
            if model.__module__ == names["__name__"]:
                connection = connections[router.db_for_write(model)]
                if model._meta.db_table not in connection.introspection.table_names():
                    made.append((connection, model))
                    with connection.schema_editor() as editor:
                        editor.create_model(model)

    yield make
    for connection, model in reversed(made):  # the router of the page may have gone
        with connection.schema_editor() as editor:
            editor.delete_model(model)


class DocsRouter:
    """Sends the models of the docs to MongoDB whose ids are made there."""

    def db_for_read(self, model: type[models.Model], **_hints: Any) -> str | None:
        return "mongo" if "mongodb" in type(model._meta.pk).__module__ else None

    db_for_write = db_for_read


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.long] * ("<!-- long -->" in page.notes), id=page.name) for page in RUN],
)
@pytest.mark.django_db(databases=["default", "mongo"], transaction=True)
@isolate_apps("django.contrib.auth", "django.contrib.contenttypes", "testproject.shop")
def test_a_page(
    page: Page, tables: Callable[[dict[str, Any]], None], settings: Settings, request: pytest.FixtureRequest
) -> None:
    """F215: All blocks of the page run one after the other. Models belong to the app "shop", and get their tables."""
    settings.DATABASE_ROUTERS = [f"{__name__}.DocsRouter", *settings.DATABASE_ROUTERS]
    names = {**NAMES, "DATABASES": {"default": {}}, "INSTALLED_APPS": []}
    names |= {name: request.getfixturevalue(name) for name in page.fixtures}
    names["__name__"] = f"testproject.shop.docs_{uuid.uuid4().hex}"
    for step in page.steps():
        if step.kind == "pycon":
            example = doctest.DocTestParser().get_doctest(step.text, names, page.name, step.path, step.line)
            assert not doctest.DocTestRunner().run(example, clear_globs=False).failed
        else:
            step.run(names)
            tables(names)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_no_block_is_overlooked(page: Page) -> None:
    """Each block of Python is found. A page that another module runs is read by that module."""
    shown = sum(bool(re.match("py", kind)) for kind in re.findall(r"```(\w*)\n", page.text))
    skipped = re.findall(r"^<!-- skip: next \((\S+)\) -->\n```py", page.text, re.MULTILINE)
    assert shown == sum(step.kind != "unseen" for step in page.steps()) + len(skipped)
    for module in [ELSEWHERE.get(page.name), *(name.partition("::")[0] for name in skipped)]:
        assert not module or page.name.removeprefix("docs/") + '"' in (ROOT / module).read_text()


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_each_unseen_block_has_its_place(page: Page) -> None:
    """A page names each block of its file below tests/docs/unseen once, in the same order, and no other block."""
    assert re.findall(r"<!-- run: (.*?) -->", page.text) == list(page.unseen())
    assert page.notes.count("```python") == len(page.unseen())


def test_each_unseen_file_has_its_page() -> None:
    """A file below tests/docs/unseen belongs to a page that there is."""
    assert {*(ROOT / "tests/docs/unseen").rglob("*.md")} <= {page.beside for page in pages()}


def commands(page: Page) -> Iterator[tuple[str, list[str]]]:
    """Our commands that a page shows, each with its arguments."""
    for line in re.findall(r"^\$ python manage\.py (.*)$", page.text, re.MULTILINE):
        name, *arguments = shlex.split(line, comments=True)
        if (ROOT / f"django_mongolock/management/commands/{name}.py").exists():
            yield name, arguments


@pytest.mark.parametrize("page", [page for page in pages() if any(commands(page))], ids=lambda page: page.name)
def test_commands(page: Page) -> None:
    """Every command on a page has its arguments."""
    for name, arguments in commands(page):
        load_command_class("django_mongolock", name).create_parser("manage.py", name).parse_args(arguments)
