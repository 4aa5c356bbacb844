"""Servers with wall clocks of their own that can be set while they run."""

import functools
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self


def missing() -> str | None:
    """Return why there can be no such clocks here, or None."""
    return None if sys.platform == "linux" and shutil.which("cc") else "no C compiler (cc) on PATH"


@functools.cache
def _library() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="clock-")
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", f"{folder.name}/clock.so", source, "-ldl"], check=True)
    return folder


class Dial:
    """A dial for the wall clock of the processes started with its `environment`. Their other clocks are true."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="dial-", buffering=0)  # noqa: SIM115 - lives as long as we
        self.offset = 0.0
        self.set(0.0)

    def set(self, seconds: float) -> None:
        """Let the clock differ from the machine's by so many seconds from now on."""
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
