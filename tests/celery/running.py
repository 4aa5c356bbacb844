"""A task that runs in this process, as a worker runs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from celery._state import _task_stack  # type: ignore[attr-defined]

from django_mongolock import mongo_lock


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


class OtherRun:
    """Another run of a task, in a thread, which holds a lock until it is told to end."""

    def __init__(self, key: str, task: Any, task_id: str, **request: Any) -> None:
        self.ready, self.enough = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(key, task, task_id), kwargs=request)

    def _run(self, key: str, task: Any, task_id: str, **request: Any) -> None:
        with in_task(task, task_id, **request), mongo_lock(key, owner=task_id):
            self.ready.set()
            self.enough.wait(30)

    def end(self) -> None:
        self.enough.set()
        self.thread.join()

    def __enter__(self) -> Self:
        self.thread.start()
        assert self.ready.wait(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()
