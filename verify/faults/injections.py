"""The faults of servers and networks.

Each function injects one, lets it last, and heals it. No function knows locks.
"""

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from bson.int64 import Int64
from pymongo import WriteConcern
from pymongo.errors import PyMongoError

from verify.faults.aims import granted_by, held_at
from verify.faults.cluster import ELECTION, Cluster
from verify.faults.peers import APPNAME, COLLECTION, DATABASE
from verify.faults.plans import KEYS
from verify.faults.proxy import CLIENT, HELD, Rule
from verify.faults.records import now

T = TypeVar("T")

#: The probability that a fault with an aim takes it. Other faults come at any moment.
AIMED: Final = 0.8
#: The largest difference between the clocks of two members in seconds.
SKEW: Final = 8.0
#: The most seconds by which the clock of a running primary may be set back.
FAR_BACK: Final = 600.0
#: The age in seconds by all clocks from which an unused document may be removed. A document that is made again starts
#: with a larger token, as long as no clock is behind its last one. After the removal, no clock is set back that far.
PURGED_AFTER: Final = 20.0


class Skipped(Exception):
    """The exception for a fault that cannot be injected now."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The tools of a fault.

    - sleep: function that waits, ends early when the run does, and returns whether it did.
    """

    cluster: Cluster
    chance: random.Random
    sleep: Callable[[float], bool]

    def last(self, shortest: float, longest: float) -> None:
        """Let the fault last for a random time between these."""
        self.sleep(self.chance.uniform(shortest, longest))

    def poll(self, look: Callable[[], T]) -> T:
        """Look until there is a result, for less than an election takes. Return the result."""
        end = now() + ELECTION - 1
        while not (found := look()) and now() < end and not self.sleep(0.05):
            pass
        return found


def kill_primary(scene: Scene) -> None:
    """SIGKILL; a few seconds later it is started again."""
    _away(scene, [scene.cluster.primary()], 8, killed=True)


def kill_secondary(scene: Scene) -> None:
    """SIGKILL of a secondary."""
    _away(scene, [scene.chance.choice(scene.cluster.others())], 4, killed=True)


def stop_primary(scene: Scene) -> None:
    """SIGSTOP for up to eight seconds; when it wakes up, it is no longer the primary."""
    _away(scene, [scene.cluster.primary()], 8, killed=False)


def stop_secondary(scene: Scene) -> None:
    """SIGSTOP of a secondary."""
    _away(scene, [scene.chance.choice(scene.cluster.others())], 4, killed=False)


def _away(scene: Scene, numbers: Iterable[int], longest: float, *, killed: bool) -> None:
    """Kill or stop members for a limited number of seconds."""
    for member in [scene.cluster.members[number] for number in numbers]:
        if killed:
            member.kill()
        else:
            member.pause()
    scene.last(0.5, longest)
    scene.cluster.run_all()


def step_down(scene: Scene) -> None:
    """The primary steps down, by force or in order."""
    cluster = scene.cluster
    cluster.command(cluster.primary(), "replSetStepDown", 5, force=scene.chance.random() < 0.5)


def no_majority(scene: Scene) -> None:
    """Both secondaries are down: killed, or stopped."""
    _away(scene, scene.cluster.others(), 6, killed=scene.chance.random() < 0.5)


def all_down(scene: Scene) -> None:
    """All members are killed, and started again."""
    _away(scene, range(len(scene.cluster.members)), 3, killed=True)


# The network


def _ways(scene: Scene, ways: list[tuple[int, int]], rule: Rule, shortest: float, longest: float) -> None:
    scene.cluster.network.set(ways, rule)
    scene.last(shortest, longest)
    scene.cluster.network.clear(ways)


def cut_primary(scene: Scene) -> dict[str, Any]:
    """The other members cannot reach the primary; clients can, until it finds that it has lost the election.

    Most of the time, another one is elected as soon as a lock was released that only the old primary knows of.
    """
    cluster, primary = scene.cluster, scene.cluster.primary()
    ways = cluster.around(primary)
    aimed = scene.chance.random() < AIMED
    if aimed:
        scene.poll(lambda: held_at(cluster, primary, waiters=[]))
    # The release of a lock without waiters does not wait for the other members.
    held = held_at(cluster, primary, waiters=[])
    cluster.network.set(ways, HELD)
    if aimed:
        scene.poll(lambda: held - held_at(cluster, primary))
        scene.last(0.1, 0.5)
    else:
        scene.last(1, 10)
    released = held - held_at(cluster, primary)
    if aimed:
        cluster.step_up(next(number for number in range(len(cluster.members)) if number != primary), timeout=5)
    undone = released & held_at(cluster, cluster.primary())
    cluster.network.clear(ways)
    return {"undone": sorted(undone)}


def isolate_primary(scene: Scene) -> None:
    """Neither members nor clients can reach the primary."""
    primary = scene.cluster.primary()
    _ways(scene, [*scene.cluster.around(primary), (CLIENT, primary)], HELD, 1, 10)


def slow_links(scene: Scene) -> None:
    """All traffic of clients is delayed, by up to half a second each way."""
    everyone = [(CLIENT, number) for number in range(len(scene.cluster.members))]
    _ways(scene, everyone, Rule(delay=scene.chance.uniform(0.03, 0.5)), 2, 6)


def half_open(scene: Scene) -> None:
    """The clients' connections to the primary are dead, without an error."""
    scene.cluster.network.forget(CLIENT, scene.cluster.primary())
    scene.last(0.5, 4)


def late_commands(scene: Scene) -> None:
    """Commands are held up, and delivered when their senders have given up or are dead."""
    _ways(scene, scene.cluster.to_primary(), Rule(hold_requests=True), 0.5, 6)


def late_replies(scene: Scene) -> None:
    """Commands take effect; the answers are held up for longer than a lease."""
    _ways(scene, scene.cluster.to_primary(), Rule(hold_replies=True), 0.5, 4)


def lost_replies(scene: Scene) -> None:
    """Some answers and their connections are lost."""
    _ways(scene, scene.cluster.to_primary(), Rule(lose_replies=scene.chance.uniform(0.02, 0.3)), 1, 6)


def lost_grants(scene: Scene) -> dict[str, Any]:
    """Answers are lost by which a process would have learned that it holds a lock."""
    share, chance = scene.chance.uniform(0.3, 1.0), random.Random(scene.chance.random())
    lost: list[tuple[str, float]] = []

    def loses(reply: bytes) -> bool:
        if (attempt := granted_by(reply)) is None or chance.random() > share:
            return False
        lost.append((attempt, now()))
        return True

    network = scene.cluster.network
    network.loses, before = loses, network.loses
    scene.last(0.5, 2)
    network.loses = before
    if not lost:
        raise Skipped
    return {"lost": lost}


# Answers of the server

_COMMANDS: Final = ["findAndModify", "update", "find", "aggregate", "getMore"]


def _failing(scene: Scene, probability: float, **data: Any) -> None:
    fail = {"appName": APPNAME, "failCommands": [*scene.chance.sample(_COMMANDS, 3), "findAndModify"], **data}
    _points(scene, range(len(scene.cluster.members)), {"failCommand": fail}, scene.chance.uniform(0.05, probability), 1)


def _points(scene: Scene, members: Iterable[int], points: dict[str, Any], probability: float, shortest: float) -> None:
    """Set failpoints of these members for up to five seconds, each with its data."""
    mode = {"activationProbability": probability}
    chosen = list(itertools.product(members, points))
    for member, point in chosen:
        scene.cluster.command(member, "configureFailPoint", point, mode=mode, data=points[point])
    scene.last(shortest, 5)
    for member, point in chosen:
        scene.cluster.command(member, "configureFailPoint", point, mode="off")


def fail_closed(scene: Scene) -> None:
    """The server closes the connection instead of answering."""
    _failing(scene, 0.6, closeConnection=True)


def fail_write_concern(scene: Scene) -> None:
    """The write takes effect, and then its write concern fails."""
    error = {"code": scene.chance.choice([64, 91, 11602]), "errmsg": "injected", "codeName": "injected"}
    _failing(scene, 0.6, writeConcernError=error)


def fail_not_primary(scene: Scene) -> None:
    """The server reports that it is not the primary, or is shutting down."""
    _failing(scene, 0.4, errorCode=scene.chance.choice([10107, 13435, 11602, 91, 189]))


def fail_exceeded(scene: Scene) -> None:
    """The server reports a timeout, a failure to get its own locks, or a conflict."""
    _failing(scene, 0.4, errorCode=scene.chance.choice([50, 262, 24, 112]))


# Clocks


def wrong_clocks(scene: Scene) -> None:
    """A secondary's clock is set wrong, either way, and it becomes the primary."""
    cluster = scene.cluster
    member = scene.chance.choice(cluster.others())
    # Setting a running primary's clock forward is a limit that the documentation names.
    if cluster.command(member, "replSetFreeze", 30) is None:
        raise Skipped
    cluster.dials[member].set(scene.chance.uniform(-SKEW, SKEW))
    cluster.command(member, "replSetFreeze", 0)
    if scene.chance.random() < 0.5:
        cluster.command(cluster.primary(), "replSetStepDown", 10, force=True)
    else:
        cluster.step_up(member)
    scene.last(0, 2)


def clock_set_back(scene: Scene) -> dict[str, Any]:
    """The running primary's clock is set back."""
    return _set_back(scene, 1, 2 * SKEW, -SKEW)


def clock_set_far_back(scene: Scene) -> dict[str, Any]:
    """The running primary's clock is set back by ten seconds to ten minutes."""
    return _set_back(scene, 10, FAR_BACK, -FAR_BACK)


def _set_back(scene: Scene, least: float, most: float, lowest: float) -> dict[str, Any]:
    """Set the primary's clock back by *least* to *most* seconds, though no further than *lowest*.

    A primary that no longer replicates is started again. MongoDB waits for a millisecond, until a time of this clock,
    before it shows its oplog to the others (`OplogVisibilityThread`). After a set back meanwhile, that time is minutes
    away.
    """
    cluster = scene.cluster
    primary = cluster.primary()
    dial = cluster.dials[primary]
    lowest = max(lowest, dial.offset - most, cluster.purged - time.time())
    if dial.offset - least <= lowest:
        raise Skipped
    dial.set(scene.chance.uniform(lowest, dial.offset - least))
    scene.last(0, 2)
    stuck = not cluster.replicates()
    if stuck:
        cluster.members[primary].kill()
        cluster.run_all()
    return {"stuck": stuck}


def held_up_commands(scene: Scene) -> None:
    """The server begins commands, and holds them up for up to five seconds before they write: their `$$NOW` is old."""
    points = {"hangDuringBatchUpdate": {"nss": f"{DATABASE}.{COLLECTION}"}, "hangBeforeFindAndModifyPerformsUpdate": {}}
    chosen = {name: points[name] for name in scene.chance.sample(sorted(points), scene.chance.choice([1, 1, 2]))}
    _points(scene, [scene.cluster.primary()], chosen, scene.chance.uniform(0.1, 0.6), 0.3)


# A client that is in the way


def stuck_transaction(scene: Scene) -> dict[str, Any]:
    """A process writes to the document of a lock in a transaction, like `lock.atomic()`, and stops for a while."""
    cluster = scene.cluster
    try:
        with cluster.client(5) as client, client.start_session() as session:
            wanted = client[DATABASE][COLLECTION].distinct("_id", {"waiters": {"$ne": []}})
            key = scene.chance.choice(sorted(wanted) if wanted and scene.chance.random() < 0.5 else KEYS)
            session.start_transaction()
            _write(client[DATABASE][COLLECTION], key, session)
            scene.last(2, 12)  # longer than any lease
            with contextlib.suppress(PyMongoError):
                session.abort_transaction()
    except PyMongoError:
        raise Skipped from None
    return {"key": key}


def _write(locks: Any, key: str, session: Any) -> None:
    """Write to a lock as a fence does. Raises PyMongoError if others write again and again."""
    for _ in range(20):
        try:
            if not locks.update_one({"_id": key}, {"$inc": {"changes": Int64(1)}}, session=session).matched_count:
                raise Skipped  # nobody has asked for it yet
        except PyMongoError:
            session.abort_transaction()
            session.start_transaction()
        else:
            return
    raise Skipped


# Actions of the server itself


def ttl(scene: Scene) -> None:
    """The TTL monitor, which runs every second, finds unused documents."""
    cluster = scene.cluster
    behind = min((dial.offset for dial in cluster.dials), default=0.0)
    # The clocks run on meanwhile. A fault that sets one can only come later.
    cluster.purged = max(cluster.purged, time.time() + min(0.0, behind) - PURGED_AFTER)
    free: dict[str, Any] = {"holders": [], "waiters": []}
    old = {"token": {"$lt": Int64(cluster.purged * 1000)}}
    removed = 0
    for _ in range(3):
        try:
            with cluster.client() as client:
                collection = client[DATABASE][COLLECTION]
                update = [{"$set": {"purge_at": {"$subtract": ["$$NOW", 1000]}}}]
                removed += collection.update_many({**free, **old}, update).modified_count
        except PyMongoError:
            raise Skipped from None
        scene.sleep(0.5)
    if not removed:
        raise Skipped


def bells_killed(scene: Scene) -> None:
    """The cursors of those who listen are killed, and half of the time the bells are dropped."""
    cluster = scene.cluster
    try:
        with cluster.client() as client:
            running = client.admin.aggregate([{"$currentOp": {"idleCursors": True, "allUsers": True}}])
            cursors = [op["cursor"]["cursorId"] for op in running if op.get("appName") == APPNAME and "cursor" in op]
            if not cursors:
                raise Skipped
            for name in (f"{COLLECTION}_bells_{number}" for number in range(8)):
                client[DATABASE].command("killCursors", name, cursors=cursors)
                if scene.chance.random() < 0.5:
                    client[DATABASE].drop_collection(name)
    except PyMongoError:
        raise Skipped from None


def oplog_rolled_over(scene: Scene) -> None:
    """The oplog is overwritten while it cannot be read, so that nobody can go on from where it was."""
    cluster = scene.cluster
    ways = scene.cluster.to_primary()
    cluster.network.set(ways, Rule(hold_replies=True))
    try:
        with cluster.client(20) as client:
            # No member may fall so far behind that it never catches up.
            everybody = WriteConcern(w=len(cluster.members), wtimeout=2_000)
            filler = client["filler"].get_collection("filler", write_concern=everybody)
            before = _oldest(client)
            for number in range(60):
                filler.insert_one({"filler": b"x" * 1_000_000})
                if number >= 30:  # slowly, since only checkpointed entries are cut off
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

    - inject: function that injects it, lets it last and heals it. It may return facts for the record.
    - lane: faults of one lane come one after the other, those of two lanes at the same time.
    - order: whether a waiter may lose its place.
    - servers: whether it may stop everybody.
    - clocks: whether it sets a clock. Not every machine supports that.
    - linger: additional seconds for which it may be felt.
    """

    name: str
    inject: Callable[[Scene], dict[str, Any] | None]
    lane: Literal["servers", "network", "replies", "clients"] = "servers"
    order: bool = True
    servers: bool = True
    clocks: bool = False
    linger: float = 0.0

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
        # Dead connections stay in a client's pool until its monitor has had none of its own answered for 20 s.
        Fault("half-open", half_open, "network", linger=22.0),
        Fault("late-commands", late_commands, "network"),
        Fault("late-replies", late_replies, "network"),
        Fault("lost-replies", lost_replies, "network"),
        Fault("lost-grants", lost_grants, "replies"),
        Fault("fail-closed", fail_closed, "network"),
        # A driver that believes in a change of primary asks for it. A server without a change answers its monitor only
        # every ten seconds (the driver's heartbeat). Until then the client knows no primary.
        Fault("fail-write-concern", fail_write_concern, "network", linger=10.0),
        Fault("fail-not-primary", fail_not_primary, "network", linger=10.0),
        Fault("fail-exceeded", fail_exceeded, "network"),
        Fault("wrong-clocks", wrong_clocks, clocks=True),
        # No place and no lock is lost. Everything goes on as before.
        Fault("clock-set-back", clock_set_back, clocks=True),
        Fault("clock-set-far-back", clock_set_far_back, clocks=True),
        Fault("held-up-commands", held_up_commands),
        Fault("stuck-transaction", stuck_transaction, "clients", servers=False),
        Fault("ttl", ttl, order=False),
        Fault("bells-killed", bells_killed, order=False),
        Fault("oplog-rolled-over", oplog_rolled_over),
    )
}
