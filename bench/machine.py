"""What the figures were measured on."""

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
    "django",
    "pymongo",
    "redis",
    "python-redis-lock",
    "kazoo",
    "django-pglock",
    "psycopg",
    "filelock",
    "mongoelector",
)


def facts() -> dict[str, Any]:
    """The machine, and the versions of everything that is compared."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory": memory(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "servers": servers(),
        "packages": {name: found for name in PACKAGES if (found := installed(name))},
        "load before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def processor() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor() or platform.machine()


def memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GB"
    except (ValueError, OSError, AttributeError):
        return "unknown"


def servers() -> dict[str, str]:
    """Versions of the server programs that are here."""
    found = {}
    with contextlib.suppress(ServerError):
        found["MongoDB"] = said([str(mongod_path()), "--version"], r"db version v(\S+)")
    found["Redis"] = said(["redis-server", "--version"], r"v=(\S+)")
    if Postgres.missing() is None:
        found["PostgreSQL"] = said(["psql", "--version"], r"PostgreSQL\) (\S+)")
    if ZooKeeper.missing() is None:
        jars = sorted(Path("/usr/share/java").glob("zookeeper-[0-9]*.jar"))
        found["ZooKeeper"] = jars[-1].stem.removeprefix("zookeeper-") if jars else ""
    return {name: text for name, text in found.items() if text}


def said(command: list[str], pattern: str) -> str:
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if found := re.search(pattern, done.stdout):
            return found[1]
    return ""


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
