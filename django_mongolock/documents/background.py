"""What is tried again and again although nobody waits for it: one thread of this process, for all document locks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from ..engine import clock
from ..engine.logs import DEBUG, log, log_exception
from ..engine.session.worker_threads import WorkerThreads
from ..exceptions import LockBackendFailed

#: Seconds before each try. A command that was held up in the network may still arrive after the first of them.
PAUSES: Final = (0.0, 0.5, 2.0, 5.0, 10.0)


@dataclass(slots=True)
class Task:
    """Something to be done: *attempt* says whether it has been. tries: how often it was tried."""

    name: str
    attempt: Callable[[], bool]
    due: float
    tries: int = 0


class Background:
    """A thread that is started with the first task. Never waits for a lock: a signal may strike whoever calls."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self._thread = WorkerThreads(1)

    def add(self, name: str, attempt: Callable[[], bool]) -> None:
        """Have *attempt* made now, and again after each of the pauses until it returns True."""
        self._tasks.put(Task(name, attempt, clock.now()))
        if not len(self._thread):
            self._thread.submit(self._work)

    def _work(self) -> None:
        waiting: list[Task] = []
        while True:
            due = min((task.due for task in waiting), default=None)
            try:
                waiting.append(self._tasks.get(timeout=None if due is None else max(0.0, due - clock.now())))
                continue  # take all that there are before the first is tried
            except Empty:
                now = clock.now()
            waiting = [task for task in waiting if task.due > now or not self._try(task)]

    def _try(self, task: Task) -> bool:
        """Try once. Return whether it need not be tried again."""
        task.tries += 1
        try:
            done = task.attempt()
        except LockBackendFailed as error:
            log(DEBUG, "tried in vain to let go", place=task.name, error=error)
            done = False
        except Exception:  # noqa: BLE001 - it is logged
            log_exception("failed to let go", place=task.name)
            done = False
        if not done and task.tries < len(PAUSES):
            task.due = clock.now() + PAUSES[task.tries]
            return False
        return True


_background = Background()


def _after_fork() -> None:
    """The thread of the parent does not exist in the child, nor is its work the child's."""
    global _background  # noqa: PLW0603 - one for each process
    _background = Background()


os.register_at_fork(after_in_child=_after_fork)


def in_background(name: str, attempt: Callable[[], bool]) -> None:
    """See Background.add()."""
    _background.add(name, attempt)
