"""The checker: hand-written records, each of which breaks one promise, and the like of it that breaks none."""

from pathlib import Path
from typing import Any

import pytest

from verify.faults.checker import check
from verify.faults.history import History
from verify.faults.records import Journal, Record, now, read

#: When all is over.
LATER = 100.0


def _who(name: str) -> str:
    """Whose attempt it is: "a.1" is one of a's."""
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
        """A look that takes a millisecond: held for *left* seconds more, or not at all."""
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

    def end(self, t: float = LATER) -> "Story":
        return self.tell("over", t, "harness")

    def rules(self) -> set[str]:
        """Which rules find something."""
        return {violation.rule for violation in check(History(sorted(self.records, key=lambda r: float(r["t"]))))}


class TestOverlap:
    def test_one_after_another(self) -> None:
        """Two who hold the key one after the other break nothing."""
        assert Story().hold(10, 11, "a", 1).hold(11.1, 12, "b", 2).end().rules() == set()

    def test_two_at_once(self) -> None:
        """Both looked, and both were told that they hold the key."""
        assert "overlap" in Story().hold(10, 11, "a", 1).hold(10.5, 11.5, "b", 2).end().rules()

    def test_it_was_promised(self) -> None:
        """One who was killed, or stopped, had been promised the time in which another got the key."""
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 1.0).tell("kill", 10.1, "harness", group=1)
        assert "overlap" in story.hold(10.9, 11.2, "b", 2).end().rules()

    def test_after_what_was_promised(self) -> None:
        """When that time is over, it may be another's, also if the first never learns of it."""
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 1.0).tell("kill", 10.1, "harness", group=1)
        assert story.hold(11.01, 11.2, "b", 2).end().rules() == set()

    def test_a_pause_between_looks(self) -> None:
        """Held before a pause, and held after it: held all the time, so nobody else may hold it meanwhile."""
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 0.1).see(14, "a", 0.1).leave(14.05, "a")
        assert "overlap" in story.hold(12, 13, "b", 2).end().rules()

    def test_a_pause_before_the_loss(self) -> None:
        """A process that was stopped past its lease and then told so is not accused."""
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 1.0).see(14, "a", 0).leave(14, "a", "lost")
        story.tell("told", 14.1, "a", id="a")
        assert story.hold(12, 13, "b", 2).end().rules() == set()

    def test_readers_share(self) -> None:
        """Readers hold it together, but not with a writer."""
        shared: dict[str, Any] = {"mode": "shared", "capacity": 9}
        story = Story().hold(10, 12, "a", 1, **shared).hold(10.5, 11, "b", 2, **shared)
        assert story.end().rules() == set()
        assert "overlap" in story.hold(11.2, 11.5, "c", 3).end().rules()

    def test_permits(self) -> None:
        """Two of two, but not three."""
        permits: dict[str, Any] = {"mode": "semaphore", "capacity": 2}
        story = Story().hold(10, 12, "a", 1, **permits).hold(10.5, 11, "b", 2, **permits)
        assert story.end().rules() == set()
        assert "overlap" in story.hold(10.7, 11.5, "c", 3, **permits).end().rules()

    def test_weights(self) -> None:
        """Three of three, but not four."""
        permits: dict[str, Any] = {"mode": "semaphore", "capacity": 3}
        story = Story().hold(10, 12, "a", 1, **permits, weight=2).hold(10.5, 11, "b", 2, **permits)
        assert story.end().rules() == set()
        assert "overlap" in story.hold(11.2, 11.5, "c", 3, **permits, weight=2).end().rules()

    @pytest.mark.parametrize("taken", [True, False])
    def test_force_release(self, taken: bool) -> None:
        """Who takes a lock from its holder lets another in; the holder may learn of it later."""
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 2.0).see(11, "a", 2.0).see(11.5, "a", 0)
        story.leave(11.5, "a", "lost").tell("told", 11.6, "a", id="a")
        if taken:
            story.tell("force", 10.5, "janitor", key="k", tokens=[1])
        assert ("overlap" in story.hold(10.7, 11.2, "b", 2).end().rules()) is not taken

    @pytest.mark.parametrize(("owner", "fine"), [("me", True), ("you", False)])
    def test_resuming(self, owner: str, fine: bool) -> None:
        """The same owner takes the lock from itself; another does not."""
        story = Story().hold(10, 12, "a", 1, owner="me").hold(10.7, 11.2, "b", 2, owner=owner).end()
        assert ("overlap" not in story.rules()) is fine

    def test_a_thread_that_dies(self) -> None:
        """Who believes nothing any more is in nobody's way."""
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 5.0).tell("dropped", 10.5, "a", id="a")
        assert story.hold(11, 12, "b", 2).end().rules() == set()

    def test_each_key_of_several(self) -> None:
        """A lock on two keys excludes others from both."""
        story = Story().ask(10, "a", "k+l").got(10, "a", 1, 7, keys="k+l").see(10, "a", 1.0).leave(10.5, "a")
        assert story.hold(10.6, 11, "b", 2).end().rules() == set()
        assert "overlap" in story.hold(10.2, 10.4, "c", 3).end().rules()


class TestTokens:
    def test_smaller_than_before(self) -> None:
        """A token that is smaller than one that had been given before it was asked for."""
        assert "token" in Story().hold(10, 11, "a", 5).hold(12, 13, "b", 4).end().rules()

    def test_the_same_twice(self) -> None:
        """Also where the two asked at the same time."""
        assert "token" in Story().hold(10, 11, "a", 5).ask(9.9, "b").got(11.5, "b", 5).end().rules()

    def test_answers_may_pass_each_other(self) -> None:
        """Where two ask at once, their answers may come in any order; not so their beliefs."""
        shared: dict[str, Any] = {"mode": "shared", "capacity": 9}
        story = Story().ask(10, "a", **shared).ask(10.1, "b", **shared).got(10.3, "b", 6).got(10.4, "a", 5)
        assert story.end().rules() == set()
        story = Story().ask(10, "a").ask(10.1, "b").got(10.2, "b", 6).see(10.3, "b", 0.2).got(10.8, "a", 5)
        assert "token" in story.see(10.9, "a", 0.2).end().rules()

    def test_without_tokens(self) -> None:
        """A lock that has none is not asked for them."""
        assert Story().hold(10, 11, "a", None).hold(12, 13, "b", None).end().rules() == set()


class TestPromises:
    def test_lost_too_early(self) -> None:
        """A lock that is lost before the time it had promised: what the servers acknowledged is gone."""
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 2.0).see(11, "a", 0).leave(11, "a", "lost")
        assert story.tell("told", 11.1, "a", id="a").end().rules() == {"promise"}

    def test_lost_in_time(self) -> None:
        """A lock that is lost when its time is over."""
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 0.9).see(11, "a", 0).leave(11, "a", "lost")
        assert story.tell("told", 11.1, "a", id="a").end().rules() == set()

    def test_who_was_told_believes_nothing(self) -> None:
        """It was told of its loss too early, and then another held the key: that is one fault, not two."""
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 2.0).see(10.5, "a", 0)
        story.leave(10.8, "a", "lost").tell("told", 10.6, "a", id="a")
        assert story.hold(10.7, 11.5, "b", 2).end().rules() == {"promise"}

    def test_it_comes_back(self) -> None:
        """Not held, and then held again."""
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 0.5).see(11, "a", 0).see(11.5, "a", 1.0)
        assert "promise" in story.end().rules()

    def test_a_child_holds_nothing(self) -> None:
        """A forked child that looks at its parent's lock."""
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 1.5)
        assert story.see(10.5, "a", 0, who="child").end().rules() == set()
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 1.5).see(10.6, "a", 9.0, who="child")
        assert story.hold(11.6, 12, "b", 2).end().rules() == {"child"}

    def test_lost_on_leaving(self) -> None:
        """No look has found it, but release() does: within the time that was promised."""
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 2.0).leave(10.5, "a", "lost")
        assert story.tell("told", 10.6, "a", id="a").end().rules() == {"promise"}
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 2.0).leave(12.5, "a", "lost")
        assert story.tell("told", 12.6, "a", id="a").end().rules() == set()

    def test_a_child_leaves_the_block(self) -> None:
        """A lock that is lost after a child has left the block: the child has taken it."""
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 2.0).tell("forked", 10.5, "a", id="a")
        assert story.see(11, "a", 1.0).leave(11.5, "a").end().rules() == set()
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 2.0).tell("forked", 10.5, "a", id="a")
        story.see(11, "a", 0).leave(11, "a", "lost").tell("told", 11.1, "a", id="a")
        assert story.end().rules() == {"child"}


class TestDocuments:
    """P1 of the locks of documents: one flow at a time, whoever lost it writes nothing, nothing is pending for ever."""

    def test_one_after_another(self) -> None:
        """Each finds what the one before has written."""
        story = Story().document(10, 11, "a", 1, seen=0).document(11.1, 12, "b", 3, seen=1)
        assert story.end().rules() == set()

    def test_two_at_once(self) -> None:
        """One got it while another one's time was running."""
        story = Story().document(10, 11, "a", 1, seen=0).document(10.5, 11.5, "b", 2, seen=0)
        assert "overlap" in story.end().rules()

    def test_when_it_is_stale(self) -> None:
        """One who works for longer than that is refused at the end: nobody's fault, and he need not be told before."""
        story = Story().document(10, 14, "a", 1, seen=0, was="lost").document(13.1, 13.5, "b", 2, seen=0)
        assert story.end().rules() == set()
        story = Story().document(10, 14, "a", 1, seen=0, was="lost").document(12.1, 13.5, "b", 2, seen=0)
        assert story.end().rules() == {"overlap"}

    def test_finished_late(self) -> None:
        """It was stale, and nobody had taken it."""
        assert Story().document(10, 14, "a", 1, seen=0).see(13.5, "a", 0).end().rules() == set()

    def test_by_another_clock(self) -> None:
        """Where a clock was set, the next primary may find a document stale earlier; else no fault excuses that."""
        for clocks in (True, False):
            story = Story().fault(5, 6, clocks=clocks).fault(10.2, 10.3)
            story.document(10, 11, "a", 1, seen=0, was="lost").document(10.5, 10.8, "b", 2, seen=0)
            assert story.end().rules() == (set() if clocks else {"overlap", "promise"})
        story = Story().fault(10.2, 10.3, order=False, clocks=True)
        story.document(10, 11, "a", 1, seen=0, was="lost").document(10.5, 10.8, "b", 2, seen=0)
        assert story.end().rules() == set()

    def test_a_write_that_is_gone(self) -> None:
        """Its holder was told that it had been written; the next one does not find it."""
        story = Story().document(10, 11, "a", 1, seen=0).document(11.1, 12, "b", 3, seen=0)
        assert story.end().rules() == {"written"}
        story = Story().document(10, 11, "a", 1, seen=0, was="unknown").document(13.1, 14, "b", 3, seen=0)
        assert story.end().rules() == set()

    def test_a_write_that_is_gone_in_the_end(self) -> None:
        """Nobody of the run came after it."""
        story = Story().document(10, 11, "a", 1, seen=0).end(12)
        assert story.tell("free", 12.5, "harness", key="d", since=12.0, seen=1).rules() == set()
        story = Story().document(10, 11, "a", 1, seen=0).end(12)
        assert story.tell("free", 12.5, "harness", key="d", since=12.0, seen=0).rules() == {"written"}

    def test_a_write_that_nobody_made(self) -> None:
        """A count that the server has refused, or more than those before can have written."""
        story = Story().document(10, 11, "a", 1, seen=0, was="unknown").document(13.1, 14, "b", 3, seen=1)
        assert story.end().rules() == set()
        story = Story().document(10, 11, "a", 1, seen=0, was="unknown").document(13.1, 14, "b", 3, seen=1_000_000)
        assert story.end().rules() == {"unasked"}

    def test_a_child_fails_the_work(self) -> None:
        """F63: a child left the block by an error, and its parent finished work that was another's."""
        story = Story().document(10, 11, "a", 1, seen=0).tell("forked", 10.2, "a", id="a")
        assert story.end().rules() == set()
        story.document(10.5, 10.8, "b", 2, seen=0).document(11.1, 11.2, "c", 4, seen=1)
        assert story.rules() == {"overlap", "told", "written"}

    def test_pending_for_ever(self) -> None:
        """A document of one that was killed is free when it is stale."""
        story = Story().ask(10, "a", "d", kind="document", server_lease=3.0).got(10, "a", 1, keys="d").end(11)
        assert story.tell("free", 16, "harness", key="d", since=11.0).rules() == set()
        story = Story().ask(10, "a", "d", kind="document", server_lease=3.0).got(10, "a", 1, keys="d").end(11)
        assert story.tell("free", 18, "harness", key="d", since=11.0).rules() == {"free"}


class TestLosses:
    def lost(self, was: str, told: float | None) -> Story:
        story = Story().ask(10, "a").got(10, "a", 1).see(10, "a", 0.5).see(11, "a", 0).leave(11, "a", was)
        return story if told is None else story.tell("told", told, "a", id="a")

    def test_told(self) -> None:
        """Told on leaving, and by on_lost."""
        assert self.lost("lost", 11.1).end().rules() == set()

    def test_not_told_on_leaving(self) -> None:
        """It was lost, and release() said that it was given back."""
        assert self.lost("released", 11.1).end().rules() == {"told"}

    def test_on_lost_was_not_called(self) -> None:
        """Unless the process ended before it could be."""
        assert self.lost("lost", None).end().rules() == {"told"}
        assert self.lost("lost", None).tell("kill", 12, "harness", group=1).end().rules() == set()

    def test_a_release_after_somebody_else_s_grant(self) -> None:
        """Nobody looked, but somebody else had it before it was given back."""
        story = Story().ask(10, "a").got(10, "a", 1).ask(10, "b").got(12, "b", 2).leave(13, "a")
        assert story.end().rules() == {"told"}

    def test_a_release_that_gets_no_answer(self) -> None:
        """A lock that was taken by force, and given back while the servers do not answer: nobody can know."""
        story = Story().ask(10, "a").got(10, "a", 1).tell("force", 11, "janitor", key="k", tokens=[1])
        story.ask(10, "b").got(12, "b", 2).leave(13, "a")
        assert story.end().rules() == {"told"}
        assert story.fault(12.9, 14).end().rules() == set()


class TestOrder:
    def overtaken(self, later: float, **facts: Any) -> Story:
        """While one waits from 10 to 21, another that came so much later gets it at 19.5."""
        story = Story().ask(10, "a", wait=20.0, **facts).ask(10 + later, "b", **facts).got(19.5, "b", 1)
        return story.leave(20, "b").got(21, "a", 2).leave(22, "a")

    def test_overtaken(self) -> None:
        """Who came certainly later was served first."""
        assert self.overtaken(3).end().rules() == {"order"}

    def test_almost_together(self) -> None:
        """Nobody knows whose command came first."""
        assert self.overtaken(1).end().rules() == set()

    def test_an_answer_that_was_late(self) -> None:
        """The tokens tell who got it first, not who heard of it first."""
        permits: dict[str, Any] = {"mode": "semaphore", "capacity": 2}
        story = Story().ask(10, "a", wait=20.0, **permits).ask(13, "b", **permits).got(14, "b", 2).got(16, "a", 1)
        assert story.end().rules() == set()

    def test_one_who_never_got_it(self) -> None:
        """A waiter whose time is over, or who gave up, has been overtaken before, but not at the last moment."""
        for refused, found in ((21, {"order"}), (19.6, set())):
            story = Story().ask(10, "a", wait=20.0).ask(13, "b").got(19.5, "b", 1).leave(20, "b")
            assert story.tell("refused", refused, "a", id="a", error="LockNotAcquired").end().rules() == found

    def test_whoever_else_of_its_process_waits(self) -> None:
        """F69: a thread that waits behind others of its process is overtaken by another process."""
        story = Story().ask(10, "a.0").ask(10.1, "a.1", wait=20.0).ask(13, "b").got(13.5, "a.0", 1).leave(14, "a.0")
        story.got(14.1, "b", 2).leave(15, "b")
        assert story.got(15.1, "a.1", 3).leave(16, "a.1").end().rules() == {"order"}

    def test_in_one_process(self) -> None:
        """Its own threads are served in order as well."""
        story = Story().ask(10, "a.1", wait=20.0).ask(13, "a.2").got(14, "a.2", 1).leave(15, "a.2")
        assert story.got(16, "a.1", 2).leave(17, "a.1").end().rules() == {"order"}

    @pytest.mark.parametrize("how", ["refused", "lost", "dropped", "forced"])
    def test_without_a_next_waiter(self, how: str) -> None:
        """Who stood in the document for its whole process has left it and named no next waiter: the next is a little
        late."""
        story = Story().ask(10, "a.0").ask(10.1, "a.1", wait=20.0).ask(13, "b")
        match how:
            case "refused":
                story.tell("refused", 14, "a", id="a.0", error="LockNotAcquired")
            case "lost":
                story.got(11, "a.0", 1).leave(14, "a.0", "lost").tell("told", 14, "a", id="a.0")
            case "dropped":
                story.got(11, "a.0", 1).tell("dropped", 14, "a", id="a.0")
            case "forced":
                story.got(11, "a.0", 1).tell("force", 14, "janitor", key="k", tokens=[1])
        story.got(14.1, "b", 2).leave(18, "b")
        assert story.got(18.1, "a.1", 3).leave(19, "a.1").end().rules() == set()

    def test_long_after_that(self) -> None:
        """That excuses nobody for ever."""
        story = Story().ask(10, "a.0").ask(10.1, "a.1", wait=20.0).ask(16, "b")
        story.tell("refused", 12, "a", id="a.0", error="LockNotAcquired").got(17, "b", 2).leave(18, "b")
        assert story.got(18.1, "a.1", 3).leave(19, "a.1").end().rules() == {"order"}

    def test_two_permits_at_once(self) -> None:
        """Where others hold it as well, the next of a process may learn too late that it stands first now."""
        permits: dict[str, Any] = {"mode": "semaphore", "capacity": 2}
        story = Story().ask(10, "a.0", **permits).ask(10.1, "a.1", wait=20.0, **permits).ask(13, "b", **permits)
        story.got(14, "a.0", 1).got(14.1, "b", 2)
        assert story.got(15, "a.1", 3).end().rules() == set()
        assert self.overtaken(3, **permits).end().rules() == {"order"}

    def test_readers(self) -> None:
        """One reader takes nothing from another."""
        assert self.overtaken(3, mode="shared", capacity=9).end().rules() == set()

    def test_several_keys(self) -> None:
        """Who waits for several waits for the first from the beginning, for the others nobody knows since when."""
        for keys, found in (("k+l", {"order"}), ("j+k", set())):
            story = Story().ask(10, "a", keys, wait=20.0).ask(13, "b").got(14, "b", 1).leave(15, "b")
            assert story.got(16, "a", 2, 2, keys=keys).leave(17, "a").end().rules() == found

    def test_a_fault_interfered(self) -> None:
        """Who could not renew its place has lost it, until some time after the fault. A fault that does nothing to the
        order excuses nobody, nor does one of another key."""
        assert self.overtaken(3).fault(15, 16).end().rules() == set()
        assert self.overtaken(3).fault(7, 8).end().rules() == set()
        assert self.overtaken(3).fault(15, 16, order=False).end().rules() == {"order"}
        assert self.overtaken(3).fault(15, 16, key="k").end().rules() == set()
        assert self.overtaken(3).fault(15, 16, key="l").end().rules() == {"order"}

    def test_a_fault_before_the_other_came(self) -> None:
        """What had happened to its place was made good when the other came."""
        story = Story().ask(10, "a", wait=40.0).fault(11, 12).hold(12.5, 13, "c", 1).ask(21, "b").got(22, "b", 2)
        story.leave(23, "b").got(24, "a", 3).leave(25, "a")
        assert story.end().rules() == {"order"}
        story.records.append({"what": "fault", "t": 11, "u": 12, "pid": 0, "name": "x", "order": True, "linger": 20.0})
        assert story.rules() == set()

    @pytest.mark.parametrize("how", ["stopped", "starved"])
    def test_it_was_stopped(self, how: str) -> None:
        """So has who was stopped, or did not get to run, but not who saw another being stopped."""
        for who, found in (("a", set()), ("b", {"order"})):
            story = self.overtaken(3)
            if how == "stopped":
                story.tell("stopped", 14, "harness", u=16, group=story.pid(who))
            else:
                story.tell("starved", 14, who, u=16)
            assert story.end().rules() == found


class TestNobodyElse:
    """What happens to one key, and to nothing else, costs nobody another (F66)."""

    def lost(self) -> Story:
        """A lock that was to be renewed ends at 21, as nobody could renew it for two seconds."""
        story = Story().ask(18, "a", renew=True).got(18, "a", 1).see(18, "a", 2.0).see(19, "a", 2.0).see(21, "a", 0)
        return story.leave(21, "a", "lost").tell("told", 21.1, "a", id="a")

    def test_without_a_reason(self) -> None:
        """Nothing had happened."""
        assert self.lost().end().rules() == {"suffered"}

    def test_another_key(self) -> None:
        """Its own key was stuck, or another."""
        assert self.lost().fault(15, 20, key="k").end().rules() == set()
        assert self.lost().fault(15, 20, key="l").end().rules() == {"suffered"}

    def test_with_a_reason(self) -> None:
        """The servers, its process or somebody with a right to it was the reason; or it was never to be renewed."""
        assert self.lost().fault(19, 20).end().rules() == set()
        assert self.lost().tell("stopped", 19, "harness", u=20.5, group=1).end().rules() == set()
        assert self.lost().tell("starved", 19.5, "a", u=20).end().rules() == set()
        assert self.lost().tell("force", 20, "janitor", key="k", tokens=[1]).end().rules() == set()
        story = self.lost()
        next(record for record in story.records if record["what"] == "ask")["renew"] = False
        assert story.end().rules() == set()

    def test_long_before(self) -> None:
        """What was over ten seconds before is no reason."""
        assert self.lost().fault(5, 6).hold(6.5, 7, "b", 0).end().rules() == {"suffered"}

    def test_an_error(self) -> None:
        """An attempt that ends in an error, and what had happened."""
        for key, found in ((None, set()), ("k", set()), ("l", {"suffered"})):
            story = Story().ask(18, "a").tell("refused", 20, "a", id="a", error="LockBackendFailed")
            assert story.fault(15, 20, key=key).end().rules() == found
        story = Story().ask(18, "a").tell("refused", 20, "a", id="a", error="LockNotAcquired")
        assert story.end().rules() == set()


class TestWaiting:
    def test_forgotten(self) -> None:
        """A waiter without a limit, and a key that nobody touches."""
        assert Story().ask(10, "a", wait=None).end(60).rules() == {"forgotten"}

    def test_served(self) -> None:
        """The same, with others before it."""
        story = Story().ask(10, "a", wait=None)
        for number in range(10):
            story.hold(10 + 2 * number, 11.5 + 2 * number, f"b{number}", number)
        assert story.got(30, "a", 99).leave(31, "a").end(60).rules() == {"order"}

    def test_while_a_fault_lasts(self) -> None:
        """Nobody is to blame for what the servers' absence takes."""
        story = Story().ask(10, "a", wait=None).fault(10.5, 55, servers=True)
        assert story.got(56, "a", 1).leave(57, "a").end(60).rules() == set()

    def test_its_process_was_killed(self) -> None:
        """The dead wait for nothing."""
        assert Story().ask(10, "a", wait=None).tell("kill", 11, "harness", group=1).end().rules() == set()

    def test_it_comes_back_too_late(self) -> None:
        """acquire(wait=1) that takes half a minute."""
        story = Story().ask(10, "a", wait=1.0).fault(10, 40)
        assert story.tell("refused", 40, "a", id="a", error="LockNotAcquired").end().rules() == {"hung"}

    def test_it_never_comes_back(self) -> None:
        """acquire(wait=1) that has not returned when all is over."""
        assert "hung" in Story().ask(10, "a", wait=1.0).fault(10, 40).end(41).rules()

    @pytest.mark.parametrize(
        ("seconds", "keys", "found"),
        [(5.9, "k", set()), (6.1, "k", {"wait"}), (6.1, "k+l", set()), (10.1, "k+l", {"wait"})],
    )
    def test_within_its_wait_and_one_command(self, seconds: float, keys: str, found: set[str]) -> None:
        """acquire(wait=1) where a command takes 4 s at most, whatever happens to the servers; one more for each key."""
        story = Story(timeout=4.0).ask(10, "a", keys, wait=1.0).fault(9, 30)
        assert story.tell("refused", 10 + seconds, "a", id="a", error="LockNotAcquired").end().rules() == found

    def test_its_process_did_not_run(self) -> None:
        """What it was stopped, or starved, is not counted, and not twice; what the servers do is."""

        def late(**facts: Any) -> Story:
            story = Story(timeout=4.0, **facts).ask(10, "a", wait=1.0).fault(9, 30)
            return story.tell("refused", 18, "a", id="a", error="LockNotAcquired").end()

        assert late().rules() == {"wait"}
        assert late().tell("stopped", 11, "harness", u=14, group=1).rules() == set()
        assert late().tell("starved", 11, "a", u=14).rules() == set()
        assert late().tell("stopped", 11, "harness", u=12, group=1).tell("starved", 11, "a", u=12).rules() == {"wait"}
        assert late().tell("stall", 11, "harness", u=14).rules() == {"wait"}

    def test_one_that_never_comes_back(self) -> None:
        """It counts when the run is over; not for who was killed before, nor for who waits without end."""
        assert Story(timeout=4.0).ask(10, "a", wait=1.0).fault(9, 17).end(17).rules() == {"wait"}
        story = Story(timeout=4.0).ask(10, "a", wait=1.0).fault(9, 17)
        assert story.tell("kill", 15, "harness", group=1).end(17).rules() == set()
        assert Story(timeout=4.0).ask(10, "a", wait=None).fault(9, 17).end(17).rules() == set()

    def test_documents_are_not_waited_for(self) -> None:
        """What is asked of a document takes more commands than one."""
        for kind, found in (("lock", {"wait", "hung"}), ("document", set())):
            story = Story(timeout=4.0).ask(10, "a", kind=kind, wait=0.0).fault(9, 30)
            assert story.tell("refused", 26, "a", id="a", error="LockBackendFailed").end().rules() == found

    def test_a_process_that_does_not_end(self) -> None:
        """The harness says so."""
        assert Story().tell("hung", 50, "harness", group=7, text="sync").end().rules() == {"hung"}

    def test_a_standstill(self) -> None:
        """A fault was healed, and nobody gets anything any more."""
        story = Story().fault(10, 11, servers=True)
        assert story.hold(20, 21, "a", 1).end().rules() == set()
        story = Story().fault(10, 11, servers=True).hold(60, 61, "a", 1).end()
        assert story.rules() == {"standstill"}
        assert story.tell("stall", 20, "harness", u=50).rules() == set()


class TestTheEnd:
    def test_free_in_time(self) -> None:
        """The key of one who was killed, within its lease."""
        story = Story().ask(10, "a").got(10, "a", 1).tell("kill", 11, "harness", group=1).end(11)
        assert story.tell("free", 13, "harness", key="k").rules() == set()

    def test_free_too_late(self) -> None:
        """Later than that."""
        story = Story().ask(10, "a").got(10, "a", 1).tell("kill", 11, "harness", group=1).end(11)
        assert story.tell("free", 17, "harness", key="k").rules() == {"free"}

    def test_never_free(self) -> None:
        """Another key is free, this one is not."""
        story = Story().hold(10, 11, "a", 1).ask(10, "b", "l").got(10, "b", 1, keys="l").leave(10.5, "b").end(12)
        assert story.tell("free", 12, "harness", key="l").rules() == {"free"}


class TestRecords:
    def test_what_was_written_is_read(self, tmp_path: Path) -> None:
        """In the order of time, over the files of several processes, each line with the process that wrote it."""
        one, two = Journal(tmp_path, "one"), Journal(tmp_path, "two")
        first, second = one.new_id(), one.new_id()
        assert first != second
        one.write("ask", id=first)
        two.write("ask", id=two.new_id())
        one.write("got", 1.0, id=first)
        records = read(tmp_path)
        assert [record["what"] for record in records] == ["got", "start", "start", "ask", "ask"]
        assert {record["pid"] for record in records} == {one.pid}
        assert 0 <= now() - records[-1]["t"] < 60

    def test_a_torn_line(self, tmp_path: Path) -> None:
        """Whoever was killed while it wrote has written nothing; damage elsewhere is an error."""
        journal = Journal(tmp_path, "one")
        (path,) = tmp_path.iterdir()
        with path.open("a") as file:
            file.write('{"what":"got"')
        assert [record["what"] for record in read(tmp_path)] == ["start"]
        journal.write("end")
        with pytest.raises(ValueError, match="delimiter"):
            read(tmp_path)

    def test_what_is_not_known(self) -> None:
        """A record that the checker does not know is no reason to go on as if nothing was."""
        with pytest.raises(ValueError, match="no record of the kind 'gott'"):
            Story().tell("gott", 1.0, "a").rules()
