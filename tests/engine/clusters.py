"""Replica sets with a member whose clock can be set."""

import contextlib
import time
from collections.abc import Iterator, Mapping

from testproject.servers import Mongod, ReplicaSet
from tests.support.waiting import eventually
from verify.faults import clocks


class Cluster:
    """Three members; the clock of the second can be set by the dial, where there can be such clocks."""

    def __init__(self, replica_set: ReplicaSet, dial: clocks.Dial) -> None:
        self.replica_set = replica_set
        self.dial = dial

    def lead(self, number: int) -> None:
        """Make this member the primary."""
        member = self.replica_set.members[number]
        assert eventually(lambda: self._steps_up(member), 20)

    @staticmethod
    def _steps_up(member: Mongod) -> bool:
        with contextlib.suppress(Exception), member.client() as client:
            client.admin.command("replSetStepUp")
        return bool(member.hello().get("isWritablePrimary"))

    def now(self, number: int) -> float:
        """What the clock of a member shows, in seconds from ours."""
        with self.replica_set.members[number].client() as client:
            return float(client.admin.command("hello")["localTime"].timestamp() - time.time())


@contextlib.contextmanager
def cluster_with_a_dial(parameters: Mapping[str, str | int] | None = None) -> Iterator[Cluster]:
    """A replica set of three that runs until the end of the block."""
    replica_set = ReplicaSet(members=3, parameters=parameters)
    with clocks.Dial() as dial:
        if clocks.missing() is None:
            replica_set.members[1].environment |= dial.environment
        with replica_set:
            yield Cluster(replica_set, dial)
