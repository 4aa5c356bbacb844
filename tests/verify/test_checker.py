"""The checker with hand-written records. Each breaks one promise, and a similar one breaks none."""

from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from verify.faults.checker import check
from verify.faults.history import History
from verify.faults.records import Journal, Record, now, read
from verify.faults.tolerances import Tolerances

#: The time when all is over.
LATER = 100.0


def _who(name: str) -> str:
    """Return the process of an attempt. "a.1" is one of a's."""
    return name.partition(".")[0]


class Story:
    """Records, written by hand. Every process is a group of its own."""

    def __init__(self, **meta: Any) -> None:
        self.records: list[Record] = [{"what": "run", "t": 0.0, "pid": 0, **meta}]
        self.pids: dict[str, int] = {}

    def pid(self, who: str) -> int:
        if who not in self.pids:
            self.pids[who] = pid = len(self.pids) + 1
            self.tell("start", 0.0, who, group=pid, kind=who)
        return self.pids[who]

    def tell(self, what: str, t: float, who: str, **facts: Any) -> "Story":
        self.records.append({"what": what, "t": t, "pid": self.pid(who), **facts})
        return self

    def ask(self, t: float, name: str, keys: str = "k", **facts: Any) -> "Story":
        facts = {
            "mode": "exclusive",
            "capacity": 1,
            "wait": 5.0,
            "owner": None,
            "renew": False,
            "server_lease": 2.0,
            **facts,
        }
        return self.tell("ask", t, _who(name), id=name, keys=keys.split("+"), inner=None, **facts)

    def got(self, t: float, name: str, *tokens: int | None, keys: str = "k") -> "Story":
        return self.tell("got", t, _who(name), id=name, tokens=dict(zip(keys.split("+"), tokens, strict=True)))

    def see(self, t: float, name: str, left: float, who: str | None = None) -> "Story":
        """Add a look of a millisecond, with the lock held for *left* seconds more, or not at all."""
        return self.tell("see", t, who or _who(name), id=name, u=t + 0.001, held=left > 0, left=left)

    def leave(self, t: float, name: str, was: str = "released") -> "Story":
        who = _who(name)
        return self.tell("leave", t, who, id=name).tell("left", t + 0.01, who, id=name, was=was)

    def hold(
        self, since: float, until: float, name: str, token: int | None, left: float = 1.0, **facts: Any
    ) -> "Story":
        """Ask, get, look twice, and give back."""
        self.ask(since - 0.1, name, **facts).got(since, name, token)
        return self.see(since, name, left).see(until - 0.01, name, left).leave(until, name)

    def fault(self, since: float, until: float, *, order: bool = True, **facts: Any) -> "Story":
        return self.tell("fault", since, "harness", u=until, name="some", order=order, **facts)

    def document(
        self, since: float, until: float, name: str, version: int, *, seen: int, was: str = "released"
    ) -> "Story":
        """Get a document that has this count in it, hold it for 3 s at most, and give it back with one more."""
        self.ask(since - 0.1, name, "d", kind="document", wait=0.0, server_lease=3.0)
        self.tell("got", since, _who(name), id=name, tokens={"d": version}, seen=seen).see(since, name, 2.9)
        self.see(until - 0.01, name, 2.9 - (until - since))
        wrote = seen + 1 if was == "released" else None
        return self.tell("leave", until, _who(name), id=name).tell(
            "left", until + 0.01, _who(name), id=name, was=was, wrote=wrote
        )

    def kill(self, t: float) -> "Story":
        """Kill the first process."""
        return self.tell("kill", t, "harness", group=1)

    def lost(self, t: float, name: str, *, told: float | None = None, was: str = "lost") -> "Story":
        """Add a look that finds the lock lost, the end of the block, and a call of `on_lost`."""
        self.see(t, name, 0).leave(t, name, was)
        return self if told is None else self.tell("told", told, _who(name), id=name)

    def refused(self, t: float, name: str, error: str = "LockNotAcquired") -> "Story":
        return self.tell("refused", t, _who(name), id=name, error=error)

    def end(self, t: float = LATER) -> "Story":
        return self.tell("over", t, "harness")

    def history(self, *allowed: Tolerances) -> History:
        """Return the history of the records in their order. If they do not say when all is over, the end is added."""
        if not any(record["what"] == "over" for record in self.records):
            self.end()
        return History(sorted(self.records, key=lambda record: float(record["t"])), *allowed)

    def rules(self) -> str:
        """Return the names of the rules that find a violation."""
        return " ".join(sorted({violation.rule for violation in check(self.history())}))


SHARED: dict[str, Any] = {"mode": "shared", "capacity": 9}
TWO: dict[str, Any] = {"mode": "semaphore", "capacity": 2}
THREE: dict[str, Any] = {"mode": "semaphore", "capacity": 3}


def held(left: float, name: str = "a", **facts: Any) -> Story:
    """Held from 10 on, for so long as a look says."""
    return Story().ask(10, name, **facts).got(10, name, 1).see(10, name, left)


def document(until: float = 11, *, was: str = "released") -> Story:
    """A document whose count was raised from 0 to 1."""
    return Story().document(10, until, "a", 1, seen=0, was=was)


def pending() -> Story:
    """A document whose holder is gone at 11."""
    return Story().ask(10, "a", "d", kind="document", server_lease=3.0).got(10, "a", 1, keys="d").end(11)


def overtaken(later: float, **facts: Any) -> Story:
    """While one waits from 10 to 21, another that came so much later gets it at 19.5."""
    story = Story().ask(10, "a", wait=20.0, **facts).ask(10 + later, "b", **facts).got(19.5, "b", 1)
    return story.leave(20, "b").got(21, "a", 2).leave(22, "a")


def line() -> Story:
    """One process waits in a line of two, and another one comes 2.9 s later."""
    return Story().ask(10, "a.0").ask(10.1, "a.1", wait=20.0).ask(13, "b")


def suffering(renew: bool = True) -> Story:
    """Return a lock with renewals that ends at 21, because nobody could renew it for two seconds."""
    return (
        Story().ask(18, "a", renew=renew).got(18, "a", 1).see(18, "a", 2.0).see(19, "a", 2.0).lost(21, "a", told=21.1)
    )


def forever() -> Story:
    """A waiter without a limit."""
    return Story().ask(10, "a", wait=None)


def late(seconds: float = 8, keys: str = "k", **facts: Any) -> Story:
    """acquire(wait=1) where a command takes 4 s at most, and the servers do not answer, comes back so late."""
    story = Story(timeout=4.0).ask(10, "a", keys, **{"wait": 1.0, **facts}).fault(9, 30)
    return story.refused(10 + seconds, "a")


#: The records of a story, and the rules that accuse it.
CASES: dict[str, tuple[Story, str]] = {
    # Two at once
    "one after another": (Story().hold(10, 11, "a", 1).hold(11.1, 12, "b", 2), ""),
    "both looked, and both hold it": (Story().hold(10, 11, "a", 1).hold(10.5, 11.5, "b", 2), "overlap told"),
    "one was killed, in the time it had been promised": (held(1.0).kill(10.1).hold(10.9, 11.2, "b", 2), "overlap"),
    "when that time is over, although it never learns": (held(1.0).kill(10.1).hold(11.01, 11.2, "b", 2), ""),
    "held before a pause and after it, so all the time": (
        held(0.1).see(14, "a", 0.1).leave(14.05, "a").hold(12, 13, "b", 2), "overlap told"
    ),
    "stopped past its lease, and then told so": (held(1.0).lost(14, "a", told=14.1).hold(12, 13, "b", 2), ""),
    "readers share": (Story().hold(10, 12, "a", 1, **SHARED).hold(10.5, 11, "b", 2, **SHARED), ""),
    "not with a writer": (Story().hold(10, 12, "a", 1, **SHARED).hold(11.2, 11.5, "c", 3), "overlap"),
    "two permits of two": (Story().hold(10, 12, "a", 1, **TWO).hold(10.5, 11, "b", 2, **TWO), ""),
    "three permits of two": (
        Story().hold(10, 12, "a", 1, **TWO).hold(10.5, 11, "b", 2, **TWO).hold(10.7, 11.5, "c", 3, **TWO), "overlap"
    ),
    "weights of three": (Story().hold(10, 12, "a", 1, **THREE, weight=2).hold(10.5, 11, "b", 2, **THREE), ""),
    "weights of four": (
        Story().hold(10, 12, "a", 1, **THREE, weight=2).hold(11.2, 11.5, "c", 3, **THREE, weight=2), "overlap"
    ),
    "taken by force, which it may learn later": (
        held(2.0).see(11, "a", 2.0).tell("force", 10.5, "janitor", key="k", tokens=[1])
        .lost(11.5, "a", told=11.6).hold(10.7, 11.2, "b", 2), ""
    ),
    "not taken by anybody": (
        held(2.0).see(11, "a", 2.0).lost(11.5, "a", told=11.6).hold(10.7, 11.2, "b", 2), "overlap promise"
    ),
    "the same owner resumes": (
        Story().hold(10, 12, "a", 1, owner="me").hold(10.7, 11.2, "b", 2, owner="me"), "told"
    ),
    "another owner does not": (
        Story().hold(10, 12, "a", 1, owner="me").hold(10.7, 11.2, "b", 2, owner="you"), "overlap told"
    ),
    "a thread that died believes nothing": (held(5.0).tell("dropped", 10.5, "a", id="a").hold(11, 12, "b", 2), ""),
    "a lock on two keys, one after another": (
        Story().ask(10, "a", "k+l").got(10, "a", 1, 7, keys="k+l").see(10, "a", 1.0).leave(10.5, "a")
        .hold(10.6, 11, "b", 2), ""
    ),
    "a lock on two keys excludes from both": (
        Story().ask(10, "a", "k+l").got(10, "a", 1, 7, keys="k+l").see(10, "a", 1.0).leave(10.5, "a")
        .hold(10.2, 10.4, "c", 3), "overlap told"
    ),
    # Tokens
    "a smaller token": (Story().hold(10, 11, "a", 5).hold(12, 13, "b", 4), "token told"),
    "the same token, also where two asked at once": (
        Story().hold(10, 11, "a", 5).ask(9.9, "b").got(11.5, "b", 5), "token"
    ),
    "answers may pass each other": (
        Story().ask(10, "a", **SHARED).ask(10.1, "b", **SHARED).got(10.3, "b", 6).got(10.4, "a", 5), ""
    ),
    "not so beliefs": (
        Story().ask(10, "a").ask(10.1, "b").got(10.2, "b", 6).see(10.3, "b", 0.2).got(10.8, "a", 5)
        .see(10.9, "a", 0.2), "token"
    ),
    "without tokens": (Story().hold(10, 11, "a", None).hold(12, 13, "b", None), ""),
    # Promises
    "lost before the time that it promised": (held(2.0).lost(11, "a", told=11.1), "promise"),
    "lost when its time is over": (held(0.9).lost(11, "a", told=11.1), ""),
    "told too early, and then another: one fault": (
        held(2.0).see(10.5, "a", 0).leave(10.8, "a", "lost").tell("told", 10.6, "a", id="a")
        .hold(10.7, 11.5, "b", 2), "promise"
    ),
    "not held, and then held again": (held(0.5).see(11, "a", 0).see(11.5, "a", 1.0), "promise"),
    "a child holds nothing": (held(1.5).see(10.5, "a", 0, who="child"), ""),
    "a child that believes it does": (held(1.5).see(10.6, "a", 9.0, who="child").hold(11.6, 12, "b", 2), "child"),
    "found lost by release(), too early": (
        held(2.0).leave(10.5, "a", "lost").tell("told", 10.6, "a", id="a"), "promise"
    ),
    "found lost by release(), in time": (held(2.0).leave(12.5, "a", "lost").tell("told", 12.6, "a", id="a"), ""),
    "a child leaves the block": (held(2.0).tell("forked", 10.5, "a", id="a").see(11, "a", 1.0).leave(11.5, "a"), ""),
    "a child leaves the block, and takes the lock": (
        held(2.0).tell("forked", 10.5, "a", id="a").lost(11, "a", told=11.1), "child"
    ),
    # Documents
    "each finds what the one before has written": (document().document(11.1, 12, "b", 3, seen=1), ""),
    "a document, while another one's time was running": (
        document().document(10.5, 11.5, "b", 2, seen=0), "overlap told written"
    ),
    "a document that was stale need not be told": (
        document(14, was="lost").document(13.1, 13.5, "b", 2, seen=0), ""
    ),
    "a document before it was stale": (document(14, was="lost").document(12.1, 13.5, "b", 2, seen=0), "overlap"),
    "a document that was finished late": (document(14).see(13.5, "a", 0), ""),
    "a document by another clock": (
        Story().fault(5, 6, clocks=True).fault(10.2, 10.3).document(10, 11, "a", 1, seen=0, was="lost")
        .document(10.5, 10.8, "b", 2, seen=0), ""
    ),
    "no other fault excuses that": (
        Story().fault(5, 6, clocks=False).fault(10.2, 10.3).document(10, 11, "a", 1, seen=0, was="lost")
        .document(10.5, 10.8, "b", 2, seen=0), "overlap promise"
    ),
    "a clock that is set meanwhile": (
        Story().fault(10.2, 10.3, order=False, clocks=True).document(10, 11, "a", 1, seen=0, was="lost")
        .document(10.5, 10.8, "b", 2, seen=0), ""
    ),
    "a write that is gone": (document().document(11.1, 12, "b", 3, seen=0), "written"),
    "a write of which nobody knows": (document(was="unknown").document(13.1, 14, "b", 3, seen=0), ""),
    "a write that is there in the end": (
        document().end(12).tell("free", 12.5, "harness", key="d", since=12.0, seen=1), ""
    ),
    "a write that is gone in the end": (
        document().end(12).tell("free", 12.5, "harness", key="d", since=12.0, seen=0), "written"
    ),
    "a write that may have been made": (document(was="unknown").document(13.1, 14, "b", 3, seen=1), ""),
    "a write that nobody made": (document(was="unknown").document(13.1, 14, "b", 3, seen=1_000_000), "unasked"),
    "F63: a child fails the work, which another one has then": (
        document().tell("forked", 10.2, "a", id="a").document(10.5, 10.8, "b", 2, seen=0)
        .document(11.1, 11.2, "c", 4, seen=1), "overlap told written"
    ),
    "a document is free when it is stale": (pending().tell("free", 16, "harness", key="d", since=11.0), ""),
    "pending for ever": (pending().tell("free", 18, "harness", key="d", since=11.0), "free"),
    # Losses are told
    "told on leaving, and by on_lost": (held(0.5).lost(11, "a", told=11.1), ""),
    "lost, and then released as if it were held": (held(0.5).lost(11, "a", told=11.1, was="released"), "told"),
    "on_lost was not called": (held(0.5).lost(11, "a"), "told"),
    "its process ended before it could be": (held(0.5).lost(11, "a").kill(12), ""),
    "released after somebody else's grant": (
        Story().ask(10, "a").got(10, "a", 1).ask(10, "b").got(12, "b", 2).leave(13, "a"), "told"
    ),
    "a release that got an answer": (
        Story().ask(10, "a").got(10, "a", 1).tell("force", 11, "janitor", key="k", tokens=[1]).ask(10, "b")
        .got(12, "b", 2).leave(13, "a"), "told"
    ),
    "a release that got none": (
        Story().ask(10, "a").got(10, "a", 1).tell("force", 11, "janitor", key="k", tokens=[1]).ask(10, "b")
        .got(12, "b", 2).leave(13, "a").fault(12.9, 14), ""
    ),
    "its session was closed before the answer": (
        Story().ask(10, "a").got(10, "a", 1).tell("force", 11, "janitor", key="k", tokens=[1]).ask(10, "b")
        .got(12, "b", 2).leave(13, "a").tell("closed", 13.005, "a"), ""
    ),
    # Order
    "overtaken": (overtaken(3), "order"),
    "nobody knows whose command came first": (overtaken(1), ""),
    "tokens tell who got it first": (
        Story().ask(10, "a", wait=20.0, **TWO).ask(13, "b", **TWO).got(14, "b", 2).got(16, "a", 1), ""
    ),
    "one who never got it": (
        Story().ask(10, "a", wait=20.0).ask(13, "b").got(19.5, "b", 1).leave(20, "b").refused(21, "a"), "order"
    ),
    "one who gave up at the last moment": (
        Story().ask(10, "a", wait=20.0).ask(13, "b").got(19.5, "b", 1).leave(20, "b").refused(19.6, "a"), ""
    ),
    "F69: whoever else of its process waits": (
        line().got(13.5, "a.0", 1).leave(14, "a.0").got(14.1, "b", 2).leave(15, "b").got(15.1, "a.1", 3)
        .leave(16, "a.1"), "order"
    ),
    **{
        f"what was taken {how}": (
            overtaken(3).tell("force", 15, "janitor", key="k", tokens=[token], ids=[whose]), found
        )
        for how, token, whose, found in (
            ("from it before it knew, and had been granted before", 0, "a", ""),
            ("from it, and had been granted after", 2, "a", "order"),
            ("from another one", 0, "c", "order"),
        )
    },
    "in one process": (
        Story().ask(10, "a.1", wait=20.0).ask(13, "a.2").got(14, "a.2", 1).leave(15, "a.2").got(16, "a.1", 2)
        .leave(17, "a.1"), "order"
    ),
    **{
        f"the next waiter was not named: {how}": (
            story.got(14.1, "b", 2).leave(18, "b").got(18.1, "a.1", 3).leave(19, "a.1"), ""
        )
        for how, story in {
            "refused": line().refused(14, "a.0"),
            "lost": line().got(11, "a.0", 1).leave(14, "a.0", "lost").tell("told", 14, "a", id="a.0"),
            "dropped": line().got(11, "a.0", 1).tell("dropped", 14, "a", id="a.0"),
            "forced": line().got(11, "a.0", 1).tell("force", 14, "janitor", key="k", tokens=[1]),
        }.items()
    },
    "that excuses nobody for ever": (
        Story().ask(10, "a.0").ask(10.1, "a.1", wait=20.0).ask(16, "b").refused(12, "a.0").got(17, "b", 2)
        .leave(18, "b").got(18.1, "a.1", 3).leave(19, "a.1"), "order"
    ),
    "where others hold it as well, the next learns too late": (
        Story().ask(10, "a.0", **TWO).ask(10.1, "a.1", wait=20.0, **TWO).ask(13, "b", **TWO).got(14, "a.0", 1)
        .got(14.1, "b", 2).got(15, "a.1", 3), ""
    ),
    "overtaken for a permit": (overtaken(3, **TWO), "order"),
    "one reader takes nothing from another": (overtaken(3, **SHARED), ""),
    "who waits for several waits for the first": (
        Story().ask(10, "a", "k+l", wait=20.0).ask(13, "b").got(14, "b", 1).leave(15, "b")
        .got(16, "a", 2, 2, keys="k+l").leave(17, "a"), "order"
    ),
    "nobody knows since when for the others": (
        Story().ask(10, "a", "j+k", wait=20.0).ask(13, "b").got(14, "b", 1).leave(15, "b")
        .got(16, "a", 2, 2, keys="j+k").leave(17, "a"), ""
    ),
    "a fault interfered": (overtaken(3).fault(15, 16), ""),
    "a fault before it came": (overtaken(3).fault(7, 8), ""),
    "a fault that does nothing to the order": (overtaken(3).fault(15, 16, order=False), "order"),
    "a fault of its key": (overtaken(3).fault(15, 16, key="k"), ""),
    "a fault of another key": (overtaken(3).fault(15, 16, key="l"), "order"),
    **{
        f"a fault before the other came, felt for {linger} s": (
            Story().ask(10, "a", wait=40.0).fault(11, 12, linger=linger).hold(12.5, 13, "c", 1).ask(21, "b")
            .got(22, "b", 2).leave(23, "b").got(24, "a", 3).leave(25, "a"), found
        )
        for linger, found in ((0.0, "order"), (20.0, ""))
    },
    "it was stopped": (overtaken(3).tell("stopped", 14, "harness", u=16, group=1), ""),
    "the other was stopped": (overtaken(3).tell("stopped", 14, "harness", u=16, group=2), "order"),
    "it did not get to run": (overtaken(3).tell("starved", 14, "a", u=16), ""),
    "the other did not get to run": (overtaken(3).tell("starved", 14, "b", u=16), "order"),
    # F66: a fault of one key costs nobody another key
    "lost without a reason": (suffering(), "suffered"),
    "its own key was stuck": (suffering().fault(15, 20, key="k"), ""),
    "another key was stuck": (suffering().fault(15, 20, key="l"), "suffered"),
    "the servers were the reason": (suffering().fault(19, 20), ""),
    "its process was stopped": (suffering().tell("stopped", 19, "harness", u=20.5, group=1), ""),
    "its process did not run": (suffering().tell("starved", 19.5, "a", u=20), ""),
    "somebody with a right to it": (suffering().tell("force", 20, "janitor", key="k", tokens=[1]), ""),
    "it was never to be renewed": (suffering(renew=False), ""),
    "what was over long before": (suffering().fault(5, 6).hold(6.5, 7, "b", 0), "suffered"),
    "an error, and a fault": (Story().ask(18, "a").refused(20, "a", "LockBackendFailed").fault(15, 20), ""),
    "an error, and a fault of its key": (
        Story().ask(18, "a").refused(20, "a", "LockBackendFailed").fault(15, 20, key="k"), ""
    ),
    "an error, and a fault of another key": (
        Story().ask(18, "a").refused(20, "a", "LockBackendFailed").fault(15, 20, key="l"), "suffered"
    ),
    "a refusal is no error": (Story().ask(18, "a").refused(20, "a"), ""),
    # Waiting
    "a key that nobody touches": (forever().end(60), "forgotten"),
    "served, with others before it": (
        reduce(lambda story, n: story.hold(10 + 2 * n, 11.5 + 2 * n, f"b{n}", n), range(10), forever())
        .got(30, "a", 99).leave(31, "a").end(60), "order"
    ),
    "while a fault lasts": (
        forever().fault(10.5, 55, servers=True).got(56, "a", 1).leave(57, "a").end(60), ""
    ),
    "the dead wait for nothing": (forever().kill(11), ""),
    "within its wait and one command": (late(5.9), ""),
    "later than that": (late(6.1), "wait"),
    "one command for each key": (late(6.1, "k+l"), ""),
    "later than two": (late(10.1, "k+l"), "wait"),
    "what it was stopped is not counted": (late().tell("stopped", 11, "harness", u=14, group=1), ""),
    "what it was starved is not counted": (late().tell("starved", 11, "a", u=14), ""),
    "and not twice": (
        late().tell("stopped", 11, "harness", u=12, group=1).tell("starved", 11, "a", u=12), "wait"
    ),
    "what the servers do is counted": (late().tell("stall", 11, "harness", u=14), "wait"),
    "not back when the run is over": (Story(timeout=4.0).ask(10, "a", wait=1.0).fault(9, 17).end(17), "wait"),
    "killed before": (Story(timeout=4.0).ask(10, "a", wait=1.0).fault(9, 17).kill(15).end(17), ""),
    "it waits without end": (Story(timeout=4.0).ask(10, "a", wait=None).fault(9, 17).end(17), ""),
    "what is asked of a document takes more commands": (late(48, wait=0.0, kind="document"), ""),
    "but no more than twelve": (late(49.1, wait=0.0, kind="document"), "wait"),
    "a process that does not end": (Story().tell("hung", 50, "harness", group=7, text="sync"), "hung"),
    "work goes on": (Story().fault(10, 11, servers=True).hold(20, 21, "a", 1), ""),
    "a standstill": (Story().fault(10, 11, servers=True).hold(60, 61, "a", 1), "standstill"),
    "the machine stood still": (
        Story().fault(10, 11, servers=True).hold(60, 61, "a", 1).tell("stall", 20, "harness", u=50), ""
    ),
    # The end
    **{
        f"the key of one who was killed is free {at - 11} s later": (
            Story().ask(10, "a").got(10, "a", 1).kill(11).end(11).tell("free", at, "harness", key="k"), found
        )
        for at, found in ((13, ""), (17, "free"))
    },
    "another key is free, this one is not": (
        Story().hold(10, 11, "a", 1).ask(10, "b", "l").got(10, "b", 1, keys="l").leave(10.5, "b").end(12)
        .tell("free", 12, "harness", key="l"), "free"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("story", "found"), CASES.values(), ids=CASES)
def test_what_is_accused(story: Story, found: str) -> None:
    """The rules find stories that break a promise, and not similar ones that break none."""
    assert story.rules() == found


# Records


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Records are read in the order of time, over the files of several processes, each with its process."""
    one, two = Journal(tmp_path, "one"), Journal(tmp_path, "two")  # as of two processes
    first, second = one.new_id(), one.new_id()
    assert first != second
    one.write("ask", id=first)
    two.write("ask", id=two.new_id())
    one.write("got", 1.0, id=first)
    records = read(tmp_path)
    assert [record["what"] for record in records] == ["got", "start", "start", "ask", "ask"]
    assert 0 <= now() - records[-1]["t"] < 60


def test_a_pid_that_is_used_again(tmp_path: Path) -> None:
    """A pid that is used again is another process in another group. The first was killed, and the second was not."""
    one = Journal(tmp_path, "one")
    one.write("kill", group=one.pid)
    two = Journal(tmp_path, "two")
    two.write("kill", group=one.pid)
    starts_and_kills = read(tmp_path)
    assert [record["pid"] for record in starts_and_kills] == [one.pid, one.pid, one.pid + 2**23, one.pid + 2**23]
    assert [record["group"] for record in starts_and_kills if record["what"] == "kill"] == [one.pid, one.pid + 2**23]


def test_a_torn_line(tmp_path: Path) -> None:
    """A process that was killed while it wrote has written nothing. Damage elsewhere is an error."""
    journal = Journal(tmp_path, "one")
    (path,) = tmp_path.iterdir()
    with path.open("a") as file:
        file.write('{"what":"got"')
    assert [record["what"] for record in read(tmp_path)] == ["start"]
    journal.write("end")
    with pytest.raises(ValueError, match="delimiter"):
        read(tmp_path)


def test_what_is_not_known() -> None:
    """An unknown record is an error."""
    with pytest.raises(ValueError, match="no record of the kind 'gott'"):
        Story().tell("gott", 1.0, "a").rules()
