"""A Redis server, for tests of a Celery broker that redelivers."""

import shutil
import socket

from testproject.servers.process import HOST, Server, ServerError


class Redis(Server):
    """A redis-server that keeps nothing on disk. If *durable*, it keeps everything, and answers only when the data are
    on disk."""

    title = "redis-server"

    def __init__(self, *, durable: bool = False) -> None:
        super().__init__()
        self.durable = durable

    @property
    def uri(self) -> str:
        """The URI of its first database."""
        return f"redis://{HOST}:{self.port}/0"

    @classmethod
    def missing(cls) -> str | None:
        """Return why there can be no Redis here, or None when there can."""
        return None if shutil.which(cls.title) else f"no {cls.title} on PATH: apt-get install redis-server"

    def command(self) -> list[str]:
        """See Server.command()."""
        if reason := self.missing():
            raise ServerError(reason)
        where = ["--bind", HOST, "--port", str(self.port), "--dir", str(self.directory)]
        kept = ["--appendonly", "yes", "--appendfsync", "always"] if self.durable else ["--appendonly", "no"]
        return [self.title, *where, "--save", "", *kept]

    def answers(self) -> bool:
        """See Server.answers()."""
        try:
            with socket.create_connection((HOST, self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
