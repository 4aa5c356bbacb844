"""What the page of all document locks shows: which documents of which lock, and what a row submits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from bson import json_util
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..documents import DocumentLock, DocumentQuerySet, DocumentSnapshot, declared
from ..documents.snapshot import as_rows
from ..exceptions import LockError
from ..inspection import display
from ..inspection.snapshot import State

#: How many documents of each lock the page shows; and how many if it shows one lock.
SHOWN: Final = 20
SHOWN_OF_ONE: Final = 100

STATES: Final = {
    "all": gettext_lazy("All"),
    "held": gettext_lazy("Held"),
    "stale": gettext_lazy("Stale"),
    "damaged": gettext_lazy("Damaged"),
}


@dataclass(frozen=True)
class Shown:
    """A document on a page, with what its form submits and the address of its page."""

    lock: DocumentLock[Any]
    document: DocumentSnapshot
    address: str = ""

    @property
    def value(self) -> str:
        """The document and its holder in a form."""
        return json.dumps([self.lock.name, json_util.dumps(self.document.id), self.document.holder])

    @property
    def left(self) -> str:
        """In what time it is stale, or for how long it has been."""
        left = self.document.left
        if left is None:
            return "–"
        return (_("in %s") if left > 0 else _("for %s")) % display.duration(left)


@dataclass(frozen=True)
class Section:
    """The documents of one lock that the page shows. error: why they could not be read."""

    lock: DocumentLock[Any]
    documents: Sequence[DocumentSnapshot] = ()
    more: bool = False
    error: LockError | None = None
    rows: Sequence[Shown] = ()

    def of(self, state: State) -> list[DocumentSnapshot]:
        """Those in this state."""
        return [document for document in self.documents if document.lock_state is state]

    @property
    def has_stale(self) -> bool:
        return bool(self.of(State.STALE))

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        found = {state.value: list(as_rows(self.of(state))) for state in (State.HELD, State.STALE, State.DAMAGED)}
        error = None if self.error is None else str(self.error)
        return {"lock": self.lock.name, **found, "more": self.more, "error": error}


class Choice:
    """What the address of the page chooses: one lock or all, a state, an owner."""

    def __init__(self, request: HttpRequest) -> None:
        self.lock = request.GET.get("lock", "")
        state = request.GET.get("state", "all")
        self.state = state if state in STATES else "all"
        self.owner = request.GET.get("owner", "").strip()

    @property
    def locks(self) -> list[DocumentLock[Any]]:
        return [lock for lock in declared() if self.lock in ("", lock.name)]

    def querysets(self, lock: DocumentLock[Any]) -> Iterator[DocumentQuerySet]:
        """Where the documents are to be found, one after the other."""
        if self.state in ("all", "held", "stale"):
            found = {"all": lock.at_work, "held": lock.held, "stale": lock.stale}[self.state]()
            yield found.owned_by(self.owner) if self.owner else found
        if self.state in ("all", "damaged") and not self.owner:
            yield lock.damaged()

    def section(self, lock: DocumentLock[Any]) -> Section:
        """Read the first documents of a lock."""
        most = SHOWN_OF_ONE if self.lock else SHOWN
        found: list[DocumentSnapshot] = []
        try:
            for queryset in self.querysets(lock):
                found += queryset[: most + 1 - len(found)]
        except LockError as error:
            return Section(lock, error=error)
        return Section(lock, found[:most], more=len(found) > most)

    def links(self) -> Iterator[tuple[str, Any, bool]]:
        """The filters of the state: address, word, whether it is chosen."""
        for state, word in STATES.items():
            yield address(lock=self.lock, owner=self.owner, state=state), word, state == self.state


def address(**parameters: str) -> str:
    """The part of the page's address behind its path."""
    return "?" + urlencode({name: value for name, value in parameters.items() if value})
