"""The examples of a page, and the comments about running them.

A block of Python is run with the names of the blocks before it. Readers do not see these comments:

    <!-- invisible-code-block: python        run as well, in this place: needs of an example, and its checks
    <!-- fixtures: app, settings -->         fixtures for the blocks of the page, beside the names of `test_examples`
    <!-- skip: next (NAME) -->               the next block is run by the test of that name instead
    <!-- long -->                            the page takes longer than a short test may
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
#: The pages that other tests run, each as a project of its own.
ELSEWHERE: Final = {
    "docs/reference/settings.md": "tests/test_environment.py",
    "docs/howto/security.md": "tests/test_authentication.py",
    "docs/howto/testing.md": "tests/docs/test_projects.py",
    "docs/tutorial/quickstart.md": "tests/docs/test_projects.py",
}
STEP: Final = re.compile(
    r"(?P<skip><!-- skip: next .*? -->\n)?"
    r"^(?:```(?P<kind>python|pycon)\n(?P<shown>.*?)^```$|<!-- invisible-code-block: python\n(?P<hidden>.*?)^-->$)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Step:
    """A block of a page, with its kind, its text, and its line."""

    kind: str
    text: str
    line: int

    def run(self, path: str, names: dict[str, Any]) -> None:
        """Run a block of Python. An error shows the page and its line."""
        code = compile("\n" * self.line + self.text, path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)  # noqa: S307 - our own pages
        if inspect.iscoroutine(result):
            asyncio.run(result)


@dataclass(frozen=True)
class Page:
    """A page of the documentation, by its path below the root."""

    name: str

    @property
    def path(self) -> str:
        return str(ROOT / self.name)

    @property
    def text(self) -> str:
        return Path(self.path).read_text()

    @property
    def fixtures(self) -> list[str]:
        """Names of pytest's fixtures that the examples use."""
        return [
            name
            for found in re.findall(r"^<!-- fixtures: (.*) -->$", self.text, re.MULTILINE)
            for name in found.split(", ")
        ]

    def steps(self) -> Iterator[Step]:
        """Yield the blocks that are run, from top to bottom."""
        for found in STEP.finditer(self.text):
            if not found["skip"]:
                part = "shown" if found["kind"] else "hidden"
                yield Step(found["kind"] or part, found[part], self.text[: found.start(part)].count("\n"))


def pages() -> list[Page]:
    """Return README.md and the pages below docs/."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [Page(str(path.relative_to(ROOT))) for path in found]


def blocks(name: str, kind: str = "python") -> list[str]:
    """Return the blocks of the page *name* below docs/ that readers see."""
    text = (ROOT / "docs" / name).read_text()
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
