"""OpenTelemetry metrics and spans of this process's locks.

Put ``"django_mongolock.contrib.opentelemetry.OpenTelemetryConfig"`` into INSTALLED_APPS. Needs
``django-mongolock[opentelemetry]``, and an SDK that is set up.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from django.apps import AppConfig
from opentelemetry import metrics, trace
from opentelemetry.trace import Span, Status, StatusCode

from .. import signals
from .metrics import BUCKETS, INSTRUMENTS, Instrument, Metrics

__all__ = ["LockSpans", "OpenTelemetryConfig", "OpenTelemetryMetrics"]

_NAME = "django_mongolock"


class OpenTelemetryMetrics(Metrics):
    """The instruments ``mongolock.acquired``, ``mongolock.wait`` and so on, with attributes such as
    ``mongolock.template``. Without *provider*, they use the global one.
    """

    def __init__(self, provider: metrics.MeterProvider | None = None) -> None:
        super().__init__()
        self._meter = metrics.get_meter(_NAME, version("django-mongolock"), meter_provider=provider)
        self._instruments = {name: self._make(name, instrument) for name, instrument in INSTRUMENTS.items()}

    def _make(self, name: str, instrument: Instrument) -> Any:
        name = f"mongolock.{name}"
        if instrument.kind == "counter":
            return self._meter.create_counter(name, "1", instrument.help)
        if instrument.kind == "gauge":
            return self._meter.create_up_down_counter(name, "1", instrument.help)
        return self._meter.create_histogram(
            name, "s", instrument.help, explicit_bucket_boundaries_advisory=list(BUCKETS)
        )

    def change(self, name: str, amount: float, **labels: str) -> None:
        """See Metrics.change()."""
        attributes = {f"mongolock.{label}": value for label, value in labels.items()}
        instrument = self._instruments[name]
        record = instrument.record if INSTRUMENTS[name].kind == "histogram" else instrument.add
        record(amount, attributes)


class LockSpans:
    """A span for each wait and for each hold of a lock, as children of the span that acquires the lock.

    The span of a wait is made when the wait is over. A lock that was free has no span for a wait. The span of a lock
    that was lost or not acquired has the status ERROR.
    """

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer(_NAME, version("django-mongolock"), tracer_provider=provider)
        self._held: dict[tuple[str, str, int], Span] = {}

    def connect(self) -> None:
        """Connect to the signals."""
        signals.lock_acquired.connect(self._acquired)
        signals.lock_not_acquired.connect(self._not_acquired)
        signals.lock_released.connect(self._ended)
        signals.lock_lost.connect(self._lost)

    def _acquired(self, using: str, key: str, token: int, **facts: Any) -> None:
        if facts["contended"]:
            self._waited(**facts).end()
        span = self._start("hold", **facts)
        span.set_attribute("mongolock.token", token)
        self._held[using, key, token] = span

    def _not_acquired(self, reason: str, **facts: Any) -> None:
        span = self._waited(**facts)
        span.set_status(Status(StatusCode.ERROR, reason))
        span.end()

    def _ended(self, using: str, key: str, token: int, **facts: Any) -> None:
        if (span := self._held.pop((using, key, token), None)) is not None:
            span.end()

    def _lost(self, using: str, key: str, token: int, reason: str, **facts: Any) -> None:
        if (span := self._held.get((using, key, token))) is not None:
            span.set_status(Status(StatusCode.ERROR, reason))
            self._ended(using, key, token)

    def _waited(self, waited: float, **facts: Any) -> Span:
        return self._start("wait", time.time_ns() - round(waited * 1e9), **facts)

    def _start(self, what: str, start: int | None = None, *, template: str, mode: str, **facts: Any) -> Span:
        attributes = {"mongolock.template": template, "mongolock.mode": mode}
        return self._tracer.start_span(f"{what} {template or 'lock'}", start_time=start, attributes=attributes)


class OpenTelemetryConfig(AppConfig):
    """Metrics and spans from the start of the process on, for the global providers.

    For only one of them, or for other providers, ``connect()`` an `OpenTelemetryMetrics` or `LockSpans` in your own
    AppConfig instead, and keep a reference to it.
    """

    name = "django_mongolock.contrib.opentelemetry"
    label = "mongolock_opentelemetry"

    def ready(self) -> None:
        self.metrics = OpenTelemetryMetrics()
        self.metrics.connect()
        self.spans = LockSpans()
        self.spans.connect()
