"""The metrics of this process's locks in Prometheus and OpenTelemetry."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from django_mongolock import SKIPPED, LockLost, LockNotAcquired, mongo_lock, mongo_locked, mongo_semaphore, signals
from django_mongolock.contrib.metrics import INSTRUMENTS, MOST_TEMPLATES
from django_mongolock.contrib.opentelemetry import LockSpans, OpenTelemetryMetrics
from django_mongolock.contrib.prometheus import PrometheusMetrics
from django_mongolock.exceptions import VersionConflict
from django_mongolock.keys import lock_key
from django_mongolock.testing import MemoryLocks
from django_mongolock.versions import retry_on_conflict
from django_mongolock.versions.checking import lost_race
from testproject.rates.models import Rate
from testproject.shop.models import Order
from tests.support.programs import python
from tests.support.waiting import eventually

Number = Callable[..., float]


@pytest.fixture(params=["prometheus", "opentelemetry"])
def number(request: pytest.FixtureRequest, mongolock: MemoryLocks) -> Number:
    """Return a function such as number("acquired", template="a"). The result is the value of the instrument, or the
    count of a histogram."""
    if request.param == "prometheus":
        registry = CollectorRegistry()
        metrics: Any = PrometheusMetrics(registry)

        def number(name: str, **labels: str) -> float:
            found = {"counter": "_total", "gauge": "", "histogram": "_seconds_count"}[INSTRUMENTS[name].kind]
            return registry.get_sample_value(f"mongolock_{name}{found}", labels) or 0

    else:
        reader = InMemoryMetricReader()
        metrics = OpenTelemetryMetrics(MeterProvider([reader]))

        def number(name: str, **labels: str) -> float:
            wanted = {f"mongolock.{label}": value for label, value in labels.items()}
            data: Any = reader.get_metrics_data()
            for metric in data.resource_metrics[0].scope_metrics[0].metrics if data else ():
                for point in metric.data.data_points:
                    if metric.name == f"mongolock.{name}" and dict(point.attributes) == wanted:
                        return float(point.count if hasattr(point, "count") else point.value)
            return 0

    metrics.connect()
    number.metrics = metrics  # type: ignore[attr-defined]  # signals hold it weakly
    return number


EXCLUSIVE = {"mode": "exclusive"}


class TestNumbers:
    def test_a_free_lock(self, number: Number) -> None:
        labels = {"template": "order:{pk}", **EXCLUSIVE}
        with mongo_lock(lock_key("order:{pk}", pk=5)):
            assert number("held", **labels) == 1
            assert number("hold", **labels) == 0
        assert number("held", **labels) == 0
        assert number("acquired", **labels) == number("hold", **labels) == 1
        assert number("wait", outcome="acquired", **labels) == 1
        assert number("contended", **labels) == number("waiting", **labels) == 0

    def test_a_busy_lock(self, number: Number, mongolock: MemoryLocks) -> None:
        labels = {"template": "order:{pk}", **EXCLUSIVE}
        key = lock_key("order:{pk}", pk=5)
        with mongolock.hold(key):
            assert not mongo_lock(key).try_acquire()
            with pytest.raises(LockNotAcquired):
                mongo_lock(key, wait=100).acquire()
        assert number("contended", **labels) == 2
        assert number("not_acquired", reason="busy", **labels) == 2
        assert number("wait", outcome="not acquired", **labels) == 2
        assert number("waiting", **labels) == number("acquired", **labels) == number("held", **labels) == 0

    def test_a_wait(self, number: Number, mongolock: MemoryLocks) -> None:
        labels = {"template": "other", **EXCLUSIVE}
        held = mongolock.hold("a")
        thread = threading.Thread(target=lambda: mongo_lock("a").acquire().release())
        thread.start()
        assert eventually(lambda: number("waiting", **labels) == 1)
        held.release()
        thread.join(10)
        assert number("waiting", **labels) == 0
        assert number("acquired", **labels) == number("contended", **labels) == 1

    def test_a_loss(self, number: Number, mongolock: MemoryLocks) -> None:
        labels = {"template": "other", **EXCLUSIVE}
        with pytest.raises(LockLost), mongo_lock("a"):
            mongolock.lose("a")
        assert number("lost", **labels) == number("hold", **labels) == 1
        assert number("held", **labels) == 0

    def test_conflicts_and_retries(self, number: Number) -> None:
        """Conflicts are counted by the model of the write. An error of the database itself does not name the model."""
        errors = [OperationalError(1213, "Deadlock found"), lost_race(Rate(pk="EUR"), 1), lost_race(Rate(pk="EUR"), 1)]

        @retry_on_conflict(attempts=3, backoff=0.001)
        def work() -> None:
            raise errors.pop(0)

        with pytest.raises(VersionConflict):
            work()
        assert number("conflicts", what="rates.Rate") == 2
        assert number("retries", what="rates.Rate", error="VersionConflict") == 1
        assert number("retries", what="other", error="OperationalError") == 1

    @pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:the test has left locks behind")
    def test_a_lock_that_was_not_released(self, number: Number) -> None:
        """The gauge comes back to zero, however a lock ends."""
        mongo_lock("a").acquire()
        assert eventually(lambda: number("held", template="other", **EXCLUSIVE) == 0)

    def test_a_skip(self, number: Number, mongolock: MemoryLocks) -> None:
        @mongo_locked("order:{pk}", wait=0, on_contention="skip")
        def work(pk: int) -> int:
            return pk

        mongolock.hold("order:5")
        assert work(5) is SKIPPED
        assert work(6) == 6
        assert number("skipped", template="order:{pk}") == 1

    def test_clearing_up(self, number: Number) -> None:
        signals.send(signals.lock_forced, key="a", using="mongo")
        signals.send(signals.stale_locks_cleared, count=5, using="mongo")
        assert number("forced") == 1
        assert number("stale_cleared") == 5

    @pytest.mark.parametrize(
        ("make", "template", "mode"),
        [
            (lambda: mongo_lock("order:5"), "other", "exclusive"),
            (lambda: mongo_lock(Order(pk=5)), "shop.order:{pk}", "exclusive"),
            (lambda: mongo_lock("a", mode="shared"), "other", "shared"),
            (lambda: mongo_semaphore(lock_key("gpu:{n}", n=1), 2), "gpu:{n}", "semaphore"),
        ],
        ids=["ad hoc", "instance", "shared", "semaphore"],
    )
    def test_labels_never_hold_a_key(self, number: Number, make: Callable[[], Any], template: str, mode: str) -> None:
        with make():
            assert number("held", template=template, mode=mode) == 1

    def test_a_decorated_function(self, number: Number) -> None:
        """A decorated function without a template uses its name as the template, because all its calls share one
        key."""

        @mongo_locked()
        def nightly() -> None: ...

        @mongo_locked("a:{x}", "b:{x}")
        def two(x: int) -> None: ...

        nightly()
        two(1)
        name = f"{__name__}.TestNumbers.test_a_decorated_function.<locals>.nightly"
        for template in (name, "a:{x}", "b:{x}"):
            assert number("acquired", template=template, **EXCLUSIVE) == 1

    def test_labels_are_bounded(self, number: Number) -> None:
        for pk in range(MOST_TEMPLATES + 5):
            signals.send(signals.lock_skipped, key="k", template=f"order:{pk}", reason="")
        assert number("skipped", template="other") == 5


class TestSpans:
    @pytest.fixture
    def provider(self) -> TracerProvider:
        return TracerProvider()

    @pytest.fixture
    def ended(self, provider: TracerProvider, mongolock: MemoryLocks) -> Iterator[Callable[[], list[ReadableSpan]]]:
        exporter = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        spans = LockSpans(provider)
        spans.connect()
        yield lambda: list(exporter.get_finished_spans())
        assert spans._held == {}

    def test_a_free_lock(self, provider: TracerProvider, ended: Callable[[], list[ReadableSpan]]) -> None:
        """The span of a hold is below the caller's span, with the template and without the key."""
        with provider.get_tracer("test").start_as_current_span("view"), mongo_lock(lock_key("order:{pk}", pk=4711)):
            pass
        hold, view = ended()
        assert (hold.name, view.name) == ("hold order:{pk}", "view")
        assert hold.parent is not None
        assert hold.parent.span_id == view.context.span_id
        assert hold.attributes is not None
        assert dict(hold.attributes).keys() == {"mongolock.template", "mongolock.mode", "mongolock.token"}
        assert "4711" not in hold.to_json()

    def test_a_wait(self, mongolock: MemoryLocks, ended: Callable[[], list[ReadableSpan]]) -> None:
        mongolock.hold("a", lease=20).die()
        with mongo_lock("a", wait=60):
            pass
        wait, hold = ended()
        assert (wait.name, hold.name) == ("wait lock", "hold lock")
        assert wait.start_time is not None
        assert wait.end_time is not None
        assert 20 < (wait.end_time - wait.start_time) / 1e9 < 30

    def test_lost(self, mongolock: MemoryLocks, ended: Callable[[], list[ReadableSpan]]) -> None:
        lock = mongo_lock("a").acquire()
        mongolock.lose("a")
        lock.release()
        (hold,) = ended()
        assert hold.status.status_code is StatusCode.ERROR
        assert "taken away" in (hold.status.description or "")


class TestActivation:
    def run(self, app: str, code: str, tmp_path: Path) -> str:
        (tmp_path / "chosen.py").write_text(
            f"SECRET_KEY = 'x'\nINSTALLED_APPS = ['django_mongolock', '{app}']\n"
            "MONGOLOCK = {'BACKEND': 'django_mongolock.testing.memory.MemoryLockBackend'}\n"
        )
        (tmp_path / "code.py").write_text(
            f"import django; django.setup()\nfrom django_mongolock import mongo_lock\n{code}"
        )
        path = f"{Path(__file__).resolve().parent.parent}:{tmp_path}"
        return python(str(tmp_path / "code.py"), PYTHONPATH=path, DJANGO_SETTINGS_MODULE="chosen")

    @pytest.mark.long
    def test_prometheus(self, tmp_path: Path) -> None:
        code = "import prometheus_client as p\nwith mongo_lock('a'): print(p.generate_latest().decode())"
        found = self.run("django_mongolock.contrib.prometheus.PrometheusConfig", code, tmp_path)
        assert 'mongolock_held{mode="exclusive",template="other"} 1.0' in found

    @pytest.mark.long
    def test_opentelemetry(self, tmp_path: Path) -> None:
        """Measurements reach a provider that is set later, as by `opentelemetry-instrument`."""
        code = """
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
reader = InMemoryMetricReader()
set_meter_provider(MeterProvider([reader]))
with mongo_lock('a'): print(reader.get_metrics_data().to_json())
"""
        found = self.run("django_mongolock.contrib.opentelemetry.OpenTelemetryConfig", code, tmp_path)
        assert '"mongolock.held"' in found


def test_a_collector_that_fails_breaks_no_lock(
    mongolock: MemoryLocks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure of a collector is logged by Django, once for each event."""
    metrics = PrometheusMetrics(CollectorRegistry())
    monkeypatch.setattr(metrics, "change", lambda *args, **labels: 1 / 0)
    metrics.connect()
    with caplog.at_level(logging.ERROR), mongo_lock("a") as lock:
        assert lock.held
    assert [record.name for record in caplog.records] == ["django.dispatch"] * 2
    mongolock.assert_free()


class TestLogging:
    """Log lines have their facts as text and as fields."""

    def test_a_life(self, mongolock: MemoryLocks, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "django_mongolock")
        mongolock.hold("b")
        caplog.clear()
        assert not mongo_lock("b").try_acquire()
        with pytest.raises(LockLost), mongo_lock(lock_key("order:{pk}", pk=5)):
            mongolock.lose("order:5")
        told = [(record.levelname, record.getMessage()) for record in caplog.records]
        assert [level for level, _ in told] == ["DEBUG", "DEBUG", "DEBUG", "WARNING"]
        texts = [text for _, text in told]
        assert texts[0].startswith('lock contended key=b holder="another process')
        assert texts[1].startswith('lock not acquired key=b holder="another process')
        assert texts[1].endswith(" reason=busy")
        assert texts[2].startswith("lock acquired key=order:5 template=order:{pk} token=")
        assert texts[3].startswith("lock lost key=order:5 template=order:{pk} token=")
        fields: Any = caplog.records[3]
        assert (fields.lock_key, fields.lock_template) == ("order:5", "order:{pk}")
        assert isinstance(fields.lock_token, int)
        assert "taken away" in fields.lock_reason
        assert fields.funcName == "_report"
