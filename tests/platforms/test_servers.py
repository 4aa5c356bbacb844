"""Web servers lose no counts under a lock, with several processes, threads, greenlets or tasks."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.platforms.programs import PLATFORMS, counted, held, key, program
from tests.support.waiting import eventually

pytestmark = PLATFORMS

REQUESTS = 40
#: The patch of gunicorn's documentation for gevent and --preload, applied before any other import.
PATCH = "from gevent import monkey\n\nmonkey.patch_all()\n"
GUNICORN = ["gunicorn", "tests.platforms.site:wsgi", "--workers=2"]
UVICORN = ["uvicorn", "tests.platforms.site:asgi", "--log-level=warning"]
DAPHNE = ["daphne", "tests.platforms.site:asgi"]


def get(address: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address, timeout=90) as answer:  # noqa: S310 - it is ours
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextmanager
def served(*command: str, **environment: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    bind = ["--bind", f"127.0.0.1:{port}"] if command[0] == "gunicorn" else ["--port", str(port)]
    with program(*command, *bind, **environment):
        address = f"http://127.0.0.1:{port}"
        assert eventually(lambda: answers(address), 60)
        yield address


def answers(address: str) -> bool:
    try:
        return get(address)[0] == 404  # nothing that is counted
    except OSError:
        return False


def hit(address: str) -> set[str]:
    """Send many requests at once, and return the processes that answered."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        found = list(pool.map(lambda _: get(address), range(REQUESTS)))
    assert {status for status, _ in found} == {200}
    return {text for _, text in found}


@pytest.mark.parametrize(
    "options",
    [
        ["--worker-class=sync"],
        ["--worker-class=gthread", "--threads=10"],
        ["--worker-class=gthread", "--threads=10", "--preload"],
        ["--worker-class=gevent"],
        ["--worker-class=gevent", "--preload", "--config={patch}"],
    ],
    ids=["sync", "gthread", "gthread preload", "gevent", "gevent preload"],
)
def test_gunicorn(options: list[str], tmp_path: Path) -> None:
    """All counts arrive, also if the application is loaded before the fork. All locks are free afterwards."""
    patch, name = tmp_path / "gunicorn_conf.py", key()
    patch.write_text(PATCH)
    with served(*GUNICORN, *(option.format(patch=patch) for option in options)) as address:
        hit(f"{address}/count/{name}")
    assert counted(name) == REQUESTS
    assert held(name) == []


@pytest.mark.parametrize(
    ("server", "view"),
    [([*UVICORN, "--workers=2"], "count"), ([*UVICORN, "--workers=2"], "acount"), (DAPHNE, "acount")],
    ids=["uvicorn, a sync view", "uvicorn", "daphne"],
)
def test_asgi(server: list[str], view: str) -> None:
    name = key()
    with served(*server) as address:
        hit(f"{address}/{view}/{name}")
    assert counted(name) == REQUESTS
    assert held(name) == []


def test_prometheus_with_several_processes(tmp_path: Path) -> None:
    """In its multiprocess mode, the grants of all processes are counted, and each once."""
    name = key()
    environment = {
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PLATFORM_APPS": "django_mongolock.contrib.prometheus.PrometheusConfig",
    }
    with served(*GUNICORN, "--worker-class=gthread", "--threads=10", **environment) as address:
        processes: set[str] = set()
        while len(processes) < 2:
            processes |= hit(f"{address}/count/{name}")
        metrics = get(f"{address}/metrics")[1]
    lines = [line for line in metrics.splitlines() if line.startswith("mongolock_hold_seconds_count{")]
    counts = [float(line.rpartition(" ")[2]) for line in lines if 'template="other"' in line]
    assert counts == [counted(name)], metrics
