"""The records of a run as attempts: their requests, their results, and the times of their certain beliefs."""

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from verify.faults.records import Record
from verify.faults.tolerances import REAL_TIME, Tolerances

FOREVER = float("inf")
#: The most seconds after a fault was healed in which another primary may appear.
AFTERMATH = 5.0
#: The number of keys in the description of an attempt.
SHOWN = 3
#: The records that only the rules of a simulation read.
_MORE = {"taken", "request", "requested", "extended", "downgraded", "closed", "shut", "stood"}
#: The events of an attempt, with the facts that are kept besides the time.
_EVENTS: dict[str, tuple[str, ...]] = {
    "got": ("tokens", "seen"), "refused": ("error",), "left": ("was", "wrote"),
    "forked": (), "leave": (), "dropped": (), "told": (), "see": (),
}  # fmt: skip


@dataclass(slots=True)
class Sample:
    """A look between *since* and *until*. The lock said whether it is held, and that it would be for *left* seconds
    more.
    """

    since: float
    until: float
    held: bool
    left: float
    pid: int


@dataclass(slots=True)
class Attempt:
    """One call of acquire() and its outcome. Times that never came are None.

    - kind: "lock" or "document".
    - renew: whether it is renewed in the background.
    - inner: attempt of the same thread that already holds the key (a reentrant lock).
    - within: attempt of the same thread that is in its block meanwhile.
    - seen, wrote: count found in a document, and count written to it.
    - forked: time when a child was forked inside the block.
    """

    id: str
    pid: int
    keys: tuple[str, ...]
    asked: float
    mode: str = "exclusive"
    capacity: int = 1
    weight: int = 1
    wait: float | None = None
    server_lease: float = 0.0
    owner: str | None = None
    kind: str = "lock"
    renew: bool = True
    inner: str | None = None
    max_hold: float | None = None
    lease: float = 0.0
    within: str | None = None
    got: float | None = None
    tokens: dict[str, int | None] = field(default_factory=dict)
    refused: float | None = None
    error: str = ""
    seen: int | None = None
    samples: list[Sample] = field(default_factory=list)
    forked: float | None = None
    leave: float | None = None
    left: float | None = None
    was: str = ""
    wrote: int | None = None
    dropped: float | None = None
    told: float | None = None

    def take(self, what: str, record: Record) -> None:
        """Record an event of the attempt. All looks count. Of other events the last one counts, except that the first
        loss does.
        """
        if what == "see":
            self.samples.append(Sample(record["t"], record["u"], record["held"], record["left"], record["pid"]))
        elif what != "told" or self.told is None:
            for name in _EVENTS[what]:
                setattr(self, name, record.get(name))
            setattr(self, what, record["t"])

    def __str__(self) -> str:
        tokens = ", ".join(map(str, list(self.tokens.values())[:SHOWN])) or "none"
        more = f" and {len(self.keys) - SHOWN} more" if len(self.keys) > SHOWN else ""
        return f"{self.id} ({self.mode} {'+'.join(self.keys[:SHOWN])}{more}, token {tokens})"

    @property
    def answered(self) -> float | None:
        """The end of acquire()."""
        return self.got if self.got is not None else self.refused

    @property
    def given_up(self) -> float:
        """The time from which it believes nothing any more, by its own doing."""
        return min(t if t is not None else FOREVER for t in (self.leave, self.dropped))


@dataclass(frozen=True, slots=True)
class Belief:
    """A certain belief, or promise, that the attempt held *key* from *since* to *until*."""

    attempt: Attempt
    key: str
    since: float
    until: float


@dataclass(frozen=True, slots=True)
class Window:
    """A time with a fault, of one *key* only if it has one.

    - linger: additional seconds for which it may be felt when it is over.
    """

    name: str
    since: float
    until: float
    key: str | None = None
    linger: float = 0.0

    def meets(self, since: float, until: float) -> bool:
        return self.since < until and since < self.until

    def part(self, since: float, until: float) -> float:
        """Return how many seconds between these times are in the window."""
        return max(0.0, min(until, self.until) - max(since, self.since))


class History:
    """The events of a run."""

    def __init__(self, records: Iterable[Record], allow: Tolerances = REAL_TIME) -> None:
        self.allow = allow
        self.attempts: dict[str, Attempt] = {}
        self.groups: dict[int, int] = {}
        self.ended: dict[int, float] = {}
        self.killed: dict[int, float] = {}
        self.forced: dict[tuple[str, int], float] = {}
        #: The tokens of locks taken from an attempt before it knew of them, by key and attempt, as far as known.
        self.unheard: dict[tuple[str, str], list[int]] = defaultdict(list)
        self.faults: list[Record] = []
        self.windows: list[Window] = []
        self.stopped: dict[int, list[Window]] = defaultdict(list)
        self.starved: dict[int, list[Window]] = defaultdict(list)
        self.harness = 0
        #: The times at which a clock of the servers was set.
        self.clocks: list[Window] = []
        self.hung: list[Record] = []
        self.free: dict[str, Record] = {}
        self.over = FOREVER
        self.last = 0.0
        self.meta: Record = {}
        self.more: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            self._take(record)
        self.over = min(self.over, self.last)
        self._of_owner: dict[tuple[str, str], list[Attempt]] = defaultdict(list)
        for attempt in self.attempts.values():
            if attempt.owner is not None:
                for key in attempt.keys:
                    self._of_owner[key, attempt.owner].append(attempt)
        self._mates: dict[tuple[int, str], list[Attempt]] = defaultdict(list)
        for attempt in self.attempts.values():
            for key in attempt.keys:
                self._mates[attempt.pid, key].append(attempt)
        #: The times of all grants.
        self.grants = sorted(a.got for a in self.attempts.values() if a.got is not None)

    def _take(self, record: Record) -> None:
        what, t = record["what"], record["t"]
        self.last = max(self.last, t)
        if what == "ask":
            self._take_ask(record)
        elif what in _EVENTS:
            if (attempt := self.attempts.get(record["id"])) is not None:
                attempt.take(what, record)
        elif what in _MORE:
            self.more[what].append(record)
        elif what in ("start", "end", "kill", "stopped", "starved", "hung"):
            self._take_process(what, t, record)
        else:
            self._take_run(what, t, record)

    def _take_process(self, what: str, t: float, record: Record) -> None:
        match what:
            case "start":
                self.groups[record["pid"]] = record["group"]
                self.harness = record["pid"] if record["kind"] == "harness" else self.harness
            case "end":
                self.ended[record["pid"]] = t
            case "kill":
                self.killed.setdefault(record["group"], t)
            case "stopped":
                self.stopped[record["group"]].append(Window("stopped", t, record["u"]))
            case "starved":
                self.starved[record["pid"]].append(Window("starved", t, record["u"]))
            case "hung":
                self.hung.append(record)

    def _take_run(self, what: str, t: float, record: Record) -> None:
        match what:
            case "force":
                names: list[str] = record.get("ids", [""] * len(record["tokens"]))
                for token, name in zip(record["tokens"], names, strict=True):
                    self.forced.setdefault((record["key"], token), t)
                    self.unheard[record["key"], name].append(token)
            case "fault":
                self.faults.append(record)
                window = Window(record["name"], t, record["u"], record.get("key"), record.get("linger", 0.0))
                if record["order"]:
                    self.windows.append(window)
                if record.get("clocks"):
                    self.clocks.append(window)
            case "stall":
                self.windows.append(Window("stall", t, record["u"]))
            case "free":
                self.free[record["key"]] = record
            case "over":
                self.over = t
            case "run":
                self.meta = record
            case _:
                raise ValueError(f"there is no record of the kind {what!r}")

    def _take_ask(self, record: Record) -> None:
        facts: dict[str, Any] = {each.name: record[each.name] for each in fields(Attempt) if each.name in record}
        facts |= {"keys": tuple(record["keys"]), "asked": record["t"]}
        self.attempts[record["id"]] = Attempt(**facts)

    def group(self, attempt: Attempt) -> int:
        return self.groups.get(attempt.pid, attempt.pid)

    def alive_until(self, attempt: Attempt) -> float:
        """Return until when the process of an attempt may have run."""
        return min(self.killed.get(self.group(attempt), FOREVER), self.ended.get(attempt.pid, FOREVER), self.over)

    def paused(self, attempt: Attempt, since: float, until: float) -> float:
        """Return for how long its process, or the whole machine, was stopped between these times."""
        stopped = self.stopped[self.group(attempt)]
        return sum(window.part(since, until) for window in stopped) + self.stalled(since, until)

    def stalled(self, since: float, until: float) -> float:
        """Return for how long the servers were too slow even for a plain write."""
        return sum(window.part(since, until) for window in self.windows if window.name == "stall")

    def own(self, attempt: Attempt) -> list[Window]:
        """Return when its process did not get to run, because it was stopped, or it or the machine was too busy."""
        return [*self.stopped[self.group(attempt)], *self.starved[attempt.pid], *self.starved[self.harness]]

    def idle(self, attempt: Attempt, since: float, until: float) -> float:
        """Return for how long its process did not get to run between these times.

        Delays of the servers do not count.
        """
        total, end = 0.0, since
        for window in sorted(self.own(attempt), key=lambda window: window.since):
            total += window.part(max(end, since), until)
            end = max(end, window.until)
        return total

    def is_calm(self, attempt: Attempt, since: float, until: float, idle: float) -> bool:
        """Return whether nothing interfered with the attempt between these times, including the effects of earlier
        faults.

        A fault of the servers is felt until some seconds (`Tolerances.recovery`) after the first grant since then. A
        long pause of its own process is felt as long. The process may have been *idle* for so many seconds.
        """
        grace = self.allow.recovery
        pauses = (window for window in self.own(attempt) if window.until - window.since >= self.allow.lapse)
        if any(window.since < until and since < window.until + grace for window in pauses):
            return False
        if self.idle(attempt, since, until) > idle:
            return False
        return not any(
            window.since < until and since < self.recovered(window, grace)
            for window in self.windows
            if window.key is None or window.key in attempt.keys
        )

    def belief(self, attempt: Attempt, key: str) -> Belief | None:
        """Return when *attempt* certainly believed to hold *key*, or None if never.

        The belief starts at the end of the first look that said "held". It lasts until the lock said "not held", or
        until the end of the promise of the last look. It ends earlier if the program gave the lock up, if somebody took
        it away, or if the same owner asked again.
        """
        seen = [sample for sample in attempt.samples if sample.pid == attempt.pid]
        held = [sample for sample in seen if sample.held]
        if not held or attempt.got is None:
            return None
        promised = max(sample.since + sample.left for sample in held)
        believed = max(promised, held[-1].since)
        told = min((sample.until for sample in seen if not sample.held), default=FOREVER)
        until = min(believed, told, attempt.given_up, self.excused(attempt, key))
        since = held[0].until
        return Belief(attempt, key, since, until) if since < until else None

    def excused(self, attempt: Attempt, key: str) -> float:
        """Return from when on the lock may be somebody else's despite the promise.

        The lock may have been taken away on purpose. The lock of a document may be judged by the clock of another
        primary.
        """
        token = attempt.tokens.get(key)
        forced = self.forced.get((key, token), FOREVER) if token is not None else FOREVER
        if f"{attempt.id}-reader" in self.attempts and token is not None:
            # If the reader of a downgrade was taken away before it knew its token, nothing says whose token that was.
            later = (at for (forced_key, its), at in self.forced.items() if forced_key == key and its > token)
            forced = min(forced, *(at for at in later if at > (attempt.leave or FOREVER)), FOREVER)
        if attempt.kind == "document":
            forced = min(forced, self._other_clock(attempt))
        forced = min(forced, self.ended.get(attempt.pid, FOREVER))
        if attempt.owner is None:
            return forced
        others = (other for other in self._of_owner[key, attempt.owner] if other is not attempt)
        resumed = min((_resumes(other, attempt) for other in others), default=FOREVER)
        if attempt.kind == "document" or self.allow.resumes_the_dead:  # F70: a run that lives keeps its document
            resumed = max(resumed, self.alive_until(attempt))
        return min(forced, resumed)

    def _other_clock(self, attempt: Attempt) -> float:
        """Return from when on another clock may judge *attempt*.

        Once one clock is wrong, any fault may lead to that.
        """
        earliest = max(attempt.asked, min((window.since for window in self.clocks), default=FOREVER))
        windows = [*self.windows, *self.clocks]
        return min(
            (max(w.since, earliest) for w in windows if self.recovered(w, AFTERMATH) > earliest), default=FOREVER
        )

    def mates(self, attempt: Attempt, key: str) -> list[Attempt]:
        """Return the attempts of its process on this key, including itself."""
        return self._mates[attempt.pid, key]

    def by_key(self) -> dict[str, list[Attempt]]:
        """Return the attempts on each key, in the order in which they asked, without the inner ones."""
        found: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in sorted(self.attempts.values(), key=lambda attempt: attempt.asked):
            if attempt.inner is None:
                for key in attempt.keys:
                    found[key].append(attempt)
        return found

    def recovered(self, window: Window, grace: float) -> float:
        """Return when work went on after a fault, some *grace* seconds after the first grant since it was healed."""
        place = bisect.bisect_left(self.grants, window.until)
        return (self.grants[place] if place < len(self.grants) else self.over) + grace + window.linger


def _resumes(other: Attempt, attempt: Attempt) -> float:
    """Return from when on *other*, of the same owner, may take the place of *attempt*."""
    if other.asked > attempt.asked:
        return other.asked
    # The command of the other may still be on the way, and arrive after ours.
    settled = other.got or (other.refused if other.error == "LockNotAcquired" else None)
    return FOREVER if settled is not None and settled < attempt.asked else attempt.asked
