"""The parts of the system that some tests need beside Python packages, with the ways to find them and their names in
Debian.

    pytestmark = parts.needs("Redis")    # without it, these tests are left out
    parts.require("Redis")               # the same in a fixture

`pytest --with-system-packages` installs missing parts, where there is apt.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from testproject.chromium import NoBrowserError, chromium_path
from testproject.servers import Docker, MariaDB, Postgres, RabbitMQ, Redis
from verify.faults import clocks

#: The log of `dev.py`, where this is its environment.
LOG: Final = Path(sys.prefix, "dev.log")


class Part(NamedTuple):
    """Something that is on the machine or not. Without *packages*, apt does not bring it."""

    is_here: Callable[[], bool]
    packages: tuple[str, ...] = ()


def _has_chromium() -> bool:
    with contextlib.suppress(NoBrowserError):
        return bool(chromium_path())
    return False


def _has_libraries() -> bool:
    with contextlib.suppress(OSError):
        return sys.platform != "linux" or all(map(ctypes.CDLL, ["libcurl.so.4", "libcrypto.so.3"]))
    return False


def _has_python_tests() -> bool:
    with contextlib.suppress(ImportError):
        return importlib.util.find_spec("test.lock_tests") is not None
    return False


def runs_docker() -> bool:
    """Return whether a Docker engine runs, where DOCKER_HOST or the usual socket leads to."""
    import docker
    from docker.errors import DockerException

    with contextlib.suppress(DockerException):
        return bool(docker.from_env(timeout=10).ping())
    return False


def _has_docker() -> bool:
    return runs_docker() or ("DOCKER_HOST" not in os.environ and Docker.missing() is None)


PARTS: Final = {
    "Chromium": Part(_has_chromium, ("chromium",)),
    "Redis": Part(lambda: Redis.missing() is None, ("redis-server",)),
    "RabbitMQ": Part(lambda: RabbitMQ.missing() is None, ("rabbitmq-server",)),
    "PostgreSQL": Part(lambda: Postgres.missing() is None, ("postgresql",)),
    "MariaDB": Part(lambda: MariaDB.missing() is None, ("mariadb-server",)),
    "a C compiler": Part(lambda: clocks.missing() is None, ("gcc", "libc6-dev")),
    "promtool": Part(lambda: shutil.which("promtool") is not None, ("prometheus",)),
    "curl": Part(lambda: shutil.which("curl") is not None, ("curl",)),
    "the libraries of MongoDB": Part(_has_libraries, ("libcurl4", "libssl3")),
    "the tests of Python": Part(_has_python_tests, (f"libpython3.{sys.version_info.minor}-testsuite",)),
    "a Docker engine": Part(_has_docker, ("docker.io",)),
}


def needs(name: str) -> pytest.MarkDecorator:
    """Mark tests that are left out where the part is missing."""
    return pytest.mark.skipif(not PARTS[name].is_here(), reason=f"needs {name}")


def require(name: str) -> None:
    """Leave the test out where the part is missing."""
    if not PARTS[name].is_here():
        pytest.skip(f"needs {name}")


def missing() -> list[str]:
    """Return the parts that are missing here and that apt could bring."""
    return [name for name, part in PARTS.items() if part.packages and not part.is_here()]


def install() -> None:
    """Install missing parts, and name the parts that are not available. apt is not called if nothing is missing."""
    if not (wanted := missing()):
        return
    _say(f"installing {', '.join(wanted)} (log: {LOG})")
    if _apt("update", "--quiet") is None:
        _say("there is no apt-get, or neither root nor sudo: install them by hand")
        return
    if _install(package for name in wanted for package in PARTS[name].packages):
        for name in wanted:  # one by one, because a missing package would keep the others away
            _install(PARTS[name].packages)
    if left := missing():
        _say(f"apt-get could not bring {', '.join(left)}: see {LOG}")


def _install(packages: Iterable[str]) -> int | None:
    return _apt("install", "--yes", "--no-install-recommends", *packages)


def _apt(*arguments: str) -> int | None:
    """Run apt-get with its output in the log. Return its exit code, or None if it cannot be run."""
    if (become_root := _become_root()) is None or shutil.which("apt-get") is None:
        return None
    command = [*become_root, "env", "DEBIAN_FRONTEND=noninteractive"]
    command += ["apt-get", "--option=DPkg::Lock::Timeout=120", "--option=DPkg::Options::=--force-confold", *arguments]
    with LOG.open("ab") as log:
        return subprocess.call(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _become_root() -> list[str] | None:
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return []
    return ["sudo", "--non-interactive"] if shutil.which("sudo") else None


def _say(text: str) -> None:
    sys.stderr.write(f"system packages: {text}\n")
