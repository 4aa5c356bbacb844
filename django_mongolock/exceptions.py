"""The errors. Each name says what happened. Only their base, `LockError`, ends in Error.

The facts of an error are its attributes and its `args`, because Celery ships errors by pickling.
"""

from __future__ import annotations

import math
import re
import sys
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Final

#: Unicode categories that `printable` shows as codes: controls, invisible and direction marks, surrogates, line breaks.
_CODED: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: object, keep: str = "") -> str:
    """Return *text* as people see it. Invisible characters and terminal controls, except those in *keep*, are codes."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in _CODED and c not in keep else c for c in shown)


def from_printed(text: str) -> str:
    """Return the text that `printable` shows as *text*."""

    def character(found: re.Match[str]) -> str:
        for length in (6, 5, 4):  # the code has no end, and a letter of the text may follow it
            code = int(found[1][:length], 16)
            if code <= sys.maxunicode and printable(chr(code)) == f"\\u{found[1][:length]}":
                return chr(code) + found[1][length:]
        return found[0]

    return re.sub(r"\\u([0-9a-f]{4,6})", character, text)


class LockError(Exception):
    """The base of all errors of this library. Invalid arguments raise TypeError or ValueError instead."""

    #: The message, a format in which `self` is the error. If empty, `_text` makes the message.
    text = ""

    def __str__(self) -> str:
        return printable(self.text.format(self=self) if self.text else self._text())

    def _text(self) -> str:
        return super().__str__()

    def __post_init__(self) -> None:
        self.args = tuple(getattr(self, fact.name) for fact in fields(self))  # type: ignore[arg-type]


class LockKeyInvalid(ValueError):
    """A text or a value makes no lock key. The key is too long, has control characters, or has another form than
    required.

    A view under ``on_contention="respond"`` answers 400, because a key may be made from a request. Nothing was sent.
    """


@dataclass(eq=False, repr=False)
class LockNotAcquired(LockError):
    """The lock could not be acquired within the wait time.

    - key: key of the lock.
    - waited: seconds spent waiting, 0 for a single try.
    - holder: text that describes the holder (None if unknown).
    - retry_after: seconds until the holder's lease ends unless it is renewed (0 if unknown).
    - template: template of the key ("" if unknown).
    - why: kind of the error in a word or two, for statistics.
    - held_for: seconds since the grant of the holder (inf if unknown).
    - waiting: number of waiters in the queue (0 if unknown).
    - owner: owner of the holder ("" if the holder has none, None if unknown).
    - usual: seconds that such a lock is usually held (None if unknown).
    - kept: whether the holder has released the lock, and only its minimum hold keeps the key.
    """

    key: str
    waited: float = 0.0
    holder: str | None = None
    retry_after: float = 0.0
    template = ""
    why = "busy"
    held_for = math.inf
    waiting = 0
    owner: str | None = None
    usual: float | None = None
    kept = False

    @property
    def come_back_in(self) -> float:
        """The number of seconds after which a retry makes sense.

        The holder is expected to finish when it has held the lock for the usual time. If that time is unknown or over,
        the result is the time that the lock has been held so far. The result is at least 1, and at most the rest of
        the holder's lease.
        """
        left = self.usual - self.held_for if self.usual is not None else 0.0
        return max(1.0, min(self.retry_after, left if left > 0 else self.held_for))

    def _text(self) -> str:
        after = f" within {self.waited:.1f} s" if self.waited >= 0.05 else ""
        return f"lock {self.key!r} was not acquired{after}: held by {self.holder or 'a waiter ahead in the queue'}"


class LockQueueFull(LockNotAcquired):
    """The queue of the lock is as long as MONGOLOCK["MAX_WAITERS"] allows."""

    why = "queue full"
    text = "lock {self.key!r} was not acquired: its queue is full (MONGOLOCK['MAX_WAITERS'])"


class LockCancelled(LockNotAcquired):
    """`MongoLock.cancel` ended the wait."""

    why = "cancelled"
    text = "the wait for lock {self.key!r} was cancelled after {self.waited:.1f} s"


class LockDeadlock(LockNotAcquired):
    """The holders wait for one another, and the wait would never end. The youngest waiter of the cycle gets this error.

    - cycle: text that says which holder waits for which key.
    - keys: locks of the cycle.
    """

    why = "deadlock"
    text = "lock {self.key!r} was not acquired, its wait would never end (deadlock): {self.cycle}"

    def __init__(self, key: str, waited: float = 0.0, cycle: str = "", keys: tuple[str, ...] = ()) -> None:
        super().__init__(key, waited)
        self.args = (key, waited, cycle, keys)
        self.cycle = cycle
        self.keys = keys


class LockReentry(LockNotAcquired):
    """This thread or task holds the lock already, and would wait for itself.

    - upgrade: whether the lock is held as a reader, and was asked for exclusively.
    - differs: whether the lock was asked for with ``reentrant=True``, but in another mode, or with another number of
      permits or weight.
    """

    upgrade = differs = False

    def _text(self) -> str:
        if self.upgrade:
            return (
                f"lock {self.key!r} is held as a reader by this thread or task, and is not made exclusive: two readers "
                "that both wait for that would wait for each other for ever. Release it first; or acquire it "
                "exclusively, and downgrade() it for what only reads"
            )
        same = "it is taken again only in the same mode, with the same permits and weight"
        cure = same if self.differs else "pass reentrant=True to take it again"
        return (
            f"lock {self.key!r} is already held by this thread or task, or by its caller in sync_to_async() or "
            f"async_to_sync(). It would wait for itself: {cure}"
        )


@dataclass(eq=False, repr=False)
class LockLost(LockError):
    """The lease ended, or the lock was taken away, before the holder released it.

    Work done since then may have overlapped with that of another holder. Check the work, or fence it (`fencing_token`).
    """

    key: str
    token: int | None = None
    reason: str = "its lease ended"

    def _text(self) -> str:
        token = "" if self.token is None else f" (token {self.token})"
        return f"lock {self.key!r}{token} was lost: {self.reason}"


@dataclass(eq=False, repr=False)
class LockTransactionAborted(LockError):
    """MongoDB aborted the transaction of `MongoLock.atomic`. Nothing was committed. The lock was held. Try again.

    Another client changed a document that the transaction wrote. Joining the queue changes the document of the lock.
    """

    key: str
    token: int | None = None
    reason: str = "a write conflict"
    text = "the transaction under lock {self.key!r} was aborted ({self.reason}), nothing was committed: try again"


@dataclass(eq=False, repr=False)
class StaleToken(LockError):
    """A write was refused because a later holder of the lock has already written. The later holder's token is larger.

    - token: fencing token of the refused write.
    - newest: token that was found.
    - field: name of the field that holds the token.
    - where: model or collection, and row or document in it ("" if unknown).
    """

    token: int
    newest: int | None = None
    field: str = "fencing_token"
    where: str = ""

    def _text(self) -> str:
        found = "a newer token" if self.newest is None else str(self.newest)
        where = f" in {self.where}" if self.where else ""
        return f"the fencing token {self.token} is stale: {self.field} holds {found}{where}, from a later holder"


class LockMisused(LockError):
    """A lock object was used in a way that its state does not allow, such as being acquired twice at once."""


@dataclass(eq=False, repr=False)
class LockBackendFailed(LockError):
    """MongoDB did not answer, or refused the command.

    The outcome of the command is then unknown. The library removes in the background what the command may have left.

    - passing: whether trying again may help.
    - waited: seconds spent waiting for a lock (0 if there was no wait).
    """

    problem: str
    key: str | None = None
    passing: bool = True
    waited = 0.0

    def _text(self) -> str:
        after = f"after {self.waited:.1f} s, " if self.waited >= 0.05 else ""
        return f"lock {self.key!r}: {after}{self.problem}" if self.key is not None else f"{after}{self.problem}"


@dataclass(eq=False, repr=False)
class LockDocumentDamaged(LockError):
    """The document of the key is damaged, or another program or a newer release wrote it.

    The document is not changed.
    """

    #: The beginning of `problem` if a newer release wrote the document and nothing is wrong with it.
    NEWER = "a newer release of django_mongolock wrote it"
    key: str
    problem: str = "it is not a lock document"

    def _text(self) -> str:
        cure = "Inspect it in mongosh, and delete it there if nothing else needs it"
        if self.problem.startswith(self.NEWER):
            cure = "Upgrade this process, and leave the document as it is: it may be held"
        return f"the document {self.key!r} in the locks collection cannot be used: {self.problem}. {cure}"


@dataclass(eq=False, repr=False)
class DocumentChanged(LockError):
    """The document has another version than the given one. Read the document again, and decide again."""

    collection: str
    id: Any
    given: int
    found: int
    text = "document {self.id!r} in {self.collection} has version {self.found}, not {self.given}: read it again"


class DocumentHeld(LockNotAcquired):
    """Another holder has the document.

    - holder: name of the holder.
    - since: moment when the holder took the document, by the server's clock (None if unknown).
    - state: state of the document.
    - retry_after: seconds after which a retry makes sense, about as long as the document has been held already.
    - stale_in: seconds until the document is stale if its holder has died (None if unknown).
    """

    def __init__(  # noqa: PLR0917 - as they pickle
        self,
        collection: str,
        id: Any,  # noqa: A002
        holder: str,
        state: str | None = None,
        since: datetime | None = None,
        retry_after: float = 0.0,
        stale_in: float | None = None,
    ) -> None:
        super().__init__(f"{collection}:{id}", holder=holder, retry_after=retry_after)
        self.args = (collection, id, holder, state, since, retry_after, stale_in)
        self.stale_in = stale_in
        self.collection = collection
        self.id = id
        self.state = state
        self.since = since

    def _text(self) -> str:
        since = f" since {self.since.isoformat()}" if self.since else ""
        return f"document {self.id!r} in {self.collection} is held by {self.holder!r}{since} ({self.state})"


@dataclass(eq=False, repr=False)
class DocumentDamaged(LockError):
    """A field of the document that the lock needs has a wrong value. The document is not changed."""

    collection: str
    id: Any
    problem: str
    text = "document {self.id!r} in {self.collection} cannot be locked: {self.problem}. Correct it first"


@dataclass(eq=False, repr=False)
class DocumentNotFound(LockError):
    """The document does not exist, or no longer does."""

    collection: str
    id: Any
    text = "there is no document {self.id!r} in {self.collection}"


class DocumentLockLost(LockLost):
    """The document was taken from its holder before the work was finished. Somebody cleared it as stale, or took it
    over.

    - found_holder, found_state: holder and state now. Both are None in a forked child, where no lock of the parent is
      held.
    - maybe_written: whether the write may have been done before. MongoDB did not answer, and the write was sent again.
    """

    text = "document {self.id!r} in {self.collection} was lost by the holder of version {self.version}: {self.reason}"

    def __init__(  # noqa: PLR0917 - as they pickle
        self,
        collection: str,
        id: Any,  # noqa: A002
        version: int,
        found_holder: str | None = None,
        found_state: str | None = None,
        reason: str = "",
        maybe_written: bool = False,
    ) -> None:
        now = f"held by {found_holder!r}" if found_holder else "free"
        why = reason or f"it is {now} now, in the state {found_state!r}"
        written = ". The write may have been done before: MongoDB did not answer the first time"
        super().__init__(f"{collection}:{id}", version, why + written * maybe_written)
        self.args = (collection, id, version, found_holder, found_state, reason, maybe_written)
        self.maybe_written = maybe_written
        self.collection = collection
        self.id = id
        self.version = version
        self.found_holder = found_holder
        self.found_state = found_state


@dataclass(eq=False, repr=False)
class DocumentRefused(LockError):
    """MongoDB refuses to write the document. The cause is its validator, a unique index, or a path of the changes that
    leads through a value without fields. Nothing was written."""

    collection: str
    id: Any
    problem: str
    text = "document {self.id!r} in {self.collection} was not written: {self.problem}. Correct it, or the changes"


@dataclass(eq=False, repr=False)
class VersionConflict(LockError):
    """An object was changed after it was read, and before it was written or deleted. Nothing was written.

    - what: model or collection.
    - pk: primary key.
    - read: version that was read (None if the object was never read).
    - stored: version in the database now (None if the object was deleted, or the database did not say).
    - changed: fields that differ, each with (value to be written, stored value). The message does not contain the
      values.
    """

    what: str
    pk: Any
    read: int | None
    stored: int | None = None
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    problem: str = "it was changed meanwhile"

    def _text(self) -> str:
        known = {"read": self.read, "stored": self.stored}
        versions = [f"{what} in version {version}" for what, version in known.items() if version is not None]
        differing = f"; different: {', '.join(self.changed)}" if self.changed else ""
        return f"{self.what} {self.pk!r} was not written, {self.problem}: {', '.join(versions) or 'gone'}{differing}"


__all__ = [name for name, value in list(globals().items()) if isinstance(value, type) and value.__module__ == __name__]
