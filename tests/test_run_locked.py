"""`manage.py run_locked` and `LockedCommand` run programs and commands under a lock, as a shell sees them."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from django_mongolock import LockLost, mongo_lock
from django_mongolock.decorator.locked_command import BUSY, LOST, UNAVAILABLE
from django_mongolock.exceptions import LockReentry
from django_mongolock.management.commands.run_locked import Command as RunLocked
from django_mongolock.models import Lock
from tests.locked_command import Command, Patient
from tests.support.looking import document, held_elsewhere, holder, holders, new_key
from tests.support.programs import Start, runs, starting
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.django_db(databases=["default", "mongo"], transaction=True),
    pytest.mark.skipif(sys.platform == "win32", reason="signals"),
]

start = pytest.fixture(starting)


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def shell(key: str, script: str, *options: str) -> list[str]:
    """Return the arguments that run a shell script under a lock."""
    return ["run_locked", key, *options, "--", "sh", "-c", script]


class TestProgram:
    @pytest.mark.long
    def test_runs(self, start: Start) -> None:
        """The program has its arguments and the lock, and finds the token in its environment. Its exit code is the
        command's."""
        key = new_key()
        script = "echo $MONGOLOCK_KEY $MONGOLOCK_FENCING_TOKEN $1; read x < /dev/null; exit 3"
        process = start("run_locked", key, "--lease", "45", "--label", "mine", "--", "sh", "-c", script, "sh", "--x")
        code, out, err = finished(process)
        assert (code, err) == (3, "")
        assert out.split() == [key, str(document(key)["token"]), "--x"]
        last = document(key)["last_holder"]
        assert (last["label"], last["lease"]) == ("mine", 45_000)
        assert holders(key) == []

    @pytest.mark.long
    def test_the_label_is_the_program(self, start: Start) -> None:
        """Arguments of the program are not stored, because they may be passwords or have several lines."""
        key = new_key()
        code, _, err = finished(start("run_locked", key, "--", "/bin/sh", "-c", "true\n: --password=hunter2"))
        assert (code, err) == (0, "")
        assert document(key)["last_holder"]["label"] == "sh"
        assert "hunter2" not in str(document(key))

    @pytest.mark.long
    def test_busy(self, start: Start) -> None:
        """A busy lock is exit code 75 with the holder's name, or 0 if that is fine. The program does not run."""
        key = new_key()
        with held_elsewhere(key, label="nightly"):
            fails, skips = start(*shell(key, "echo ran")), start(*shell(key, "echo ran", "--on-contention", "skip"))
            code, out, err = finished(fails)
            assert (code, out) == (BUSY, "")
            assert err.startswith(f"CommandError: lock '{key}' was not acquired: held by nightly")
            code, out, err = finished(skips)
            assert (code, err) == (0, "")
            assert out.startswith(f"Skipped: lock '{key}' was not acquired: held by nightly")

    @pytest.mark.long
    def test_waits(self, start: Start) -> None:
        """The command waits in the queue up to its limit. A command that is stopped there leaves the queue."""
        key = new_key()
        with held_elsewhere(key):
            waits, stopped = (start(*shell(key, "echo ran", "--wait", "60s")) for _ in range(2))
            assert eventually(lambda: len(document(key)["waiters"]) == 2, 60)
            stopped.terminate()
            assert finished(stopped)[0] == 128 + signal.SIGTERM
            assert eventually(lambda: len(document(key)["waiters"]) == 1)
        assert finished(waits)[:2] == (0, "ran\n")

    @pytest.mark.long
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT])
    def test_signals(self, start: Start, number: signal.Signals) -> None:
        """The program answers the signals that are sent to the command. The command stays until the program has ended,
        and then releases the lock."""
        key = new_key()
        name = number.name.removeprefix("SIG")
        process = start(*shell(key, f"trap 'echo got; exit 7' {name}; echo ready; while :; do sleep 0.05; done"))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert finished(process)[:2] == (7, "got\n")
        assert holders(key) == []

    def test_a_signal_before_popen_returns(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The program runs a moment before its pid is known. A signal in that moment is passed on afterwards."""
        ready = tmp_path / "ready"

        class Slow(subprocess.Popen[bytes]):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                assert eventually(ready.exists)
                os.kill(os.getpid(), signal.SIGUSR1)

        monkeypatch.setattr("django_mongolock.management.program_command.subprocess.Popen", Slow)
        script = f"trap 'exit 7' USR1; touch {ready}; for i in $(seq 100); do sleep 0.05; done"
        command = RunLocked()
        call_command(command, *shell(new_key(), script)[1:])
        assert command.code == 7

    @pytest.mark.long
    def test_what_is_ignored_stays_ignored(self, start: Start) -> None:
        """Under nohup neither we nor the program end when the terminal goes."""
        inner = shell(new_key(), "kill -HUP $PPID $$; sleep 0.3; echo lives")
        process = start("run_locked", new_key(), "--", "nohup", sys.executable, "-m", "django", *inner)
        assert finished(process)[:2] == (0, "lives\n")

    @pytest.mark.long
    def test_dashes(self, start: Start) -> None:
        """Arguments after the first -- belong to the program, including every other --. Without --, the error names the
        cure."""
        assert finished(start("run_locked", new_key(), "--", "echo", "--", "-x", "--"))[1] == "-- -x --\n"
        code, _, err = finished(start("run_locked", new_key(), "echo", "-x"))
        assert code == 2
        assert "put -- between the key and the program" in err

    @pytest.mark.long
    @pytest.mark.parametrize("stubborn", [False, True])
    def test_lost(self, start: Start, stubborn: bool) -> None:
        """If the lock is taken away, the program is stopped with all of its processes, if need be by SIGKILL."""
        key = new_key()
        trap = "trap '' TERM" if stubborn else "trap 'echo asked; exit 0' TERM"
        script = f"{trap}; sleep 300 & echo $!; while :; do sleep 0.05; done"
        process = start(*shell(key, script, "--lease", "1", "--grace", "0.5"))
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        (lock,) = Lock.objects.filter(key=key)
        assert lock.force_release()
        code, out, err = finished(process)
        assert code == LOST
        assert "was lost" in err
        assert out == ("" if stubborn else "asked\n")
        assert eventually(lambda: not runs(grandchild))

    @pytest.mark.long
    def test_max_hold(self, start: Start) -> None:
        """A program that hangs is stopped after the longest time that it may have the lock."""
        key = new_key()
        assert finished(start(*shell(key, "sleep 300", "--max-hold", "0.5")))[0] == LOST
        assert eventually(lambda: holders(key) == [])

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("program", "code", "said"),
        [(["/no/such/program"], 127, "does not exist"), (["/"], 126, ""), (["sh", "-c", "kill -9 $$"], 128 + 9, "")],
    )
    def test_codes(self, start: Start, program: list[str], code: int, said: str) -> None:
        """The exit codes are those of a shell. The lock is released."""
        key = new_key()
        found, _, err = finished(start("run_locked", key, "--", *program))
        assert (found, said in err, holders(key)) == (code, True, [])

    def test_mistakes(self) -> None:
        """A wrong key or time is an error of one line."""
        for arguments in (("", "--", "true"), ("k", "--lease", "0", "--", "true")):
            with pytest.raises(CommandError) as caught:
                call_command("run_locked", *arguments)
            assert caught.value.returncode == 2
        with pytest.raises(CommandError, match="put -- between the key and the program"):
            call_command("run_locked", "k")

    def test_called(self) -> None:
        """The command works from Python as well. Signal handlers are restored."""
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        key = new_key()
        call_command("run_locked", key, "--", "sh", "-c", "exit 0")
        assert document(key)["acquisitions"] == 1
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


class TestLockedCommand:
    def test_runs(self) -> None:
        """The command holds its lock until its end, with the key of its options."""
        source, out = new_key(), io.StringIO()
        call_command(Command(), source, stdout=out)
        key = f"import:{source.replace(':', '%3A')}"
        assert out.getvalue().split() == ["token", str(document(key)["token"]), "done"]
        assert document(key)["last_holder"]["label"] == "manage.py locked_command"
        assert holders(key) == []

    def test_busy(self, name: str) -> None:
        """A busy command fails with 75, or says so and succeeds."""
        with held_elsewhere(f"import:{name}", label="another"):
            with pytest.raises(CommandError, match="another") as caught:
                call_command(Command(), name)
            assert caught.value.returncode == BUSY
            out = io.StringIO()
            call_command(Patient(), name, stdout=out)
            assert out.getvalue().startswith("Skipped: lock")
        with mongo_lock(f"import:{name}"), pytest.raises(LockReentry):  # a mistake is not skipped
            call_command(Patient(), name)

    def test_no_key(self) -> None:
        """Options that make no key are a wrong command line."""
        with pytest.raises(CommandError, match="a lock key has at most 512 bytes") as caught:
            call_command(Command(), "x" * 3_000)
        assert caught.value.returncode == 2

    @pytest.mark.long
    def test_lost(self, start: Start, name: str) -> None:
        process = start(name, "--seconds", "0.5", module="tests.locked_command")
        assert process.stdout is not None
        assert process.stdout.readline().startswith("token")
        assert Lock.objects.get(key=f"import:{name}").force_release()
        code, _, err = finished(process)
        assert code == LOST  # it learns of it when it gives the lock back
        assert "was lost" in err

    @pytest.mark.long
    def test_terminated(self, start: Start, name: str) -> None:
        """SIGTERM ends the command in order, and the lock is released."""
        process = start(name, "--seconds", "300", module="tests.locked_command")
        assert process.stdout is not None
        assert process.stdout.readline().startswith("token")
        assert holder(f"import:{name}")
        process.terminate()
        assert finished(process)[0] == 128 + signal.SIGTERM
        assert holders(f"import:{name}") == []

    @pytest.mark.long
    @pytest.mark.usefixtures("away")
    def test_away(self) -> None:
        with pytest.raises(CommandError) as caught:
            call_command(Command(), "x")
        assert caught.value.returncode == UNAVAILABLE

    def test_its_own_errors(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """An error of the command itself is not taken for ours. The loss of another lock is not, either."""

        def handle(self: Any, **options: Any) -> None:
            with mongo_lock(f"import:{options['source']}", wait=0):
                pass

        def lose(self: Any, **options: Any) -> None:
            raise LockLost("another")

        monkeypatch.setattr(Command, "handle", handle)
        with pytest.raises(LockReentry, match="already held by this thread"):
            call_command(Command(), name)
        monkeypatch.setattr(Command, "handle", lose)
        with pytest.raises(LockLost, match="another"):
            call_command(Command(), name)
