"""What the steps of a document lock need of it: where its documents are, by which rules, and who sends the commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .rules import Rules
from .sender import Sender
from .source import Source


@dataclass(frozen=True, slots=True)
class Context:
    """The source of the documents, the rules of their lock, and the sender of its commands."""

    source: Source
    rules: Rules
    sender: Sender

    @property
    def name(self) -> str:
        """The collection, for people."""
        return self.source.name

    def check_changes(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return *changes* as they are stored, if they touch no field of the lock. Raises TypeError, ValueError."""
        return self.rules.check_changes(self.source.changes(changes))
