"""A task that runs in this process, as a worker runs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

from celery import states
from celery._state import _task_stack  # type: ignore[attr-defined]
from celery.signals import task_postrun

from django_mongolock import LockLost, mongo_locked
from tests.support.looking import document
from tests.support.waiting import eventually


@contextmanager
def in_task(task: Any, task_id: str = "the-id", **request: Any) -> Iterator[Any]:
    facts = {"args": ("x",), "kwargs": {}, "called_directly": False, "delivery_info": {}, "retries": 0, **request}
    task.push_request(id=task_id, **facts)
    _task_stack.push(task)
    try:
        yield task.request
    finally:
        _task_stack.pop()
        task.pop_request()


def ended(task: Any, state: str = states.SUCCESS) -> None:
    """Report the end of a run, as a worker does."""
    task_postrun.send(sender=task, task_id=task.request.id, task=task, state=state, retval=None)


class OtherRun:
    """Another run of a task, in a thread that holds a lock until it is told to end.

    - state: the state that its worker reports then. "" for a worker that dies, with its lock taken away.
    """

    state: str = states.SUCCESS

    def __init__(self, key: str, task: Any, task_id: str, **request: Any) -> None:
        self.key = key
        self.ready, self.enough = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(key, task, task_id), kwargs=request)

    def _run(self, key: str, task: Any, task_id: str, **request: Any) -> None:
        @mongo_locked(key)
        def body() -> None:
            self.ready.set()
            self.enough.wait(30)

        with in_task(task, task_id, **request):
            with suppress(LockLost):
                body()
            if self.state:
                ended(task, self.state)

    def end(self) -> None:
        """End the run, and wait for the proof that it leaves."""
        self.enough.set()
        self.thread.join()
        if self.state:
            assert eventually(lambda: document(self.key).get("tombstones"))

    def __enter__(self) -> Self:
        self.thread.start()
        assert self.ready.wait(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()
