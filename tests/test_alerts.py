"""The documented alerts for Prometheus and the dashboard for Grafana are loaded, and evaluated by promtool."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from django_mongolock.contrib.prometheus import PrometheusMetrics
from tests import parts
from tests.docs.pages import blocks
from tests.support.lock_documents import Locks, entry, now, waiter
from tests.support.lock_fixtures import WITH_MONGO

FOLDER = Path(__file__).resolve().parents[1] / "docs/howto/monitoring"
RULES = FOLDER / "alerts.yml"
WITH_PROMTOOL = parts.needs("promtool")

#: The series for each alert, one value a minute. The alert fires after the first number of minutes, but not before the
#: second.
FIRING = {
    "LockLost": ({'mongolock_lost_total{template="a"}': "0x20 1x60"}, 22, 19),
    "LockDeadlock": ({'mongolock_not_acquired_total{template="a",reason="deadlock"}': "0x20 1x60"}, 22, 19),
    "LockHeldTooLong": ({"locks_longest_hold_seconds": "0+60x90"}, 67, 65),
    "LockWaitsTooLong": (
        {
            'mongolock_wait_seconds_bucket{template="a",le="5"}': "0+90x30",
            'mongolock_wait_seconds_bucket{template="a",le="10"}': "0+100x30",
            'mongolock_wait_seconds_bucket{template="a",le="+Inf"}': "0+100x30",
        },
        15,
        9,
    ),
    "LockWaiterStuck": ({"locks_longest_wait_seconds": "0+60x90"}, 12, 9),
    "LockStale": ({"locks_stale": "2x60"}, 31, 29),
}


def promtool(*arguments: object) -> None:
    """Run promtool, and fail with its complaints."""
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@WITH_PROMTOOL
@pytest.mark.parametrize("name", FIRING)
def test_alert(name: str, tmp_path: Path) -> None:
    """Each alert fires when it should, not before, and not in a healthy system."""
    series, minute, before = FIRING[name]
    quiet = {
        each: re.sub(r"0x20 1x60", "1x90", re.sub(r"(2|0\+\d+)x\d+", "0x90", values)) for each, values in series.items()
    }
    count = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'

    def case(measured: dict[str, str], at: int, *, firing: bool) -> dict[str, Any]:
        samples = [{"labels": "{}", "value": 1}] if firing else []
        return {
            "interval": "1m",
            "input_series": [{"series": each, "values": values} for each, values in measured.items()],
            "promql_expr_test": [{"expr": count, "eval_time": f"{at}m", "exp_samples": samples}],
        }

    cases = [case(series, minute, firing=True), case(series, before, firing=False), case(quiet, minute, firing=False)]
    tests = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": cases}
    path = tmp_path / "tests.yml"
    path.write_text(json.dumps(tests))
    promtool("test", "rules", path)


@WITH_PROMTOOL
def test_rules_are_tested() -> None:
    promtool("check", "rules", RULES)
    assert re.findall(r"- alert: (\w+)", RULES.read_text()) == list(FIRING)


def expressions() -> list[str]:
    """Return the queries of the dashboard, with values for its variables."""
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    return [each.replace("$template", ".*").replace("$__rate_interval", "5m") for each in asked]


@WITH_PROMTOOL
def test_dashboard(tmp_path: Path) -> None:
    """Prometheus understands each expression of the dashboard."""
    rules = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(expressions())]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", path)


@WITH_MONGO
def test_the_collector_of_the_page(locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules and dashboard use existing metrics only. The collector of the page measures the documented ones."""
    registry = CollectorRegistry()
    PrometheusMetrics(registry)
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    _app, collector, *_ = blocks("howto/monitoring.md")
    exec(collector, {})  # noqa: S102 - our own page
    locks.add("held", [entry(1)], [waiter(2), waiter(3)])
    locks.add("stale", [entry(4, left=-60)])
    locks.add("kept", [entry(5, held_for=90_000, released=now())])  # as after once_per, when the job is done
    values = {
        name: registry.get_sample_value(f"locks_{name}") or 0
        for name in ("stale", "longest_hold_seconds", "longest_wait_seconds")
    }
    assert values["stale"] == 1
    assert 0 < values["longest_hold_seconds"] < 9_000
    assert values["longest_wait_seconds"] > 0
    shown = set(re.findall(r"# TYPE (\w+)", generate_latest(registry).decode()))
    asked = re.findall(r"\b(?:mongolock|locks)_\w+", RULES.read_text() + " ".join(expressions()))
    assert {re.sub(r"_bucket$", "", name) for name in asked} - shown == set()
