"""The faults of servers and networks: each function makes one, lets it last, and heals it. No lock is known here."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from pymongo import WriteConcern
from pymongo.errors import PyMongoError

from tests.faults import clocks
from tests.faults.cluster import Cluster, MongoCluster
from tests.faults.peers import APPNAME, COLLECTION, DATABASE
from tests.faults.proxy import CLIENT, HELD, Rule

#: How far the clocks of two members may be apart, in seconds.
SKEW: Final = 8.0
#: A document that is made again after its removal starts with a larger token, as long as no two clocks are so far
#: apart as it is old.
PURGED_AFTER: Final = 20.0


class Skipped(Exception):
    """The fault cannot be injected as things are now."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What a fault may use. sleep: waits, but ends early when the run does."""

    cluster: Cluster
    chance: random.Random
    sleep: Callable[[float], object]

    @property
    def mongo(self) -> MongoCluster:
        if not isinstance(self.cluster, MongoCluster):
            raise Skipped
        return self.cluster

    def last(self, shortest: float, longest: float) -> None:
        """Let the fault last for so long."""
        self.sleep(self.chance.uniform(shortest, longest))


def kill_primary(scene: Scene) -> None:
    """SIGKILL; it is started again a few seconds later."""
    member = scene.cluster.members[scene.cluster.primary()]
    member.kill()
    scene.last(0.5, 8)
    member.restart()


def kill_secondary(scene: Scene) -> None:
    """SIGKILL of a secondary."""
    member = scene.cluster.members[scene.chance.choice(_secondaries(scene))]
    member.kill()
    scene.last(0.5, 4)
    member.restart()


def stop_primary(scene: Scene) -> None:
    """SIGSTOP for up to eight seconds; it wakes up as a primary that is none any more."""
    member = scene.cluster.members[scene.cluster.primary()]
    member.pause()
    scene.last(0.5, 8)
    member.resume()


def stop_secondary(scene: Scene) -> None:
    """SIGSTOP of a secondary."""
    member = scene.cluster.members[scene.chance.choice(_secondaries(scene))]
    member.pause()
    scene.last(0.5, 4)
    member.resume()


def step_down(scene: Scene) -> None:
    """The primary hands over, by force or in order."""
    cluster = scene.mongo
    cluster.command(cluster.primary(), "replSetStepDown", 5, force=scene.chance.random() < 0.5)


def no_majority(scene: Scene) -> None:
    """Both secondaries are gone: killed, or stopped."""
    members = [scene.cluster.members[number] for number in _secondaries(scene)]
    killed = scene.chance.random() < 0.5
    for member in members:
        if killed:
            member.kill()
        else:
            member.pause()
    scene.last(0.5, 6)
    scene.cluster.run_all()


def all_down(scene: Scene) -> None:
    """All members are killed, and started again."""
    for member in scene.cluster.members:
        member.kill()
    scene.last(0.5, 3)
    scene.cluster.run_all()


def _secondaries(scene: Scene) -> list[int]:
    scene.mongo  # noqa: B018 - only a replica set has any
    return scene.cluster.others()


# The network


def _ways(scene: Scene, ways: list[tuple[int, int]], rule: Rule, shortest: float, longest: float) -> None:
    scene.cluster.network.set(ways, rule)
    scene.last(shortest, longest)
    scene.cluster.network.clear(ways)


def cut_primary(scene: Scene) -> None:
    """The other members do not hear the primary any more; clients still do, until it sees that it has lost."""
    scene.mongo  # noqa: B018
    _ways(scene, scene.cluster.around(scene.cluster.primary()), HELD, 1, 10)


def isolate_primary(scene: Scene) -> None:
    """Nobody hears the primary any more."""
    primary = scene.cluster.primary()
    _ways(scene, [*scene.cluster.around(primary), (CLIENT, primary)], HELD, 1, 10)


def slow_links(scene: Scene) -> None:
    """Everything from and to clients takes longer, up to half a second each way."""
    everyone = [(CLIENT, number) for number in range(len(scene.cluster.members))]
    _ways(scene, everyone, Rule(delay=scene.chance.uniform(0.03, 0.5)), 2, 6)


def half_open(scene: Scene) -> None:
    """The clients' connections to the primary are dead, and nobody is told."""
    scene.cluster.network.forget(CLIENT, scene.cluster.primary())
    scene.last(0.5, 4)


def late_commands(scene: Scene) -> None:
    """Commands are held up, and delivered when their senders have given them up or are dead."""
    _ways(scene, scene.cluster.to_primary(), Rule(hold_requests=True), 0.5, 6)


def late_replies(scene: Scene) -> None:
    """Commands take effect; the answers are held up for longer than a lease."""
    _ways(scene, scene.cluster.to_primary(), Rule(hold_replies=True), 0.5, 4)


def lost_replies(scene: Scene) -> None:
    """Some answers are lost, and their connections with them."""
    _ways(scene, scene.cluster.to_primary(), Rule(lose_replies=scene.chance.uniform(0.02, 0.3)), 1, 6)


# What the server answers

_COMMANDS: Final = ["findAndModify", "update", "find", "aggregate", "getMore"]


def _failing(scene: Scene, data: dict[str, Any], probability: float) -> None:
    cluster = scene.mongo
    fail = {"appName": APPNAME, "failCommands": [*scene.chance.sample(_COMMANDS, 3), "findAndModify"], **data}
    for number in range(len(cluster.members)):
        mode = {"activationProbability": probability}
        cluster.command(number, "configureFailPoint", "failCommand", mode=mode, data=fail)
    scene.last(1, 5)
    for number in range(len(cluster.members)):
        cluster.command(number, "configureFailPoint", "failCommand", mode="off")


def fail_closed(scene: Scene) -> None:
    """The server closes the connection instead of an answer."""
    _failing(scene, {"closeConnection": True}, scene.chance.uniform(0.05, 0.6))


def fail_write_concern(scene: Scene) -> None:
    """The write takes effect, and then its write concern fails."""
    error = {"code": scene.chance.choice([64, 91, 11602]), "errmsg": "injected", "codeName": "injected"}
    _failing(scene, {"writeConcernError": error}, scene.chance.uniform(0.05, 0.6))


def fail_not_primary(scene: Scene) -> None:
    """The server says that it is not the primary, or is shutting down."""
    code = scene.chance.choice([10107, 13435, 11602, 91, 189])
    _failing(scene, {"errorCode": code}, scene.chance.uniform(0.05, 0.4))


def fail_exceeded(scene: Scene) -> None:
    """The server says that it took too long, could not get its own locks, or met a conflict."""
    code = scene.chance.choice([50, 262, 24, 112])
    _failing(scene, {"errorCode": code}, scene.chance.uniform(0.05, 0.4))


# Clocks


def wrong_clocks(scene: Scene) -> None:
    """A secondary's clock is set wrong, either way, and it becomes the primary."""
    cluster = _with_clocks(scene)
    member = scene.chance.choice(cluster.others())
    # A clock that is set forward under a running primary is a limit that the documentation names: so not that.
    if cluster.command(member, "replSetFreeze", 30) is None:
        raise Skipped
    cluster.dials[member].set(scene.chance.uniform(-SKEW, SKEW))
    cluster.command(member, "replSetFreeze", 0)
    if scene.chance.random() < 0.5:
        cluster.command(cluster.primary(), "replSetStepDown", 10, force=True)
    else:
        cluster.step_up(member)
    scene.last(0, 2)


def clock_set_back(scene: Scene) -> None:
    """The running primary's clock is set back."""
    dial = _with_clocks(scene).dials[scene.cluster.primary()]
    if dial.offset <= 1 - SKEW:
        raise Skipped
    dial.set(scene.chance.uniform(-SKEW, dial.offset - 1))
    scene.last(0, 2)


def _with_clocks(scene: Scene) -> MongoCluster:
    if not scene.mongo.dials:
        raise Skipped
    return scene.mongo


# What the server does by itself


def ttl(scene: Scene) -> None:
    """The TTL monitor, which comes every second, finds documents that nobody uses."""
    free: dict[str, Any] = {"holders": [], "waiters": []}
    old = {"$expr": {"$lt": ["$token", {"$subtract": [{"$toLong": "$$NOW"}, round(PURGED_AFTER * 1000)]}]}}
    cluster = scene.mongo
    removed = 0
    for _ in range(3):
        try:
            with cluster.members[cluster.primary()].client() as client:
                collection = client[DATABASE][COLLECTION]
                update = [{"$set": {"purge_at": {"$subtract": ["$$NOW", 1000]}}}]
                removed += collection.update_many({**free, **old}, update).modified_count
        except PyMongoError:
            raise Skipped from None
        scene.sleep(0.5)
    if not removed:
        raise Skipped


def stream_killed(scene: Scene) -> None:
    """The cursors of the change streams are killed."""
    cluster = scene.mongo
    try:
        with cluster.members[cluster.primary()].client() as client:
            running = client.admin.aggregate([{"$currentOp": {"idleCursors": True, "allUsers": True}}])
            cursors = [op["cursor"]["cursorId"] for op in running if op.get("appName") == APPNAME and "cursor" in op]
            if not cursors:
                raise Skipped
            client[DATABASE].command("killCursors", COLLECTION, cursors=cursors)
    except PyMongoError:
        raise Skipped from None


def oplog_rolled_over(scene: Scene) -> None:
    """The oplog is written over while it cannot be read, so that the change streams cannot go on where they were."""
    cluster = scene.mongo
    ways = scene.cluster.to_primary()
    cluster.network.set(ways, Rule(hold_replies=True))
    try:
        with cluster.members[cluster.primary()].client(20) as client:
            # Nobody may fall so far behind that it never catches up.
            everybody = WriteConcern(w=len(cluster.members), wtimeout=2_000)
            filler = client["filler"].get_collection("filler", write_concern=everybody)
            before = _oldest(client)
            for number in range(60):
                filler.insert_one({"filler": b"x" * 1_000_000})
                if number >= 30:  # by and by: what is not in a checkpoint is not cut off
                    scene.sleep(0.1)
                    if _oldest(client) != before:
                        break
            filler.drop()
    except PyMongoError:
        pass
    cluster.network.clear(ways)


def _oldest(client: Any) -> Any:
    return next(iter(client.local["oplog.rs"].find({}, {"ts": 1}).sort("$natural", 1).limit(1)))["ts"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the servers or of the network.

    lane: faults of one lane come one after the other, those of two at the same time. order: may a waiter lose its
    place by it? needs: why it cannot be had on this machine, None if it can.
    """

    name: str
    inject: Callable[[Scene], None]
    lane: Literal["servers", "network"] = "servers"
    order: bool = True
    needs: Callable[[], str | None] = lambda: None

    @property
    def text(self) -> str:
        return (self.inject.__doc__ or "").strip()


FAULTS: Final[dict[str, Fault]] = {
    fault.name: fault
    for fault in (
        Fault("kill-primary", kill_primary),
        Fault("kill-secondary", kill_secondary),
        Fault("stop-primary", stop_primary),
        Fault("stop-secondary", stop_secondary),
        Fault("step-down", step_down),
        Fault("no-majority", no_majority),
        Fault("all-down", all_down),
        Fault("cut-primary", cut_primary, "network"),
        Fault("isolate-primary", isolate_primary, "network"),
        Fault("slow-links", slow_links, "network"),
        Fault("half-open", half_open, "network"),
        Fault("late-commands", late_commands, "network"),
        Fault("late-replies", late_replies, "network"),
        Fault("lost-replies", lost_replies, "network"),
        Fault("fail-closed", fail_closed, "network"),
        Fault("fail-write-concern", fail_write_concern, "network"),
        Fault("fail-not-primary", fail_not_primary, "network"),
        Fault("fail-exceeded", fail_exceeded, "network"),
        Fault("wrong-clocks", wrong_clocks, needs=clocks.missing),
        Fault("clock-set-back", clock_set_back, needs=clocks.missing),
        Fault("ttl", ttl, order=False),
        Fault("stream-killed", stream_killed, order=False),
        Fault("oplog-rolled-over", oplog_rolled_over),
    )
}
