"""A network in between. Every member of a cluster is known only by the address of a proxy that can misbehave.

The proxy identifies the other end of a connection, a member or a client, so that they can be cut off separately. A
mongod with test commands enabled identifies itself in its first message (`hostInfo`), for MongoDB's own such proxy,
mongobridge.
"""

import asyncio
import contextlib
import functools
import random
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from testproject.servers.process import HOST

#: The number of every client, because only members have numbers.
CLIENT: Final = -1
#: Seconds for which the way to the member stays open after the last request of a gone client was delivered. A member
#: drops requests that it has not begun.
_LINGER: Final = 0.5
_PIECE: Final = 1 << 16
#: A field of BSON, with its name, the length of its text, and the text.
_HOST_INFO: Final = re.compile(rb"\x02hostInfo\x00.{4}[^\x00]*:(\d+)\x00", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Rule:
    """The behaviour of the way from one end to the other.

    - delay: seconds of everything, each way.
    - hold_requests, hold_replies: whether everything is held up, and delivered when this is over, even if its sender
      has gone.
    - lose_replies: probability that a reply is lost, with its connection.
    """

    delay: float = 0.0
    hold_requests: bool = False
    hold_replies: bool = False
    lose_replies: float = 0.0


OPEN: Final = Rule()
HELD: Final = Rule(hold_requests=True, hold_replies=True)


class _Connection:
    """One connection through a proxy. A dead one is half open. Nothing gets through, and nobody is told."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self.target = target
        self.dead = False


class Network:
    """The proxies of a cluster, one for each of *ports*."""

    def __init__(self, ports: Sequence[int], seed: int = 0) -> None:
        self.ports: list[int] = []
        self._targets = list(ports)
        self._rules: dict[tuple[int, int], Rule] = {}
        self._chance = random.Random(seed)
        self._connections: set[_Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        #: The function that chooses the messages to clients that are lost, with their connections.
        self.loses: Callable[[bytes], bool] = lambda reply: False
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)

    def start(self) -> None:
        """Open the proxies. Afterwards, `ports` has their ports, in the order of the members."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)

    def close(self) -> None:
        """Close the proxies and everything that goes through them."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    def rule(self, source: int, target: int) -> Rule:
        """Return the rule from *source* to *target*. The way of a member to itself is always open."""
        return OPEN if source == target else self._rules.get((source, target), OPEN)

    def set(self, ways: Iterable[tuple[int, int]], rule: Rule) -> None:
        """Apply *rule* to these ways, each from a source to a target."""
        self._call(lambda: self._rules.update(dict.fromkeys(ways, rule)))

    def clear(self, ways: Iterable[tuple[int, int]]) -> None:
        """Open these ways. Held-up messages are delivered."""
        self.set(ways, OPEN)

    def forget(self, source: int, target: int) -> None:
        """Leave the present connections of this way half open for ever. New ones get through."""

        def kill() -> None:
            for connection in self._connections:
                if (connection.source, connection.target) == (source, target):
                    connection.dead = True

        self._call(kill)

    def _call(self, change: Callable[[], None]) -> None:
        done = threading.Event()

        def apply() -> None:
            change()
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            done.set()

        self._loop.call_soon_threadsafe(apply)
        done.wait(10)

    async def _open(self) -> None:
        for number in range(len(self._targets)):
            server = await asyncio.start_server(functools.partial(self._accept, number), HOST, 0)
            self._servers.append(server)
            self.ports.append(server.sockets[0].getsockname()[1])

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(target, reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            first = await reader.read(_PIECE)
            connection = _Connection(self._source(first), target)
            await self._wait_while(connection, requests=True)
            there, back = await asyncio.open_connection(HOST, self._targets[target])
        except OSError:
            writer.transport.abort()
            return
        self._connections.add(connection)
        try:
            replies = asyncio.create_task(self._pump(connection, there, writer, requests=False))
            await self._pump(connection, reader, back, first, requests=True)
            await asyncio.wait([replies], timeout=_LINGER)
            replies.cancel()
        finally:
            self._connections.discard(connection)
            writer.transport.abort()
            back.transport.abort()

    async def _pump(
        self,
        connection: _Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        first: bytes = b"",
        *,
        requests: bool,
    ) -> None:
        """Carry one direction of a connection until its end. *first* has been read already."""
        with contextlib.suppress(OSError):
            while data := first or await reader.read(_PIECE):
                first = b""
                rule = self.rule(connection.source, connection.target)
                if rule.delay:
                    await asyncio.sleep(rule.delay)
                await self._wait_while(connection, requests=requests)
                if connection.dead:
                    continue
                if not requests and self._chance.random() < rule.lose_replies:
                    break
                if not requests and connection.source == CLIENT and self.loses(data):
                    break
                writer.write(data)
                await writer.drain()
        if not requests and not connection.dead:
            writer.transport.abort()

    async def _wait_while(self, connection: _Connection, *, requests: bool) -> None:
        while True:
            rule = self.rule(connection.source, connection.target)
            if not (rule.hold_requests if requests else rule.hold_replies):
                return
            await self._changed.wait()

    def _source(self, first: bytes) -> int:
        """Return the member that begins a connection like this, or CLIENT."""
        said = _HOST_INFO.search(first)
        port = int(said[1]) if said else 0
        return self._targets.index(port) if port in self._targets else CLIENT
