"""System packages: what is missing is installed with apt-get, quietly, and what cannot be had is named."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import parts
from tests.parts import Part

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="takes a Unix shell")

#: Notes its calls; brings every package but "none".
APT = """#!/bin/sh
echo "$DEBIAN_FRONTEND $*" >> "{folder}/calls"
echo "a word to the log"
case "$*" in
    *none*) echo "E: no package none"; exit 100 ;;
    *install*) for package; do touch "{folder}/$package"; done ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a machine that lacks parts, with an apt-get; root runs on it."""
    monkeypatch.setattr(parts, "LOG", tmp_path / "log")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    program(tmp_path, "apt-get", APT)

    def lacking(*names: str) -> Path:
        made = {name: Part((tmp_path / name).exists, (name, f"{name}-more")) for name in names}
        monkeypatch.setattr(parts, "PARTS", {**made, "an engine": Part(lambda: False)})
        return tmp_path

    return lacking


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text.format(folder=folder))
    (folder / name).chmod(0o755)


def calls(folder: Path) -> list[str]:
    """With what apt-get was called: the frontend of Debian's installer, and what comes after the options."""
    file = folder / "calls"
    lines = file.read_text().splitlines() if file.exists() else []
    return [" ".join(word for word in line.split() if not word.startswith("--")) for line in lines]


def test_what_is_missing_is_installed(machine: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    """Only that, in one call that asks no question; what apt says goes into the log."""
    folder = machine("browser", "server", "here")
    (folder / "here").touch()
    parts.install()
    assert calls(folder) == ["noninteractive update", "noninteractive install browser browser-more server server-more"]
    assert "--yes" in (folder / "calls").read_text()
    assert (folder / "log").read_text() == "a word to the log\n" * 2
    said = f"system packages: installing browser, server (log: {folder / 'log'})\n"
    assert capfd.readouterr() == ("", said)
