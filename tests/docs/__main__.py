"""Build the documentation and run its examples: `python3 dev.py docs`.

    python3 dev.py docs --build     only build it, into build/docs
    python3 dev.py docs --write     write the tables that are made from docstrings and fields
    python3 dev.py docs --words     count its words, part by part
    python3 dev.py docs -k celery   further arguments go to pytest

A warning of Sphinx is an error. The site is in build/docs/index.html.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import words
from tests.docs.pages import ELSEWHERE, ROOT

SITE = ROOT / "build" / "docs"


def build(site: Path = SITE) -> int:
    """Build the site, and return Sphinx' exit code."""
    strict = ["--fail-on-warning", "--keep-going", "--nitpicky", "--fresh-env", "--quiet"]
    command = [sys.executable, "-m", "sphinx", *strict, str(ROOT / "docs"), str(site)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def write_tables() -> None:
    """Write the tables of the reference."""
    import django

    os.environ["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
    django.setup()
    from tests.docs import tables

    tables.write()


def main(arguments: list[str]) -> int:
    """Build, then run the tests that read a page."""
    if arguments == ["--words"]:
        print(words.report())
        return 0
    if arguments == ["--write"]:
        write_tables()
        return 0
    if code := build():
        return code
    print(f"docs: {SITE / 'index.html'}", flush=True)
    if arguments == ["--build"]:
        return 0
    whole = ["--numprocesses", "3", "-m", "program or not program"]  # with the tutorial, although it takes minutes
    return pytest.main([*whole, *arguments, "tests/docs", *sorted({*ELSEWHERE.values()})])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
