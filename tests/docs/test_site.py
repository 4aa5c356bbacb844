"""The documentation as a site can be built, and the targets, names and quotes of its pages exist."""

from __future__ import annotations

import pkgutil
import re
import runpy
from pathlib import Path

import pytest
from django.apps import apps

from testproject.celery import app as shop
from tests.docs import __main__ as docs
from tests.docs.pages import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
IMAGE = re.compile(r'(?:src|srcset)="([^":]+)"')
LINK = re.compile(r"\]\((?!https?:|#|mailto:|\.\./\.\./actions/)([^)#\s]+)(?:#([\w-]+))?\)")

#: A path below one of these folders, and a name below one of these packages.
FILE = re.compile(r"(?<![\w/.<…])((?:django_mongolock|tests|testproject|docs|engine)/[\w./-]*\w)")
DOTTED = re.compile(r"(?<![\w/.-])(?:(?:django_mongolock|tests|testproject)(?:\.[a-zA-Z_]\w*)+)")


def anchors(page: Path) -> set[str]:
    """Return the headings of a page, as GitHub and MyST name them in links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = [title.lower() for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    """Links lead to a file in the repository, and to a heading of it, as on GitHub."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in [*LINK.findall(text), *((image, "") for image in IMAGE.findall(text))]:
        file = page.parent / target
        assert file.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(file), f"{page}: {target}#{anchor}"


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every page has its place in a table of contents, and every link its end."""
    assert docs.build(tmp_path) == 0, capfd.readouterr().err
    for page in PAGES:
        assert (tmp_path / page.relative_to(ROOT / "docs").with_suffix(".html")).exists()


def test_the_pictures_are_what_the_script_draws() -> None:
    """The pictures can be drawn again, and every page shows existing ones."""
    images = ROOT / "docs" / "images"
    draw = runpy.run_path(str(images / "draw.py"))["PICTURES"]
    assert {name: (images / name).read_text() for name in draw} == {name: function() for name, function in draw.items()}


def exists(dotted: str) -> bool:
    """Return whether a dotted name is a module or something in a module."""
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True


def test_files_and_import_paths_exist() -> None:
    """Files and import paths of every page exist. Permissions, tasks and loggers look alike, but are no import
    paths."""
    package = ROOT / "django_mongolock"
    apart = [folder for name in ("static", "templates") for folder in package.glob(f"*/{name}")]
    homes = (ROOT, package, package / "static", package / "templates", *apart)
    meta = [model._meta for model in apps.get_app_config("django_mongolock").get_models()]
    codes = {code for each in meta for code, _ in each.permissions}
    codes |= {f"{action}_{each.model_name}" for each in meta for action in each.default_permissions}
    others = {f"django_mongolock.{code}" for code in codes} | set(shop.tasks)
    wrong = []
    for page in [*ROOT.glob("*.md"), *PAGES]:
        text = page.read_text()
        wrong += [(page.name, name) for name in FILE.findall(text) if not any((home / name).exists() for home in homes)]
        wrong += [(page.name, name) for name in DOTTED.findall(text) if name not in others and not exists(name)]
    assert wrong == []
    assert DOTTED.findall("`tests.nothing.at_all()`") == ["tests.nothing.at_all"]
    assert not exists("tests.nothing.at_all")


def test_messages_of_troubleshooting() -> None:
    """Each text in the first column is a text of the library, of SQLite or of Django's test runner."""
    source = "".join(path.read_text() for path in (ROOT / "django_mongolock").rglob("*.py"))
    source = re.sub(r"\{[^{}]*\}", "…", re.sub(r'"\s*\n\s*f?"', "", source))  # each string in one piece
    source += "no such table: … Database queries to '…' are not allowed in this test"
    table = (ROOT / "docs/howto/troubleshooting.md").read_text().partition("## By message")[2].partition("\n## ")[0]
    messages = [text for line in table.splitlines() for text in re.findall(r"`([^`]+)`", line.partition(" | ")[0])]
    assert len(messages) > 15
    for text in messages:
        plain = re.sub(r"'[^']*'|\"django_mongolock\.router[^\"]*\"|mongolock_locks$|\d+", "…", text)
        assert [piece for piece in plain.split("…") if piece.strip(" :;,.?'") not in source] == [], text
