"""The metrics of this process's locks, for any collector. They come from the signals alone.

Labels are few and bounded: the template of a key, never the key itself. Keys without a template, such as
``mongo_lock(f"order:{pk}")``, are counted as "other".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from django.dispatch import Signal

from .. import signals

OTHER: Final = "other"
#: Templates beyond this number are counted as "other", too: the project makes them from data.
MOST_TEMPLATES: Final = 500
#: Bounds of the histograms, in seconds: from a free lock to a job of an hour.
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3_600)

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Instrument:
    """A counter, a gauge, or a histogram of seconds."""

    kind: Kind
    help: str
    labels: tuple[str, ...] = ("template", "mode")


INSTRUMENTS: Final[Mapping[str, Instrument]] = {
    "acquired": Instrument("counter", "Locks that were acquired"),
    "contended": Instrument("counter", "Acquisitions that found the lock taken"),
    "not_acquired": Instrument(
        "counter", "Acquisitions that ended without the lock", ("template", "mode", "reason")
    ),
    "lost": Instrument("counter", "Locks that were lost before they were released"),
    "skipped": Instrument("counter", 'Calls that were skipped by on_contention="skip"', ("template",)),
    "forced": Instrument("counter", "Locks that this process took from their holders", ()),
    "stale_cleared": Instrument("counter", "Stale locks that this process cleared", ()),
    "conflicts": Instrument("counter", "Writes refused because what was read had changed meanwhile", ("what",)),
    "retries": Instrument("counter", "Attempts that a conflict ended, followed by another", ("what", "error")),
    "held": Instrument("gauge", "Locks that this process holds now"),
    "waiting": Instrument("gauge", "Acquisitions of this process that wait now"),
    "wait": Instrument(
        "histogram", "Seconds until a lock was acquired or its wait ended without it", ("template", "mode", "outcome")
    ),
    "hold": Instrument("histogram", "Seconds that a lock was held"),
}  # fmt: skip


class Metrics(ABC):
    """Receives the signals and changes the instruments, which a subclass provides."""

    def __init__(self) -> None:
        self._templates: set[str] = set()

    @abstractmethod
    def change(self, name: str, amount: float, **labels: str) -> None:
        """Add to a counter or a gauge, or record in a histogram."""

    def connect(self) -> None:
        """Connect to the signals."""
        for signal, receiver in self._receivers():
            signal.connect(receiver)

    def disconnect(self) -> None:
        """Disconnect from the signals."""
        for signal, receiver in self._receivers():
            signal.disconnect(receiver)

    def _receivers(self) -> list[tuple[Signal, Callable[..., None]]]:
        return [
            (signals.lock_contended, self._contended),
            (signals.lock_acquired, self._acquired),
            (signals.lock_not_acquired, self._not_acquired),
            (signals.lock_released, self._released),
            (signals.lock_lost, self._lost),
            (signals.lock_skipped, self._skipped),
            (signals.lock_forced, self._forced),
            (signals.stale_locks_cleared, self._cleared),
            (signals.version_conflict, self._conflict),
            (signals.conflict_retried, self._retried),
        ]

    def label(self, template: str) -> str:
        """The template of a key, or the name of a model or a collection, as a label."""
        if template not in self._templates and len(self._templates) < MOST_TEMPLATES:
            self._templates.add(template)
        return template if template and template in self._templates else OTHER

    def _contended(self, template: str, mode: str, **facts: Any) -> None:
        labels = {"template": self.label(template), "mode": mode}
        self.change("contended", 1, **labels)
        self.change("waiting", 1, **labels)

    def _acquired(self, template: str, mode: str, waited: float, contended: bool, **facts: Any) -> None:
        labels = {"template": self.label(template), "mode": mode}
        self.change("acquired", 1, **labels)
        self.change("wait", waited, outcome="acquired", **labels)
        self.change("held", 1, **labels)
        if contended:
            self.change("waiting", -1, **labels)

    def _not_acquired(
        self, template: str, mode: str, waited: float, contended: bool, reason: str, **facts: Any
    ) -> None:
        labels = {"template": self.label(template), "mode": mode}
        self.change("not_acquired", 1, reason=reason, **labels)
        self.change("wait", waited, outcome="not acquired", **labels)
        if contended:
            self.change("waiting", -1, **labels)

    def _released(self, template: str, mode: str, held: float, **facts: Any) -> None:
        labels = {"template": self.label(template), "mode": mode}
        self.change("held", -1, **labels)
        self.change("hold", held, **labels)

    def _lost(self, template: str, mode: str, held: float, **facts: Any) -> None:
        self._released(template=template, mode=mode, held=held)
        self.change("lost", 1, template=self.label(template), mode=mode)

    def _skipped(self, template: str, **facts: Any) -> None:
        self.change("skipped", 1, template=self.label(template))

    def _forced(self, **facts: Any) -> None:
        self.change("forced", 1)

    def _cleared(self, count: int, **facts: Any) -> None:
        self.change("stale_cleared", count)

    def _conflict(self, what: str, **facts: Any) -> None:
        self.change("conflicts", 1, what=self.label(what))

    def _retried(self, what: str, error: str, **facts: Any) -> None:
        self.change("retries", 1, what=self.label(what), error=error)
