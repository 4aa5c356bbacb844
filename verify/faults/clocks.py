"""Servers with wall clocks of their own, which can be set while they run."""

import functools
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self


def missing() -> str | None:
    """Why there can be no such clocks here, or None when there can."""
    return None if sys.platform == "linux" and shutil.which("cc") else "no C compiler (cc) on PATH"


@functools.cache
def _library() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="clock-")
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", f"{folder.name}/clock.so", source, "-ldl"], check=True)
    return folder


class Dial:
    """Sets the wall clock of the processes that are started with its `environment`; their other clocks are true."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="dial-", buffering=0)  # noqa: SIM115 - lives as long as we
        self.offset = 0.0
        self.set(0.0)

    def set(self, seconds: float) -> None:
        """Have its clock differ from the machine's by so much, from now on."""
        self._file.seek(0)
        self._file.write(struct.pack("=q", round(seconds * 1e9)))
        self.offset = seconds

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": f"{_library().name}/clock.so", "CLOCK_OFFSET_FILE": self._file.name}

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
