"""By whose clock a command is judged: which primary it goes to, and that primary's cluster time.

Both are known only when a command is encoded for the server that was selected for it. So `MongoStore` gives
placeholders to `Step.arguments`, and the encoders here replace them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

from bson.codec_options import TypeEncoder, TypeRegistry
from pymongo import MongoClient
from pymongo.server_description import ServerDescription


class _Clock:
    """Stands for the name of the primary."""


class _ClusterTime:
    """Stands for the expression of the cluster time."""


CLOCK: Final = _Clock()
CLUSTER_TIME: Final = _ClusterTime()


class ClockEncoder(TypeEncoder):
    """Names the primary that a command goes to.

    The name is the election that made it primary. It is the same for every client (host names are not: a replica
    set may have several horizons), and another one after every failover, which is when clocks change. The driver
    selects a server, then encodes, in one thread, and does both again for a retry; so what `select` saw last in
    this thread is where the command goes.
    """

    python_type = _Clock

    def __init__(self) -> None:
        self._seen = threading.local()
        self.client: MongoClient[dict[str, Any]] | None = None

    def registry(self) -> TypeRegistry:
        """The encoders of both placeholders."""
        return TypeRegistry([self, _ClusterTimeEncoder(self)])

    def select(self, servers: Sequence[ServerDescription]) -> Sequence[ServerDescription]:
        """The client's `server_selector`: changes nothing, remembers the choice."""
        self._seen.server = servers[0] if len(servers) == 1 else None
        return servers

    def server(self) -> ServerDescription | None:
        """Where this thread's command goes to."""
        server: ServerDescription | None = getattr(self._seen, "server", None)
        if server is None:
            # A single server without discovery: no selection is made, and its clock is the only one.
            known = self._servers()
            return known[0] if len(known) == 1 else None
        return server

    def transform_python(self, value: object) -> str:
        server = self.server()
        return str((server and server.election_id) or "")

    def sent_to(self) -> str:
        """The name of the primary that this thread's last command went to; empty if it has none."""
        return self.transform_python(None)

    def primary(self) -> str:
        """The name of the present primary, according to the driver's monitors; empty if none is known."""
        return next((str(it.election_id) for it in self._servers() if it.is_writable and it.election_id), "")

    def _servers(self) -> list[ServerDescription]:
        return [] if self.client is None else list(self.client.topology_description.server_descriptions().values())


class _ClusterTimeEncoder(TypeEncoder):
    """Asks for the cluster time of the server that a command goes to. A standalone server has none."""

    python_type = _ClusterTime

    def __init__(self, clock: ClockEncoder) -> None:
        self._clock = clock

    def transform_python(self, value: object) -> object:
        server = self._clock.server()
        return None if server is not None and server.server_type_name == "Standalone" else "$$CLUSTER_TIME"
