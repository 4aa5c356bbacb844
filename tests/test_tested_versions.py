"""dev.py versions: the newest Python is found, its lack is reported, and the table is that of a commit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import tested_versions
from tests.tested_versions import BEGIN, END, Candidate

OLD = Candidate((3, 11, 7), "/python3.11")
NEW = Candidate((3, 13, 0), "/python3.13")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The runs that would be made. That of the Python "/bad" fails."""
    made: list[tuple[str, str]] = []

    def run(name: str, python: str, arguments: list[str]) -> tuple[int, str]:
        made.append((name, python))
        return int(python == "/bad"), f"| {name} |\n"

    monkeypatch.setattr(tested_versions, "run", run)
    monkeypatch.setattr(tested_versions, "environment", lambda python: python)
    monkeypatch.setattr(tested_versions, "oldest_supported", lambda: sys.version_info[:2])
    monkeypatch.setattr(tested_versions, "git", lambda *arguments: "")
    monkeypatch.setattr(tested_versions, "pythons", lambda: iter([NEW, OLD]))
    monkeypatch.delenv("CI", raising=False)
    return made


def test_both_pairs_are_run(runs: list[tuple[str, str]]) -> None:
    """The oldest pair runs in the environment of dev.py, the newest one with the newest Python of the machine."""
    assert tested_versions.main([]) == 0
    assert runs == [("oldest", sys.executable), ("newest", NEW.path)]


def test_the_table_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands between the marks is written anew, and the rest of the page stays."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")
    monkeypatch.setattr(tested_versions, "PAGE", page)
    rows = [tested_versions.row("newest", ["3.13.0", "6.1.3", "6.1.0", "4.20.0", "6.0.5"], 12)]
    tested_versions.write_table(rows, "`abc1234` of 2026-11-24")
    assert page.read_text() == (
        f"before\n{BEGIN}{tested_versions.HEAD}| newest | 3.13.0 | 6.1.3 | 6.1.0 | 4.20.0 | 6.0.5 | 12 passed |\n\n"
        f"Run at commit `abc1234` of 2026-11-24.\n{END}after\n"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="a program there is no script")
def test_only_pythons_that_run_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shim of a Python that is not installed, and one before its release, are left out."""
    for name, script in {"python3.98": "exit 1", "python3.97": "echo", "python3.96": "echo 3 96 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PYENV_ROOT", raising=False)
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "apart" / "python"))
    found = sorted(tested_versions.pythons())
    assert [each.version for each in found] == [tuple(sys.version_info[:3]), (3, 96, 1)]
