"""A Docker engine, for containers of a machine that runs none."""

import contextlib
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from testproject.servers.process import HOST, Server, ServerError
from testproject.servers.unprivileged import is_root

#: The seconds in which the engine may stop its containers.
STOP_TIMEOUT = 20.0


class Docker(Server):
    """A dockerd with its own containerd, behind a socket in its directory. Published ports are on loopback.

    The rules of the firewall stay as they are. The containers therefore reach nothing outside.
    """

    title = "dockerd"

    @property
    def uri(self) -> str:
        """The value for DOCKER_HOST."""
        return f"unix://{self.path}"

    @property
    def path(self) -> Path:
        """The socket that it listens on."""
        return self.directory / "socket"

    @classmethod
    def missing(cls) -> str | None:
        """Return why there can be no Docker engine here, or None when there can."""
        if not shutil.which("dockerd"):
            return "no dockerd on PATH: apt-get install docker.io"
        return None if is_root() else "dockerd needs root"

    def command(self) -> list[str]:
        """See Server.command()."""
        if reason := self.missing():
            raise ServerError(reason)
        places = {name: f"{self.directory}/{name}" for name in ("data-root", "exec-root", "pidfile")}
        options = {
            **places, "host": self.uri, "storage-driver": "vfs", "iptables": "false", "ip6tables": "false",
            "ip": HOST,
        }  # fmt: skip
        return ["dockerd", *(f"--{name}={value}" for name, value in options.items())]

    def answers(self) -> bool:
        """See Server.answers()."""
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
            connection.settimeout(5.0)
            connection.connect(str(self.path))
            connection.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return connection.recv(4096).endswith(b"OK")
        return False

    def kill(self) -> None:
        """End it in order (SIGTERM), so that its containers end, too."""
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT)
        super().kill()
