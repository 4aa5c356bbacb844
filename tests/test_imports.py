"""Imports go one way. Read from the source, so that nothing needs to be imported, or installed."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "django_mongolock"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE

#: Nobody imports from a layer to the right of its own.
LAYERS = ("exceptions", "engine", "backends", "locks", "decorators", "contrib")
#: These stand on all of that. None of it may import them.
ON_TOP = ("models", "admin", "management", "versions", "editing")
#: Nothing below `backends` may import these.
FRAMEWORKS = ("django", "django_mongodb_backend", "celery")


def imports(source: str, module: str, is_package: bool) -> Iterator[str]:
    """The full names of the modules that a source imports anywhere, also inside functions; not for type checkers."""
    tree = ast.parse(source)
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ""
            if node.level:
                parts = module.split(".")
                base = ".".join(parts[: len(parts) - node.level + is_package])
            name = ".".join(part for part in (base, node.module) if part)
            yield from (f"{name}.{alias.name}" for alias in node.names)


def wrong_arrows(root: Path) -> list[str]:
    """Every import that must not be, in words."""
    wrong: list[str] = []
    for path in sorted(root.rglob("*.py")):
        parts = [PACKAGE, *path.relative_to(root).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        wrong += (
            f"{module} imports {name}: {complaint}"
            for name in imports(path.read_text(), module, is_package)
            if (complaint := complain(layer(module), name))
        )
    return wrong


def layer(name: str) -> str:
    """The layer of a module, or "" for what is outside of our package, or in none."""
    parts = name.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else ""


def complain(importer: str, name: str) -> str:
    """Say what is wrong with an import, if anything."""
    imported = layer(name)
    if importer == "exceptions" and name.split(".", maxsplit=1)[0] == PACKAGE:
        return "exceptions import nothing of ours"
    if importer in ("exceptions", "engine") and name.split(".", maxsplit=1)[0] in FRAMEWORKS:
        return "there is no Django below this line"
    if importer == "engine" and imported not in ("engine", "exceptions", ""):
        return "the engine stands on nothing but the exceptions"
    if importer in LAYERS and imported in ON_TOP:
        return f"{imported} stands on top of {importer}"
    if importer in LAYERS and imported in LAYERS and LAYERS.index(imported) > LAYERS.index(importer):
        return f"the arrow goes from {importer} to {imported}"
    return ""


def test_imports_go_one_way() -> None:
    """exceptions <- engine <- backends <- locks <- decorators <- contrib; models, admin and management on top."""
    assert list((ROOT / "engine").glob("*.py"))
    assert wrong_arrows(ROOT) == []


@pytest.mark.parametrize(
    ("path", "source", "arrow"),
    [
        ("engine/session/session.py", "import django.conf", "django.conf"),
        ("engine/session/session.py", "from django import db", "django.db"),
        ("engine/session/session.py", "def f():\n    from ..conf import settings", "django_mongolock.conf.settings"),
        ("engine/__init__.py", "from ..locks import mongo_lock", "django_mongolock.locks.mongo_lock"),
        ("engine/__init__.py", "from .. import signals", "django_mongolock.signals"),
        ("exceptions.py", "from .engine.document import Terms", "django_mongolock.engine.document.Terms"),
        (
            "backends/mongo.py",
            "from django_mongolock.decorator.mongo_locked import x",
            "django_mongolock.decorator.mongo_locked.x",
        ),
        ("locks.py", "if True:\n    import django_mongolock.models", "django_mongolock.models"),
        ("decorators.py", "from .contrib import celery", "django_mongolock.contrib.celery"),
    ],
)
def test_an_arrow_that_turns_round_is_found(tmp_path: Path, path: str, source: str, arrow: str) -> None:
    """The test above can fail: a planted import is found, wherever it stands."""
    planted = tmp_path / path
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(source)
    (found,) = wrong_arrows(tmp_path)
    assert f"imports {arrow}:" in found


def test_imports_for_type_checkers_do_not_count(tmp_path: Path) -> None:
    """They are not there when the program runs."""
    (tmp_path / "exceptions.py").write_text("if TYPE_CHECKING:\n    from .engine.document import Terms")
    (tmp_path / "models.py").write_text("from .decorators import x\nfrom .contrib import celery")
    assert wrong_arrows(tmp_path) == []
