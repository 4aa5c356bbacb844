"""The documentation as a site: it can be built, its links lead somewhere on GitHub too, and its first page works."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
from django.test import RequestFactory

from tests import docs
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.looking import held_elsewhere

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
IMAGE = re.compile(r'(?:src|srcset)="([^":]+)"')
LINK = re.compile(r"\]\((?!https?:|#|mailto:|\.\./\.\./actions/)([^)#\s]+)(?:#([\w-]+))?\)")


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub and MyST name them in links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = [title.lower() for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    """In the repository, as it is shown on GitHub: to a file, and to a heading of it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in [*LINK.findall(text), *((image, "") for image in IMAGE.findall(text))]:
        file = page.parent / target
        assert file.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(file), f"{page}: {target}#{anchor}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "project"], ids=str)
def test_each_page_begins_with_what_it_is_for(page: Path) -> None:
    """In a sentence, before any heading, table, list or example."""
    title, purpose, *_ = page.read_text().split("\n\n")
    assert title.startswith("# ")
    assert re.match(r"[A-Z`]", purpose)
    assert purpose.rstrip().endswith((".", ":"))


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every page has its place in a table of contents, and every link its end."""
    assert docs.build(tmp_path) == 0, capfd.readouterr().err
    for page in PAGES:
        assert (tmp_path / page.relative_to(ROOT / "docs").with_suffix(".html")).exists()


def test_a_warning_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that leads nowhere fails the build."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/conf.py").write_text('extensions = ["myst_parser"]\n')
    (tmp_path / "docs/index.md").write_text("# A\n\n[b](b.md)\n")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    assert docs.build(tmp_path / "site") != 0
    (tmp_path / "docs/index.md").write_text("# A\n")
    assert docs.build(tmp_path / "site") == 0


def test_the_pictures_are_what_the_script_draws() -> None:
    """They can be made anew, and every page shows one that there is."""
    images = ROOT / "docs" / "images"
    draw = runpy.run_path(str(images / "draw.py"))["PICTURES"]
    assert {name: (images / name).read_text() for name in draw} == {name: function() for name, function in draw.items()}


def test_what_is_built_is_not_kept() -> None:
    """git ignores the site."""
    subprocess.run(["git", "check-ignore", "--quiet", "build/docs/index.html"], cwd=ROOT, check=True)


@WITH_MONGO
def test_the_first_page() -> None:
    """Its example runs, and the view answers what it says."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "docs_index"}
    exec(example, names)  # noqa: S102 - our own page
    request = RequestFactory().get("/")
    assert names["pay"](request, 5).content == b"paid"
    with held_elsewhere("order:5"):
        assert names["pay"](request, 5).status_code == 423
