"""The verdict on a lock in words, with the consequence if nobody acts."""

from __future__ import annotations

from typing import Final

from django.utils.translation import gettext_lazy as _

from ..exceptions import printable
from .display import ago, duration, time_left, who
from .snapshot import LockSnapshot, Verdict

_TEXTS: Final = {
    "works": _("Renewed %(heard)s. The holder keeps it until its work is done."),
    "works, waited for": _(
        "Renewed %(heard)s. The holder keeps it until its work is done. If that takes too long, ask for a release."
    ),
    "claimed": _("No process renews it. If you do nothing: free in %(left)s, unless it is taken up again."),
    "slow": _(
        "Earlier holds: %(mean)s on average, %(longest)s at most. Renewed %(heard)s: the holder keeps it until its "
        "work is done. If that takes too long, ask for a release."
    ),
    "asked": _(
        "Asked %(asked)s to release it, by “%(who)s”. Renewed %(heard)s. The holder releases it when it can, at the "
        "latest when its work is done."
    ),
    "hangs": _(
        "Earlier holds: %(mean)s on average, %(longest)s at most. Renewed %(heard)s: it may never get free by itself. "
        "Ask for a release, then force it."
    ),
    "hangs, asked": _(
        "Asked %(asked)s to release it, by “%(who)s”. Renewed %(heard)s: it may never get free by itself. Force the "
        "release."
    ),
    "silent": _(
        "Last renewed %(heard)s: its holder may be stopped, cut off or dead. Waiting is safest. If you do nothing: "
        "free in %(left)s, unless the holder comes back."
    ),
    "silent, waited for": _(
        "Last renewed %(heard)s: its holder may be stopped, cut off or dead. Waiting is safest. If you do nothing: the "
        "first waiter gets it in %(left)s, unless the holder comes back."
    ),
    "stale": _(
        "Its holder is dead or cut off: its lease ended %(ended)s, without a release. If you do nothing: %(next)s gets "
        "it."
    ),
    "kept": _("Its work is done, and the job does not run again before. If you do nothing: free in %(left)s."),
}

_OBSTACLE: Final = _(
    "Its holder “%(who)s” has itself waited %(time)s for “%(key)s”, held by “%(holder)s”. Look there first."
)


def verdict_text(lock: LockSnapshot) -> str:
    """Return the verdict in two or three sentences, "" without a verdict."""
    if lock.verdict is None:
        return ""
    asked = lock.asked
    facts = {
        "left": time_left(lock.expires_at, lock.now),
        "next": _("the first waiter") if lock.waiting else _("the next process that asks"),
        "ended": ago(lock.expires_at or lock.now, lock.now),
        "heard": ago(lock.heard or lock.now, lock.now),
        "mean": duration(lock.mean_hold or 0.0),
        "longest": duration(lock.longest_hold_ms / 1_000),
        "who": asked and printable(asked.release_requested_by),
        "asked": ago((asked and asked.release_requested_at) or lock.now, lock.now),
    }
    return " ".join(filter(None, (obstacle_text(lock), _TEXTS[_case(lock)] % facts)))


def obstacle_text(lock: LockSnapshot) -> str:
    """Return a sentence about the lock that a holder waits for, "" if no holder waits."""
    if (obstacle := lock.obstacle) is None:
        return ""
    facts = {
        "who": who(obstacle.waiter),
        "key": printable(obstacle.key),
        "holder": who(obstacle.holder) if obstacle.holder else "?",
        "time": duration(lock.age(obstacle.waiter.since) if obstacle.waiter.since else 0.0),
    }
    return _OBSTACLE % facts


def _case(lock: LockSnapshot) -> str:
    name = str(lock.verdict)
    if lock.verdict is Verdict.HANGS and lock.asked:
        return f"{name}, asked"
    if lock.verdict is Verdict.WORKS and lock.is_claimed:
        return "claimed"
    return waited if lock.waiting and not lock.obstacle and (waited := f"{name}, waited for") in _TEXTS else name
