"""A PostgreSQL server, for features that need an SQL database with transactions of every kind."""

import contextlib
import shutil
import signal
import socket
import struct
import subprocess
from pathlib import Path

from testproject.servers.process import HOST
from testproject.servers.unprivileged import UnprivilegedServer

USER = "postgres"


class Postgres(UnprivilegedServer):
    """A PostgreSQL server with one empty database, `postgres`. The server keeps nothing, and trusts all connections on
    loopback.

    PostgreSQL refuses to run as root. Root therefore starts it as the system's user postgres.
    """

    title = "postgres"
    system_user = USER
    package = "postgresql"

    def __init__(self, *, connections: int = 100) -> None:
        super().__init__()
        self.connections = connections

    @property
    def uri(self) -> str:
        """The URI of its database."""
        return f"postgres://{USER}@{HOST}:{self.port}/postgres"

    @classmethod
    def missing_programs(cls) -> str | None:
        """See UnprivilegedServer.missing_programs()."""
        return None if _programs() else "no initdb on PATH or in /usr/lib/postgresql"

    def initialize(self) -> list[str]:
        """See UnprivilegedServer.initialize()."""
        command = [f"{_programs()}/initdb", "-D", str(self.data), "-U", USER, "-A", "trust", "-E", "UTF8"]
        return [*command, "--locale=C", "--no-sync"]

    def command(self) -> list[str]:
        """See Server.command()."""
        where = ["-D", str(self.data), "-h", HOST, "-p", str(self.port), "-k", str(self.directory)]
        fast = ["-c", "fsync=off", "-c", "full_page_writes=off", "-c", "shared_buffers=16MB"]
        fast += ["-c", f"max_connections={self.connections}"]
        return [f"{_programs()}/postgres", *where, *fast]

    def answers(self) -> bool:
        """See Server.answers(). The user of the server must be able to log in. An open port is not enough."""
        who = b"user\0%s\0database\0postgres\0\0" % USER.encode()
        try:
            with socket.create_connection((HOST, self.port), timeout=1.0) as connection:
                connection.sendall(struct.pack("!ii", len(who) + 8, 3 << 16) + who)
                # the answer about authentication; an E means that the server is starting up
                return connection.recv(1) == b"R"
        except OSError:
            return False

    def close(self) -> None:
        """End the server at once, but let it release its shared memory. Remove its directory."""
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGQUIT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        super().close()


def _programs() -> Path | None:
    """Return the directory of the server's programs. Debian keeps them off PATH, by version."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    return max(Path("/usr/lib/postgresql").glob("[0-9]*/bin"), key=lambda path: int(path.parent.name), default=None)
