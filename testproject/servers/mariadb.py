"""A MariaDB server: MySQL's protocol, its deadlocks and its lock waits."""

import shutil
import socket

from testproject.servers.process import HOST
from testproject.servers.unprivileged import UnprivilegedServer


class MariaDB(UnprivilegedServer):
    """A MariaDB server with one empty database, `test`. The server keeps nothing, and trusts root on loopback."""

    title = "mariadb"
    system_user = "mysql"
    package = "mariadb-server"

    @property
    def uri(self) -> str:
        """The URI of its database."""
        return f"mysql://root@{HOST}:{self.port}/test"

    @classmethod
    def missing_programs(cls) -> str | None:
        """See UnprivilegedServer.missing_programs()."""
        found = shutil.which("mariadbd") and shutil.which("mariadb-install-db")
        return None if found else "no mariadbd on PATH"

    def initialize(self) -> list[str]:
        """See UnprivilegedServer.initialize()."""
        options = ["--auth-root-authentication-method=normal", "--innodb-flush-log-at-trx-commit=0"]
        return ["mariadb-install-db", "--no-defaults", f"--datadir={self.data}", *options]

    def command(self) -> list[str]:
        """See Server.command()."""
        where = [f"--datadir={self.data}", f"--bind-address={HOST}", f"--port={self.port}"]
        where += [f"--socket={self.directory / 'socket'}", f"--pid-file={self.directory / 'pid'}"]
        fast = ["--innodb-flush-log-at-trx-commit=0", "--skip-log-bin", "--innodb-buffer-pool-size=16M"]
        return ["mariadbd", "--no-defaults", *where, *fast]

    def answers(self) -> bool:
        """See Server.answers(). The server sends its greeting once it is ready."""
        try:
            with socket.create_connection((HOST, self.port), timeout=1.0) as connection:
                return len(connection.recv(5)) == 5
        except OSError:
            return False
