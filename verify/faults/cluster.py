"""The target of the faults: three mongods behind a network that can misbehave."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from testproject.servers import Mongod, ReplicaSet, ServerError
from testproject.servers.process import HOST, Runnable, patience
from verify.faults.clocks import Dial
from verify.faults.proxy import CLIENT, Network

#: Seconds after which an unreachable primary is replaced. The default is 10, but a run is short.
ELECTION: Final = 3.0
#: Seconds in which a cluster must be whole again after a fault was healed.
RECOVERY: Final = 45.0
#: The size of the oplog in MB, small enough to be rolled over.
OPLOG: Final = 16
_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - with a name of its own in it
_ROOM: Final = 4 << 30


class Member(Mongod):
    """A mongod that writes a checkpoint every second, because its oplog is cut off no earlier.

    The data are in memory if there is room. A run is about chosen faults, and nobody has chosen a busy disk.
    """

    @property
    def directory(self) -> Path:
        if self._directory is None and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM:
            self._directory = Path(tempfile.mkdtemp(prefix="mongod-", dir=_MEMORY))
        return super().directory

    def command(self) -> list[str]:
        return [*super().command(), "--syncdelay", "1"]


class ProxiedSet(ReplicaSet):
    """A replica set whose members are known, also to each other, by the addresses of their proxies only."""

    def __init__(self, seed: int) -> None:
        super().__init__(3, election_timeout=ELECTION)
        parameters = {"enableTestCommands": 1, "ttlMonitorSleepSecs": 1}
        self.members = [Member(replica_set=self.name, parameters=parameters, oplog_mb=OPLOG) for _ in range(3)]
        self.network = Network([member.port for member in self.members], seed)

    def start(self) -> None:
        self.network.start()
        super().start()
        with self.primary().client(20) as client:
            config = client.admin.command("replSetGetConfig")["config"]
            config["version"] += 1
            config["settings"] |= {"heartbeatIntervalMillis": 500, "catchUpTimeoutMillis": 2000}
            client.admin.command("replSetReconfig", config)

    def close(self) -> None:
        super().close()
        self.network.close()

    def _hosts(self) -> list[str]:
        return [f"{HOST}:{port}" for port in self.network.ports]


class Cluster(Runnable):
    """The servers of a run from the view of the faults: the primary, its network ways, its recovery.

    - clocks: whether its members have clocks that can be set (`dials`).
    - purged: time in seconds before which no clock may be set back, because tokens until then may have been forgotten.
    """

    uri: str

    def __init__(self, seed: int, *, clocks: bool = False) -> None:
        self.purged = 0.0
        self.replica_set = ProxiedSet(seed)
        self.members: Sequence[Mongod] = self.replica_set.members
        self.network = self.replica_set.network
        self._written: MongoClient[dict[str, Any]] | None = None
        self.dials = [Dial() for _ in self.members] if clocks else []
        for member, dial in zip(self.members, self.dials, strict=False):
            member.environment |= dial.environment

    def start(self) -> None:
        self.replica_set.start()
        self.uri = self.replica_set.uri

    def close(self) -> None:
        self._forget_written()
        self.replica_set.close()
        for dial in self.dials:
            dial.close()

    def primary(self) -> int:
        """Return the number of the present primary. Raises ServerError if there is none in time."""
        return self.members.index(self.replica_set.primary(RECOVERY))

    def others(self) -> list[int]:
        """Return all members but the primary."""
        primary = self.primary()
        return [number for number in range(len(self.members)) if number != primary]

    def client(self, timeout: float = 5.0) -> MongoClient[dict[str, Any]]:
        """Return a client of the primary, past the proxies."""
        return self.members[self.primary()].client(timeout)

    def to_primary(self) -> list[tuple[int, int]]:
        """Return the way of the clients to the primary."""
        return [(CLIENT, self.primary())]

    def around(self, member: int) -> list[tuple[int, int]]:
        """Return the ways between a member and all others."""
        others = [number for number in range(len(self.members)) if number != member]
        return [way for other in others for way in ((other, member), (member, other))]

    def run_all(self) -> None:
        """Resume and restart the members that do not run."""
        for member in self.members:
            if member.paused:
                member.resume()
        for member in self.members:
            if not member.running:
                member.restart()

    def recover(self) -> None:
        """Wait until the cluster is whole. Raises ServerError if that takes too long."""
        with patience(RECOVERY, "the replica set does not recover") as still_time:
            while not self._is_whole():
                time.sleep(0.2)  # asking is not free
                still_time()

    def _is_whole(self) -> bool:
        answers = [member.hello() for member in self.members]
        primaries = [answer for answer in answers if answer.get("isWritablePrimary")]
        return len(primaries) == 1 and sum(bool(answer.get("secondary")) for answer in answers) == 2

    def write(self) -> None:
        """Write something, past the proxies, and wait until the majority has it."""
        try:
            if self._written is None:
                self._written = self.replica_set.primary(1.0).client(3.0)
            self._written["filler"]["beats"].update_one({"_id": 1}, {"$inc": {"beats": 1}}, upsert=True)
        except (ServerError, PyMongoError):
            self._forget_written()

    def _forget_written(self) -> None:
        if self._written is not None:
            self._written.close()
            self._written = None

    def replicates(self) -> bool:
        """Return whether the majority has a write within a few seconds."""
        with contextlib.suppress(ServerError, PyMongoError), self.client() as client:
            client["filler"]["beats"].update_one({"_id": 2}, {"$inc": {"beats": 1}}, upsert=True)
            return True
        return False

    def command(self, member: int, *command: Any, timeout: float = 5.0, **options: Any) -> Any:
        """Send one member a command of `admin`, past the proxies. Return None if it does not answer or refuses."""
        with contextlib.suppress(PyMongoError), self.members[member].client(timeout) as client:
            return client.admin.command(*command, **options)
        return None

    def step_up(self, member: int, timeout: float = 20.0) -> bool:
        """Make *member* the primary. Return whether it is the primary within *timeout* seconds."""
        end = time.monotonic() + timeout
        while not self.members[member].hello().get("isWritablePrimary"):
            if time.monotonic() > end:
                return False
            self.command(member, "replSetStepUp")
            time.sleep(0.2)
        return True
