"""The servers of a run: each is started when somebody needs it first, and runs until the run is over."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any, Final, Self

from pymongo import MongoClient

from testproject.servers import Mongod, Postgres, Redis, ReplicaSet, Server, ServerError, ZooKeeper

#: A client's commands, by the names under which a mongod counts them.
COMMANDS: Final = ("findAndModify", "update", "find", "getMore", "aggregate", "insert", "delete")


class World:
    """Servers by name: "mongo", "mongo3" (three members), "redis", "redis-always", "zookeeper", "postgres", and
    "directory", which is no server but a place for files."""

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
        """Where it is; starts it if it does not run yet. Raises ServerError, which says what to install, or OSError."""
        if name not in self._uris:
            try:
                self._uris[name] = self._start(name)
            except (ServerError, OSError):
                self._ends.pop(name).close()
                raise
        return self._uris[name]

    def missing(self, name: str) -> str | None:
        """Start it, if it does not run yet; return why that cannot be."""
        try:
            self.uri(name)
        except (ServerError, OSError) as error:
            return str(error)
        return None

    def stop(self, name: str) -> None:
        """End it: what nobody needs any more shall not use the processor. It is started anew if somebody does."""
        self._uris.pop(name, None)
        self._servers.pop(name, None)
        self._ends.pop(name, contextlib.ExitStack()).close()

    def client(self, name: str = "mongo") -> MongoClient[dict[str, Any]]:
        """A new client of that MongoDB."""
        return MongoClient(self.uri(name))

    def mongod(self, name: str = "mongo") -> Mongod:
        """The member of that replica set that is primary."""
        self.uri(name)
        return next(server for server in self._servers[name] if isinstance(server, Mongod) and is_primary(server))

    def cpu(self, name: str) -> float:
        """Seconds of CPU that its processes have used."""
        return sum(cpu_of(server.pid) for server in self._servers.get(name, []))

    def commands(self, name: str) -> dict[str, int]:
        """How many commands it has had, by name; nothing where it does not count them."""
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
    """Seconds of CPU that a process has used, its threads and its children that have ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
