"""A network before one server that can be slow or hold up traffic."""

import contextlib
from collections.abc import Callable, Iterator

from testproject.servers.process import HOST
from verify.faults.proxy import CLIENT, Network, Rule


@contextlib.contextmanager
def proxied(port: int, rule: Rule | None = None) -> Iterator[tuple[str, Callable[[Rule], None]]]:
    """Yield the URI of the server by a way with *rule*, and a function that sets another rule."""
    network = Network([port])
    network.start()

    def hold(rule: Rule) -> None:
        network.set([(CLIENT, 0)], rule)

    try:
        hold(rule or Rule())
        yield f"mongodb://{HOST}:{network.ports[0]}/?directConnection=true", hold
    finally:
        network.close()
