"""The metrics of this process's locks, for any collector. They come from the signals alone.

Labels are few and bounded. The template of a key is a label, the key itself never is. Keys without a template, such as
``mongo_lock(f"order:{pk}")``, are counted as "other".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from django.dispatch import Signal

from .. import signals

OTHER: Final = "other"
#: The number of templates that are counted by name. Further templates are counted as "other", since the project makes
#: them from data.
MOST_TEMPLATES: Final = 500
#: Bounds of the histograms, in seconds: from a free lock to a job of an hour.
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3_600)

MetricKind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Instrument:
    """A counter, a gauge, or a histogram of seconds."""

    kind: MetricKind
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


#: The change of the instruments by each signal, as a number or as the name of the fact with the number. A caller that
#: found a free lock did not wait.
CHANGES: Final[Mapping[Signal, Mapping[str, float | str]]] = {
    signals.lock_contended: {"contended": 1, "waiting": 1},
    signals.lock_acquired: {"acquired": 1, "held": 1, "wait": "waited", "waiting": -1},
    signals.lock_not_acquired: {"not_acquired": 1, "wait": "waited", "waiting": -1},
    signals.lock_released: {"held": -1, "hold": "held"},
    signals.lock_lost: {"held": -1, "hold": "held", "lost": 1},
    signals.lock_skipped: {"skipped": 1},
    signals.lock_forced: {"forced": 1},
    signals.stale_locks_cleared: {"stale_cleared": "count"},
    signals.version_conflict: {"conflicts": 1},
    signals.conflict_retried: {"retries": 1},
}


class Metrics(ABC):
    """A receiver of the signals that changes the instruments. A subclass provides the instruments."""

    def __init__(self) -> None:
        self._templates: set[str] = set()

    @abstractmethod
    def change(self, name: str, amount: float, **labels: str) -> None:
        """Add to a counter or a gauge, or record in a histogram."""

    def connect(self) -> None:
        """Connect to the signals."""
        for signal in CHANGES:
            signal.connect(self._receive)

    def _receive(self, signal: Signal, **facts: Any) -> None:
        facts["outcome"] = "not acquired" if signal is signals.lock_not_acquired else "acquired"
        for name, amount in CHANGES[signal].items():
            if name != "waiting" or facts["contended"]:
                labels = {label: self._bounded(label, facts[label]) for label in INSTRUMENTS[name].labels}
                self.change(name, facts[amount] if isinstance(amount, str) else amount, **labels)

    def _bounded(self, label: str, value: str) -> str:
        """Return the value of a label, or "other" for a value without a name, such as a key without a template, or
        beyond the limit.
        """
        if label not in ("template", "what"):
            return value
        if value not in self._templates and len(self._templates) < MOST_TEMPLATES:
            self._templates.add(value)
        return value if value and value in self._templates else OTHER
