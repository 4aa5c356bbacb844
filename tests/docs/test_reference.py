"""The reference has an entry for everything with a name, and no others."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from django.apps import apps
from django.contrib import admin
from django.core.management import load_command_class
from django.core.management.base import BaseCommand
from django.template import engines

from django_mongolock.engine.store.layout import INDEXES
from django_mongolock.history import writer as history
from django_mongolock.history.models import LockEvent
from django_mongolock.models import Lock
from django_mongolock.models.lock_model import LockDashboard
from tests.docs import tables, words
from tests.docs.pages import ROOT, pages
from tests.tested_versions import BEGIN, END, HEAD

PACKAGE = ROOT / "django_mongolock"
#: The options that every command of Django has.
DJANGOS = {action.dest for action in BaseCommand().create_parser("manage.py", "x")._actions}


def section(page: str, heading: str | None = None) -> str:
    """Return the text of a page below docs/, or of one of its sections."""
    text = (ROOT / "docs" / page).read_text()
    if heading is None:
        return text
    parts = re.split(r"(?m)^## ", text)
    return next((part for part in parts if part.partition("\n")[0] == heading), "")


def rows(page: str, heading: str | None = None, table: str | None = None) -> dict[str, list[str]]:
    """Return the rows of the tables of a page, as the `code` at the start of a row with the other cells.

    - table: the title of the first column of the only table to read.
    """
    found: dict[str, list[str]] = {}
    title = ""
    for line in section(page, heading).splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            title = ""
        elif not title:
            title = cells[0]
        elif table in {None, title}:
            for name in re.findall(r"`([^`]+)`", cells[0]):
                found[name] = cells[1:]
    return found


def compare(documented: set[str], real: set[str], page: str, where: str) -> None:
    """Fail with the rows to add or to remove, and their places."""
    todo = [f"docs/{page}: add a row for `{name}` {where}" for name in sorted(real - documented)]
    todo += [f"docs/{page}: take out `{name}` {where}, it is not in the code" for name in sorted(documented - real)]
    assert not todo, "\n".join(todo)


@cache
def sources() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))]


# Settings, checks, signals, errors


def check_ids() -> set[str]:
    """Return the ids of all system checks. An id is written out, whole or as a number that `checks` completes."""
    texts = {
        node.value
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    found = (re.fullmatch(r"(?:mongolock\.)?([EIW]\d{3})", text) for text in texts)
    return {f"mongolock.{match[1]}" for match in found if match}


def test_checks() -> None:
    ids = re.findall(r"`(mongolock\.[EIW]\d{3})`", section("reference/checks.md"))
    compare(set(ids), check_ids(), "reference/checks.md", "in the table")
    assert len(ids) == len(set(ids)), "docs/reference/checks.md: an id is used twice"
    first = re.findall(r"(?m)^\| `(mongolock\.\w+)`", section("reference/checks.md"))
    assert first == sorted(first), "docs/reference/checks.md: sort the rows by their first id"


def test_what_signals_send() -> None:
    """The facts of those that one line of code sends are those of the row."""
    documented = rows("reference/api.md", "Signals")
    for path, tree in sources():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name("send"), args=[ast.Name(signal)], keywords=facts) if signal in documented:
                    told = set(re.findall(r"`(\w+)`", documented[signal][0].partition(". ")[2]))
                    assert {fact.arg for fact in facts} == told, f"docs/reference/api.md: {signal}, see {path}"


# Tables made from docstrings and fields


@pytest.mark.parametrize("page", sorted({page for page, _ in tables.TABLES}))
def test_tables_are_current(page: str) -> None:
    """F151: Options, errors, signals, settings and names can be read in the repository, as the code has them."""
    text = section(page)
    assert tables.with_tables(page, text) == text, f"run `python3 dev.py docs --write`: docs/{page} is not current"


def test_a_table_that_is_not_current_is_found() -> None:
    """F151: A row that was removed comes back. A page without a place for its table is an error."""
    text = section("howto/locks.md")
    cut = re.sub(r"\n\| `lease` .*", "", text)
    assert cut != text == tables.with_tables("howto/locks.md", cut)
    with pytest.raises(AssertionError, match="no place"):
        tables.with_tables("howto/locks.md", "# Using locks")


def test_no_page_shows_its_source() -> None:
    """F151: No page of the repository has markup that only the site can show."""
    wrong = [page.name for page in pages() if re.search(r"```\{(?!toctree)|^\.\. ", page.text, re.MULTILINE)]
    assert [name for name in wrong if not name.startswith("docs/project/")] == []


@pytest.mark.parametrize("part", words.LIMITS)
def test_words(part: str) -> None:
    """Each part can be read in its time (`dev.py docs --words`)."""
    assert words.totals()[part] <= words.LIMITS[part], words.report()


def test_what_is_counted() -> None:
    """The counted words are those that readers see, in text, examples and tables. Comments and targets of links do not
    count."""
    assert words.words("a [b c](d.md) <!-- e\nf --> | g |\n|---|\n`h`") == 5
    assert {words.part_of(page.name) for page in pages()} == {*words.LIMITS, None}


# Commands


def commands() -> dict[str, BaseCommand]:
    names = [info.name for info in pkgutil.iter_modules([str(PACKAGE / "management/commands")])]
    return {name: load_command_class("django_mongolock", name) for name in names}


def test_commands() -> None:
    documented = set(re.findall(r"(?m)^## `(\w+)`$", section("reference/commands.md")))
    compare(documented, set(commands()), "reference/commands.md", "as a section: ## `name`, and its two tables")


@pytest.mark.parametrize("name", commands())
def test_options(name: str) -> None:
    """Every option of a command is listed, in all its spellings."""
    parser = commands()[name].create_parser("manage.py", name)
    actions = [action for action in parser._actions if action.dest not in DJANGOS]
    real = {text for action in actions for text in (action.option_strings or [str(action.metavar or action.dest)])}
    documented = {
        text for text in rows("reference/commands.md", f"`{name}`", "option") if text.startswith("-") or text.isupper()
    }
    compare(documented, real, "reference/commands.md", f"in the table of options of `{name}`")


@pytest.mark.parametrize("name", commands())
def test_exit_codes(name: str) -> None:
    """The documented exit codes are those in the module of a command and in its help."""
    module = importlib.import_module(f"django_mongolock.management.commands.{name}")
    used = re.findall(r"(?:sys\.exit\(|returncode=|returncode [!=]= )([A-Z]+|\d+)", inspect.getsource(module))
    real = {str(getattr(module, code, code)) for code in used}
    help_text = commands()[name].create_parser("manage.py", name).format_help()
    real |= set(re.findall(r"(?m)^ {1,4}(\d+)  ", help_text))
    documented = {code for code in rows("reference/commands.md", f"`{name}`", "exit code") if code.isdecimal()}
    missing = sorted(real - documented, key=int)
    assert not missing, f"docs/reference/commands.md: add {missing} to the exit codes of `{name}`"


# Reports in logs and metrics


def logged() -> Iterator[tuple[Path, str, list[str]]]:
    """Yield every call that logs, with its file, the event, and the names of its facts."""
    for path, tree in sources():
        for node in ast.walk(tree):
            match node:
                case (
                    ast.Call(func=ast.Name("log"), args=[_, text, *_])
                    | ast.Call(func=ast.Name("log_exception"), args=[text, *_])
                    | ast.Call(func=ast.Attribute(value=ast.Name("logger")), args=[text, *_])
                ):
                    facts = [each.arg for each in node.keywords if each.arg not in {None, "exc_info"}]
                    texts = [text.body, text.orelse] if isinstance(text, ast.IfExp) else [text]
                    yield from ((path, event(each), [fact for fact in facts if fact]) for each in texts)


def event(text: ast.expr) -> str:
    """Return the words of a line before its facts, with "…" for inserted values."""
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    words = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
    return re.split(r" \w+=%", words)[0]


@pytest.mark.long
def test_log_events() -> None:
    real = {words for path, words, _ in logged() if path.name != "logs.py"}
    for_users = set(rows("reference/logs.md", "Events"))
    for_developers = set(rows("project/house.md", "Log events for debugging"))
    assert for_users.isdisjoint(for_developers)
    compare(
        for_users | for_developers,
        real,
        "reference/logs.md",
        "under ## Events (or docs/project/house.md, if it is DEBUG)",
    )


def test_log_fields() -> None:
    """Every fact in the logs is listed by name."""
    inline = {"key", "template", "holder", "token", "reason", "document", "place", "error"}  # put together before
    real = {f"lock_{fact}" for _, _, facts in logged() for fact in facts} | {f"lock_{fact}" for fact in inline}
    compare(set(rows("reference/logs.md", "Fields")), real, "reference/logs.md", "under ## Fields")


def test_metrics() -> None:
    """Every instrument is listed, by the name in Prometheus, with its labels."""
    metrics = importlib.import_module("django_mongolock.contrib.metrics")
    ends = {"counter": "_total", "gauge": "", "histogram": "_seconds"}
    real = {f"mongolock_{name}{ends[each.kind]}": each for name, each in metrics.INSTRUMENTS.items()}
    documented = {
        name: cells for name, cells in rows("howto/monitoring.md", "Prometheus").items() if name.startswith("mongolock")
    }
    compare(set(documented), set(real), "howto/monitoring.md", "under ## Prometheus")
    for name, instrument in real.items():
        assert documented[name][0] == ", ".join(instrument.labels), f"docs/howto/monitoring.md: the labels of {name}"


# Names outside of Python


def permissions() -> set[str]:
    found = set()
    for label in ("django_mongolock", "mongolock_history"):
        for model in apps.get_app_config(label).get_models():
            meta = model._meta
            found |= {f"{label}.{action}_{meta.model_name}" for action in meta.default_permissions}
            found |= {f"{label}.{codename}" for codename, _ in meta.permissions}
    return found


def templates() -> set[str]:
    folders = [PACKAGE / "templates", *PACKAGE.glob("*/templates")]
    return {str(path.relative_to(folder)) for folder in folders for path in folder.rglob("*.html")}


def template_filters() -> set[str]:
    library = engines["django"].engine.template_libraries["mongolock"]  # type: ignore[attr-defined]
    return {*library.filters, *library.tags}


def addresses() -> set[str]:
    """Every page of the admin that has a name."""
    pages = [
        page for model in (Lock, LockDashboard, LockEvent) for page in admin.site.get_model_admin(model).get_urls()
    ]
    return {pattern.name for pattern in pages if pattern.name}


def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def celery_tasks() -> set[str]:
    return {
        node.value.value
        for _, tree in sources()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "shared_task"
        for node in call.keywords
        if node.arg == "name" and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def in_mongodb() -> set[str]:
    locks, events = str(Lock._meta.db_table), str(LockEvent._meta.db_table)
    return {locks, events, *INDEXES, *(str(index.document["name"]) for index in history.INDEXES)}


@pytest.mark.parametrize(
    ("page", "heading", "real"),
    [
        ("reference/names.md", "Permissions", permissions),
        ("project/admin-pages.md", "Templates", templates),
        ("project/admin-pages.md", "Template filters", template_filters),
        ("project/admin-pages.md", "URL names of the admin", addresses),
        ("reference/names.md", "Extras", extras),
        ("reference/names.md", "In MongoDB", in_mongodb),
    ],
)
def test_names(page: str, heading: str, real: Callable[[], set[str]]) -> None:
    """Each table of names has every name, and no other."""
    documented = rows(page, heading, "extra" if heading == "Extras" else None)
    compare(set(documented), real(), page, f"under ## {heading}")


def test_celery_tasks() -> None:
    """The list of other names has every task of Celery."""
    documented = set(re.findall(r"`(django_mongolock\.\w+)`", section("reference/names.md", "Others")))
    compare(documented, celery_tasks(), "reference/names.md", "under ## Others")


def test_compatibility() -> None:
    """The table of tested versions has the form of `dev.py versions --write`, with both pairs and a commit."""
    table = section("reference/compatibility.md", "Tested versions").partition(BEGIN)[2].partition(END)[0]
    assert table.startswith(HEAD)
    pairs = re.findall(r"(?m)^\| (\w+) \| (\d+\.\d+)\.\d+ \| (\d+\.\d+)\S* \|.* \| \d+ passed \|$", table)
    assert [name for name, _python, _django in pairs] == ["oldest", "newest"]
    assert pairs[0][1:] == ("3.11", "5.2")
    assert [int(part) for part in pairs[1][2].split(".")] >= [6, 1]
    assert re.search(r"\nRun at commit `[0-9a-f]{7,}` of \d{4}-\d\d-\d\d\.\n$", table)
