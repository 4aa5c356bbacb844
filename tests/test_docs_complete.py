"""No page has an example that nobody runs."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Each page with Python, and the module that runs all of it.
RUN_BY = {
    "README.md": "tests/test_readme.py",
    "docs/explanation/which-lock.md": "tests/documents/test_docs.py",
    "docs/howto/at-most-n.md": "tests/test_docs_howto.py",
    "docs/howto/celery.md": "tests/test_docs_topics.py",
    "docs/howto/commands.md": "tests/test_docs_topics.py",
    "docs/howto/cron.md": "tests/test_docs_howto.py",
    "docs/howto/dashboard.md": "tests/test_dashboard.py",
    "docs/howto/document-locks.md": "tests/documents/test_docs.py",
    "docs/howto/containers.md": "tests/test_containers.py",
    "docs/howto/edit-locks.md": "tests/editing/test_docs.py",
    "docs/howto/environment.md": "tests/test_environment.py",
    "docs/howto/fencing.md": "tests/test_docs_howto.py",
    "docs/howto/idempotency.md": "tests/test_docs_topics.py",
    "docs/howto/incidents.md": "tests/test_incidents.py",
    "docs/howto/locks.md": "tests/test_docs_howto.py",
    "docs/howto/looking.md": "tests/test_docs_howto.py",
    "docs/howto/migrating.md": "tests/test_docs_migrating.py",
    "docs/howto/mongo-models.md": "tests/test_docs_howto.py",
    "docs/howto/monitoring.md": "tests/test_docs_examples.py",
    "docs/howto/owners.md": "tests/test_docs_topics.py",
    "docs/howto/rows.md": "tests/test_docs_topics.py",
    "docs/howto/running.md": "tests/test_docs_howto.py",
    "docs/howto/security.md": "tests/test_authentication.py",
    "docs/howto/testing.md": "tests/test_docs_examples.py",
    "docs/howto/transactions.md": "tests/test_docs_decorator.py",
    "docs/howto/untrusted-keys.md": "tests/security/test_key_values.py",
    "docs/howto/versions.md": "tests/test_versions_docs.py",
    "docs/howto/views.md": "tests/test_docs_topics.py",
    "docs/index.md": "tests/test_docs_site.py",
    "docs/reference/decorator.md": "tests/test_docs_decorator.py",
    "docs/tutorial/index.md": "tests/test_docs_tutorial.py",
    "docs/tutorial/quickstart.md": "tests/test_docs_topics.py",
}
#: What else reads a page: its figures, its tables, the tests that it names.
CHECKED_BY = (
    "tests/verify/test_model.py",
    "tests/test_docs_complete.py",
    "tests/test_docs_paths.py",
    "tests/test_docs_reference.py",
    "tests/test_documented_tests.py",
    "tests/test_contention_policies.py",
)


def pages_with_python() -> list[str]:
    """Also in a list or a quotation, also `py`."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(str(page.relative_to(ROOT)) for page in pages if "```py" in page.read_text())


def test_every_page_is_run() -> None:
    """A page that is new, or has its first example, needs a test that runs it."""
    assert pages_with_python() == sorted(RUN_BY)


@pytest.mark.parametrize("page", RUN_BY)
def test_the_module_knows_the_page(page: str) -> None:
    """The module that is said to run it reads that page, and no example is written so that it is not found."""
    name = page.removeprefix("docs/")
    assert f'{name}"' in (ROOT / RUN_BY[page]).read_text()
    text = (ROOT / page).read_text()
    assert text.count("```py") == text.count("\n```python\n") + text.count("\n```pycon\n")
