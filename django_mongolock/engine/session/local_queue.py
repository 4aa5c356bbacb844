"""The lines of waiters in this process.

Those who want the same key on the same terms stand in one line. The first of a line stands in the document's queue for
all of them. When it releases the key, or leaves the queue, it puts the next of the line into the queue.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from ...exceptions import LockQueueFull
from ..protocol.actions import Answer, Turn
from .grant import Grant, LineKey
from .grant_registry import GrantRegistry


class LocalQueue:
    """The lines of one process. May be called from any thread.

    waiting: the grants that are waited for, by id, also those that are only tried. lines: those that are not only
    tried, in the order in which they came. limit: how many may stand in a line.
    """

    def __init__(self, limit: int, registry: GrantRegistry) -> None:
        self.waiting: dict[str, Grant] = {}
        self.lines: dict[LineKey, OrderedDict[str, Grant]] = {}
        self._limit = limit
        self.registry = registry
        self._mutex = threading.Lock()

    def join(self, grant: Grant, *, trial: bool) -> Turn:
        """Stand in line for *grant*, unless it is only to be tried. Returns whether it may be asked for now.

        Raises LockQueueFull where the line is as long as any queue may be.
        """
        with self._mutex:
            if not trial:
                line = self.lines.setdefault(grant.line, OrderedDict())
                if len(line) >= self._limit:
                    raise LockQueueFull(grant.key)
                if line:
                    grant.line = next(iter(line.values())).line  # one for all of them: there may be thousands
                line[grant.id] = grant
                self._count(line)
            self.waiting[grant.id] = grant
            turn = "now" if trial else self._turn(grant)[0]
        grant.reporting.busy = turn != "now"
        return turn

    def turn(self, grant: Grant) -> tuple[Turn, Grant | None]:
        """Where *grant* stands in its line, and the first of the line if that is another one."""
        with self._mutex:
            return self._turn(grant)

    def _turn(self, grant: Grant) -> tuple[Turn, Grant | None]:
        first = self._first(grant.line)
        if first is not None and first is not grant:
            return "behind", first
        return ("next" if grant.line in self.registry.by_line else "now"), None

    def leave(self, grant: Grant) -> None:
        """Stand in line no more: it is held, or is waited for no longer."""
        with self._mutex:
            self.waiting.pop(grant.id, None)
            line = self.lines.get(grant.line)
            if line is None:
                return
            was_first = next(iter(line), None) == grant.id
            line.pop(grant.id, None)
            grant.waiting.behind = 0
            if line:
                self._count(line)
            else:
                self.lines.pop(grant.line, None)
        if was_first and line:
            self.wake_first(grant.line)

    def wake_first(self, key: LineKey) -> None:
        """Wake the first in that line."""
        with self._mutex:
            first = self._first(key)
        if first is not None:
            first.waiting.wake()

    def wake_first_of(self, key: str) -> None:
        """Wake the first in each line of that key."""
        for line in list(self.lines):
            if line[0] == key:
                self.wake_first(line)

    def reserve_handover(self, grant: Grant) -> Grant | None:
        """Reserve the hand-over of *grant*'s key to the next in line, and return that grant; `finish_handover` ends
        it."""
        with self._mutex:
            line = iter(self.lines.get(grant.line, {}).values())
            next_waiter = next(line, None)
            if grant.id in self.waiting:  # it stands in line itself
                while next_waiter is not None and next_waiter is not grant:
                    next_waiter = next(line, None)
                next_waiter = next(line, None)
            while next_waiter is not None and self._is_served(next_waiter):
                next_waiter = next(line, None)
            if next_waiter is None or next_waiter.waiting.cancelled:
                return None
            next_waiter.waiting.handover_reserved = True
            # Under the mutex: its caller forgets it only after it has left the line.
            self.registry.add(next_waiter)
        self.registry.see_to(next_waiter)
        return next_waiter

    def _is_served(self, waiter: Grant) -> bool:
        """Whether another command sees to that waiter. Reserved twice, a second one would be on its way after the first
        has been answered; and where several may hold the key, one that asks for itself may be granted by that. One
        whose command had no answer does not ask."""
        waiting = waiter.waiting
        unanswered = waiting.sent and not waiter.lease.until and not waiter.outcome_unknown
        asks = unanswered and waiter.terms.mode != "exclusive"
        return waiting.handover_reserved or asks

    def finish_handover(self, next_waiter: Grant, answer: Answer | None) -> None:
        """Pass the *answer* on to the waiter that the hand-over was reserved for; None if it is not known."""
        if answer is None:
            next_waiter.outcome_unknown = True
        next_waiter.waiting.answer = answer
        next_waiter.waiting.handover_reserved = False
        next_waiter.waiting.wake()

    def _count(self, line: OrderedDict[str, Grant]) -> None:
        """Note at the first of a line how many stand behind it."""
        next(iter(line.values())).waiting.behind = len(line) - 1

    def _first(self, key: LineKey) -> Grant | None:
        """The first in that line. Call it with the mutex held."""
        line = self.lines.get(key)
        return next(iter(line.values())) if line else None
