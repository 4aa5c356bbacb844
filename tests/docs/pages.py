"""The examples of a page, and the comments about running them.

A test runs each block of Python with the names that the blocks before it have defined. Readers do not see these
comments:

    <!-- run: NAME -->              run the block of that name in this place: the setup of an example, or its checks
    <!-- skip: next (NAME) -->      the test of that name runs the next block instead

The blocks that a page names by `run` are in a file with the path of the page, below tests/docs/unseen. Such a file may
also have these comments:

    <!-- fixtures: app, settings -->    the fixtures that the blocks use beside the names of `test_examples`
    <!-- long -->                       the page takes longer than a short test may
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
    r"^(?:```(?P<kind>python|pycon)\n(?P<shown>.*?)^```$|<!-- run: (?P<unseen>.*?) -->$)",
    re.MULTILINE | re.DOTALL,
)
UNSEEN: Final = re.compile(r"^## (?P<name>\w+)\n\n```python\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    """A block: its kind, its text, its file, its line there."""

    kind: str
    text: str
    path: str
    line: int

    def run(self, names: dict[str, Any]) -> None:
        """Run a block of Python. An error shows the file and the line."""
        code = compile("\n" * self.line + self.text, self.path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
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
    def beside(self) -> Path:
        """The file with the blocks that readers do not see."""
        return ROOT / "tests/docs/unseen" / self.name.removeprefix("docs/")

    @property
    def notes(self) -> str:
        """The text of that file, or "" if there is none."""
        return self.beside.read_text() if self.beside.exists() else ""

    @property
    def fixtures(self) -> list[str]:
        """Names of pytest's fixtures that the examples use."""
        found = re.findall(r"^<!-- fixtures: (.*) -->$", self.notes, re.MULTILINE)
        return [name for names in found for name in names.split(", ")]

    def unseen(self) -> dict[str, Step]:
        """The blocks that readers do not see, by name."""
        text = self.notes
        return {
            found["name"]: Step("unseen", found["text"], str(self.beside), text[: found.start("text")].count("\n"))
            for found in UNSEEN.finditer(text)
        }

    def steps(self) -> Iterator[Step]:
        """The blocks that are run, from top to bottom."""
        unseen = self.unseen()
        for found in STEP.finditer(self.text):
            if found["unseen"]:
                yield unseen[found["unseen"]]
            elif not found["skip"]:
                line = self.text[: found.start("shown")].count("\n")
                yield Step(found["kind"], found["shown"], self.path, line)


def pages() -> list[Page]:
    """Return README.md and the pages below docs/."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [Page(str(path.relative_to(ROOT))) for path in found]


def blocks(name: str, kind: str = "python") -> list[str]:
    """Return the blocks of the page *name* below docs/ that readers see."""
    text = (ROOT / "docs" / name).read_text()
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
