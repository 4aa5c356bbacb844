"""Servers that refuse to run as root, and make a data directory before their first start."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

from testproject.servers.process import Server, ServerError


class UnprivilegedServer(Server):
    """A server that root starts as a user of the system."""

    system_user: ClassVar[str]
    package: ClassVar[str]

    @property
    def data(self) -> Path:
        """The folder of the server's data."""
        return self.directory / "data"

    @classmethod
    def missing(cls) -> str | None:
        """Return why there can be no such server here, or None when there can."""
        if reason := cls.missing_programs():
            return f"{reason}: apt-get install {cls.package}"
        if is_root() and not _has_user(cls.system_user):
            problem = f"{cls.title} does not run as root, and there is no user {cls.system_user}"
            return f"{problem}: apt-get install {cls.package}"
        return None

    @classmethod
    def missing_programs(cls) -> str | None:
        """Return which program is not here, or None."""
        raise NotImplementedError

    def initialize(self) -> list[str]:
        """Return the command line that makes the data directory."""
        raise NotImplementedError

    def launch(self) -> None:
        """Start the process. The first time, make its data directory before."""
        if reason := self.missing():
            raise ServerError(reason)
        self.user = self.system_user if is_root() else None
        if self.user is not None:
            shutil.chown(self.directory, self.user)
        if not self.data.exists():
            command = self.initialize()
            done = subprocess.run(
                command, cwd=self.directory, user=self.user, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise ServerError(f"{Path(command[0]).name}: {done.stderr.strip() or done.stdout.strip()}")
        super().launch()


def is_root() -> bool:
    """Return whether this process runs as root."""
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _has_user(name: str) -> bool:
    import pwd

    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
