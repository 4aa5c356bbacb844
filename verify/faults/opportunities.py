"""How often a run came to where a promise could have been broken: one that never did proves nothing."""

from collections import Counter

from verify.faults.history import Attempt, History, Window

#: After which faults an election may undo what the majority did not have.
UNDOING = {"kill-primary", "stop-primary", "step-down", "all-down", "no-majority", "partition", "elect"}
#: How shortly before such a fault a release must have been made that it may undo, in seconds.
JUST_BEFORE = 0.05


def opportunities(history: History) -> Counter[str]:
    """Count the stops of processes, those that struck a holder, and those that let a rival in, which waited beyond the
    holder's lease; errors after which a grant was not known; and releases shortly before what may undo them."""
    found: Counter[str] = Counter()
    attempts = [attempt for attempt in history.attempts.values() if attempt.kind == "lock"]
    for group, windows in history.stopped.items():
        mine = [attempt for attempt in attempts if history.group(attempt) == group]
        for window in windows:
            held = [attempt for attempt in mine if _holds(history, attempt, window.since)]
            found["stops"] += 1
            found["stops of a holder"] += bool(held)
            found["stops that let a rival in"] += any(_lets_in(attempts, attempt, window) for attempt in held)
    found["unknown outcomes"] = sum(attempt.error == "LockBackendFailed" for attempt in attempts)
    undoing = [fault["t"] for fault in history.faults if fault["name"] in UNDOING]
    left = [attempt.left for attempt in attempts if attempt.was == "released" and attempt.left is not None]
    found["releases that may be undone"] = sum(any(0 <= at - t <= JUST_BEFORE for at in undoing) for t in left)
    return found


def _holds(history: History, attempt: Attempt, at: float) -> bool:
    return any((belief := history.belief(attempt, key)) and belief.since <= at < belief.until for key in attempt.keys)


def _lets_in(attempts: list[Attempt], holder: Attempt, window: Window) -> bool:
    """Whether another attempt got one of its keys while it was stopped."""
    return any(
        other.got is not None and window.since < other.got < window.until and set(other.keys) & set(holder.keys)
        for other in attempts
        if other is not holder and other.mode == "exclusive"
    )
