"""The machine (Linux) and the software of a measurement."""

import contextlib
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from testproject.servers import Postgres, ServerError, ZooKeeper, mongod_path

PACKAGES: Final = (
    "django", "pymongo", "redis", "python-redis-lock", "kazoo", "django-pglock", "psycopg", "filelock", "mongoelector",
)  # fmt: skip


def facts() -> dict[str, Any]:
    """Return the facts about the machine, and the versions of everything compared."""
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor[1] if processor else platform.machine(),
        "cores": os.cpu_count(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GB",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "servers": servers(),
        "packages": {name: found for name in PACKAGES if (found := installed(name))},
        "load before": round(os.getloadavg()[0], 2),
    }


def servers() -> dict[str, str]:
    """Return the versions of the installed server programs."""
    found = {"Redis": said("redis-server", r"v=(\S+)")}
    with contextlib.suppress(ServerError):
        found["MongoDB"] = said(str(mongod_path()), r"db version v(\S+)")
    if Postgres.missing() is None:
        found["PostgreSQL"] = said("psql", r"PostgreSQL\) (\S+)")
    if ZooKeeper.missing() is None:
        jars = sorted(Path("/usr/share/java").glob("zookeeper-[0-9]*.jar"))
        found["ZooKeeper"] = jars[-1].stem.removeprefix("zookeeper-") if jars else ""
    return {name: text for name, text in found.items() if text}


def said(program: str, pattern: str) -> str:
    """Return the version that a program reports, or nothing if it is not installed."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    found = re.search(pattern, done.stdout)
    return found[1] if found else ""


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
