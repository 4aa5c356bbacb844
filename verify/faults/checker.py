"""The checker of a run. It finds records that are impossible if the locks keep their promises.

The checker asks no lock and no server. It knows only the beliefs of each process and their times. Every rule is sound.
A rule accuses only if the records leave no other explanation. A pause of a process or a late message therefore makes no
accusation.

A lock is *believed* to be held from the end of the first look that said so, for the promised time (`remaining`, counted
from the beginning of the look). Further looks renew this, until the program gives the lock up or is told otherwise. A
stop of the process changes nothing, because nobody else may have been let in before.
"""

import bisect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from verify.faults.history import FOREVER, Attempt, Belief, History, Window

#: The name in the simulation's records of a waiter that no document names.
OUTSIDE: Final = "nothing of a process that waits"
#: The most seconds for which a waiter may not know of its grant, without interference.
UNHEARD: Final = 1.0


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise, with the rule that found it, the time, and a description."""

    rule: str
    at: float
    text: str


def no_overlap(history: History) -> Iterator[Violation]:
    """Check that no two exclusive beliefs overlap, and that a semaphore has no more holders than permits."""
    for key, attempts in history.by_key().items():
        beliefs = filter(None, (history.belief(attempt, key) for attempt in attempts))
        holding: list[Belief] = []
        for belief in sorted(beliefs, key=lambda belief: belief.since):
            holding = [other for other in holding if other.until > belief.since]
            yield from _conflicts(belief, holding)
            holding.append(belief)


def _conflicts(belief: Belief, holding: list[Belief]) -> Iterator[Violation]:
    mine = belief.attempt
    for other in holding:
        if mine.mode != other.attempt.mode or mine.mode == "exclusive":
            together = min(belief.until, other.until) - belief.since
            text = f"{mine} and {other.attempt} both held {belief.key!r} for {together:.3f} s"
            yield Violation("overlap", belief.since, text)
    if mine.mode == "semaphore" and mine.weight + sum(other.attempt.weight for other in holding) > mine.capacity:
        others = ", ".join(str(other.attempt) for other in holding)
        yield Violation("overlap", belief.since, f"{mine} and {others}: more than {mine.capacity} held {belief.key!r}")


def tokens_grow(history: History) -> Iterator[Violation]:
    """Check that a later request gets a larger token, and that no token is given twice."""
    for key, attempts in history.by_key().items():
        granted = [(a.got, a, token) for a in attempts if a.got and (token := a.tokens.get(key)) is not None]
        yield from _reused(key, [(attempt, token) for _, attempt, token in granted])
        order = sorted(granted, key=lambda grant: grant[0] or 0.0)
        times = [got for got, _, _ in order]
        highest = list(itertools.accumulate((token for _, _, token in order), max))
        for got, attempt, token in granted:
            before = bisect.bisect_left(times, attempt.asked)
            if before and highest[before - 1] >= token:
                text = f"{attempt} got {key!r} after the token {highest[before - 1]} had been given"
                yield Violation("token", got or 0.0, text)


def _reused(key: str, granted: list[tuple[Attempt, int]]) -> Iterator[Violation]:
    seen: dict[int, Attempt] = {}
    for attempt, token in granted:
        if token in seen:
            yield Violation("token", attempt.got or 0.0, f"{attempt} and {seen[token]} got the same token of {key!r}")
        seen[token] = attempt


def tokens_follow_beliefs(history: History) -> Iterator[Violation]:
    """Check that exclusive holders' tokens grow in the order in which they held the key."""
    for key, attempts in history.by_key().items():
        beliefs = [b for a in attempts if a.mode == "exclusive" and (b := history.belief(a, key)) is not None]
        beliefs = [belief for belief in beliefs if belief.attempt.tokens.get(key) is not None]
        for before, after in itertools.pairwise(sorted(beliefs, key=lambda belief: belief.since)):
            if (before.attempt.tokens[key] or 0) >= (after.attempt.tokens[key] or 0):
                text = f"{after.attempt} held {key!r} after {before.attempt}"
                yield Violation("token", after.since, text)


def promises_hold(history: History) -> Iterator[Violation]:
    """Check that a lock is held for the time that it promised, unless it was taken away on purpose.

    The servers therefore never lose an acknowledged grant, and a lost grant never comes back. A child that leaves the
    block of its parent takes nothing from it.
    """
    for attempt in history.attempts.values():
        promised, ended = 0.0, False
        losses: list[float] = []
        for sample in attempt.samples:
            if sample.pid != attempt.pid:
                if sample.held:
                    yield Violation("child", sample.since, f"a forked child believed to hold {attempt}")
            elif sample.held and ended:
                yield Violation("promise", sample.since, f"{attempt} was not held, and then it was")
            elif sample.held:
                promised = max(promised, sample.since + sample.left)
            else:
                losses.append(sample.until)
            ended |= not sample.held and sample.pid == attempt.pid
        if attempt.was == "lost" and attempt.left is not None:
            losses.append(attempt.left)
        yield from _early(history, attempt, min(losses, default=FOREVER), promised)


def _early(history: History, attempt: Attempt, lost: float, promised: float) -> Iterator[Violation]:
    """Yield a violation if the lock was lost before the time that it had promised."""
    if lost < min(promised, *(history.excused(attempt, key) for key in attempt.keys)):
        text = f"{attempt} was lost {promised - lost:.3f} s before the time that it promised"
        if attempt.forked is not None and attempt.forked < lost:
            yield Violation("child", lost, f"{text}, after a child of its process had left the block")
        else:
            yield Violation("promise", lost, text)


def losses_are_told(history: History) -> Iterator[Violation]:
    """Check that a program learns of a loss when it leaves the block, and by on_lost."""
    for attempt in history.attempts.values():
        if attempt.kind == "document":  # only the writer learns of the loss, and may finish late until then
            continue
        lost = next((sample for sample in attempt.samples if not sample.held and sample.pid == attempt.pid), None)
        if attempt.left is not None and attempt.was == "released" and lost is not None:
            yield Violation("told", attempt.left, f"{attempt} was not held any more, and then released")
        told_by = (
            attempt.left + history.allow.telling if attempt.left is not None and attempt.was == "lost" else FOREVER
        )
        late = history.paused(attempt, attempt.asked, history.over)
        is_due = told_by + late < history.alive_until(attempt)
        if is_due and attempt.told is None and attempt.inner is None:
            yield Violation("told", told_by, f"{attempt} was lost, and on_lost was not called")
    yield from _releases_after_others(history)


def _releases_after_others(history: History) -> Iterator[Violation]:
    """Check that a release does not report success if somebody else certainly held the key in between.

    If the session is closed meanwhile, the release may do so. It does not know what the close has released.
    """
    closed = {record["pid"]: record["t"] for record in history.more["closed"]}
    for key, attempts in history.by_key().items():
        granted = [a for a in attempts if a.mode == "exclusive" and a.got and a.tokens.get(key) is not None]
        order = sorted(granted, key=lambda attempt: attempt.tokens[key] or 0)
        for mine, other in itertools.pairwise(order):
            if mine.was == "released" and mine.leave is not None and (other.got or 0.0) < mine.leave:
                if mine.leave < closed.get(mine.pid, 0.0) <= (mine.left or FOREVER):
                    continue
                if history.excused(mine, key) < mine.leave and _is_disturbed(history, mine.leave, mine.left):
                    continue  # a release without an answer is finished in the background
                text = f"{mine} released {key!r} as if it were its own: {other} had it before"
                yield Violation("told", mine.leave, text)


def _is_disturbed(history: History, since: float, until: float | None) -> bool:
    """Return whether a fault that may change the order lasted until shortly before that time, or into it."""
    return any(window.meets(since - history.allow.recovery, until or FOREVER) for window in history.windows)


def writes_stay(history: History) -> Iterator[Violation]:
    """Check that a holder's confirmed write to a document is there for all later holders."""
    for key, attempts in history.by_key().items():
        granted = [a for a in attempts if a.kind == "document" and a.tokens.get(key) is not None]
        last: Attempt | None = None
        for attempt in sorted(granted, key=lambda attempt: attempt.tokens[key] or 0):
            if last is not None and (attempt.seen or 0) < (last.wrote or 0):
                text = f"{attempt} found {attempt.seen} in {key!r}, where {last} had written {last.wrote}"
                yield Violation("written", attempt.got or 0.0, text)
                last = None  # once is enough
            if attempt.was == "released" and attempt.wrote is not None:
                last = attempt if last is None or attempt.wrote > (last.wrote or 0) else last
        found = history.free.get(key, {}).get("seen")
        if last is not None and found is not None and found < (last.wrote or 0):
            text = f"in the end {found} was found in {key!r}, where {last} had written {last.wrote}"
            yield Violation("written", history.free[key]["t"], text)


def nothing_else_is_written(history: History) -> Iterator[Violation]:
    """Check that a document never counts further than its holders have.

    Each holder adds one to the count that it has found. A write that MongoDB has refused, or that reverts or repeats
    another, would show.
    """
    for key, attempts in history.by_key().items():
        granted = [a for a in attempts if a.kind == "document" and a.tokens.get(key) is not None]
        most = 0
        for attempt in sorted(granted, key=lambda attempt: attempt.tokens[key] or 0):
            if (attempt.seen or 0) > most:
                text = f"{attempt} found {attempt.seen} in {key!r}, where at most {most} was to be written"
                yield Violation("unasked", attempt.got or 0.0, text)
            most = max(most, (attempt.seen or 0) + 1)


def first_come_first_served(history: History) -> Iterator[Violation]:
    """Check that nobody is overtaken by a certainly later arrival, across all threads, tasks and processes.

    A waiter that has lost its place, or whose command does not get through, returns to the place of its arrival. Only
    its presence in the queue at the time of the other grant counts. The rule therefore requires that nothing had
    interfered for some time before.
    """
    outside = [record for record in history.more["stood"] if record["why"] == OUTSIDE]
    unsent = {each["id"] for each in outside if each["t"] < history.attempts[each["id"]].asked + 0.3}
    for key, attempts in history.by_key().items():
        queue = [attempt for attempt in attempts if attempt.kind == "lock" and attempt.owner is None]
        asked = [attempt.asked for attempt in queue]
        for waiter in queue:
            if history.allow.calm_arrivals and (
                waiter.id in unsent or not history.is_calm(waiter, waiter.asked, waiter.asked + 0.1, 0.0)
            ):
                continue
            end = _waited_until(history, waiter, key)
            later = queue[
                bisect.bisect_right(asked, waiter.asked + history.allow.grace) : bisect.bisect_left(asked, end)
            ]
            others = [other for other in later if _overtook(history, key, waiter, other, end)]
            if others:
                at, first = min((other.got or 0.0, other) for other in others)
                text = f"{waiter} was overtaken by {first}, which came {first.asked - waiter.asked:.1f} s later"
                more = f", and {len(others) - 1} more" if len(others) > 1 else ""
                yield Violation("order", at, text + more)


def _waited_until(history: History, attempt: Attempt, key: str) -> float:
    """Return until when the attempt certainly waited for this key.

    An attempt for several keys waits for one after the other, for unknown times. Only its first key has a known wait,
    from the beginning, if the attempt got all keys.
    """
    if attempt.wait == 0 or attempt.keys[0] != key:
        return 0.0
    if attempt.got is not None:
        return attempt.got
    if len(attempt.keys) > 1:
        return 0.0
    limit = FOREVER if attempt.wait is None else attempt.asked + attempt.wait
    gave_up = FOREVER if attempt.refused is None else attempt.refused - history.allow.giving_up
    return min(gave_up, limit, history.alive_until(attempt))


def _overtook(history: History, key: str, waiter: Attempt, other: Attempt, end: float) -> bool:
    """Return whether *other*, which came later, was granted the key before *waiter*.

    If both got the key, the tokens decide, whenever the attempts learned of it. Readers that share a key do not take it
    from one another.
    """
    mine, its = waiter.tokens.get(key), other.tokens.get(key)
    if other.got is None or its is None or (waiter.mode == other.mode == "shared"):
        return False
    before = other.got < end if mine is None else its < mine
    return (
        before
        and other.asked - waiter.asked > _grace(history, waiter.asked, other.got)
        and history.is_calm(waiter, other.got - history.allow.grace, other.got, history.allow.lapse)
        and not _is_headless(history, key, waiter, other)
        # The earlier grant was taken away before the attempt knew of it. The attempt came again.
        and not any(token < its for token in history.unheard[key, waiter.id])
    )


def _grace(history: History, since: float, until: float) -> float:
    """Return how much later an arrival must be to be certainly behind. A clock set back stands still for a moment."""
    allow = history.allow
    was_set = any(window.meets(since - allow.clock_grace, until) for window in history.clocks)
    return (max(allow.grace, allow.clock_grace) if was_set else allow.grace) + allow.drift * (until - since)


def _is_headless(history: History, key: str, waiter: Attempt, other: Attempt) -> bool:
    """Return whether the line of its process perhaps had no entry in the document when *other* got the key.

    One entry stands for all, and hands the key on to the next. A waiter that gives up, dies, loses the key or shares it
    names no next waiter. Until the next one knows, the line has no entry.
    """
    got, allow = other.got or 0.0, history.allow
    for mate in history.mates(waiter, key):
        if mate.asked <= waiter.asked and mate is not waiter:
            refused = None if mate.error in allow.names_next else mate.refused
            times = [refused, mate.dropped, mate.told, mate.left if mate.was != "released" else None]
            times += [mate.got if mate.mode != "exclusive" else None, history.excused(mate, key)]
            # Without a bell, it may have learned of its grant when its place was renewed.
            learned = history.idle(other, other.asked, got) + UNHEARD
            since = other.asked if allow.headless >= 1.0 else got - learned
            if any(t is not None and since - allow.headless < t < got + allow.unnoticed for t in times):
                return True
    return False


def nobody_else_suffers(history: History) -> Iterator[Violation]:
    """Check that without interference no lock is lost, and none is refused by an error.

    A fault of another key is no interference. A lock ends when it could not be renewed for all of its lease on the
    server, so all of that time must have been calm.
    """
    for attempt in history.attempts.values():
        if attempt.kind == "lock" and attempt.inner is None:
            yield from _suffering(history, attempt)


def _suffering(history: History, attempt: Attempt) -> Iterator[Violation]:
    lost = [sample.since for sample in attempt.samples if not sample.held and sample.pid == attempt.pid]
    if attempt.was == "lost" and attempt.left is not None:
        lost.append(attempt.left)
    at = min(lost, default=None)
    excused = min(history.excused(attempt, key) for key in attempt.keys)
    if attempt.max_hold is not None and attempt.got is not None:
        excused = min(excused, attempt.asked + attempt.max_hold)
    if (
        at is not None
        and attempt.renew
        and at < excused
        and history.is_calm(attempt, at - attempt.server_lease, at, history.allow.idle)
    ):
        yield Violation("suffered", at, f"{attempt} was lost, and nothing had happened to its keys")
    failed = attempt.refused if attempt.error == "LockBackendFailed" else None
    if failed is not None and history.is_calm(attempt, attempt.asked, failed, history.allow.idle):
        yield Violation("suffered", failed, f"{attempt} met an error, and nothing had happened to its keys")


def waits_end_in_time(history: History) -> Iterator[Violation]:
    """Check that acquire(wait=W) returns within W plus the time of its commands, whatever happens to the servers.

    There is one command for each key, to be given back if the next is not acquired. A document needs up to twelve.
    """
    timeout = history.meta.get("timeout")
    for attempt in history.attempts.values():
        if timeout is None or attempt.wait is None:
            continue
        commands = len(attempt.keys) if attempt.kind == "lock" else 12
        end = attempt.answered or history.alive_until(attempt)
        allowed, took = attempt.wait + timeout * commands + history.allow.wait, end - attempt.asked
        if took > allowed and took - history.idle(attempt, attempt.asked, end) > allowed:
            state = "came back after" if attempt.answered else "had not come back after"
            text = f"{attempt}: wait {attempt.wait:g} s, a command takes {timeout:g} s, and it {state} {took:.1f} s"
            yield Violation("wait", end, text)


def every_wait_ends(history: History) -> Iterator[Violation]:
    """Check that each process ends when it must, and that nobody waits for ever for a key that stands still."""
    yield from (
        Violation("hung", record["t"], f"the process group {record['group']} did not end: {record['text']}")
        for record in history.hung
    )
    for key, attempts in history.by_key().items():
        yield from _standing_still(history, key, attempts)


def _standing_still(history: History, key: str, attempts: list[Attempt]) -> Iterator[Violation]:
    """Yield a violation if a key with waiters stands still longer than its holders' leases and work explain."""
    moves = sorted(t for a in attempts for t in (a.got, a.left, a.dropped) if t is not None)
    limit = 2 * max(a.server_lease for a in attempts) + history.allow.work + history.allow.slack
    for waiter in attempts:
        end = waiter.answered or history.alive_until(waiter)
        if len(waiter.keys) > 1 or waiter.wait == 0 or waiter.owner is not None or end - waiter.asked <= limit:
            continue
        between = moves[bisect.bisect_left(moves, waiter.asked) : bisect.bisect_left(moves, end)]
        for since, until in itertools.pairwise([waiter.asked, *between, end]):
            calm = longest_calm(history, waiter, since, until)
            if calm > limit:
                yield Violation("forgotten", until, f"{waiter} waited {calm:.1f} s for {key!r}, and nothing happened")
                break


def longest_calm(history: History, attempt: Attempt, since: float, until: float) -> float:
    """Return the longest part of this time in which nothing interfered with the attempt."""
    if until - since < history.allow.slack:
        return 0.0
    disturbed = [
        (window.since, history.recovered(window, history.allow.recovery))
        for window in [*history.windows, *history.stopped[history.group(attempt)]]
        if window.meets(since - history.allow.standstill, until) and (window.key is None or window.key in attempt.keys)
    ]
    longest, start = 0.0, since
    for begin, end in sorted(disturbed):
        longest, start = max(longest, min(begin, until) - start), max(start, end)
    return max(longest, until - start)


def work_goes_on(history: History) -> Iterator[Violation]:
    """Check that somebody gets a lock soon after a fault of the servers that no other followed at once.

    The time in which the machine itself stood still does not count.
    """
    windows = [Window(f["name"], f["t"], f["u"]) for f in history.faults if f.get("servers")]
    for window in windows:
        place = bisect.bisect_left(history.grants, window.until)
        again = history.grants[place] if place < len(history.grants) else history.over
        seconds = again - window.until - history.stalled(window.until, again)
        is_last = not any(other.meets(window.until, again) for other in windows if other is not window)
        if is_last and seconds > history.allow.standstill:
            yield Violation("standstill", window.until, f"nobody got anything for {seconds:.1f} s after {window.name}")


def keys_come_free(history: History) -> Iterator[Violation]:
    """Check that in the end every key can be had within one lease, and every document once it is stale."""
    if not history.free:
        return
    for key, attempts in history.by_key().items():
        allowed = max(attempt.server_lease for attempt in attempts) + history.allow.slack
        free = history.free.get(key)
        if free is None:
            yield Violation("free", history.over, f"{key!r} was not to be had after the end")
        elif (took := free["t"] - free.get("since", history.over)) > allowed:
            yield Violation(
                "free", free["t"], f"{key!r} was to be had only {took:.1f} s after the end, not {allowed:.1f}"
            )


RULES: Final[tuple[Callable[[History], Iterator[Violation]], ...]] = (
    no_overlap,
    tokens_grow,
    tokens_follow_beliefs,
    promises_hold,
    losses_are_told,
    writes_stay,
    nothing_else_is_written,
    first_come_first_served,
    nobody_else_suffers,
    waits_end_in_time,
    every_wait_ends,
    work_goes_on,
    keys_come_free,
)


def check(history: History) -> list[Violation]:
    """Return all violations, in the order of time."""
    found = [violation for rule in RULES for violation in rule(history)]
    return sorted(set(found), key=lambda violation: violation.at)
