"""The clock by which a command is judged, as the name of the primary and that primary's cluster time.

Both are known only when a command is encoded for the server that was selected for it. For that reason `MongoStore`
gives placeholders to `Step.arguments`, and the encoders here replace them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

from bson.codec_options import TypeEncoder, TypeRegistry
from pymongo import MongoClient
from pymongo.server_description import ServerDescription


class _Clock:
    """The placeholder for the name of the primary."""


class _ClusterTime:
    """The placeholder for the expression of the cluster time."""


CLOCK: Final = _Clock()
CLUSTER_TIME: Final = _ClusterTime()


class ClockEncoder(TypeEncoder):
    """An encoder that names the primary of a command.

    The name is the election that made the server primary. All clients see the same name. (Host names differ, because a
    replica set may have several horizons.) The name changes with every failover, and so does the clock. The driver
    selects a server and then encodes, in one thread, and repeats both for a retry. For that reason the command goes to
    the server that `select` saw last in this thread.
    """

    python_type = _Clock

    def __init__(self) -> None:
        self._seen = threading.local()
        self.client: MongoClient[dict[str, Any]] | None = None

    def registry(self) -> TypeRegistry:
        """Return the encoders of both placeholders."""
        return TypeRegistry([self, _ClusterTimeEncoder(self)])

    def select(self, servers: Sequence[ServerDescription]) -> Sequence[ServerDescription]:
        """Remember the selected server, and return *servers* unchanged. The `server_selector` of the client."""
        self._seen.server = servers[0] if len(servers) == 1 else None
        return servers

    def server(self) -> ServerDescription | None:
        """Return the server that gets this thread's command."""
        server: ServerDescription | None = getattr(self._seen, "server", None)
        if server is None:
            # A single server without discovery needs no selection, and has the only clock.
            known = self._servers()
            return known[0] if len(known) == 1 else None
        return server

    def transform_python(self, value: object) -> str:
        server = self.server()
        return str((server and server.election_id) or "")

    def sent_to(self) -> str:
        """Return the name of the primary of this thread's last command, or "" if it has none."""
        return self.transform_python(None)

    def primary(self) -> str:
        """Return the name of the present primary, as the driver's monitors know it, or "" if none is known."""
        return next((str(it.election_id) for it in self._servers() if it.is_writable and it.election_id), "")

    def _servers(self) -> list[ServerDescription]:
        return [] if self.client is None else list(self.client.topology_description.server_descriptions().values())


class _ClusterTimeEncoder(TypeEncoder):
    """An encoder that asks for the cluster time of the server of a command. A standalone server has none."""

    python_type = _ClusterTime

    def __init__(self, clock: ClockEncoder) -> None:
        self._clock = clock

    def transform_python(self, value: object) -> object:
        server = self._clock.server()
        return None if server is not None and server.server_type_name == "Standalone" else "$$CLUSTER_TIME"
