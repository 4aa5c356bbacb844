"""A TCP relay before a server, which holds up what a client sends or what it is answered."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

Test = Callable[[bytes], bool]


class Hold:
    """Holds up the first message of one direction that passes a test, for *seconds* or until `let_go`."""

    def __init__(self, test: Test, seconds: float) -> None:
        self.caught = threading.Event()
        self._test = test
        self._seconds = seconds
        self._free = threading.Event()
        self._first = threading.Lock()

    def pass_on(self, message: bytes) -> None:
        """Return when *message* may go on."""
        if self._test(message) and self._first.acquire(blocking=False):
            self.caught.set()
            self._free.wait(self._seconds)

    def let_go(self) -> None:
        """Let go on what is held."""
        self._free.set()


class Relay:
    """Stands before the server on *port*; the messages on each connection stay in order."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._requests: list[Hold] = []
        self._replies: list[Hold] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def uri(self) -> str:
        return f"mongodb://127.0.0.1:{self.port}/?directConnection=true"

    def holding_requests(self, test: Test, seconds: float = 60) -> contextlib.AbstractContextManager[Hold]:
        """Hold up the first request that passes *test* on its way to the server, also when its sender has hung up."""
        return self._holding(self._requests, Hold(test, seconds))

    def holding_replies(self, test: Test, seconds: float = 60) -> contextlib.AbstractContextManager[Hold]:
        """Hold up the first answer that passes *test* on its way to the client."""
        return self._holding(self._replies, Hold(test, seconds))

    @staticmethod
    @contextlib.contextmanager
    def _holding(holds: list[Hold], hold: Hold) -> Iterator[Hold]:
        holds.append(hold)
        try:
            yield hold
        finally:
            holds.remove(hold)
            hold.let_go()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                for source, target, holds in ((client, server, self._requests), (server, client, self._replies)):
                    threading.Thread(target=self._pump, args=(source, target, holds), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, holds: list[Hold]) -> None:
        with contextlib.suppress(OSError):
            while message := _read_message(source):
                for hold in list(holds):
                    hold.pass_on(message)
                target.sendall(message)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def _read_message(source: socket.socket) -> bytes:
    """The next whole message of MongoDB's wire protocol: it begins with its length. Empty at the end."""
    head = _read(source, 4)
    return head + _read(source, int.from_bytes(head, "little") - 4) if len(head) == 4 else b""


def _read(source: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size and (more := source.recv(size - len(read))):
        read += more
    return read
