"""No page has an example that nobody runs."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Each page with Python, and the module that runs all of it.
RUN_BY = {
    "README.md": "tests/test_readme.py",
    "docs/celery.md": "tests/test_docs_topics.py",
    "docs/commands.md": "tests/test_docs_topics.py",
    "docs/decorator.md": "tests/test_docs_decorator.py",
    "docs/document-locks.md": "tests/documents/test_docs.py",
    "docs/monitoring.md": "tests/test_docs_examples.py",
    "docs/owners.md": "tests/test_docs_topics.py",
    "docs/rows.md": "tests/test_docs_topics.py",
    "docs/security.md": "tests/test_access.py",
    "docs/testing.md": "tests/test_docs_examples.py",
    "docs/transactions.md": "tests/test_docs_decorator.py",
    "docs/versions.md": "tests/test_versions_docs.py",
    "docs/which-lock.md": "tests/documents/test_docs.py",
}


def pages_with_python() -> list[str]:
    """Also in a list or a quotation, also `py`."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(page.relative_to(ROOT)) for page in pages if "```py" in page.read_text()]


def test_every_page_is_run() -> None:
    """A page that is new, or has its first example, needs a test that runs it."""
    assert pages_with_python() == list(RUN_BY)


@pytest.mark.parametrize("page", RUN_BY)
def test_the_module_knows_the_page(page: str) -> None:
    """The module that is said to run it reads that page, and no example is written so that it is not found."""
    name = Path(page).name
    assert f'"{name}"' in (ROOT / RUN_BY[page]).read_text()
    text = (ROOT / page).read_text()
    assert text.count("```py") == text.count("\n```python\n") + text.count("\n```pycon\n")
