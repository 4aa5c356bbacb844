"""A PostgreSQL server, for what has to work on an SQL database with transactions of every kind."""

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
from pathlib import Path

from testproject.servers.process import HOST, Server, ServerError

USER = "postgres"


class Postgres(Server):
    """A PostgreSQL server with one empty database, `postgres`; it keeps nothing and trusts all connections on loopback.

    It refuses to run as root: root starts it as the system's user postgres.
    """

    title = "postgres"

    def __init__(self, *, connections: int = 100) -> None:
        super().__init__()
        self.connections = connections

    @property
    def uri(self) -> str:
        """The URI of its database."""
        return f"postgres://{USER}@{HOST}:{self.port}/postgres"

    @classmethod
    def missing(cls) -> str | None:
        """Return why there can be no PostgreSQL here, or None when there can."""
        if _programs() is None:
            return "no initdb on PATH or in /usr/lib/postgresql: apt-get install postgresql"
        if _is_root() and not _has_user():
            return "PostgreSQL does not run as root, and there is no user postgres: apt-get install postgresql"
        return None

    def command(self) -> list[str]:
        """See Server.command()."""
        where = ["-D", str(self.directory / "data"), "-h", HOST, "-p", str(self.port), "-k", str(self.directory)]
        fast = ["-c", "fsync=off", "-c", "full_page_writes=off", "-c", "shared_buffers=16MB"]
        fast += ["-c", f"max_connections={self.connections}"]
        return [f"{_programs()}/postgres", *where, *fast]

    def launch(self) -> None:
        """Start the process; the first time, make its data directory before."""
        if reason := self.missing():
            raise ServerError(reason)
        self.user = USER if _is_root() else None
        if self.user is not None:
            shutil.chown(self.directory, self.user)
        data = self.directory / "data"
        if not data.exists():
            command = [f"{_programs()}/initdb", "-D", str(data), "-U", USER, "-A", "trust", "-E", "UTF8"]
            options = ["--locale=C", "--no-sync"]
            done = subprocess.run(
                [*command, *options], cwd=self.directory, user=self.user, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise ServerError(f"initdb: {done.stderr.strip() or done.stdout.strip()}")
        super().launch()

    def answers(self) -> bool:
        """See Server.answers(): whether its user can log in, not only whether the port is open."""
        who = b"user\0%s\0database\0postgres\0\0" % USER.encode()
        try:
            with socket.create_connection((HOST, self.port), timeout=1.0) as connection:
                connection.sendall(struct.pack("!ii", len(who) + 8, 3 << 16) + who)
                return connection.recv(1) == b"R"  # its answer about authentication; E: it is starting up
        except OSError:
            return False

    def close(self) -> None:
        """End the server at once, but let it give back its shared memory; remove its directory."""
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGQUIT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        super().close()


def _programs() -> Path | None:
    """Return the directory of the server's programs; Debian keeps them off PATH, by version."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    return max(Path("/usr/lib/postgresql").glob("[0-9]*/bin"), key=lambda path: int(path.parent.name), default=None)


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _has_user() -> bool:
    import pwd

    try:
        pwd.getpwnam(USER)
    except KeyError:
        return False
    return True
