"""How often a run came to where a promise could have been broken: one that never did proves nothing."""

from collections import Counter
from typing import Final

from verify.faults.history import FOREVER, Attempt, History, Window

#: What each of the faults that choose where they strike is after.
AIMS: Final = {
    "stop-worker": "stops that let a rival in",
    "kill-worker": "kills of a holder with a rival",
    "lost-grants": "replies lost after a grant",
    "cut-primary": "releases undone by an election",
}
#: After which faults an election may undo what the majority did not have.
UNDOING: Final = {"kill-primary", "stop-primary", "step-down", "all-down", "no-majority", "partition", "elect"}
#: How shortly before such a fault a release must have been made that it may undo, in seconds.
JUST_BEFORE: Final = 0.05


def opportunities(history: History) -> Counter[str]:
    """Count the stops of processes, those that struck a holder, and those that let a rival in, which waited beyond the
    holder's lease; kills of a holder that a rival waited for; answers lost by which an attempt would have learned that
    it holds its lock; releases that an election may undo, and those that one has undone; and errors after which a grant
    was not known."""
    found: Counter[str] = Counter()
    attempts = [attempt for attempt in history.attempts.values() if attempt.kind == "lock"]
    for group, windows in history.stopped.items():
        for window in windows:
            held = _held(history, attempts, group, window.since)
            found["stops"] += 1
            found["stops of a holder"] += bool(held)
            found[AIMS["stop-worker"]] += any(_lets_in(attempts, holder, window) for holder in held)
    for group, at in history.killed.items():
        held = _held(history, attempts, group, at)
        found[AIMS["kill-worker"]] += any(_is_waited_for(history, attempts, holder, at) for holder in held)
    undoing = [fault["t"] for fault in history.faults if fault["name"] in UNDOING]
    released = [(a.id, a.left) for a in attempts if a.was == "released" and a.left is not None]
    found["releases that may be undone"] = sum(any(0 <= at - t <= JUST_BEFORE for at in undoing) for _, t in released)
    lost = [pair for fault in history.faults for pair in fault.get("lost", ())]
    unaware = {name for name, at in lost if name in history.attempts and (history.attempts[name].got or FOREVER) > at}
    found[AIMS["lost-grants"]] += len(unaware)
    undone = {name: fault["u"] for fault in history.faults for name in fault.get("undone", ())}
    found[AIMS["cut-primary"]] += sum(left < undone.get(name, 0.0) for name, left in released)
    found["unknown outcomes"] = sum(attempt.error == "LockBackendFailed" for attempt in attempts)
    return found


def _held(history: History, attempts: list[Attempt], group: int, at: float) -> list[Attempt]:
    """The attempts of a process group that believed at that time that they held their locks."""
    mine = (a for a in attempts if a.got is not None and a.got < at <= a.given_up and history.group(a) == group)
    return [
        attempt
        for attempt in mine
        if any((belief := history.belief(attempt, key)) and belief.since <= at < belief.until for key in attempt.keys)
    ]


def _lets_in(attempts: list[Attempt], holder: Attempt, window: Window) -> bool:
    """Whether another attempt got one of its keys while it was stopped."""
    return any(
        other.got is not None and window.since < other.got < window.until and set(other.keys) & set(holder.keys)
        for other in attempts
        if other is not holder and other.mode == "exclusive"
    )


def _is_waited_for(history: History, attempts: list[Attempt], holder: Attempt, at: float) -> bool:
    """Whether an attempt of another process group waited at that time for one of its keys."""
    return any(
        other.asked < at < (other.answered or FOREVER) and set(other.keys) & set(holder.keys)
        for other in attempts
        if history.group(other) != history.group(holder)
    )
