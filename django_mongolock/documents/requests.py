"""What a caller asks of a document lock, checked before anything is sent."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from typing import Any

from ..engine.text_checks import tidy_fact
from ..exceptions import DocumentDamaged
from . import updates
from .hold import PendingState
from .holding import FinalState
from .rules import Rules, check_version
from .snapshot import DocumentSnapshot
from .source import Source
from .updates import Acquisition, Request


class Requests:
    """Makes requests of the arguments of callers. Raises TypeError and ValueError that name the cure."""

    def __init__(self, source: Source, rules: Rules) -> None:
        self._source = source
        self._rules = rules

    def make(self, document: Any, pending: PendingState, changes: dict[str, Any]) -> Request:
        """Return the request for a document as the caller has read it, or for (id, version)."""
        id_, version = self._reference(document)
        if callable(pending):
            if isinstance(document, (tuple, DocumentSnapshot)):
                raise TypeError("a function for pending= needs the document as you have read it")
            pending = pending(document)
        return Request(id_, version, self._rules.check_pending(pending), changes)

    def attempt(self, owner: str | None) -> Acquisition:
        """Return an attempt to acquire documents, with names of this process: make it when it is sent."""
        name = owner or tidy_fact(f"{secrets.token_hex(12)}/{socket.gethostname()}/{os.getpid()}")
        return Acquisition(name[: self._rules.longest_owner], updates.new_attempt())

    def check_changes(self, changes: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return *changes* as they are stored, if they touch no field of the lock."""
        return self._rules.check_changes(self._source.changes(changes or {}))

    def check_final(self, final: FinalState) -> FinalState:
        """Return *final*, if it is declared; what a function returns is checked when it is called."""
        return final if final is None or callable(final) else self._rules.check_final(final)

    def _reference(self, document: Any) -> tuple[Any, int]:
        if isinstance(document, DocumentSnapshot):
            return document.id, document.version
        if isinstance(document, tuple):
            if len(document) != 2:
                raise TypeError("pass the document as you have read it, or (id, version)")
            return self._source.key(document[0]), check_version(document[1])
        key, field = self._source.key(document), self._rules.fields.version
        version = self._source.read(document, field)
        if version is None:
            return key, 0  # a document that never had a version
        if isinstance(version, bool) or not isinstance(version, int):
            problem = f"its field {field!r} is {type(version).__name__}, not a whole number"
            raise DocumentDamaged(self._source.name, key, problem)
        return key, check_version(version)
