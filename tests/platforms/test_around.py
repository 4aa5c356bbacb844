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


def run(script: str, name: str, **more: str) -> None:
    python("-c", SETUP + script, name, folder=ROOT, **environment(**more))


def test_channels() -> None:
    """Twenty sockets count under one lock, half of them in coroutines."""
    name = key()
    run(CHANNELS, name)
    assert counted(name) == 20
    assert held(name) == []
