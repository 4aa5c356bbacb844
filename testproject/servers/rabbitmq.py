"""A RabbitMQ server, for tests of a Celery broker that pushes its messages."""

import shutil
import socket
from pathlib import Path

from testproject.servers.process import HOST, Server, ServerError, free_port

#: The Debian package has its own command only for root, and the program here.
PROGRAM = "/usr/lib/rabbitmq/bin/rabbitmq-server"


class RabbitMQ(Server):
    """A rabbitmq-server, a node of its own, with the user guest."""

    title = "rabbitmq-server"
    start_timeout = 90.0  # Erlang takes some seconds of a processor

    def __init__(self) -> None:
        super().__init__()
        self.names_port, self.nodes_port = free_port(), free_port()

    @property
    def uri(self) -> str:
        """The URI of its first virtual host."""
        return f"amqp://guest:guest@{HOST}:{self.port}//"

    @classmethod
    def missing(cls) -> str | None:
        """Return why there can be no RabbitMQ here, or None when there can."""
        if not Path(PROGRAM).exists():
            return f"no {PROGRAM}: apt-get install rabbitmq-server"
        return None if shutil.which("setpriv") else "no setpriv on PATH: apt-get install util-linux"

    def command(self) -> list[str]:
        """See Server.command(). Erlang's register of node names, epmd, is one of its own, and ends with it."""
        if reason := self.missing():
            raise ServerError(reason)
        names = f"setpriv --pdeathsig KILL epmd -port {self.names_port} -address {HOST} -relaxed_command_check"
        return ["sh", "-c", f"{names} & exec {PROGRAM}"]

    def launch(self) -> None:
        """Start the process, with all that it keeps in the directory."""
        config = self.directory / "rabbitmq"
        config.with_suffix(".conf").write_text(
            f"listeners.tcp.1 = {HOST}:{self.port}\ndisk_free_limit.absolute = 1MB\n"
        )
        self.environment |= {
            "HOME": str(self.directory),
            "ERL_EPMD_PORT": str(self.names_port),
            "RUNNING_UNDER_SYSTEMD": "1",  # without it, a shell stays between us and the server
            "RABBITMQ_CONFIG_FILE": str(config),
            "RABBITMQ_DIST_PORT": str(self.nodes_port),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "plugins"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_MNESIA_BASE": str(self.directory / "data"),
            "RABBITMQ_NODENAME": f"rabbit{self.port}@localhost",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 -kernel inet_dist_use_interface {127,0,0,1}",
        }
        super().launch()

    def answers(self) -> bool:
        """See Server.answers()."""
        try:
            with socket.create_connection((HOST, self.port), timeout=1.0) as connection:
                connection.sendall(b"AMQP\0\0\x09\x01")
                return connection.recv(1) == b"\x01"
        except OSError:
            return False
