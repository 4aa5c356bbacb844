"""Processes that run the measured code, one call at a time."""

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Final

#: Seconds that a worker has for one call, unless told otherwise.
PATIENCE: Final = 60.0

#: The objects that a worker keeps between the calls, by name.
State = dict[str, Any]


class WorkerError(Exception):
    """The error of a call in a worker that failed, or did not end."""


#: Workers are forked from a process that has imported everything and done nothing. This is quick and safe.
_NURSERY: Final = multiprocessing.get_context("forkserver")
_NURSERY.set_forkserver_preload(["bench.prepared"])


class Worker:
    """One process. Each call gets its *state* first, and must be a function of some module."""

    def __init__(self) -> None:
        here, there = multiprocessing.Pipe()
        self._pipe = here
        self._process = _NURSERY.Process(target=serve, args=(there,), daemon=True)
        self._process.start()
        there.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def alive(self) -> bool:
        return bool(self._process.is_alive())

    def begin(self, call: Callable[..., Any], *args: Any) -> None:
        """Start a call without waiting for the result."""
        try:
            self._pipe.send((call, args))
        except OSError as error:
            raise WorkerError(f"the process of {call.__name__} is gone") from error

    def result(self, patience: float = PATIENCE) -> Any:
        """Return the result of the call. Raises WorkerError, also if there is none within so many seconds."""
        try:
            if not self._pipe.poll(patience):
                raise WorkerError(f"no result within {patience:.0f} s")
            good, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise WorkerError("the process has ended") from error
        if not good:
            raise WorkerError(value)
        return value

    def call(self, call: Callable[..., Any], *args: Any, patience: float = PATIENCE) -> Any:
        self.begin(call, *args)
        return self.result(patience)

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


@contextlib.contextmanager
def workers(count: int) -> Iterator[list[Worker]]:
    """Yield *count* workers. The workers end with the block, in order if they can, otherwise by force."""
    crew: list[Worker] = []
    try:
        crew.extend(Worker() for _ in range(count))
        yield crew
    finally:
        for worker in crew:
            with contextlib.suppress(WorkerError):
                worker.begin(finish)
        for worker in crew:
            with contextlib.suppress(WorkerError):
                worker.result(2.0)
        for worker in crew:
            worker.kill()


def finish(state: State) -> None:
    """Close the peer."""
    if (peer := state.pop("peer", None)) is not None:
        peer.close()


def serve(pipe: Connection) -> None:
    """Run the process until its pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started it
    state: State = {}
    with contextlib.suppress(EOFError, OSError):
        while True:
            call, args = pipe.recv()
            try:
                answer: tuple[bool, Any] = True, call(state, *args)
            except Exception as error:  # noqa: BLE001 - it is told to who asked
                where = traceback.extract_tb(error.__traceback__)[-1]
                answer = False, f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"  # noqa: PTH119
            pipe.send(answer)
