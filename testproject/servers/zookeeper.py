"""A ZooKeeper server, for comparison."""

import shutil
import socket
from pathlib import Path

from testproject.servers.process import HOST, Server, ServerError

JAR = Path("/usr/share/java/zookeeper.jar")  # Debian's jar, with the names of the jars that it needs
TICK = 2_000  # milliseconds, half of the shortest session of a client


class ZooKeeper(Server):
    """A single ZooKeeper server. Like every ZooKeeper by default, it writes to its disk before it answers."""

    title = "zookeeper"

    @property
    def uri(self) -> str:
        """The hosts for a client."""
        return f"{HOST}:{self.port}"

    @classmethod
    def missing(cls) -> str | None:
        """Return why there can be no ZooKeeper here, or None when there can."""
        if shutil.which("java") is None:
            return "no java on PATH: apt-get install zookeeper"
        return None if JAR.exists() else f"no {JAR}: apt-get install zookeeper"

    def command(self) -> list[str]:
        """See Server.command()."""
        if reason := self.missing():
            raise ServerError(reason)
        lines = [f"dataDir={self.directory}/data", f"clientPortAddress={HOST}", f"clientPort={self.port}"]
        lines += [f"tickTime={TICK}", "maxClientCnxns=0", "admin.enableServer=false", "4lw.commands.whitelist=*"]
        config = self.directory / "zoo.cfg"
        config.write_text("\n".join([*lines, ""]))
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        return ["java", "-Xmx256m", "-Dzookeeper.jmx.log4j.disable=true", "-cp", str(JAR), main, str(config)]

    def answers(self) -> bool:
        """See Server.answers()."""
        return self.ask("ruok") == "imok"

    def ask(self, word: str) -> str:
        """Return its answer to one of its four-letter words, or nothing where there is none."""
        try:
            with socket.create_connection((HOST, self.port), timeout=1.0) as connection:
                connection.sendall(word.encode())
                return b"".join(iter(lambda: connection.recv(65_536), b"")).decode()
        except OSError:
            return ""
