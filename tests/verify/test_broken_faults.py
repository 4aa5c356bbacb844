"""Each broken variant of the lock is found, and the lock as it is passes the same scenarios."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from django_mongolock.engine import clock, grant, mongo_store, protocol, rule, runner
from django_mongolock.engine.session import commands, listener, per_process, renewals, session, waits
from tests import parts
from tests.engine.clusters import Cluster, cluster_with_a_dial
from verify.faults.broken import DEFECTS, PATCHES, VARIABLE, NothingToBreak, Patches, broken
from verify.faults.relay import Relay
from verify.faults.scenarios import SCENARIOS, WITH_CLOCKS, Stage
from verify.simulation.defects import DEFECTS as SIMULATED

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS: dict[str, str | int] = {"enableTestCommands": 1, "writePeriodicNoops": "false"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A replica set of three; the clock of the second can be set where there is a C compiler."""
    with cluster_with_a_dial(PARAMETERS) as cluster:
        yield cluster


Run = Callable[[str], list[str]]


@pytest.fixture
def run(cluster: Cluster) -> Run:
    """Runs a scenario on a stage of its own."""

    def run(name: str) -> list[str]:
        if name in WITH_CLOCKS:
            parts.require("a C compiler")
        cluster.dial.set(0)
        primary = cluster.replica_set.members[0]
        if not primary.hello().get("isWritablePrimary"):
            cluster.lead(0)
        relay = Relay(primary.port)
        with contextlib.closing(relay), contextlib.closing(Stage(cluster, relay)) as stage:
            return SCENARIOS[name](stage)

    return run


#: Each scenario with the library as it is, then with the variants that it is to find.
RUNS = [
    pytest.param(name, variant, id=f"{name}-{variant or 'healthy'}")
    for name in SCENARIOS
    for variant in ("", *(defect.name for defect in DEFECTS.values() if defect.finder == f"`{name}`"))
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "variant"), RUNS)
def test_each_broken_variant_is_found(run: Run, name: str, variant: str) -> None:
    """The library withstands each scenario, and that means something: the variant without the defence does not."""
    if not variant:
        assert run(name) == []
        return
    with broken(variant):
        assert run(name)


def test_the_table_in_the_docs() -> None:
    """Every defect has its row, and each row is of a defect; no scenario is there that finds nothing."""
    assert set(DEFECTS) == set(PATCHES) | set(SIMULATED)
    assert {row.finder.strip("`") for row in DEFECTS.values()} == set(SCENARIOS) | {"simulation", "nothing"}
    assert all(row.name in SIMULATED for row in DEFECTS.values() if row.finder == "simulation")


@pytest.mark.parametrize("name", PATCHES)
def test_a_variant_is_undone_without_a_trace(name: str) -> None:
    """After the block everything that a variant has changed is as it was."""
    before = engine()
    with broken(name):
        assert engine() != before
    assert engine() == before


def engine() -> list[object]:
    """All that the modules and classes of the engine have."""
    owners: list[Any] = [clock, runner, grant, mongo_store, protocol, rule]
    owners += [commands, listener, per_process, renewals, session, waits]
    owners += [
        value
        for module in owners
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__.startswith("django_mongolock")
    ]
    return [(id(owner), name, id(value)) for owner in owners for name, value in vars(owner).items()]


def test_a_patch_that_finds_nothing_is_an_error() -> None:
    """A refactoring that moves what a variant patches is told."""
    patches = Patches()
    with pytest.raises(NothingToBreak, match="has no nowhere"):
        patches.set(mongo_store, "nowhere", None)
    patches.undo()


@pytest.mark.long
def test_a_process_is_broken_by_its_environment() -> None:
    """MONGOLOCK_BROKEN says which variant a process is; a name that there is not is an error, not a healthy process."""
    code = "from verify.faults import broken; from django_mongolock.engine import protocol; \
print(broken.from_environment(), protocol.TOMBSTONE_TTL)"

    def said(name: str) -> str:
        command = [sys.executable, "-c", code]
        environment = {**os.environ, VARIABLE: name}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False).stdout

    assert said("no-tombstone").split() == ["no-tombstone", "0"]
    assert said("").split() == [str(protocol.TOMBSTONE_TTL)]
    assert said("no-such-variant") == ""
