"""Prometheus metrics of this process's locks.

Put ``"django_mongolock.contrib.prometheus.PrometheusConfig"`` into INSTALLED_APPS, and expose the metrics like your
other ones. Needs ``django-mongolock[prometheus]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from django.apps import AppConfig
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from .metrics import BUCKETS, INSTRUMENTS, Instrument, Metrics

__all__ = ["PrometheusConfig", "PrometheusMetrics"]

#: With PROMETHEUS_MULTIPROC_DIR, a gauge is the sum over running processes. Processes that have ended hold nothing.
_LIVE: Final = "livesum"


class PrometheusMetrics(Metrics):
    """The instruments in a registry, named ``mongolock_acquired_total``, ``mongolock_wait_seconds`` and so on."""

    def __init__(self, registry: CollectorRegistry = REGISTRY, buckets: Sequence[float] = BUCKETS) -> None:
        super().__init__()
        self._registry = registry
        self._buckets = buckets
        self._collectors = {name: self._make(name, instrument) for name, instrument in INSTRUMENTS.items()}

    def _make(self, name: str, instrument: Instrument) -> Any:
        name = f"mongolock_{name}"
        text, labels, registry = instrument.help, instrument.labels, self._registry
        if instrument.kind == "counter":
            return Counter(name, text, labels, registry=registry)
        if instrument.kind == "gauge":
            return Gauge(name, text, labels, registry=registry, multiprocess_mode=_LIVE)
        return Histogram(f"{name}_seconds", text, labels, registry=registry, buckets=self._buckets)

    def change(self, name: str, amount: float, **labels: str) -> None:
        """See Metrics.change()."""
        collector = self._collectors[name]
        child = collector.labels(**labels) if labels else collector
        child.observe(amount) if INSTRUMENTS[name].kind == "histogram" else child.inc(amount)


class PrometheusConfig(AppConfig):
    """Metrics from the start of the process on, in the default registry.

    For another registry or other buckets, call ``PrometheusMetrics(registry, buckets).connect()`` in your own AppConfig
    instead, and keep a reference to it.
    """

    name = "django_mongolock.contrib.prometheus"
    label = "mongolock_prometheus"

    def ready(self) -> None:
        self.metrics = PrometheusMetrics()
        self.metrics.connect()
