"""Check the workflows with zizmor, offline: `python -m tests.workflows`. This is a program, not a module."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Return the exit code of zizmor: 0 if it finds nothing."""
    program = Path(sys.executable).with_name("zizmor.exe" if sys.platform == "win32" else "zizmor")
    return subprocess.call([program, "--offline", "--quiet", ROOT / ".github"])


if __name__ == "__main__":
    sys.exit(main())
