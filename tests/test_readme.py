"""The examples of the README run as they stand there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from celery import shared_task

from tests.support.lock_fixtures import WITH_MONGO
from tests.support.looking import document

README = Path(__file__).parents[1] / "README.md"
HEADINGS = ["Installation", "Use", "Promises", "Try it", "Links"]
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def run(number: int, **names: Any) -> dict[str, Any]:
    """Run the example of that number; return what it has defined."""
    exec(compile(EXAMPLES[number], f"README, example {number}", "exec"), names)  # noqa: S102 - our own page
    return names


def test_all_are_here() -> None:
    """An example that is added must be added here."""
    assert len(EXAMPLES) == 2


def test_settings() -> None:
    """They are those of the project, but for the URI."""
    names: dict[str, Any] = {"DATABASES": {}, "INSTALLED_APPS": [], "os": os}
    names = run(0, **names)
    assert names["MONGOLOCK"] == {"DATABASE": "locks"}
    assert names["DATABASES"]["locks"]["ENGINE"] == "django_mongodb_backend"


@WITH_MONGO
def test_use() -> None:
    """A block, a view, two tasks."""
    shipped: list[int] = []
    names = run(1, order_id=5, ship=shipped.append, shared_task=shared_task)
    assert shipped == [5]
    assert names["export_ad"](7) is None
    assert document("ad:7")["acquisitions"] == 1


def test_it_begins_with_what_it_is() -> None:
    """The order in which a newcomer reads: one sentence, badges, why, a picture, installation, use, promises, links."""
    text = README.read_text()
    marks = ["Named locks", "[![Tests]", "take turns", "<picture>", *(f"## {name}" for name in HEADINGS)]
    assert sorted(marks, key=text.index) == marks


def test_the_two_commands() -> None:
    """One runs the demo, one the tests, and continuous integration calls the latter."""
    commands = re.findall(r"^\$ python3 dev\.py (\w+)", README.read_text(), re.MULTILINE)
    assert commands == ["demo", "test"]
    assert "python3 dev.py test" in (README.parent / ".ci/run").read_text()
