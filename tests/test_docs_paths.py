"""Every file and every import path that a page names exists."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest
from django.apps import apps

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
#: A path below one of these folders.
FILE = re.compile(r"(?<![\w/.<…])((?:django_mongolock|tests|testproject|docs|engine)/[\w./-]*\w)")
DOTTED = re.compile(r"(?<![\w/.-])(?:(?:django_mongolock|tests|testproject)(?:\.[a-zA-Z_]\w*)+)")


def exists(dotted: str) -> bool:
    """Whether a dotted name is a module or something in a module."""
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True


def test_files() -> None:
    """Below the root or the package, in static files or templates."""
    package = ROOT / "django_mongolock"
    homes = (ROOT, package, package / "static", package / "templates")
    wrong = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in FILE.findall(page.read_text())
        if not any((home / name).exists() for home in homes)
    ]
    assert wrong == []


def test_import_paths() -> None:
    """Permissions, tasks and loggers apart, which look alike."""
    tasks = {"django_mongolock.clear_stale_locks"}
    codes = {f"django_mongolock.{code}" for code in permissions()} | tasks
    named = {name: page for page in PAGES for name in DOTTED.findall(page.read_text())}
    wrong = [
        f"{page.relative_to(ROOT)}: {name}" for name, page in named.items() if name not in codes and not exists(name)
    ]
    assert wrong == []


def permissions() -> set[str]:
    """The codenames of the app's permissions."""
    models = list(apps.get_app_config("django_mongolock").get_models())
    return {code for model in models for code, _ in model._meta.permissions} | {
        f"{action}_{model._meta.model_name}" for model in models for action in model._meta.default_permissions
    }


@pytest.mark.parametrize("name", ["django_mongolock.nothing", "django_mongolock.locks.Nothing", "tests.nothing.at_all"])
def test_a_wrong_path_is_found(name: str) -> None:
    """The test above can fail."""
    assert DOTTED.findall(f"`{name}()`") == [name]
    assert not exists(name)
