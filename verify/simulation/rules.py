"""What only virtual time can judge: rules for the checker that allow next to no delay."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from verify.faults import checker
from verify.faults.checker import Violation
from verify.faults.history import FOREVER, Attempt, History
from verify.faults.tolerances import Tolerances
from verify.simulation.standing import nothing_stands

#: As much as commands take where nothing interferes, and what the engine needs by its own times. That a clock was set
#: back by less than no member has written for, which is up to six seconds, nobody can know: as much may be wrong then
#: with the arrival of who says how long it has waited.
VIRTUAL: Final = Tolerances(
    clock_grace=7.0,
    grace=0.1, calm_arrivals=True, headless=0.2, names_next=frozenset({"LockNotAcquired"}), giving_up=0.1, slack=1.0,
    resumes_the_dead=True, work=9.0, telling=3.0, standstill=10.0,
)  # fmt: skip
#: The longest lease on a server, in seconds.
LONGEST: Final = 25.0
#: How long a round of commands takes at most, in seconds.
ROUND: Final = 0.2
#: How long a deadlock may last: a waiter looks for one after a second.
DEADLOCK: Final = 1.5


def tolerances(drift: float) -> Tolerances:
    """Those for clocks that run faster or slower by that part of the time: who waits for the end of a lease learns of
    it so much later."""
    late = 2 * drift * LONGEST
    return replace(VIRTUAL, drift=2 * drift, slack=VIRTUAL.slack + late, stands=late)


def taken_is_lost(history: History) -> Iterator[Violation]:
    """What an operator has taken is not believed for longer than a lease: no renewal is good any more."""
    taken = {(record["key"], token): record["t"] for record in history.more["taken"] for token in record["tokens"]}
    for attempt in history.attempts.values():
        at = min((taken.get(item, FOREVER) for item in attempt.tokens.items()), default=FOREVER)
        end = max((s.since + s.left for s in attempt.samples if s.held and s.since > at), default=0.0)
        if end > at + attempt.server_lease:
            text = f"{attempt} was taken away, and believed to be held for {end - at:.1f} s after that"
            yield Violation("taken", end, text)


def holds_have_an_end(history: History) -> Iterator[Violation]:
    """Nothing is held for longer than its max_hold."""
    for attempt in history.attempts.values():
        if attempt.max_hold is not None and attempt.got is not None:
            end = max((s.since + s.left for s in attempt.samples if s.held), default=0.0)
            if end > attempt.got + attempt.max_hold + 0.001:
                yield Violation("max-hold", end, f"{attempt} was to be held for {attempt.max_hold} s at most")


def extensions_last(history: History) -> Iterator[Violation]:
    """What was extended has its whole length from then on, and is renewed for that length afterwards.

    A renewal that a document of its batch holds up, after a third of the lease, takes a sixth of it. It is made again
    alone. That may wait for a thread which another document holds up, for a sixth, and take one more."""
    for record in history.more["extended"]:
        attempt, length, since = history.attempts[record["id"]], record["lease"], record["since"]
        excused = min(history.excused(attempt, key) for key in attempt.keys)
        for look in attempt.samples:
            if look.since < record["t"] or attempt.max_hold is not None or look.since >= excused:
                continue
            passed = look.since - since
            least = length - passed - ROUND if passed < length / 3 or not attempt.renew else length / 6
            if look.left < least and history.is_calm(attempt, since, look.until, history.allow.idle):
                text = f"{attempt} was extended to {length} s, and {passed:.1f} s later it had {look.left:.1f} s left"
                yield Violation("extend", look.since, text)
                break


def downgrades_let_nobody_in(history: History) -> Iterator[Violation]:
    """What goes on as a reader is held all the time: nobody had the key exclusively between its two tokens."""
    for record in history.more["downgraded"]:
        before, reader = history.attempts[record["before"]], history.attempts[record["id"]]
        for key, token in reader.tokens.items():
            first, last = before.tokens[key] or 0, token or 0
            for other in history.by_key()[key]:
                if other.mode == "exclusive" and first < (other.tokens.get(key) or 0) < last:
                    text = f"while {before} became {reader}, {other} had {key!r}"
                    yield Violation("downgrade", reader.got or 0.0, text)


def requests_arrive(history: History) -> Iterator[Violation]:
    """Who is asked to release a lock knows it by the next renewal, or the one after that (see `extensions_last`)."""
    told = defaultdict[str, list[float]](list)
    for record in history.more["requested"]:
        told[record["id"]].append(record["t"])
    asked = {(r["key"], token): r["t"] for r in history.more["request"] for token in r["tokens"]}
    for attempt in history.attempts.values():
        at = min((asked.get(item, FOREVER) for item in attempt.tokens.items()), default=FOREVER)
        due = at + attempt.server_lease * 2 / 3 + ROUND
        looks = [look.since for look in attempt.samples if look.held and look.pid == attempt.pid]
        is_late = attempt.renew and max(looks, default=0.0) > due and min(told[attempt.id], default=FOREVER) > due
        if is_late and attempt.max_hold is None and history.is_calm(attempt, at - attempt.server_lease, due, 0.0):
            yield Violation("request", due, f"{attempt} was asked for, and did not know it after {due - at:.1f} s")


# Deadlocks


def deadlocks_end(history: History) -> Iterator[Violation]:
    """Two who wait for each other: exactly one of them gives up, and soon."""
    nested = [attempt for attempt in history.attempts.values() if attempt.within is not None]
    for place, one in enumerate(nested):
        others = [other for other in nested[place + 1 :] if _each_holds_what_the_other_wants(history, one, other)]
        for other in others:
            since, until = _together(history, one, other)
            if until - since > DEADLOCK and all(
                history.is_calm(each, since, until, history.allow.idle) for each in (one, other)
            ):
                yield Violation("deadlock", until, f"{one} and {other} waited for each other for {until - since:.1f} s")
            both = one.error == other.error == "LockDeadlock"
            if both and until > since and history.is_calm(one, since, until, history.allow.idle):
                yield Violation("deadlock", until, f"{one} and {other} waited for each other, and both gave up")


def _each_holds_what_the_other_wants(history: History, one: Attempt, other: Attempt) -> bool:
    mine, its = history.attempts[one.within or ""], history.attempts[other.within or ""]
    return set(mine.keys) == set(other.keys) and set(its.keys) == set(one.keys)


def _together(history: History, one: Attempt, other: Attempt) -> tuple[float, float]:
    """When both waited, while both had what they were in."""
    ends = [each.answered or history.alive_until(each) for each in (one, other)]
    for each in (one, other):
        outer = history.attempts[each.within or ""]
        belief = history.belief(outer, outer.keys[0])
        ends.append(belief.until if belief is not None else 0.0)
    return max(one.asked, other.asked), min(ends)


def deadlocks_are_real(history: History) -> Iterator[Violation]:
    """No lock is refused for a deadlock unless its thread holds something that is waited for."""
    nested = [attempt for attempt in history.attempts.values() if attempt.within is not None]
    for attempt in history.attempts.values():
        if attempt.error != "LockDeadlock" or attempt.refused is None:
            continue
        outer = history.attempts.get(attempt.within or "")
        wanted = [each for each in nested if outer is not None and each.keys == outer.keys and each is not attempt]
        if not any(each.asked < attempt.refused and _is_there(history, each, attempt.asked) for each in wanted):
            yield Violation("deadlock", attempt.refused, f"{attempt} was refused for a deadlock, and there was none")


def _is_there(history: History, attempt: Attempt, since: float) -> bool:
    """Whether its entry may have been in the queue then: one of a dead process stays for a while."""
    end = attempt.answered or history.alive_until(attempt) + attempt.server_lease
    return end + history.allow.recovery > since


def closed_is_over(history: History) -> Iterator[Violation]:
    """When its session is closed, a process holds nothing."""
    shut = {record["pid"]: record["t"] for record in history.more["shut"]}
    for attempt in history.attempts.values():
        for look in attempt.samples:
            if look.held and look.since > shut.get(look.pid, FOREVER):
                yield Violation("closed", look.since, f"{attempt} is held, and its session was closed before")
                break


MORE_RULES: Final[tuple[Callable[[History], Iterator[Violation]], ...]] = (
    nothing_stands,
    closed_is_over,
    taken_is_lost,
    holds_have_an_end,
    extensions_last,
    downgrades_let_nobody_in,
    requests_arrive,
    deadlocks_end,
    deadlocks_are_real,
)
RULES: Final = (*checker.RULES, *MORE_RULES)
