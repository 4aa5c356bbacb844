"""The race of `testproject.rates` on each kind of database: ``python -m bench.rates --runs 100``."""

import contextlib
import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from testproject.servers import MariaDB, Postgres, ServerError, mongodb

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("SQLite", "SQLite, WAL", "PostgreSQL", "MariaDB", "MongoDB")


def main(arguments: list[str]) -> int:
    """Pass *arguments* on for each database. Return 1 if any database lost a value."""
    with tempfile.TemporaryDirectory() as directory, mongodb() as mongo:
        environment = {**os.environ, "MONGODB_URI": mongo, "MONGODB_NAME": "mongolock_rates"}
        return max(race(kind, Path(directory), environment, arguments) for kind in KINDS)


def race(kind: str, directory: Path, environment: dict[str, str], arguments: list[str]) -> int:
    """Run the race on one kind of database. Return its exit code."""
    print(kind, flush=True)
    command = [sys.executable, "-m", "testproject.rates", *arguments, "--database"]
    with contextlib.ExitStack() as servers:
        try:
            uri = uri_of(kind, directory, servers)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 0
        command.append("rates" if uri else "mongo")
        return subprocess.run(command, cwd=ROOT, env={**environment, "RATES_URI": uri}, check=False).returncode


def uri_of(kind: str, directory: Path, servers: contextlib.ExitStack) -> str:
    """Start the server, if the kind has one. Return the RATES_URI, "" for the MongoDB of the locks."""
    if kind == "PostgreSQL":
        return servers.enter_context(Postgres()).uri
    if kind == "MariaDB":
        return servers.enter_context(MariaDB()).uri
    if kind == "MongoDB":
        return ""
    path = directory / "rates.sqlite3" if kind == "SQLite" else directory / "rates-wal.sqlite3"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode={'DELETE' if kind == 'SQLite' else 'WAL'}")  # stays with the file
    return f"sqlite:///{path}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
