"""The tables of the reference that are made from docstrings and fields: `python3 dev.py docs --write`.

Each table stands in its page between two comments. Readers see it on the repository's pages as well as on the site.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from django.dispatch import Signal

import django_mongolock
from django_mongolock import conf, exceptions, locks, signals
from tests.docs.pages import ROOT

NOTE: Final = "made by python3 dev.py docs --write"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown."""
    lines = [list(head), ["---"] * len(list(head)), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def cell(text: str) -> str:
    """A text of a docstring, in one line of Markdown."""
    return re.sub(r"\s+", " ", text.replace("``", "`").replace("|", "\\|")).strip()


def items(docstring: str) -> dict[str, str]:
    """Return the items "- name: text" of a docstring, as the text of each name."""
    found = re.findall(r"(?ms)^- (\w+): (.*?)(?=^- \w+: |\n\n|\Z)", docstring)
    return {name: cell(text) for name, text in found}


def first_sentence(thing: Any) -> str:
    """Return the first sentence of the docstring of *thing*."""
    return re.split(r"(?<=[a-z)`])[.;:] ", cell(inspect.getdoc(thing) or ""))[0].rstrip(".")


def comments(module: Any) -> dict[str, str]:
    """The comment ``#: …`` above each name of a module."""
    found = re.findall(r"(?m)^((?:#: ?.*\n)+)(\w+)\b", inspect.getsource(module))
    return {name: cell(re.sub(r"(?m)^#: ?", "", text)) for text, name in found}


def options() -> str:
    """The options of `mongo_lock`."""
    told = items(inspect.getdoc(locks.mongo_lock) or "")
    assert set(told) == locks.LockKeywords.__annotations__.keys()
    return table(["option", "meaning"], ([f"`{name}`", text] for name, text in told.items()))


def settings() -> str:
    """The settings, with their defaults."""
    told = items(inspect.getdoc(conf.LockSettings) or "")
    rows = (
        [f"`{field.name}`", f"`{field.default!r}`", told[field.name]] for field in dataclasses.fields(conf.LockSettings)
    )
    return table(["setting", "default", "meaning"], rows)


def errors() -> str:
    """The errors, those of named locks first, each with its base and its facts."""
    found = [getattr(exceptions, name) for name in exceptions.__all__]
    rows = []
    for error in sorted(found, key=lambda error: (error is not exceptions.LockError, error.__name__)):
        base = error.__bases__[0]
        facts = ", ".join(f"`{name}`" for name in facts_of(error) if name not in facts_of(base))
        rows.append([f"`{error.__name__}`", f"`{base.__name__}`", first_sentence(error), facts])
    return table(["error", "is a", "meaning", "attributes"], rows)


def facts_of(error: Any) -> list[str]:
    """The facts of an error: its fields, or what it is made with, and its properties."""
    made_by_hand = inspect.isfunction(error.__init__) and issubclass(error, exceptions.LockError)
    names = list(inspect.signature(error.__init__).parameters)[1:] if made_by_hand else []
    return names + [name for name, value in inspect.getmembers(error) if isinstance(value, property)]


def all_signals() -> str:
    """The signals, and when each is sent."""
    told = comments(signals)
    names = [name for name, value in vars(signals).items() if isinstance(value, Signal)]
    return table(["signal", "sent when, and its arguments"], ([f"`{name}`", told[name]] for name in names))


def public_modules() -> Iterator[tuple[str, Any]]:
    """Yield the modules that users import from, in the order of their lengths. These have `__all__`, and are not below
    engine/."""
    yield "django_mongolock", django_mongolock
    found = pkgutil.walk_packages(django_mongolock.__path__, "django_mongolock.")
    for info in sorted(found, key=lambda info: (info.name.count("."), info.name)):
        if not re.match(r"django_mongolock\.(engine|management|migrations)\b", info.name):
            module = importlib.import_module(info.name)
            if hasattr(module, "__all__"):
                yield info.name, module


def public_names() -> dict[str, list[str]]:
    """The names of each module. A thing that several modules offer is listed once, under the shortest name."""
    listed = [getattr(exceptions, name) for name in exceptions.__all__]
    seen: list[Any] = [error for error in listed if error.__name__ not in django_mongolock.__all__]
    found: dict[str, list[str]] = {}
    for module_name, module in public_modules():
        for name in module.__all__:
            thing = getattr(module, name)
            if isinstance(thing, int) or not any(thing is other for other in seen):
                seen.append(thing)
                found.setdefault(module_name, []).append(name)
    return found


def names() -> str:
    """The public names, by module."""
    rows = []
    for module_name, listed in public_names().items():
        shown = sorted(listed, key=str.lower)
        for name in shown:
            thing = getattr(importlib.import_module(module_name), name)
            assert inspect.getdoc(thing), f"{module_name}.{name} needs a docstring: help() shows it, and the site"
        rows.append([f"`{module_name}`", ", ".join(f"`{name}`" for name in shown)])
    return table(["module", "names"], rows)


TABLES: Final[dict[tuple[str, str], Callable[[], str]]] = {
    ("howto/locks.md", "options"): options,
    ("reference/settings.md", "settings"): settings,
    ("reference/api.md", "errors"): errors,
    ("reference/api.md", "signals"): all_signals,
    ("reference/api.md", "names"): names,
}


def with_tables(page: str, text: str) -> str:
    """The text of a page below docs/, with its tables as they are now."""
    for (where, name), make in TABLES.items():
        if where == page:
            found = re.search(rf"(?s)(<!-- {name}: {NOTE} -->\n).*?(<!-- {name}: end -->)", text)
            assert found, f"docs/{page}: there is no place for the table {name!r}"
            text = f"{text[: found.start()]}{found[1]}{make()}\n{found[2]}{text[found.end() :]}"
    return text


def write() -> None:
    """Write all tables into their pages."""
    for page in dict.fromkeys(page for page, _ in TABLES):
        path = ROOT / "docs" / page
        path.write_text(with_tables(page, path.read_text()))
