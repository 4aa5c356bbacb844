"""The number of situations in a run in which a promise could have been broken. A run without any proves nothing."""

from collections import Counter
from typing import Final

from verify.faults.history import FOREVER, Attempt, History, Window

#: The aim of each fault that chooses its target.
AIMS: Final = {
    "stop-worker": "stops that let a rival in",
    "kill-worker": "kills of a holder with a rival",
    "lost-grants": "replies lost after a grant",
    "cut-primary": "releases undone by an election",
}
#: The faults after which an election may undo writes that the majority did not have.
UNDOING: Final = {"kill-primary", "stop-primary", "step-down", "all-down", "no-majority", "partition", "elect"}
#: The most seconds from a release to such a fault that may undo it.
JUST_BEFORE: Final = 0.05


def opportunities(history: History) -> Counter[str]:
    """Count the opportunities of a run.

    These are stops of processes, stops that struck a holder, and stops that let a rival in. A rival waited beyond the
    holder's lease. Further opportunities are kills of a holder with a waiting rival, lost answers with a grant,
    releases that an election may undo or has undone, and errors with an unknown grant.
    """
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
    """Return the attempts of a process group that believed to hold their locks at that time."""
    mine = (a for a in attempts if a.got is not None and a.got < at <= a.given_up and history.group(a) == group)
    return [
        attempt
        for attempt in mine
        if any((belief := history.belief(attempt, key)) and belief.since <= at < belief.until for key in attempt.keys)
    ]


def _lets_in(attempts: list[Attempt], holder: Attempt, window: Window) -> bool:
    """Return whether another attempt got one of its keys while it was stopped."""
    return any(
        other.got is not None and window.since < other.got < window.until and set(other.keys) & set(holder.keys)
        for other in attempts
        if other is not holder and other.mode == "exclusive"
    )


def _is_waited_for(history: History, attempts: list[Attempt], holder: Attempt, at: float) -> bool:
    """Return whether an attempt of another process group waited for one of its keys at that time."""
    return any(
        other.asked < at < (other.answered or FOREVER) and set(other.keys) & set(holder.keys)
        for other in attempts
        if history.group(other) != history.group(holder)
    )
