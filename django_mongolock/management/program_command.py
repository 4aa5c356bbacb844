"""The common base of `run_locked` and `run_leader`, and the program that they run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser

from ..engine.lock.lock import MongoLock
from ..engine.text_checks import tidy_fact
from ..leaders import Term
from .lock_command import PlainCommand, seconds


class ProgramCommand(PlainCommand):
    """A command that runs a program, and exits with its code."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parse = parser.parse_args

        def parse_args(args: Sequence[str], namespace: Namespace | None = None) -> Namespace:
            """Leave the program's arguments alone. argparse would drop each `--` among them."""
            at = list(args).index("--") if "--" in args else None
            if at is None and not {"-h", "--help", "--version"}.intersection(args):
                parser.error(f"put -- between the key and the program: {subcommand} KEY -- PROGRAM …")
            options = parse(args[: at + 2] if at is not None else args, namespace)
            options.program = list(args[at + 1 :]) if at is not None else []
            return options

        parser.parse_args = parse_args  # type: ignore[method-assign, assignment]
        return parser

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("lock", metavar="KEY", help="the key, without MONGOLOCK['KEY_PREFIX']")
        parser.add_argument("program", nargs="+", metavar="-- PROGRAM", help="what to run, with its arguments")
        parser.add_argument(
            "--lease", type=seconds, metavar="TIME", help="how long the lock stays held if this process dies"
        )
        parser.add_argument(
            "--grace",
            type=seconds,
            default=10.0,
            metavar="TIME",
            help="between SIGTERM and SIGKILL, if the lock is lost or in danger (default: 10)",
        )
        parser.add_argument(
            "--label", help="a note for people who look at the locks (default: the name of the program)"
        )

    @staticmethod
    def label(options: dict[str, Any]) -> str:
        """Return the label of the lock, from the option or from the name of the program."""
        return options["label"] or tidy_fact(Path(options["program"][0]).name or "program")


_FORWARDED: Final = ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")
_ENDING: Final = (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGQUIT", None))
#: A script that runs a program and has it killed when its parent ends in any way, on Linux only. A child cannot ask for
#: this itself between fork and exec, since this process has threads.
_TIED: Final = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        print(f"{sys.argv[2]!r} cannot be run: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
"""


class Child:
    """The program. It has its own process group, so that its child processes are stopped with it.

    A terminal sends its signals to one group only. Programs at a terminal therefore stay in the group of this process.

    - grace: function that returns the seconds between SIGTERM and SIGKILL.
    - tied: whether the program is killed when this process ends, where possible, and its child processes when it ends.
    """

    def __init__(self, command: list[str], grace: Callable[[], float], *, tied: bool = False) -> None:
        self.command = command
        self.grace = grace
        self.tied = tied
        self._is_at_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._process: subprocess.Popen[bytes] | None = None
        #: Whether this process got a signal that ends programs.
        self.was_asked_to_end = False
        #: Held while the program is started, stopped or forgotten.
        self._changing = threading.Lock()
        self._early: list[int] = []

    def run(self, lock: MongoLock | Term, ended: threading.Event) -> int:
        """Run the program until it ends, and return its exit code as a shell would.

        The program is stopped when *ended* is set. If the lock is not held any more, the program does not start.
        """
        environment = {
            **os.environ,
            "MONGOLOCK_KEY": lock.key,
            "MONGOLOCK_FENCING_TOKEN": str(lock.fencing_token),
        }
        with self._forwarding():
            with self._changing:
                threading.Thread(target=self._stop_when, args=(ended,), daemon=True).start()
                if not lock.held:
                    return 1
                self._process = self._start(environment)
            while self._early:
                self._send(self._early.pop(0))
            code = self._process.wait()
            with self._changing:  # wait for a stop that has begun
                if self.tied:
                    self._send(signal.SIGKILL)
                self._process = None
        return 128 - code if code < 0 else code

    def _start(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        command = self.command
        if self.tied and sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command]
        group = None if self._is_at_terminal else 0
        try:
            return subprocess.Popen(command, env=environment, process_group=group)
        except FileNotFoundError as error:
            cure = ": write its arguments apart, without quotes around all of them" * (" " in command[0])
            raise CommandError(f"the program {command[0]!r} does not exist{cure}", returncode=127) from error
        except OSError as error:
            raise CommandError(f"{command[0]!r} cannot be run: {error.strerror}", returncode=126) from error

    def _stop_when(self, ended: threading.Event) -> None:
        """When *ended* is set, stop the program and its child processes in time, unless the program has ended by
        itself.
        """
        ended.wait()
        with self._changing:
            if self._process is None:
                return
            self._send(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self.grace())
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            if self._is_at_terminal:
                self._process.send_signal(number)
            else:
                os.killpg(self._process.pid, number)

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Forward the signals of this process to the program.

        A terminal sends Ctrl-C to both processes. If this process ignores a signal, because of nohup for example, the
        program ignores the signal too.
        """

        def forward(number: int, frame: FrameType | None) -> None:
            self.was_asked_to_end = self.was_asked_to_end or number in _ENDING
            if number == signal.SIGINT and self._is_at_terminal:
                return
            if self._process is None:
                self._early.append(number)  # the program may run before Popen returns
            else:
                self._send(number)

        known = [getattr(signal, name) for name in _FORWARDED if hasattr(signal, name)]
        if threading.current_thread() is not threading.main_thread():
            known = []
        numbers = [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, forward) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
