"""`LockedCommand`: the base of management commands that run under a lock."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, ClassVar, Final, Literal, NoReturn

from django.core.management.base import BaseCommand, CommandError, OutputWrapper

from ..engine.lock.lock import MongoLock
from ..exceptions import LockBackendFailed, LockDocumentDamaged, LockLost, LockNotAcquired, LockReentry
from ..keys import KeyTemplate
from ..locks import LockKeywords, chosen, make_lock

#: The exit code of a command whose lock is held elsewhere, as in sysexits.h.
BUSY: Final = 75
#: The exit code of a command whose lock was lost.
LOST: Final = 76
#: The exit code of a command that cannot reach MongoDB, or whose lock has a damaged document.
UNAVAILABLE: Final = 69


class LockedCommand(BaseCommand):
    """A management command that one process runs at a time.

    - lock_key: key, filled from the options of the command: ``"import:{source}"``. Default: ``"command:<name>"``.
    - lock_options: options of `mongo_lock`. Unless they set wait, the command tries once.
    - on_contention: reaction to a busy lock, "fail" (exit code 75, EX_TEMPFAIL) or "skip" (print a message and
      succeed).

    While `handle` runs, the lock is `self.lock`. Call ``self.lock.ensure_held()`` before steps that cannot be undone.
    The command fails with exit code 76 if the lock is lost meanwhile, with 69 if MongoDB does not answer, and with 2 if
    its options make no key. SIGTERM ends the command as Ctrl-C does, so that the lock is released.
    """

    lock_key: ClassVar[str | None] = None
    lock_options: ClassVar[LockKeywords] = {}
    on_contention: ClassVar[Literal["fail", "skip"]] = "fail"
    lock: MongoLock

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise TypeError and ValueError for invalid attributes of the class."""
        super().__init_subclass__(**options)
        if cls.on_contention not in ("fail", "skip"):
            raise ValueError(f'{cls.__qualname__}.on_contention is "fail" or "skip", not {cls.on_contention!r}')
        if isinstance(cls.lock_key, str):
            KeyTemplate(cls.lock_key)
        chosen(cls.lock_options)

    def new_lock(self, options: dict[str, Any]) -> MongoLock:
        """Return the lock of one run, not yet acquired."""
        name = type(self).__module__.rpartition(".")[2]
        key: str = f"command:{name}" if self.lock_key is None else KeyTemplate(self.lock_key).fill(options)
        return make_lock((key,), chosen({"wait": 0, "label": f"manage.py {name}", **self.lock_options}))

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the command under its lock."""
        with sigterm_as_exit(), ExitStack() as stack:
            try:
                self.lock = stack.enter_context(holding(self.new_lock(options)))
            except ValueError as error:
                raise CommandError(str(error), returncode=2) from error
            except CommandError as error:
                if error.returncode != BUSY or self.on_contention != "skip":
                    raise
                out = options.get("stdout")  # as `execute` itself does
                (OutputWrapper(out) if out else self.stdout).write(f"Skipped: {error}")
                return None
            return super().execute(*args, **options)


@contextmanager
def holding(lock: MongoLock) -> Iterator[MongoLock]:
    """Hold *lock* in the block. Its errors become CommandErrors with the exit codes of this module."""
    try:
        with ExitStack() as stack:
            try:
                stack.enter_context(lock)
            except LockReentry:  # a mistake in the code
                raise
            except (LockNotAcquired, LockBackendFailed, LockDocumentDamaged) as error:
                code = BUSY if isinstance(error, LockNotAcquired) else UNAVAILABLE
                raise CommandError(str(error), returncode=code) from error
            yield lock
    except LockLost as error:
        if error.key not in lock.keys:
            raise
        raise CommandError(str(error), returncode=LOST) from error


@contextmanager
def sigterm_as_exit(*, only_in_commands: bool = False) -> Iterator[None]:
    """Within the block, end the program by an exception on SIGTERM, so that its locks are released.

    If the program handles SIGTERM itself, nothing changes. Blocks may overlap, as those of coroutines do. The last
    block to end restores the default.

    - only_in_commands: do nothing outside of a management command.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _leave):
        yield
        return
    if only_in_commands and not in_command():
        yield
        return
    signal.signal(signal.SIGTERM, _leave)
    _blocks.append(None)
    try:
        yield
    finally:
        _blocks.pop()
        if not _blocks and signal.getsignal(signal.SIGTERM) is _leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


#: One item for each open block of `sigterm_as_exit`. Only the main thread has such blocks.
_blocks: Final[list[None]] = []


def in_command() -> bool:
    """Return whether a management command called this."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is BaseCommand.execute.__code__:
            return True
        frame = frame.f_back
    return False


class CommandBusy(LockNotAcquired, CommandError):
    """A LockNotAcquired by which a management command exits with code 75 and without a traceback."""

    returncode = BUSY


def busy_error(error: LockNotAcquired) -> LockNotAcquired:
    """Return the error. In a management command, return one that sets the exit code."""
    if not in_command():
        return error
    made = CommandBusy(error.key)
    vars(made).update(vars(error))
    made.args = error.args
    return made


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    raise SystemExit(128 + number)


__all__ = ["BUSY", "LOST", "UNAVAILABLE", "LockedCommand"]
