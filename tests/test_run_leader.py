"""`manage.py run_leader` runs a program in the one process that leads."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import CommandError, call_command, execute_from_command_line

from django_mongolock import lock_info
from django_mongolock.management.program_command import Child
from django_mongolock.models import Lock
from tests.support.looking import new_key
from tests.support.programs import Start, runs, starting
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.django_db(databases=["default", "mongo"], transaction=True),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a program is not tied to its command"),
]

#: A program that writes ten times a second that it is at work, until it is stopped.
AT_WORK = """
import os, sys, time
while True:
    os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND), b"%d %f\\n" % (os.getpid(), time.monotonic()))
    time.sleep(0.05)
"""


start = pytest.fixture(starting)


def run_leader(start: Start, key: str, *program: str, **environment: str) -> subprocess.Popen[str]:
    return start("run_leader", key, "--lease", "2", "--", *program, **environment)


class Log:
    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def spans(self) -> dict[int, tuple[float, float]]:
        found: dict[int, tuple[float, float]] = {}
        for line in self.path.read_text().splitlines():
            pid, at = int(line.split()[0]), float(line.split()[1])
            found[pid] = found.get(pid, (at, at))[0], at
        return found

    def others(self, *known: int) -> set[int]:
        return set(self.spans()) - set(known)

    def overlaps(self) -> list[tuple[int, int]]:
        spans = sorted(self.spans().items(), key=lambda item: item[1])
        return [(a, b) for (a, first), (b, second) in itertools.pairwise(spans) if first[1] >= second[0]]


@pytest.fixture
def written(tmp_path: Path) -> Log:
    return Log(tmp_path / "log")


def program(log: Log) -> tuple[str, ...]:
    return sys.executable, "-c", AT_WORK, str(log.path)


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, "release"])
def test_never_two_at_work(start: Start, written: Log, how: Any) -> None:
    """F229: The leader is killed, ended or asked to release. The program has ended before the next one begins."""
    key = new_key("leader")
    leading = run_leader(start, key, *program(written))
    assert eventually(written.spans, 60)
    (first,) = written.spans()
    assert lock_info(key).holders[0].label == Path(program(written)[0]).name  # F229: the program's name, not "leader"
    run_leader(start, key, *program(written))
    assert eventually(lambda: lock_info(key).waiting == 1, 60)
    if how == "release":
        assert Lock.objects.filter(key=key).ask_to_release("a test") == 1
    else:
        leading.send_signal(how)
    assert eventually(lambda: written.others(first), 30)
    time.sleep(1)
    assert written.overlaps() == []
    assert eventually(lambda: not runs(first))
    if how == "release":  # it stands again
        assert lock_info(key).waiting == 1


@pytest.mark.long
def test_codes(start: Start) -> None:
    """A program that ends by itself ends the command with its code. A missing program does so, too."""
    key = new_key("leader")
    assert run_leader(start, key, "sh", "-c", 'exit "${MONGOLOCK_FENCING_TOKEN:+3}"').wait(60) == 3
    assert run_leader(start, key, "/no/such/program").wait(60) == 127
    assert lock_info(key).state == "free"
    with pytest.raises(CommandError) as caught:
        call_command("run_leader", "", "--", "true")
    assert caught.value.returncode == 2
    with pytest.raises(CommandError, match="run_leader KEY -- PROGRAM"):
        call_command("run_leader", "k")


@pytest.mark.long
def test_what_it_says(capfd: pytest.CaptureFixture[str]) -> None:
    """Messages go to stderr, because the output is the program's. With --verbosity 0 there are none."""
    key = new_key("leader")
    execute_from_command_line(["manage.py", "run_leader", key, "--", "echo", "work"])
    out, said = capfd.readouterr()
    token = said.partition("fencing token ")[2].split()[0]
    assert int(token) > 0
    lines = ["waits to be elected", f"leads, with fencing token {token}", "leads no more"]
    assert (out, said.splitlines()) == ("work\n", [f"run_leader {key}: {line}" for line in lines])
    execute_from_command_line(["manage.py", "run_leader", key, "--verbosity", "0", "--", "echo", "work"])
    assert capfd.readouterr() == ("work\n", "")


#: Survives Ctrl-C, and takes two seconds to end.
SLOW_TO_END = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), os._exit(5)))
pathlib.Path(sys.argv[1] + "-").write_text(str(os.getpid()))
os.rename(sys.argv[1] + "-", sys.argv[1])
while True:
    time.sleep(0.1)
"""


@pytest.mark.long
@pytest.mark.parametrize("then", ["another signal", "request"])
def test_asked_to_end(start: Start, tmp_path: Path, then: str) -> None:
    """F114: The program answers signals. The command leads until the program has ended, however many signals come. The
    command does not stand for election again, even if its term ends meanwhile."""
    key, begun = new_key("leader"), tmp_path / "begun"
    process = run_leader(start, key, sys.executable, "-c", SLOW_TO_END, str(begun))
    assert eventually(begun.exists, 60)
    program = int(begun.read_text())
    process.send_signal(signal.SIGINT)
    process.terminate()
    time.sleep(0.3)
    if then == "request":
        assert Lock.objects.filter(key=key).ask_to_release("a test") == 1
    else:
        process.terminate()
    states = [lock_info(key).state]
    while runs(program):
        states.append(lock_info(key).state)
    assert set(states[:-1]) == {"held"}
    assert process.wait(60) in (5, 128 + signal.SIGKILL)
    assert eventually(lambda: lock_info(key).state == "free")


def test_no_program_for_a_term_that_is_over() -> None:
    term: Any = SimpleNamespace(key="k", fencing_token=5, held=False)
    assert Child(["/no/such/program"], lambda: 10).run(term, threading.Event()) == 1
