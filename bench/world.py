"""The servers of a run. Each is started at its first use, and runs until the run is over."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any, Final, Self

from pymongo import MongoClient

from testproject.servers import Mongod, Postgres, Redis, ReplicaSet, Server, ServerError, ZooKeeper

#: The commands of a client, by the names of mongod's counters.
COMMANDS: Final = ("findAndModify", "update", "find", "getMore", "aggregate", "insert", "delete")


class World:
    """Servers by name: "mongo", "mongo3" (three members), "redis", "redis-always", "zookeeper", "postgres".

    "directory" is no server but a place for files.
    """

    def __init__(self) -> None:
        self._ends: dict[str, contextlib.ExitStack] = {}
        self._uris: dict[str, str] = {}
        self._servers: dict[str, list[Server]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self._uris):
            self.stop(name)

    def uri(self, name: str) -> str:
        """Return the address of a server, and start it if needed. Raises OSError, or ServerError with the program to
        install.
        """
        if name not in self._uris:
            try:
                self._uris[name] = self._start(name)
            except (ServerError, OSError):
                self._ends.pop(name).close()
                raise
        return self._uris[name]

    def missing(self, name: str) -> str | None:
        """Start a server if needed. Return the reason if that fails."""
        try:
            self.uri(name)
        except (ServerError, OSError) as error:
            return str(error)
        return None

    def stop(self, name: str) -> None:
        """Stop a server, so that it does not use the processor. The next use starts it anew."""
        self._uris.pop(name, None)
        self._servers.pop(name, None)
        self._ends.pop(name, contextlib.ExitStack()).close()

    def client(self, name: str = "mongo") -> MongoClient[dict[str, Any]]:
        """Return a new client of that MongoDB."""
        return MongoClient(self.uri(name))

    def mongod(self, name: str = "mongo") -> Mongod:
        """Return the primary of that replica set."""
        self.uri(name)
        return next(server for server in self._servers[name] if isinstance(server, Mongod) and is_primary(server))

    def cpu(self, name: str) -> float:
        """Return the seconds of CPU that its processes have used."""
        return sum(cpu_of(server.pid) for server in self._servers.get(name, []))

    def commands(self, name: str) -> dict[str, int]:
        """Return the number of commands by name, or nothing if the server does not count them."""
        if name not in self._uris:
            return {}
        if name == "mongo":
            return self._mongo_commands()
        if name.startswith("redis"):
            return self._redis_commands(name)
        return self._zookeeper_commands() if name == "zookeeper" else {}

    def _start(self, name: str) -> str:
        ends = self._ends[name] = contextlib.ExitStack()
        if name == "directory":
            return ends.enter_context(tempfile.TemporaryDirectory())
        if name in {"mongo", "mongo3"}:
            # An oplog as small as the tests' would be full at once.
            servers = ReplicaSet(3 if name == "mongo3" else 1, name=name, oplog_mb=990)
            ends.enter_context(servers)
            self._servers[name] = list(servers.members)
            return servers.uri
        server = self._server(name)
        ends.enter_context(server)
        self._servers[name] = [server]
        return str(server.uri)

    @staticmethod
    def _server(name: str) -> Redis | ZooKeeper | Postgres:
        if name == "postgres":
            return Postgres(connections=300)
        return ZooKeeper() if name == "zookeeper" else Redis(durable=name == "redis-always")

    def _mongo_commands(self) -> dict[str, int]:
        with self.mongod().client() as client:
            counted = client.admin.command("serverStatus")["metrics"]["commands"]
        return {name: int(counted[name]["total"]) for name in COMMANDS}

    def _redis_commands(self, name: str) -> dict[str, int]:
        import redis

        with redis.Redis.from_url(self.uri(name)) as client:
            status: Any = client.info("stats")
        return {"all": int(status["total_commands_processed"])}

    def _zookeeper_commands(self) -> dict[str, int]:
        (server,) = self._servers["zookeeper"]
        said = server.ask("mntr") if isinstance(server, ZooKeeper) else ""
        figures = dict(line.split("\t", 1) for line in said.splitlines() if "\t" in line)
        return {"all": int(figures.get("zk_packets_received", 0))}


def is_primary(server: Mongod) -> bool:
    return bool(server.hello().get("isWritablePrimary"))


def cpu_of(pid: int) -> float:
    """Return the seconds of CPU that a process has used, including its threads and its ended children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
