"""Records that every process writes at once, and the counts of the checker.

Results are not enough, because a task that ran twice has one result.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery.signals import before_task_publish, task_postrun, task_received, task_retry

#: The variable that names the directory of a test.
DIRECTORY = "TEST_CELERY_DIRECTORY"
_FILE = "records"


def note(directory: Path, what: str, **facts: Any) -> None:
    """Append one line, in one write that no other process can break."""
    line = json.dumps({"what": what, "at": time.monotonic(), "pid": os.getpid(), **facts}) + "\n"
    file = os.open(directory / _FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


@contextmanager
def work(directory: Path, name: str, task_id: str) -> Iterator[None]:
    """Note the begin and the end of a task's body. A killed process leaves no end."""
    note(directory, "begin", name=name, id=task_id)
    try:
        yield
    finally:
        note(directory, "end", name=name, id=task_id)


def listen(directory: Path) -> None:
    """Note Celery's events in this process, such as messages sent and received, retries, and ends."""

    @before_task_publish.connect(weak=False)
    def sent(headers: dict[str, Any], **kwargs: Any) -> None:
        note(directory, "message", id=headers["id"])

    @task_received.connect(weak=False)
    def received(request: Any, **kwargs: Any) -> None:
        again = bool((request.delivery_info or {}).get("redelivered"))
        note(directory, "delivery", id=request.id, again=again)

    @task_retry.connect(weak=False)
    def retried(request: Any, **kwargs: Any) -> None:
        note(directory, "retry", id=request.id, retries=request.retries)

    @task_postrun.connect(weak=False)
    def ended(task_id: str, state: str, **kwargs: Any) -> None:
        note(directory, "state", id=task_id, state=state)


class Story:
    def __init__(self, directory: Path) -> None:
        file = directory / _FILE
        text = file.read_text() if file.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may be half written
        self.records: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def of(self, what: str, **facts: Any) -> list[dict[str, Any]]:
        """Return the records of this kind, with these facts."""
        return [each for each in self.records if each["what"] == what and facts.items() <= {**each}.items()]

    def of_task(self, task_id: str) -> list[dict[str, Any]]:
        """Return the messages, deliveries and states of one task."""
        kinds = ("message", "delivery", "retry", "state")
        return [each for each in self.records if each.get("id") == task_id and each["what"] in kinds]

    def count(self, what: str, **facts: Any) -> int:
        return len(self.of(what, **facts))

    def order(self) -> list[str]:
        """Return the names in the order in which their bodies began."""
        return [each["name"] for each in sorted(self.of("begin"), key=lambda each: each["at"])]

    def overlaps(self, name: str) -> int:
        """Return how often a body began while another of this name was at work. A killed one has a record of that."""
        at_work: Counter[int] = Counter()
        found = 0
        for each in sorted(self.records, key=lambda each: each["at"]):
            if each["what"] == "killed":
                at_work.pop(each["victim"], None)
            elif each.get("name") == name and each["what"] == "begin":
                found += bool(+at_work)
                at_work[each["pid"]] += 1
            elif each.get("name") == name and each["what"] == "end":
                at_work[each["pid"]] -= 1
        return found

    def summary(self) -> dict[str, int]:
        return dict(Counter(each["what"] for each in self.records))
