"""The published sdist and wheel, with their files and their metadata."""

from __future__ import annotations

import email
import re
import subprocess
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import trove_classifiers

import django_mongolock
from tests.support.packages import ROOT, Packages, build

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: Made by tools, and ignored by git.
MADE = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}


@pytest.fixture(scope="module")
def metadata(packages: Packages) -> Message:
    with zipfile.ZipFile(packages.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def files_below(folder: str) -> set[str]:
    """Return the files of the checkout in *folder*, without generated ones."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(ROOT)) for path in found if not MADE & set(path.parts)}


def tox_factors() -> tuple[set[str], set[str]]:
    """Return the Pythons and the Djangos of tox.ini, as "3.11" and "5.2"."""
    (environments,) = re.findall(r"(?m)^env_list = (.*)$", (ROOT / "tox.ini").read_text())
    found = re.findall(r"py(\d)(\d+)-django(\d)(\d)", environments)
    return {f"{major}.{minor}" for major, minor, *_ in found}, {f"{major}.{minor}" for *_, major, minor in found}


@pytest.mark.long
def test_wheel_is_the_app(packages: Packages) -> None:
    """The wheel has every file of the app, including py.typed, templates, styles and compiled translations. Tests,
    tools and the sources of translations are left out."""
    assert packages.in_wheel() == {name for name in files_below("django_mongolock") if not name.endswith(".po")}
    kinds = {Path(name).suffix for name in packages.in_wheel()}
    assert {".py", ".typed", ".html", ".css", ".mo"} <= kinds


def test_sdist_is_what_the_wheel_is_made_of(packages: Packages) -> None:
    """The sdist has the app with the sources of its translations, and the files of the build. Tests and pictures are
    left out."""
    build = {"pyproject.toml", "hatch_build.py", "README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md"}
    made = {"PKG-INFO", ".gitignore"}
    assert packages.in_sdist() - made == build | files_below("django_mongolock")


def test_metadata(metadata: Message) -> None:
    """The version is that of the module, the promises are those of tox, and PyPI knows each classifier."""
    classifiers = metadata.get_all("Classifier", [])
    assert metadata["Version"] == django_mongolock.__version__
    assert metadata["License-Expression"] == "MIT"
    assert set(classifiers) <= set(trove_classifiers.classifiers)
    assert classifiers == sorted(classifiers)
    pythons, djangos = tox_factors()
    numbers = {re.sub(r".* :: ", "", name) for name in classifiers if re.search(r":: \d+\.\d+$", name)}
    assert numbers == pythons | djangos
    assert metadata["Requires-Python"] == f">={min(pythons)}"


def test_the_package_page_stands_alone(metadata: Message) -> None:
    """All links and pictures are absolute. An owner changes one line, because nothing else names the repository."""
    text = str(metadata.get_payload())
    repository = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    targets = re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", text)
    assert len(targets) > 12
    assert all("".join(target).startswith("https://") for target in targets)
    assert f'src="{repository}/raw/main/docs/images/dashboard.png"' in text
    urls = dict(entry.split(", ") for entry in metadata.get_all("Project-URL", []))
    assert list(urls) == ["Documentation", "Source", "Changelog", "Issues"]
    tracked = subprocess.run(
        ["git", "grep", "--files-with-matches", repository.removeprefix("https://")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert tracked.stdout.split() in ([], ["pyproject.toml"])  # none in an sdist, because it is no checkout


def test_nothing_published_depends_on_the_server_in_the_dependency_groups(metadata: Message) -> None:
    """mongod is SSPL software, and no test tool comes with an installation."""
    names = {re.split(r"[<>=!;\[ ]", entry)[0] for entry in metadata.get_all("Requires-Dist", [])}
    assert names == {
        "celery",
        "django",
        "django-mongodb-backend",
        "djangorestframework",
        "opentelemetry-api",
        "prometheus-client",
        "pymongo",
    }


@pytest.mark.long
def test_built_twice_it_is_the_same(packages: Packages, tmp_path: Path) -> None:
    """Both files are equal bit by bit. Anyone can build the files on PyPI again, and compare."""
    again = build(tmp_path)
    assert again.wheel.read_bytes() == packages.wheel.read_bytes()
    assert again.sdist.read_bytes() == packages.sdist.read_bytes()


def test_actions_are_pinned() -> None:
    """Each action is pinned by a commit, because a commit cannot be moved, with its version for Dependabot. Workflows
    of this commit are exempt."""
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        used = re.findall(r"uses: (.*)", path.read_text())
        assert used
        pinned = r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+|\./\.github/workflows/tests\.yml.*"
        assert [line for line in used if not re.fullmatch(pinned, line)] == []


def test_nothing_runs_before_the_upload() -> None:
    """The job that builds a release runs only pinned tools. The tested and published files are built from a commit that
    has passed all checks."""
    jobs = re.split(r"(?m)^  (?=\w+:$)", (ROOT / ".github/workflows/release.yml").read_text().partition("\njobs:\n")[2])
    by_name = {job.partition(":")[0]: job for job in jobs if job.strip()}
    checks = by_name.pop("checks")
    assert "uses: ./.github/workflows/tests.yml" in checks
    assert list(by_name) == ["build", "test", "publish"]
    assert "dev.py" not in by_name["build"]
    assert "--require-hashes" in by_name["build"]
    assert "needs: build" in by_name["test"]
    assert "needs: [test, checks]" in by_name["publish"]
    assert all("name: dist" in job for job in by_name.values())
    lines = (ROOT / ".github/build-requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[\w-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines if line[0] != "#")
