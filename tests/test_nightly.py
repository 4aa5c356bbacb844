"""F193: A plain management command under `once_per` or `mongo_locked`, in a pod that is ended in the middle."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from django_mongolock.decorator.locked_command import BUSY
from tests.nightly_command import LEASE
from tests.support.looking import document, held_elsewhere, holders
from tests.support.programs import Start, starting

pytestmark = [
    pytest.mark.django_db(databases=["default", "mongo"], transaction=True),
    pytest.mark.skipif(sys.platform == "win32", reason="signals"),
    pytest.mark.long,
]

start = pytest.fixture(starting)
NIGHTLY = {"module": "tests.nightly_command"}


def begun(process: subprocess.Popen[str]) -> None:
    """Wait until the work of the command has begun."""
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and output of a command that has ended."""
    out, _ = process.communicate(timeout=60)
    return process.returncode, out.strip()


@pytest.mark.parametrize("kind", ["once", "once-async", "locked", "locked-async"])
def test_ended_and_started_again(start: Start, key: str, kind: str) -> None:
    """SIGTERM releases the lock, and the run does not count. A command that is started at once does the work."""
    first = start(kind, key, "--seconds", "30", **NIGHTLY)
    begun(first)
    first.send_signal(signal.SIGTERM)
    assert finished(first)[0] == 128 + signal.SIGTERM
    assert holders(key) == []
    assert finished(start(kind, key, **NIGHTLY)) == (0, "begun\ndone")
    if kind.startswith("once"):
        assert finished(start(kind, key, **NIGHTLY)) == (0, "SKIPPED")


def test_killed_and_started_again(start: Start, key: str) -> None:
    """A command that is started after a kill waits for the end of the lease, and does the work."""
    first = start("once", key, "--seconds", "30", **NIGHTLY)
    begun(first)
    first.kill()
    first.wait()
    began = time.monotonic()
    assert finished(start("once", key, **NIGHTLY)) == (0, "begun\ndone")
    assert time.monotonic() - began < LEASE + 10
    assert document(key)["expired"] == 1


def test_two_at_once(start: Start, key: str) -> None:
    """A second command waits for the end of a run that is at work, and is skipped if that ends well."""
    first = start("once", key, "--seconds", "2", **NIGHTLY)
    begun(first)
    assert finished(start("once", key, **NIGHTLY)) == (0, "SKIPPED")
    assert finished(first) == (0, "done")


def test_a_run_that_does_not_end(start: Start, key: str) -> None:
    """A command that has waited for a lease, and still does not know how the run ends, asks its controller to try
    again: exit code 75, and no traceback."""
    with held_elsewhere(key):
        process = start("once", key, **NIGHTLY)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (BUSY, "")
    assert err.startswith("CommandBusy: lock")
