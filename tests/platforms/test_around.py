"""What runs beside locks: Channels, django-ninja, Sentry, structlog, OpenTelemetry, pytest-xdist."""

from __future__ import annotations

from tests.platforms.programs import PLATFORMS, ROOT, counted, environment, held, key
from tests.support.programs import python

pytestmark = PLATFORMS

SETUP = """
import sys
import threading
from contextlib import contextmanager
import django
django.setup()
from django_mongolock import mongo_lock, mongo_locked
from tests.platforms import site
key = sys.argv[1]

@contextmanager
def busy():
    held, over = threading.Event(), threading.Event()
    def hold():
        with mongo_lock(key):
            held.set()
            over.wait()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    yield
    over.set()
    thread.join()
"""
CHANNELS = """
import asyncio
from channels.generic.websocket import AsyncWebsocketConsumer, WebsocketConsumer
from channels.testing import WebsocketCommunicator

class Sync(WebsocketConsumer):
    def receive(self, text_data=None, bytes_data=None):
        site.count(text_data)
        self.send("counted")

class Async(AsyncWebsocketConsumer):
    async def receive(self, text_data=None, bytes_data=None):
        await site.acount(text_data)
        await self.send("counted")

async def talk(consumer):
    socket = WebsocketCommunicator(consumer.as_asgi(), "/")
    assert (await socket.connect())[0]
    await socket.send_to(text_data=key)
    assert await socket.receive_from(timeout=60) == "counted"
    await socket.disconnect()

async def main():
    await asyncio.gather(*(talk(kind) for kind in [Sync, Async] * 10))

asyncio.run(main())
"""
SENTRY = """
import sentry_sdk
from django.test import Client

sent = []
sentry_sdk.init(dsn="https://key@sentry.invalid/1", transport=sent.append)
client = Client(raise_request_exception=False)
with busy():
    assert client.get(f"/busy/{key}").status_code == 423
    sentry_sdk.flush()
    assert sent == []
    assert client.get(f"/failing/{key}").status_code == 500
sentry_sdk.flush()
(event,) = sent
(error,) = event["exception"]["values"]
assert error["type"] == "LockNotAcquired" and key in error["value"], error
"""
TELEMETRY = """
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
metrics.set_meter_provider(MeterProvider([reader]))
from opentelemetry.instrumentation.django import DjangoInstrumentor
from opentelemetry.instrumentation.pymongo import PymongoInstrumentor
from django.test import Client
DjangoInstrumentor().instrument()
PymongoInstrumentor().instrument()
assert Client().get(f"/count/{key}").status_code == 200
names = [span.name for span in spans.get_finished_spans()]
print(names)
assert any("lock" in name for name in names), names
found = [m.name for r in reader.get_metrics_data().resource_metrics for s in r.scope_metrics for m in s.metrics]
assert any(name.startswith("mongolock") for name in found), found
"""


def run(script: str, name: str, **more: str) -> None:
    python("-c", SETUP + script, name, folder=ROOT, **environment(**more))


def test_channels() -> None:
    """Twenty sockets count under one lock, half of them in coroutines."""
    name = key()
    run(CHANNELS, name)
    assert counted(name) == 20
    assert held(name) == []


def test_sentry() -> None:
    """A lock that is busy is an event where the view fails, with the key; and none where it answers 423."""
    run(SENTRY, key())


def test_opentelemetry() -> None:
    """Beside the instrumentation of Django and PyMongo: a span of the lock, and its metrics."""
    run(TELEMETRY, key(), PLATFORM_APPS="django_mongolock.contrib.opentelemetry.OpenTelemetryConfig")
