"""The network between clients and members delays, loses and cuts off on demand, and tells members from clients."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import bson
import pytest

from testproject.servers.process import HOST
from tests import parts
from tests.support.waiting import eventually
from verify.faults.clocks import Dial
from verify.faults.proxy import CLIENT, HELD, OPEN, Network, Rule


class Echo:
    """A server that repeats its input, and remembers it."""

    def __init__(self) -> None:
        self.heard = b""
        self._server = socket.create_server((HOST, 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(100):
                self.heard += data
                connection.sendall(data)

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def echoes() -> Iterator[list[Echo]]:
    """Yield the servers of two members."""
    echoes = [Echo(), Echo()]
    yield echoes
    for echo in echoes:
        echo.close()


@pytest.fixture
def echo(echoes: list[Echo]) -> Echo:
    """Return the server of the first member."""
    return echoes[0]


@pytest.fixture
def network(echoes: list[Echo]) -> Iterator[Network]:
    """Yield a network in front of both servers."""
    network = Network([echo.port for echo in echoes])
    network.start()
    yield network
    network.close()


def connect(network: Network, member: int = 0) -> socket.socket:
    return socket.create_connection((HOST, network.ports[member]), timeout=5)


def answers(connection: socket.socket, seconds: float = 5.0) -> bytes:
    """Return the answer that comes in time, or nothing if there is none or the connection is closed."""
    connection.settimeout(seconds)
    with contextlib.suppress(TimeoutError, ConnectionError):
        return connection.recv(100)
    return b""


CLIENTS = [(CLIENT, 0)]


def test_slow(network: Network) -> None:
    network.set(CLIENTS, Rule(delay=0.1))
    with connect(network) as connection:
        since = time.monotonic()
        connection.sendall(b"one")
        assert answers(connection) == b"one"
        assert time.monotonic() - since >= 0.2


def test_a_command_arrives_after_its_sender_has_gone(network: Network, echo: Echo) -> None:
    """F17: A command that was held up is delivered, although its connection was closed."""
    with connect(network) as connection:
        connection.sendall(b"one")
        assert answers(connection) == b"one"
        network.set(CLIENTS, Rule(hold_requests=True))
        connection.sendall(b"two")
        assert answers(connection, 0.2) == b""
    assert echo.heard == b"one"
    network.clear(CLIENTS)
    assert eventually(lambda: echo.heard == b"onetwo")


def test_a_reply_is_held_up(network: Network, echo: Echo) -> None:
    """F16: The command has arrived. The answer comes when the way is open again."""
    with connect(network) as connection:
        connection.sendall(b"one")
        assert answers(connection) == b"one"
        network.set(CLIENTS, Rule(hold_replies=True))
        connection.sendall(b"two")
        assert eventually(lambda: echo.heard == b"onetwo")
        assert answers(connection, 0.2) == b""
        network.clear(CLIENTS)
        assert answers(connection) == b"two"


def test_a_reply_is_lost(network: Network, echo: Echo) -> None:
    """F15: The command has arrived. The connection ends instead of the answer."""
    network.set(CLIENTS, Rule(lose_replies=1.0))
    with connect(network) as connection:
        connection.sendall(b"one")
        assert answers(connection) == b""
        assert echo.heard == b"one"


def test_a_reply_is_lost_by_what_it_says(network: Network, echo: Echo) -> None:
    """The chosen reply is lost with its connection. The other replies get through."""
    network.loses = lambda reply: reply == b"two"
    with connect(network) as connection:
        for sent, answered in ((b"one", b"one"), (b"two", b"")):
            connection.sendall(sent)
            assert answers(connection) == answered
        assert echo.heard == b"onetwo"


def test_half_open(network: Network, echo: Echo) -> None:
    """F18: Nothing gets through, without a report, for the whole life of the connection. A new connection works as
    usual."""
    with connect(network) as dead, connect(network) as other:
        for connection in (dead, other):
            connection.sendall(b"one")
            assert answers(connection) == b"one"
        network.forget(CLIENT, 0)
        dead.sendall(b"two")
        assert answers(dead, 0.2) == b""
        with connect(network) as fresh:
            fresh.sendall(b"three")
            assert answers(fresh) == b"three"
        assert b"two" not in echo.heard


def test_members_are_told_from_clients(network: Network, echoes: list[Echo]) -> None:
    """Rules for clients do not apply to a member, or to a member's way to itself."""
    hello = bson.encode({"hello": 1, "hostInfo": f"here:{echoes[1].port}"})

    def gets_through(member: int, first: bytes) -> bool:
        with connect(network, member) as connection:
            connection.sendall(first)
            return answers(connection, 0.1) == first

    network.set([(CLIENT, 0), (1, 1)], HELD)
    assert network.rule(1, 1) == OPEN
    assert not gets_through(0, b"one")
    assert gets_through(0, hello)
    assert gets_through(1, hello)
    network.set([(1, 0)], HELD)
    network.clear([(CLIENT, 0)])
    assert not gets_through(0, hello)
    assert gets_through(0, b"one")


@parts.needs("a C compiler")
def test_a_clock_that_can_be_set() -> None:
    """A process with a dial has the wall clock that is set, at once, and all its other clocks and waits as ever."""
    code = """
import sys, threading, time
for line in sys.stdin:
    since = time.monotonic()
    threading.Event().wait(0.1)
    print(time.time(), time.monotonic(), time.monotonic() - since, flush=True)
"""
    command = [sys.executable, "-I", "-c", code]
    with Dial() as dial:
        environment = {**os.environ, **dial.environment}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for offset in (0.0, 30.5, -3600.0):
                dial.set(offset)
                process.stdin.write("\n")
                process.stdin.flush()
                wall, monotonic, waited = map(float, process.stdout.readline().split())
                assert abs(wall - time.time() - offset) < 5
                assert abs(monotonic - time.monotonic()) < 5
                assert 0.1 <= waited < 5
            process.stdin.close()
