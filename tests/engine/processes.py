"""Starting workers and talking to them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A worker in a process of its own."""

    def __init__(self, name: str, collection: str, *arguments: object) -> None:
        command = [sys.executable, "-m", "tests.engine.worker", name, collection, *map(str, arguments)]
        self.popen = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )

    def hear(self) -> Any:
        """Return the next line of the worker."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"the worker ended with {self.popen.wait()}"
        return json.loads(line)

    def say(self, text: str = "") -> Self:
        """Tell the worker to go on."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{text}\n")
        self.popen.stdin.flush()
        return self

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def end(self) -> int:
        """Wait until the worker has ended by itself."""
        return self.popen.wait(20)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.kill()
        self.popen.communicate()


@contextlib.contextmanager
def processes(count: int, name: str, collection: str, *arguments: object) -> Iterator[list[Process]]:
    """Start *count* workers. Workers that still run at the end are killed."""
    started = [Process(name, collection, *arguments) for _ in range(count)]
    try:
        yield started
    finally:
        for process in started:
            process.close()
