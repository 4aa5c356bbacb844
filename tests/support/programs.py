"""Start a management command as a cron job would, without a terminal, and with the test's databases."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from django.core.management import call_command
from django.db import connections

Start = Callable[..., subprocess.Popen[str]]


def heed_signals() -> None:
    """Restore the default signals. A shell starts background processes with signals ignored, and their children inherit
    that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def python(*arguments: str, folder: Path | None = None, **environment: str) -> str:
    """Run Python with *arguments* to its end, and return its output. A failure of it fails the test."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def said_by(*command: str, **options: Any) -> str:
    """Return the output of a management command that runs in this process."""
    out = io.StringIO()
    call_command(*command, stdout=out, **options)
    return out.getvalue()


def starting() -> Iterator[Start]:
    """Yield a function that starts a command. Afterwards all commands are ended."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, module: str = "django", **environment: str) -> subprocess.Popen[str]:
        env = {
            **os.environ,
            "MONGODB_NAME": str(connections["mongo"].settings_dict["NAME"]),
            "DJANGO_SETTINGS_MODULE": "testproject.settings",
            **environment,
        }
        command = [sys.executable, "-m", module, *arguments]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        made = subprocess.Popen(command, env=env, text=True, preexec_fn=heed_signals, **pipes)  # type: ignore[call-overload]  # noqa: PLW1509
        started.append(made)
        return started[-1]

    yield start
    for process in started:
        process.send_signal(signal.SIGCONT)
        process.terminate()  # ends the program too, because the program would keep the pipes open
    for process in started:
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def processes() -> dict[int, int]:
    """Return the parent of each process. Zombies are left out, because they have ended."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in table.splitlines())
    return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}


def runs(pid: int) -> bool:
    return pid in processes()
