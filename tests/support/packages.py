"""The sdist and the wheel of this checkout, built once for all tests that look at them."""

import os
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.programs import python

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Packages:
    """The two files that are uploaded."""

    sdist: Path
    wheel: Path

    def in_wheel(self) -> set[str]:
        """The files that an installation brings, without its metadata."""
        with zipfile.ZipFile(self.wheel) as archive:
            return {name for name in archive.namelist() if ".dist-info/" not in name}

    def in_sdist(self) -> set[str]:
        """The files of the source archive, by their place in the checkout."""
        with tarfile.open(self.sdist) as archive:
            return {member.name.partition("/")[2] for member in archive if member.isfile()}


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """Return the sdist of this checkout and the wheel of that sdist, or those in the folder DIST. No network is
    needed."""
    if given := os.environ.get("DIST"):
        return find(Path(given))
    return build(tmp_path_factory.mktemp("packages"))


def build(folder: Path) -> Packages:
    """Build them into *folder*."""
    python("-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    return find(folder)


def find(folder: Path) -> Packages:
    """Return the packages in *folder*."""
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return Packages(sdist, wheel)
