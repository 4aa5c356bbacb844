"""The demo's processes. They are started in their own groups, and ended by pid, the last one first.

A watcher beside them learns by the end of a pipe that the demo itself is gone, and removes the rest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_WATCHER = """
import os, shutil, signal, sys
groups = set()
for line in sys.stdin:
    sign, group = line[0], int(line[1:])
    groups.add(group) if sign == "+" else groups.discard(group)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
if groups:
    shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class ProcessEndedError(Exception):
    """A process that should run has ended: *name*, its exit code, the end of its log."""

    def __init__(self, name: str, code: int, log: str) -> None:
        super().__init__(name, code, log)
        self.name, self.code, self.log = name, code, log

    def __str__(self) -> str:
        return f"{self.name} ended with {self.code}:\n{self.log}"


@dataclass
class Running:
    """One process with its log, and the signal for its orderly end."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    stop_signal: signal.Signals
    patience: float


class Processes:
    """A block that starts processes. At its end all that still run are ended, children included.

    Each process gets its own process group. A Ctrl-C in the terminal reaches only the demo, and the demo ends the
    others in order. A group that does not end in time is killed.
    """

    def __init__(self, logs: Path, env: Mapping[str, str]) -> None:
        self.logs, self.env = logs, dict(env)
        self._running: list[Running] = []
        self._watcher: subprocess.Popen[str] | None = None

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        stop_signal: signal.Signals = signal.SIGTERM,
        patience: float = 10.0,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start *argv* with its output in ``<logs>/<name>.log``."""
        log = self.logs / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                list(argv),
                env={**self.env, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._tell_watcher(f"+{process.pid}")
        self._running.append(Running(name, process, log, stop_signal, patience))
        return process

    def stop(self, name: str) -> int:
        """End the process *name* and its group, and return its exit code."""
        running = next(each for each in self._running if each.name == name)
        self._running.remove(running)
        return self._end(running)

    @property
    def names(self) -> list[str]:
        """The names of the running processes, in the order of their starts."""
        return [each.name for each in self._running]

    def check(self) -> None:
        """Raise ProcessEndedError if one has ended by itself."""
        for each in self._running:
            code = each.process.poll()
            if code is not None:
                raise ProcessEndedError(each.name, code, tail(each.log))

    def __enter__(self) -> Self:
        watcher = [sys.executable, "-I", "-S", "-c", _WATCHER, str(self.logs)]
        self._watcher = subprocess.Popen(watcher, stdin=subprocess.PIPE, text=True, start_new_session=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._running:
            self._end(self._running.pop())
        if self._watcher:
            self._watcher.communicate()

    def _end(self, running: Running) -> int:
        code = _end(running)
        self._tell_watcher(f"-{running.process.pid}")
        return code

    def _tell_watcher(self, line: str) -> None:
        if self._watcher and self._watcher.stdin:
            print(line, file=self._watcher.stdin, flush=True)


def tail(log: Path, lines: int = 25) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _end(running: Running) -> int:
    process = running.process
    if process.poll() is None:
        process.send_signal(running.stop_signal)
        with suppress(subprocess.TimeoutExpired):
            process.wait(running.patience)
    _kill_group(process)
    return process.wait()


def _kill_group(leader: subprocess.Popen[bytes]) -> None:
    """Kill the rest of a group. The children of a pool may outlive their parent."""
    deadline = time.monotonic() + 2
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(leader.pid, signal.SIGKILL)
            leader.poll()  # reap it, or the group never becomes empty
            time.sleep(0.01)
