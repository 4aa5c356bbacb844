"""A continuous look at the documents, with their entries, and with the knowledge of their attempts.

An entry names its attempt, and the attempts record their knowledge. Nothing here asks the engine.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from verify.faults.checker import OUTSIDE, UNHEARD, Violation, longest_calm
from verify.faults.history import FOREVER, History
from verify.faults.records import Record
from verify.simulation.expressions import Document
from verify.simulation.plans import LONG_WAIT
from verify.simulation.world import World

#: The seconds between two looks at the documents.
EVERY: Final = 0.2
#: The most seconds until the first command of a waiter arrives, without interference.
ARRIVAL: Final = 0.1
#: The most seconds for which something may stand in a document without interference. A waiter learns at the renewal of
#: its place that a later run of its owner holds the key and has died. The renewal comes after a third of the place.
ALLOWED: Final = {
    "an entry of an attempt that is over": 1.0,
    "a grant of which its waiter does not know": UNHEARD,
    "a lease that is over, with a live waiter at the head": 0.5,
    OUTSIDE: 1.2,
    "a dead run of an owner, with a live one that waits": 1.5 + LONG_WAIT / 3,
}
OVER, UNKNOWN, ENDED, _, HEIR = ALLOWED
#: The most seconds until a closed session has removed all its entries without interference. The limit covers a few
#: stuck documents among many.
CLOSING: Final = 2.1
#: The most seconds for which anything may stand after a close within two seconds.
CLOSED: Final = 0.4

Standing = tuple[str, str, str]


class Watch:
    """A watch that looks at the documents of a world, and records reason, key, attempt and duration of each standing
    entry.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._since: dict[Standing, float] = {}
        self._heads: dict[str, tuple[str, float]] = {}
        self._read = 0
        self._is_over = False
        self._attempts: dict[str, Record] = {}
        self._waiting: dict[str, Record] = {}
        self._over: set[str] = set()
        self._dead: set[int] = set()

    def begin(self) -> None:
        """Look from now on."""
        self._world.kernel.at(EVERY, self._look)

    def end(self) -> None:
        """Record the entries that still stand, and stop looking."""
        self._is_over = True
        for standing in list(self._since):
            self._write(standing)

    def _look(self) -> None:
        if self._is_over:
            return
        self._read_records()
        present = dict.fromkeys(self._standing())  # in a stable order, since a set's order differs by the hash seed
        now = self._world.kernel.time
        for standing in [each for each in self._since if each not in present]:
            self._write(standing)
        for standing in present:
            self._since.setdefault(standing, now)
        self.begin()

    def _write(self, standing: Standing) -> None:
        (why, key, name), since = standing, self._since.pop(standing)
        if (now := self._world.kernel.time) - since > min(ALLOWED.values()) or why == OUTSIDE:
            self._world.write("stood", 0, since, u=now, why=why, key=key, id=name)

    def _read_records(self) -> None:
        """Read the events of the attempts since the last look."""
        records = self._world.records
        for record in records[self._read :]:
            match record["what"]:
                case "ask" if record["inner"] is None:
                    self._attempts[record["id"]] = self._waiting[record["id"]] = record
                case "got":
                    self._waiting.pop(record["id"], None)
                case "told" if len(self._attempts.get(record["id"], {}).get("keys", ())) > 1:
                    pass  # the loss of one key ends no attempt for several
                case "refused" | "left" | "dropped" | "told":
                    self._waiting.pop(record["id"], None)
                    self._over.add(record["id"])
                case "kill":
                    self._dead.add(record["group"])
                case "closed":
                    self._over |= {name for name, each in self._attempts.items() if each["pid"] == record["pid"]}
        self._read = len(records)

    def _standing(self) -> Iterator[Standing]:
        documents, now = self._world.servers.documents, self._world.servers.primary.time(self._world.kernel)
        for key, document in documents.items():
            if document["holders"] or document["waiters"]:
                yield from self._of_document(key, document, now)
        for name, record in self._waiting.items():
            if len(record["keys"]) > 1 or record["wait"] == 0 or record["pid"] in self._dead or name in self._over:
                continue
            if self._world.kernel.time < record["t"] + ARRIVAL:
                continue
            there = documents.get(record["keys"][0], {"holders": (), "waiters": ()})
            if all(e["pid"] != record["pid"] for e in (*there["holders"], *there["waiters"])):
                yield OUTSIDE, record["keys"][0], name

    def _of_document(self, key: str, document: Document, now: datetime) -> Iterator[Standing]:
        holders = [e for e in document["holders"] if e["until"] > now and "released" not in e]
        waiters = [e for e in document["waiters"] if e["until"] > now]
        for e in (*holders, *waiters):
            if e["label"] in self._over and e["pid"] not in self._dead:
                yield OVER, key, e["label"]
        for e in holders:
            record = self._waiting.get(e["label"])
            if record is not None and record["keys"] == (key,) and e["pid"] not in self._dead:
                yield UNKNOWN, key, e["label"]
            if waiters and (heir := self._heir(e, waiters)) is not None:
                yield HEIR, key, heir["label"]
        is_known = bool(waiters) and self._knows_its_place(key, waiters[0]) and waiters[0]["pid"] not in self._dead
        if is_known and all(e["until"] <= now for e in document["holders"]):
            yield ENDED, key, waiters[0]["label"]

    def _knows_its_place(self, key: str, first: Document) -> bool:
        """Return whether the first of a queue knows its place. A waiter that has moved up learns it when its place is
        renewed.
        """
        label, now = first["label"], self._world.kernel.time
        if self._heads.get(key, ("", 0.0))[0] != label:
            self._heads[key] = label, now
        return bool(now - self._heads[key][1] > first["waiter_lease"] / 3000)

    def _heir(self, holder: Document, waiters: list[Document]) -> dict[str, Any] | None:
        """Return a live waiter of the same owner, if the holder is dead."""
        if "owner" not in holder or holder["pid"] not in self._dead:
            return None
        mine = (e for e in waiters if e.get("owner") == holder["owner"] and e["label"] in self._waiting)
        return next((e for e in mine if e["pid"] not in self._dead), None)


def nothing_stands(history: History) -> Iterator[Violation]:
    """Check that the process of an entry knows of it, or that the entry is soon gone."""
    closed, shut = ({record["pid"]: record["t"] for record in history.more[what]} for what in ("closed", "shut"))
    for record in history.more["stood"]:
        attempt, why, since, until = history.attempts[record["id"]], record["why"], record["t"], record["u"]
        attempt = replace(attempt, keys=(record["key"],))  # another key is no excuse
        allowed = ALLOWED[why] + history.allow.stands
        text = f"{why} stood for {until - since:.1f} s in {record['key']!r}: {attempt}"
        if attempt.pid in closed:
            at = closed[attempt.pid]
            tries = history.is_calm(attempt, at, at + CLOSING, history.allow.idle)
            is_through = shut.get(attempt.pid, FOREVER) < at + CLOSING - CLOSED
            begin, most = (shut[attempt.pid], CLOSED) if is_through else (at, CLOSING + history.allow.stands)
            if tries and why == OVER and until - max(since, begin) > most:
                yield Violation("stood", until, f"{text}, whose session was closed")
        elif until - since > allowed and longest_calm(history, attempt, since, until) > allowed:
            yield Violation("stood", until, text)
