"""What a flow writes to the document that it holds, and how it knows its own writes again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..exceptions import (
    DocumentChanged,
    DocumentDamaged,
    DocumentLockLost,
    DocumentNotFound,
    DocumentRefused,
    LockError,
)
from . import updates
from .commands import Refusal, read_whole, write_one
from .lock_context import Context
from .rules import LAST_VERSION
from .steps import Doubt, Steps, get_path, read_state, send
from .updates import Acquisition, Document, Statement


class OwnWrites:
    """The writes of one flow to one document, each with an id of its own (an attempt).

    document: as the last of them left it; raw. version: that of the document then. pending: the state that its
    acquisition set.
    """

    def __init__(self, context: Context, acquisition: Acquisition, document: Document) -> None:
        fields = context.rules.fields
        self.document = document
        self.id: Any = document["_id"]
        self.owner = acquisition.owner
        self.pending: str = get_path(document, fields.state)
        self.version: int = int(get_path(document, fields.version))
        self._context = context
        self._rules = context.rules
        #: What may stand in the document: the id and the version of the last write that is known to be done, and those
        #: of later ones whose outcome is unknown.
        self._known = {(acquisition.attempt, self.version)}

    @property
    def in_doubt(self) -> bool:
        """Whether there is a write whose outcome is unknown."""
        return len(self._attempts()) > 1

    @property
    def failed(self) -> str:
        """The failed state that belongs to the pending one."""
        return self._rules.pending[self.pending]

    def write(self, changes: Mapping[str, Any], more: Document, *, renew: bool = False) -> Steps[None]:
        """Write, if the document is still as we left it, or as a write of ours left it whose outcome is unknown.

        The id of this very write shows whether it was done where the answer was lost, and refuses late copies of
        earlier writes. Raises DocumentRefused, DocumentDamaged, and what `why_not` returns.
        """
        attempt, doubt = updates.new_attempt(), Doubt()
        statement = self.writing(attempt, changes, more, renew=renew)
        known, mine = self._known, {(attempt, version + bool(changes)) for _, version in self._known}
        self._known = known | mine
        answer = yield from send(write_one(statement), doubt)
        if answer is None and doubt.remains:  # perhaps the copy that was not answered was done
            answer = yield from send(read_whole(self.id))
            if answer is None or get_path(answer, self._rules.fields.attempt) != attempt:
                raise self.why_not(answer, maybe_written=True)
        elif answer is None or isinstance(answer, Refusal):
            self._known = known  # it was certainly not done
            if isinstance(answer, Refusal):
                raise DocumentRefused(self._context.name, self.id, str(answer))
            raise self.why_not((yield from send(read_whole(self.id))))
        self._accept(answer, mine)

    def writing(
        self, attempt: str, changes: Mapping[str, Any], more: Mapping[str, Any], *, renew: bool = False
    ) -> Statement:
        """Return the update that makes a write. Raises DocumentDamaged."""
        rules = self._rules
        if changes and self.version >= LAST_VERSION - 1:
            raise DocumentDamaged(self._context.name, self.id, "its version is too large")
        update = updates.writing(rules, attempt, changes, more)
        if renew:
            update["$currentDate"] = {rules.fields.time: True}
        return Statement(self.id, updates.is_held(rules, self.owner, self._known), update)

    def failing(self, attempt: str | None = None) -> Statement:
        """Return the update that sets the failed state, whatever the version is."""
        update = updates.writing(
            self._rules, attempt or updates.new_attempt(), {}, updates.releasing(self._rules, self.failed)
        )
        return Statement(
            self.id, updates.is_held_in_any_version(self._rules, self.owner, list(self._attempts())), update
        )

    def may_have_written(self, attempt: str) -> None:
        """Note a write that changes no version."""
        self._known = self._known | {(attempt, version) for _, version in self._known}

    def why_not(self, found: Document | None, *, maybe_written: bool = False) -> LockError:
        """Return why a write was not done to the document, which was *found* like this afterwards."""
        name, seen = self._context.name, read_state(self._rules, found) if found is not None else None
        if seen is None:
            return DocumentNotFound(name, self.id)
        if seen.damage:
            return DocumentDamaged(name, self.id, seen.damage)
        if seen.holder == self.owner and seen.attempt in self._attempts():
            return DocumentChanged(name, self.id, self.version, seen.version)
        return DocumentLockLost(name, self.id, self.version, seen.holder, seen.state, maybe_written=maybe_written)

    def _accept(self, document: Document, mine: set[tuple[str, int]]) -> None:
        """The write was done: *mine* is how it may have left the document."""
        found = read_state(self._rules, document)
        exact = {(attempt, version) for attempt, version in mine if version == found.version}
        self._known = exact or mine  # none: another writer has raised the version already
        self.document = document
        self.version = max(version for _, version in self._known)

    def _attempts(self) -> set[str]:
        return {attempt for attempt, _ in self._known}
