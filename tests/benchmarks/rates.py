"""The race of `testproject.rates` on SQLite, PostgreSQL, MongoDB: ``python -m tests.benchmarks.rates --runs 100``."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from testproject.servers import Postgres, mongodb

ROOT = Path(__file__).resolve().parent.parent.parent


def main(arguments: list[str]) -> int:
    """Start the servers and hand *arguments* on, to each database; return 1 if any lost a value."""
    with contextlib.ExitStack() as servers:
        directory = servers.enter_context(tempfile.TemporaryDirectory())
        environment = {**os.environ, "MONGODB_URI": servers.enter_context(mongodb()), "MONGODB_NAME": "mongolock_rates"}
        environment["SQLITE_PATH"] = str(Path(directory, "db.sqlite3"))
        aliases = ["default", "mongo"]
        if reason := Postgres.missing():
            print(reason, file=sys.stderr)
        else:
            environment["POSTGRES_URI"] = servers.enter_context(Postgres()).uri
            aliases.append("postgres")
        command = [sys.executable, "-m", "testproject.rates", *arguments, "--database"]
        codes = [
            subprocess.run([*command, alias], cwd=ROOT, env=environment, check=False).returncode for alias in aliases
        ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
