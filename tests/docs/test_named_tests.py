"""Pages that name tests. Each test exists, and its docstring fits the page."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

FAILURES = ROOT / "docs" / "evidence/failures.md"
PROMISES = ROOT / "docs" / "evidence/promises.md"
THREATS = ROOT / "docs" / "evidence/threats.md"
ORIGINS = ROOT / "docs" / "evidence/origins.md"
NAME = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")


@cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


@cache
def docstrings(path: str) -> dict[str, str]:
    """Return the docstrings of the tests of a file, by name. Docstrings of their class and their file count as well."""
    found: dict[str, str] = {}

    def walk(node: ast.Module | ast.ClassDef, name: str, promised: str) -> None:
        for inner in node.body:
            if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                own = f"{promised} {ast.get_docstring(inner) or ''}"
                found[f"{name}{inner.name}"] = own
                if isinstance(inner, ast.ClassDef):
                    walk(inner, f"{name}{inner.name}::", own)

    file = ROOT / path
    if file.is_file():
        module = tree(path)
        walk(module, "", ast.get_docstring(module) or "")
    return {name: text for name, text in found.items() if name.split("::")[-1].startswith(("test_", "Test"))}


def rows(text: str) -> list[list[str]]:
    """Return the cells of every row of the tables in a page, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = {number + shift for number, line in enumerate(lines) if set(line) <= set("|-") for shift in (-1, 0)}
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for number, line in enumerate(lines)
        if number not in heads
    ]


def complaints(text: str) -> list[str]:
    """Return the faults of a page that names tests."""
    wrong = []
    for cells in rows(text):
        named = NAME.findall(cells[-1])
        row = re.fullmatch(r"[FP]\d+", cells[0])
        if not named:
            wrong.append(f"{cells[0]} names no test")
        for path, name in named:
            promise = docstrings(path).get(name)
            if promise is None:
                wrong.append(f"there is no {path}::{name}")
            elif row and not re.search(rf"\b{row[0]}\b", promise):
                wrong.append(f"{path}::{name} does not say that it is about {row[0]}")
    return wrong


def tables_of_tests(page: Path) -> str:
    """Return the text of a page, from the first table that has a column of tests."""
    text = page.read_text()
    return text if page != ORIGINS else text[text.index("\n## ") :]


@pytest.mark.long
@pytest.mark.parametrize("page", [FAILURES, PROMISES, THREATS, ORIGINS], ids=lambda page: page.name)
def test_every_row_names_its_tests(page: Path) -> None:
    """Every row names an existing test about the row."""
    assert complaints(tables_of_tests(page)) == []


def test_every_origin_has_its_table() -> None:
    """Each of the five systems has a table of its features, and a line that leads there."""
    text = ORIGINS.read_text()
    sections = text.split("\n## ")[1:]
    assert len(sections) == len(rows(text.split("\n## ")[0])) == 5
    assert all(len(rows(section)) >= 4 for section in sections)


def test_no_failure_is_left_out() -> None:
    """F1 to F69, F71 to F80, F86, F89, F91 to F93 and F95 to F106, and later ones, are there once each, in order."""
    numbers = [int(cells[0].removeprefix("F")) for cells in rows(FAILURES.read_text())]
    assert numbers == sorted(set(numbers))
    assert {*range(1, 70), *range(71, 81), 86, 89, *range(91, 94), *range(95, 107)} <= set(numbers)


def test_no_promise_is_left_out() -> None:
    """P1 to P9, each with its tests."""
    assert [cells[0] for cells in rows(PROMISES.read_text())] == [f"P{number}" for number in range(1, 10)]


def test_each_promise_has_three_short_tests() -> None:
    """The tests that run on every change find a defect that breaks a promise."""
    for cells in rows(PROMISES.read_text()):
        short = [each for each in NAME.findall(cells[-1]) if is_short(*each)]
        assert len(short) >= 3, cells[0]


def test_the_witnesses_of_real_parts_run() -> None:
    """An election, a kill, a worker, a browser, a fork: each is in the short tier."""
    text = (ROOT / "docs/project/tests.md").read_text()
    witnesses = NAME.findall(text[text.index("The witnesses") : text.index("[What a lease promises]")])
    assert len(witnesses) == 5
    assert all(is_short(*each) for each in witnesses)


@cache
def is_short(path: str, name: str) -> bool:
    """Return whether a test runs in the short tier, by the marks of its file, its class and itself."""
    nodes: list[ast.AST] = [tree(path)]
    for part in name.split("::"):
        nodes.append(next(each for each in ast.iter_child_nodes(nodes[-1]) if getattr(each, "name", "") == part))
    marks = " ".join(ast.unparse(mark) for node in nodes for mark in marks_of(node))
    return "mark.witness" in marks or not re.search(r"mark\.(long|program)", marks)


def marks_of(node: ast.AST) -> list[ast.AST]:
    """Return the marks of a test or a class, or those in the `pytestmark` of a file or a class."""
    inside = [each.value for each in getattr(node, "body", ()) if ast.unparse(each).startswith("pytestmark")]
    return [*getattr(node, "decorator_list", ()), *inside]


#: The lists of surfaces over which a test runs, by their names in the table of threats.
PLACES = {
    "pages": ("PAGES", "addresses"),
    "commands": ("COMMANDS",),
    "edit locks": ("EDITED",),
    "own admins": ("OWN_ADMINS",),
}


@cache
def names_in(path: str, name: str) -> set[str]:
    """The names that a test uses, its decorators included."""
    node: ast.AST = tree(path)
    for part in name.split("::"):
        node = next(each for each in ast.iter_child_nodes(node) if getattr(each, "name", "") == part)
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def without_a_list(text: str) -> list[str]:
    """Return the rows that name places, without a test that runs over the list of the places."""
    wrong = []
    for attack, _, where, tests in rows(text):
        used = set().union(*(names_in(path, name) for path, name in NAME.findall(tests)))
        places = filter(None, where.split(", "))
        wrong += [f"{attack}: {place}" for place in places if not used & set(PLACES[place])]
    return wrong


def test_threats_are_tried_at_every_place() -> None:
    """Pages or commands in the table of threats are always all of them. A test of the row runs over the list that
    `tests/security/test_surfaces.py::test_no_surface_is_missing` keeps complete."""
    text = THREATS.read_text()
    assert without_a_list(text) == []
    assert {place for row in rows(text) for place in row[2].split(", ")} == {*PLACES, ""}
    row = "| a | b | commands | `tests/security/test_surfaces.py::TestShown::test_pages` |"
    assert without_a_list(f"| | | | |\n|---|---|---|---|\n{row}") == ["a: commands"]


def test_drift_is_found() -> None:
    """The judgement can fail in each of its ways."""
    head = "| | a | b |\n|---|---|---|\n"
    good = "`tests/engine/test_failover.py::test_half_a_second_each_way`"
    assert complaints(f"{head}| F19 | slow | {good} |") == []
    assert complaints(f"{head}| F20 | slow | {good} |") == [f"{good.strip('`')} does not say that it is about F20"]
    assert complaints(f"{head}| F19 | slow | nothing |") == ["F19 names no test"]
    assert complaints(f"{head}| F19 | x | `tests/no.py::test_x` |") == ["there is no tests/no.py::test_x"]
