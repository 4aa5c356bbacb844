"""Work in the background that is tried again until it is done. Tasks of one group share a command.

A failed command for many tasks is split, see `bulk`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...exceptions import LockBackendFailed, LockError
from ..logs import DEBUG, WARNING, log, log_exception
from ..protocol.actions import FOREVER
from ..store.base import Store
from .bulk import SHORT_LIMIT, batches, parts_of
from .heartbeat import Heartbeat
from .lanes import BACKGROUND, RELEASE

#: The least number of seconds for a command that may still help.
SHORTEST_COMMAND: Final = 0.1
#: Seconds until a task that never gets an answer is given up.
GIVE_UP_AFTER: Final = 600.0
#: Seconds until a task is tried again while its process ends.
AT_EXIT_PAUSE: Final = 0.05
#: The longest time for which an exit waits for a server that goes on answering, in seconds.
LONGEST_EXIT: Final = 30.0


@dataclass(slots=True, eq=False, kw_only=True)
class Task:
    """Work that is tried until it is done. Times are by the session's clock, in seconds.

    - attempt: tries tasks in at most that number of seconds, and returns those that are not done. An exception means
      that there was no answer.
    - pauses: seconds before each attempt. The last pause is repeated while there is no answer.
    - give_up: time from which an attempt without an answer is the last one.
    - due: time of the next attempt, infinity during an attempt.
    - group: the tasks of one group are given to one attempt. A task without a group is tried alone.
    - key: key of the lock, see `Call`.
    """

    attempt: Callable[[Sequence[Any], float], Collection[Task]]
    pauses: Sequence[float]
    give_up: float
    due: float
    group: object = None
    key: str | None = None
    tries: int = 0


class Background:
    """The tasks of a session. May be called from any thread.

    - pending: tasks that are not known to be done.
    - store: store whose commands serve groups of tasks.
    """

    def __init__(self, heartbeat: Heartbeat, store: Store | None = None) -> None:
        self.pending: dict[Task, None] = {}
        self._heartbeat = heartbeat
        self._store = store
        #: The end of the time for all tasks, set at exit, and the latest end.
        self.end = self._latest = FOREVER
        #: The seconds by which an answer at exit puts the end off.
        self._patience = 0.0

    def add(self, task: Task) -> None:
        """Have *task* done. The caller may be handling a signal."""
        self.pending[task] = None
        self._heartbeat.schedule(task.due)

    def repeat(self, call: Callable[[], object], pauses: Sequence[float], within: float = GIVE_UP_AFTER) -> None:
        """Make *call* after each of the *pauses* until it returns a true value.

        While there is no answer but an exception, the call is repeated for *within* seconds.
        """

        def attempt(tasks: Sequence[Task], limit: float) -> Collection[Task]:
            return () if call() else tasks

        now = self._heartbeat.now()
        self.add(Task(attempt=attempt, pauses=pauses, give_up=now + within, due=now + pauses[0]))

    def next_due(self) -> float:
        """Return the time of the next attempt."""
        return min((task.due for task in self.pending.copy()), default=FOREVER)  # copied in one operation

    def do_due(self, now: float, priority: int = BACKGROUND) -> None:
        """Have other threads try the tasks that are due."""
        groups: dict[object, list[Task]] = {}
        for task in self.pending.copy():
            if task.due <= now:
                task.due = FOREVER
                groups.setdefault(task if task.group is None else task.group, []).append(task)
        for tasks in groups.values():
            for batch in batches(tasks):
                self._have_tried(batch, priority)

    def begin_to_finish(self, seconds: float) -> None:
        """Try all tasks without a first pause, and give every task at most *seconds* from now on.

        Each answer to a group, or to a part of one, puts the end off by as much, because a server that answers is worth
        waiting for.
        """
        now = self._heartbeat.now()
        self.end, self._patience, self._latest = now + seconds, seconds, now + LONGEST_EXIT
        for task in self.pending.copy():
            if (task.tries or not task.pauses[0]) and task.due < FOREVER:
                task.due = now
        self.do_due(now, RELEASE)

    def finish(self) -> None:
        """Wait until all tasks are done, or until the end that was set."""
        while self.pending and (now := self._heartbeat.now()) < self.end:
            self.do_due(now, RELEASE)
            time.sleep(0.005)

    def _have_tried(self, tasks: Sequence[Task], priority: int, limit: float = FOREVER) -> None:
        attempt = functools.partial(self._try, tasks, priority, limit)
        key = tasks[0].key if len(tasks) == 1 else None
        if not self._heartbeat.threads.submit(attempt, priority=priority, key=key):
            attempt()

    def _try(self, tasks: Sequence[Task], priority: int, limit: float) -> None:
        """Try tasks of one group in at most *limit* seconds."""
        failure: Exception | None = None
        primary = "" if self._store is None else self._store.primary()
        try:
            left = set(tasks[0].attempt(tasks, min(limit, self._limit(len(tasks)))))
        except Exception as error:  # noqa: BLE001 - it is logged
            if not isinstance(error, LockError) and not tasks[0].tries:
                log_exception("a task in the background failed", key=tasks[0].key or "")
            log(DEBUG, "not done yet", key=tasks[0].key or "", grants=len(tasks), error=error)
            if self._store is not None and (parts := parts_of(tasks, self._store, primary)):
                for part in parts:
                    self._have_tried(part, priority, SHORT_LIMIT)
                return
            left, failure = set(tasks), error.with_traceback(None)
        else:
            if len(tasks) > 1 or limit < FOREVER:
                self.end = max(self.end, min(self._latest, self._heartbeat.now() + self._patience))
        for task in tasks:
            task.tries += 1
            if task not in left or self._is_given_up(task, failure):
                self.pending.pop(task, None)
            else:
                pause = task.pauses[min(task.tries, len(task.pauses) - 1)] if self.end == FOREVER else AT_EXIT_PAUSE
                task.due = self._heartbeat.now() + pause
        self._heartbeat.schedule(min(task.due for task in tasks))

    def _limit(self, tasks: int) -> float:
        """Return the seconds for one command.

        At exit, that is a part of the time left. A command for one task keeps a thread from others, and its document
        may be stuck.
        """
        return max(SHORTEST_COMMAND, (self.end - self._heartbeat.now()) / (4 if tasks == 1 else 2))

    def _is_given_up(self, task: Task, failure: Exception | None) -> bool:
        """Return whether *task* is not tried again after an attempt with this *failure*, or with an answer."""
        ends = self.end < FOREVER
        may_pass = failure.passing if isinstance(failure, LockBackendFailed) else failure is not None and not ends
        if not may_pass:
            return ends or task.tries >= len(task.pauses)
        if is_late := self._heartbeat.now() >= task.give_up:
            log(WARNING, "given up, the lease ends by itself", key=task.key or "", error=failure)
        return is_late
