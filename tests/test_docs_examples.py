"""The examples of docs/howto/testing.md and docs/howto/monitoring.md, as a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from django.apps import AppConfig
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from django_mongolock import LockLost, mongo_lock, signals
from django_mongolock.contrib.prometheus import PrometheusMetrics
from django_mongolock.testing import MemoryLocks
from testproject import shop

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = """
SECRET_KEY = "x"
INSTALLED_APPS = ["django_mongolock"]
MONGOLOCK = {"DATABASE": "locks", "KEY_PREFIX": "shop:"}
DATABASES = {
    "default": {},
    "locks": {"ENGINE": "django_mongodb_backend", "HOST": "mongodb://127.0.0.1:9/", "NAME": "nobody"},
}
"""


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with the files that docs/howto/testing.md shows. Its MongoDB is not there."""
    for block in blocks("howto/testing.md"):
        name = re.match(r"# (\S+\.py)\n", block)
        assert name is not None, block
        (tmp_path / name[1]).write_text(block)
    (tmp_path / "settings.py").write_text(SETTINGS)
    return tmp_path


def run(project: Path, *arguments: str) -> str:
    environment = {"PYTHONPATH": f"{ROOT}:{project}", "DJANGO_SETTINGS_MODULE": "settings", "PATH": ""}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
def test_the_examples_for_pytest(project: Path) -> None:
    """All of docs/howto/testing.md, without any database; the plugin is there if the package is installed."""
    installed = any(point.value == "django_mongolock.pytest_plugin" for point in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "django_mongolock.pytest_plugin"]
    told = run(project, "-m", "pytest", "-q", "-W", "error", "-p", "no:asyncio", "-p", "no:cacheprovider", *plugin)
    assert "7 passed" in told


@pytest.mark.long
def test_the_examples_for_unittest(project: Path) -> None:
    """With Django's own test runner."""
    assert "Ran 2 tests" in run(project, "-m", "django", "test", "test_with_unittest")


def test_the_plugin_is_an_entry_point() -> None:
    """What pytest looks for in an installed package."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert declared == {"mongolock": "django_mongolock.pytest_plugin"}


def test_every_metric_of_the_page_exists(mongolock: MemoryLocks) -> None:
    """And every metric is on the page."""
    registry = CollectorRegistry()
    PrometheusMetrics(registry)
    shown = generate_latest(registry).decode()
    families = set(re.findall(r"# TYPE (\w+)", shown))
    page = set(re.findall(r"\bmongolock_\w+", (ROOT / "docs" / "howto/monitoring.md").read_text()))
    named = {re.sub(r"_(bucket|count|sum)$", "", name) for name in page}
    assert named == {name for name in families if not name.endswith("_created")}


def test_the_apps_of_the_page() -> None:
    """Each line for INSTALLED_APPS adds one app."""
    prometheus, _collector, opentelemetry, *_ = blocks("howto/monitoring.md")
    namespace: dict[str, Any] = {"INSTALLED_APPS": []}
    exec(prometheus + opentelemetry, namespace)  # noqa: S102
    labels = [AppConfig.create(entry).label for entry in namespace["INSTALLED_APPS"]]
    assert labels == ["mongolock_prometheus", "mongolock_opentelemetry"]


def test_the_spans_of_the_page(mongolock: MemoryLocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to the global provider."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    *_, spans, _ = blocks("howto/monitoring.md")
    namespace: dict[str, Any] = {"__name__": "docs_monitoring"}
    exec(spans, namespace)  # noqa: S102
    config = namespace["ShopConfig"]("shop", shop)
    config.ready()
    with mongo_lock("a"):
        pass
    assert [span.name for span in exporter.get_finished_spans()] == ["hold lock"]


def test_the_receiver_of_the_page(mongolock: MemoryLocks, capsys: pytest.CaptureFixture[str]) -> None:
    *_, block = blocks("howto/monitoring.md")
    namespace: dict[str, Any] = {}
    exec(block, namespace)  # noqa: S102
    with pytest.raises(LockLost), mongo_lock("a"):
        mongolock.lose("a")
    assert capsys.readouterr().out.startswith("lock a was lost: it was taken away")


def test_every_signal_is_on_the_page() -> None:
    page = (ROOT / "docs" / "reference/signals.md").read_text()
    names = [name for name, value in vars(signals).items() if type(value).__name__ == "Signal"]
    assert len(names) == 11
    assert [name for name in names if f"`{name}`" not in page] == []
