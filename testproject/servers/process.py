"""A server process that ends with its starter.

Beside each server a small watcher process waits for the end of its starter, however that one ends, then
kills the server and removes its directory. (Linux's PR_SET_PDEATHSIG needs no watcher, but fires at the end of the
*thread* that started the server.) A child forked from the starter counts as the starter while it lives.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

HOST = "127.0.0.1"
START_TIMEOUT = 30.0  # seconds until a started server must answer
PORTS = range(20_000, 30_000)  # below the systems' ephemeral ports, so that a restart finds its port free
LIBRARIES = "apt-get install libcurl4 libssl3 (Debian, Ubuntu) or dnf install libcurl openssl-libs (Fedora, RHEL)"

_WATCHER = """
import os, shutil, signal, sys, time
pid, directory = int(sys.argv[1]), sys.argv[2]
sys.stdin.buffer.read()
try:
    os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
except OSError:
    pass
while os.path.exists(directory):
    shutil.rmtree(directory, ignore_errors=True)
    time.sleep(0.1)
"""


class ServerError(Exception):
    """A server cannot be started or reached. The message is one line for the person at the terminal."""


class Runnable:
    """A thing that is started by `with`, and closed at its end or when the start fails half way."""

    def start(self) -> None:
        """Start, and wait until it can be used, or raise ServerError."""
        raise NotImplementedError

    def close(self) -> None:
        """End the processes and remove their files."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Server(Runnable):
    """One server process on a loopback port of its own, in a temporary directory of its own."""

    title: ClassVar[str]
    #: Seconds until it must answer once it was started.
    start_timeout: ClassVar[float] = START_TIMEOUT

    def __init__(self) -> None:
        self.port = free_port()
        self.paused = False
        #: Variables that the process gets beside those of its starter, such as LD_PRELOAD and FAKETIME.
        self.environment: dict[str, str] = {}
        #: The system's user that runs the process, or None for that of its starter.
        self.user: str | None = None
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        state = "not running" if not self.running else f"pid {self.pid}, paused" if self.paused else f"pid {self.pid}"
        return f"<{type(self).__name__} {HOST}:{self.port}, {state}>"

    @property
    def pid(self) -> int:
        """The server's process id. ServerError is raised if it was not started, or was killed."""
        if self._process is None:
            raise ServerError(f"{self.title} on port {self.port} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process exists, paused or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def directory(self) -> Path:
        """The folder of the server's data and its log. The folder is made on first use, and removed by close()."""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix=f"{self.title}-"))
        return self._directory

    @property
    def log(self) -> Path:
        """The file of the server's output."""
        return self.directory / "log"

    def command(self) -> list[str]:
        """Return the command line that runs the server."""
        raise NotImplementedError

    def answers(self) -> bool:
        """Return whether the server answers a request now."""
        raise NotImplementedError

    def listens(self) -> bool:
        """Return whether the server's port accepts connections."""
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) == 0

    def start(self) -> None:
        """Start the server and wait until it answers. Otherwise raise ServerError with its last words."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start the process, without waiting until it answers."""
        command = self.command()
        try:
            with self.log.open("wb") as log:
                environment = {**os.environ, **self.environment}
                self._process = _spawn(
                    command, env=environment, user=self.user, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
        except OSError as error:
            raise ServerError(f"cannot run {command[0]}: {error.strerror}") from error
        watcher = [sys.executable, "-I", "-S", "-c", _WATCHER, str(self.pid), str(self.directory)]
        self._watcher = _spawn(watcher, stdin=subprocess.PIPE)

    def wait_ready(self) -> None:
        """Wait until the server answers. Raise ServerError when it ends instead, or after `start_timeout`."""
        with patience(self.start_timeout, f"{self.title} does not answer") as still_time:
            while not self.answers():
                if not self.running:
                    raise ServerError(f"{self.title} did not start: {_last_words(self.log)}")
                still_time()

    def kill(self) -> None:
        """End the server at once (SIGKILL). The data stay, for restart()."""
        for process in (self._process, self._watcher):
            if process is not None:
                process.kill()
                process.communicate()
        self._process = self._watcher = None
        self.paused = False

    def restart(self) -> None:
        """Start the server again, on the same port and data. A running server is killed first."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Stop the process where it is (SIGSTOP). Its connections stay open, and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        """Let a paused process go on (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)
        self.paused = False

    def close(self) -> None:
        """Kill the server and remove its directory."""
        self.kill()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


@contextlib.contextmanager
def patience(seconds: float, complaint: str) -> Iterator[Callable[[], None]]:
    """Yield a short sleep for a waiting loop. The sleep raises ServerError(complaint) once *seconds* are over."""
    end = time.monotonic() + seconds

    def still_time() -> None:
        if time.monotonic() > end:
            raise ServerError(f"{complaint} (waited {seconds:g} s)")
        time.sleep(0.05)

    yield still_time


def _spawn(command: list[str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start *command* where the terminal's Ctrl-C does not reach it, because its starter ends it, in order."""
    if sys.platform == "win32":
        return subprocess.Popen(command, creationflags=subprocess.CREATE_NEW_PROCESS_GROUP, **streams)
    return subprocess.Popen(command, process_group=0, **streams)


def free_port() -> int:
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise ServerError(f"no free port between {PORTS.start} and {PORTS.stop}")


def _last_words(log: Path) -> str:
    """Return the reason in a dead server's log, in one line."""
    text = log.read_text(errors="replace")
    if missing := re.search(r"error while loading shared libraries: (?:\S*/)?([^:/\s]+):", text):
        return f"it needs {missing[1]}: {LIBRARIES}"
    complaints = [complaint for line in text.splitlines() if (complaint := _complaint(line))]
    return "; ".join(complaints[-3:]) or "it said nothing"


def _complaint(line: str) -> str:
    """Return the text of a plain log line, or of mongod's JSON for an error. Other lines give an empty text."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line.strip()
    if not isinstance(entry, dict) or entry.get("s") not in {"E", "F"}:
        return ""
    return f"{entry.get('msg')} {entry.get('attr', {}).get('error', '')}".strip()
