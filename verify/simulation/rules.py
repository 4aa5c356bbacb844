"""Rules for the checker that need virtual time, because they allow next to no delay."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from verify.faults import checker
from verify.faults.checker import Violation
from verify.faults.history import FOREVER, Attempt, History
from verify.faults.tolerances import Tolerances
from verify.simulation.standing import nothing_stands

#: The delay of commands without interference, and the engine's own times. Nobody can know that a clock was set back by
#: less than the time without writes, which lasts up to six seconds. The arrival of a waiter that reports its own
#: waiting time may be wrong by as much.
VIRTUAL: Final = Tolerances(
    clock_grace=7.0,
    grace=0.1, calm_arrivals=True, headless=0.2, names_next=frozenset({"LockNotAcquired"}), giving_up=0.1, slack=1.0,
    resumes_the_dead=True, work=9.0, telling=3.0, standstill=10.0,
)  # fmt: skip
#: The longest lease on a server, in seconds.
LONGEST: Final = 25.0
#: The most seconds of a round of commands.
ROUND: Final = 0.2
#: The most seconds of a deadlock. A waiter looks for a deadlock after a second.
DEADLOCK: Final = 1.5


def tolerances(drift: float) -> Tolerances:
    """Return the tolerances for clocks whose rates differ by *drift*. Waiters learn of the end of a lease so much
    later.
    """
    late = 2 * drift * LONGEST
    return replace(VIRTUAL, drift=2 * drift, slack=VIRTUAL.slack + late, stands=late)


def taken_is_lost(history: History) -> Iterator[Violation]:
    """Check that nobody believes to hold a taken lock for longer than a lease.

    Renewals after the taking are not valid.
    """
    taken = {(record["key"], token): record["t"] for record in history.more["taken"] for token in record["tokens"]}
    for attempt in history.attempts.values():
        at = min((taken.get(item, FOREVER) for item in attempt.tokens.items()), default=FOREVER)
        end = max((s.since + s.left for s in attempt.samples if s.held and s.since > at), default=0.0)
        if end > at + attempt.server_lease:
            text = f"{attempt} was taken away, and believed to be held for {end - at:.1f} s after that"
            yield Violation("taken", end, text)


def holds_have_an_end(history: History) -> Iterator[Violation]:
    """Check that nothing is held for longer than its max_hold."""
    for attempt in history.attempts.values():
        if attempt.max_hold is not None and attempt.got is not None:
            end = max((s.since + s.left for s in attempt.samples if s.held), default=0.0)
            if end > attempt.got + attempt.max_hold + 0.001:
                yield Violation("max-hold", end, f"{attempt} was to be held for {attempt.max_hold} s at most")


def extensions_last(history: History) -> Iterator[Violation]:
    """Check that an extended lease has its whole length from then on, and is renewed for that length afterwards.

    If a document of its batch holds up a renewal after a third of the lease, that takes a sixth of the lease. The
    renewal is made again alone. The second one may wait a sixth for a thread that another document holds up, and take
    one more.
    """
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
    """Check that a downgraded lock is held all the time. Nobody had the key exclusively between its two tokens."""
    for record in history.more["downgraded"]:
        before, reader = history.attempts[record["before"]], history.attempts[record["id"]]
        for key, token in reader.tokens.items():
            first, last = before.tokens[key] or 0, token or 0
            for other in history.by_key()[key]:
                if other.mode == "exclusive" and first < (other.tokens.get(key) or 0) < last:
                    text = f"while {before} became {reader}, {other} had {key!r}"
                    yield Violation("downgrade", reader.got or 0.0, text)


def requests_arrive(history: History) -> Iterator[Violation]:
    """Check that an asked holder learns of the request at its next renewal, or the one after that (see
    `extensions_last`).
    """
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
    """Check that of two attempts that wait for each other, exactly one gives up, and soon."""
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
    """Return the time for which both waited while both held their outer locks."""
    ends = [each.answered or history.alive_until(each) for each in (one, other)]
    for each in (one, other):
        outer = history.attempts[each.within or ""]
        belief = history.belief(outer, outer.keys[0])
        ends.append(belief.until if belief is not None else 0.0)
    return max(one.asked, other.asked), min(ends)


def deadlocks_are_real(history: History) -> Iterator[Violation]:
    """Check that no lock is refused for a deadlock unless its thread holds a lock that others wait for."""
    nested = [attempt for attempt in history.attempts.values() if attempt.within is not None]
    for attempt in history.attempts.values():
        if attempt.error != "LockDeadlock" or attempt.refused is None:
            continue
        outer = history.attempts.get(attempt.within or "")
        wanted = [each for each in nested if outer is not None and each.keys == outer.keys and each is not attempt]
        if not any(each.asked < attempt.refused and _is_there(history, each, attempt.asked) for each in wanted):
            yield Violation("deadlock", attempt.refused, f"{attempt} was refused for a deadlock, and there was none")


def _is_there(history: History, attempt: Attempt, since: float) -> bool:
    """Return whether its entry may have been in the queue at that time.

    The entry of a dead process stays for a while.
    """
    end = attempt.answered or history.alive_until(attempt) + attempt.server_lease
    return end + history.allow.recovery > since


def closed_is_over(history: History) -> Iterator[Violation]:
    """Check that a process holds nothing after its session is closed."""
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
