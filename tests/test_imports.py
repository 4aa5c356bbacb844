"""Imports go one way. The tests read the source, so that nothing needs to be imported or installed."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "django_mongolock"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE
PAGE = ROOT.parent / "docs" / "project/house.md"

#: A line of the path of a lock, and the names in a file.
PATH = re.compile(r"^\| (`\w+.*?`) \| `([\w/]+\.py)` \|", re.MULTILINE)
IN_FILE = re.compile(r"((?:`\w+(?:\(\))?`(?: and )?)+) in `([\w/]+\.py)`")

#: The rooms of the house, from the ground up. A room imports only from lower floors, and the rooms of one floor do not
#: know each other. docs/project/house.md draws them.
FLOORS = (
    {"exceptions"},
    {"engine", "engine.clock", "engine.logs", "engine.text_checks"},
    {"engine.rule"},
    {"engine.protocol", "engine.store"},
    {"engine.session"},
    {"engine.lock"},
    {"conf"},
    {"keys", "context", "signals", "transactions"},
    {"backends"},
    {"inspection", "other_collections"},
    {"locks"},
    {"owners", "rows", "router"},
    {"claims", "decorator", "leaders"},
    {"models"},
    {"fencing"},
    {"templatetags"},
    {"admin", "management", "contrib", "testing"},
    {"history", "versions"},
    {"documents", "editing"},
    {"apps", "migrations", "__init__"},
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
#: Nothing of Django is imported below this room.
FIRST_WITH_DJANGO = "conf"
FRAMEWORKS = ("django", "django_mongodb_backend", "celery")
#: Separate apps that the core does not know.
OPT_IN = {"documents", "versions", "editing", "history"}


def modules(root: Path) -> dict[str, Path]:
    """Return the modules below *root*, by their full names."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [PACKAGE, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, path: Path) -> Iterator[str]:
    """Yield the full names of a module's imports, also inside functions and for type checkers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ""
            if node.level:
                parts = module.split(".")
                base = ".".join(parts[: len(parts) - node.level + (path.name == "__init__.py")])
            name = ".".join(part for part in (base, node.module) if part)
            yield from (f"{name}.{alias.name}" for alias in node.names)


def arrows(root: Path) -> dict[str, set[str]]:
    """Return the imported modules of ours for each module. A name that a package exports is imported from the
    package."""
    known = modules(root)

    def resolve(name: str) -> str:
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name

    return {module: {resolve(name) for name in imports(module, path)} - {module, ""} for module, path in known.items()}


def room(module: str) -> str:
    """Return the part of the package that a module belongs to."""
    parts = module.split(".")
    if parts[1:2] == ["engine"]:
        return ".".join(parts[1:3])  # the engine has floors of its own
    return parts[1] if len(parts) > 1 else "__init__"


def wrong_arrows(root: Path) -> list[str]:
    """Every import that must not be, in words."""
    wrong = []
    for module, path in modules(root).items():
        here = room(module)
        if here not in FLOOR:
            wrong.append(f"{module} is in no room that this test knows: put it into FLOORS")
            continue
        wrong += (
            f"{module} imports {name}: {complaint}"
            for name in sorted(set(imports(module, path)))
            if (complaint := complain(here, name))
        )
    return wrong


def complain(here: str, name: str) -> str:
    """Return the fault of an import, if any."""
    top = name.partition(".")[0]
    if top in FRAMEWORKS and FLOOR[here] < FLOOR[FIRST_WITH_DJANGO]:
        return "there is no Django below this line"
    there = room(name)
    if top != PACKAGE or there == here:
        return ""
    if there not in FLOOR:  # a name that the package itself exports
        there = "__init__"
    if FLOOR[there] >= FLOOR[here]:
        return f"{there} does not stand below {here}"
    return ""


def circles(root: Path) -> list[tuple[str, ...]]:
    """Return the groups of modules that import each other, directly or not."""
    graph = arrows(root)
    reached: dict[str, set[str]] = {}
    for module in graph:
        todo, found = [module], set[str]()
        while todo:
            for other in graph[todo.pop()] - found:
                found.add(other)
                todo.append(other)
        reached[module] = found
    groups = {tuple(sorted(o for o in found if module in reached[o])) for module, found in reached.items()}
    return sorted(groups - {()})


@pytest.mark.long
def test_imports_go_one_way() -> None:
    """Every module has a floor, and imports only from below."""
    assert modules(ROOT)
    assert wrong_arrows(ROOT) == []


@pytest.mark.long
def test_no_modules_import_one_another() -> None:
    """No modules import each other, also not through others, inside functions or for type checkers."""
    assert circles(ROOT) == []


def test_nothing_in_the_core_knows_what_stands_beside_it() -> None:
    """The apps that one opts into stand above the whole core. Only the last floor loads it."""
    core = FLOOR.keys() - OPT_IN - FLOORS[-1]
    assert max(FLOOR[room] for room in core) < min(FLOOR[app] for app in OPT_IN)


#: Names that Django gives to a class inside another one, or in a module of its own.
DJANGOS = {"Meta", "Media", "Command", "Migration"}
#: The beginning of a class.
CLASS = re.compile(r"^ *class (\w+)[(:]", re.MULTILINE)


def defined_twice(root: Path) -> dict[str, list[str]]:
    """Return the names of several classes, with their modules."""
    found: dict[str, list[str]] = {}
    for module, path in modules(root).items():
        for name in CLASS.findall(path.read_text()):
            if name not in DJANGOS:
                found.setdefault(name, []).append(module)
    return {name: places for name, places in found.items() if len(places) > 1}


def test_a_name_is_one_class() -> None:
    """The name of a class is unique."""
    assert defined_twice(ROOT) == {}


def test_a_name_of_two_classes_is_found(tmp_path: Path) -> None:
    """The test above can fail."""
    (tmp_path / "a.py").write_text("class Edge:\n    class Meta: ...")
    (tmp_path / "b.py").write_text("class Edge:\n    class Meta: ...")
    assert list(defined_twice(tmp_path)) == ["Edge"]


@pytest.mark.parametrize(
    ("path", "source", "arrow"),
    [
        ("engine/session/session.py", "from django import db", "django.db"),
        ("engine/lock/lock.py", "def f():\n    from ...conf import settings", "django_mongolock.conf.settings"),
        ("engine/rule/document.py", "from ..session import grant", "django_mongolock.engine.session.grant"),
        ("locks.py", "if True:\n    import django_mongolock.models", "django_mongolock.models"),
        ("locks.py", "if TYPE_CHECKING:\n    from .models import Lock", "django_mongolock.models.Lock"),
        ("owners.py", "from .rows import LockedQuerySet", "django_mongolock.rows.LockedQuerySet"),
    ],
)
def test_an_arrow_that_turns_round_is_found(tmp_path: Path, path: str, source: str, arrow: str) -> None:
    """The tests above can fail. An import is found anywhere in a file."""
    planted = tmp_path / path
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(source)
    (found,) = wrong_arrows(tmp_path)
    assert f"imports {arrow}:" in found


def test_a_circle_is_found(tmp_path: Path) -> None:
    """A circle of three modules is found through a type checker's import and an import inside a function."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/a.py").write_text("from . import b")
    (tmp_path / "engine/b.py").write_text("if TYPE_CHECKING:\n    from .c import C")
    (tmp_path / "engine/c.py").write_text("def f():\n    from .a import A")
    (found,) = circles(tmp_path)
    assert [name.rpartition(".")[2] for name in found] == ["a", "b", "c"]


# docs/project/house.md


def test_the_page_draws_the_floors() -> None:
    """The page draws each floor with its rooms in FLOORS, numbered from the ground up."""
    lines = re.findall(r"^ ?(\d+)   ([\w.]+(?:  [\w.]+)*)(?:   .*)?$", PAGE.read_text(), re.MULTILINE)
    assert [(int(number), set(rooms.split())) for number, rooms in reversed(lines)] == list(enumerate(FLOORS, start=1))


def test_the_page_names_what_exists() -> None:
    """Every file on the page exists, with the named functions and classes."""
    text = PAGE.read_text()
    named = [(re.findall(r"`(\w+)", names), file) for names, file in [*PATH.findall(text), *IN_FILE.findall(text)]]
    assert len(named) > 20
    for names, file in named:
        source = (ROOT / file).read_text()
        for name in names:
            assert re.search(rf"(?:def|class) {name}\b|\b{name}(?::.*)? = ", source), (name, file)
    for file in re.findall(r"[\w/]+\.py", text):
        assert (ROOT / file).exists() or (ROOT.parent / file).exists(), file
