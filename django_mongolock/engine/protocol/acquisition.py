"""One acquisition of one key, and the commands that are sent for it while it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..rule.document import Terms, entry
from ..rule.step import Step
from .actions import FOREVER, Apply, Read


@dataclass(frozen=True, slots=True)
class Acquisition:
    """One acquisition: its key, its id, its terms, and what its entry says besides (see `document.entry`).

    facts: who asks, for people. nested: its thread or task holds another lock, so that it may be part of a deadlock.
    whole: it begins with a whole lease (see `Options`).
    """

    key: str
    grant: str
    terms: Terms
    session: str = ""
    worker: str = ""
    process: str = ""
    facts: Mapping[str, str | int] = field(default_factory=dict)
    whole: bool = False
    nested: bool = False

    @property
    def entry(self) -> dict[str, Any]:
        return entry(self.grant, self.session, self.terms, self.facts, self.worker, process=self.process)

    def enter(self, trial: bool) -> Apply:
        return Apply(self.key, Step(ask=self.grant, add=self.entry, trial=trial))

    def resume(self, former: str, trial: bool) -> Apply:
        """Take the place of a grant of the same owner whose process is gone."""
        step = Step(ask=self.grant, add=self.entry, remove=(former,), force=True, resumes=True, trial=trial)
        return Apply(self.key, step)

    def confirm(self) -> Apply:
        return Apply(self.key, Step(ask=self.grant, renew=(self.grant,)))

    def give_up(self) -> Apply:
        return Apply(self.key, Step(ask=self.grant, remove=(self.grant,), force=True))

    def read(self) -> Read:
        return Read(self.key, self.grant, self.terms.owner)

    @property
    def enough(self) -> float:
        """How many seconds a grant must have left to be used before it is renewed."""
        return FOREVER if self.whole else self.terms.waiter_lease / 4
