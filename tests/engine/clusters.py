"""Replica sets whose members' clocks can be set, by Debian's libfaketime."""

import contextlib
import time
from pathlib import Path

from testproject.servers import Mongod, ReplicaSet
from tests.waiting import eventually

FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)


class Dial:
    """Sets the wall clock of a process that is started with `environment`; its other clocks stay as they are."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)

    def set(self, seconds: int) -> None:
        """Have its clock differ from ours by so much, from now on."""
        self._file.write_text(f"{seconds:+d}s\n")

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


class Cluster:
    """Three members; the clock of the second can be set."""

    def __init__(self, replica_set: ReplicaSet, dial: Dial) -> None:
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
