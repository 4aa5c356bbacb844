#!/usr/bin/env python3
"""Run the project's commands on a machine that only has Python 3.11 or newer.

    python3 dev.py test                 the short tests and the witnesses, with a MongoDB that it starts
    python3 dev.py test --long          the tests that take longer
    python3 dev.py test -k deadlock     further arguments go to the program, here pytest
    python3 dev.py test --with-system-packages
                                        installs Chromium, Redis and the like before, with apt-get

The first run creates .venv next to this file (with uv if it is on PATH) and installs what the command needs; later runs
start at once, until pyproject.toml or the Python changes. With MONGODB_URI, the commands use an existing server.
"""

# dev.py exists beside tox because a fresh machine needs only Python for it. dev.py makes one environment, with a
# MongoDB. tox has to be installed first, and makes an environment for each pair of Python and Django.
#
# This file uses only the standard library, and only syntax that Python 3.6 can read. An old Python prints its advice.
import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("dev.py: this is Python %s: run it with Python 3.11 or newer" % platform.python_version())  # noqa: UP031

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "dev.json"
LOG = VENV / "dev.log"
LEFT_OUT = VENV / "left-out"  # left-out tests of the last run, written by tests/left_out.py
MONGOD_WHEELS = {"linux x86_64", "linux aarch64", "darwin x86_64", "darwin arm64", "win32 amd64"}


class Command(NamedTuple):
    """A command of the project, as modules that `python -m` runs, each with the user's arguments after its own."""

    help: str
    noun: str
    group: str
    steps: list[list[str]]
    needs_mongod: bool = True


COMMANDS = {
    "test": Command(
        "run the tests (pytest)", "tests", "test", [["pytest", "--numprocesses", str(os.cpu_count() or 1)]]
    ),
    "versions": Command(
        "run what a new Django can break on the oldest and the newest (--write: the table of the docs)",
        "versions",
        "test",
        [["tests.tested_versions"]],
    ),
    "faults": Command("run locks under random faults, and check them", "faults", "test", [["verify.faults"]]),
    "platforms": Command(
        "try locks on web servers and task queues",
        "platforms",
        "platforms",
        [["pytest", "-m", "program", "tests/platforms"]],
    ),
    "simulate": Command(
        "run the engine under virtual time, and check it (--help)",
        "simulation",
        "test",
        [["verify.simulation"]],
        needs_mongod=False,
    ),
    "demo": Command("run the shop with its traffic until Ctrl-C", "demo", "demo", [["testproject.demo"]]),
    "docs": Command(
        "build the documentation and run its examples (--build, --words, --write)", "docs", "test", [["tests.docs"]]
    ),
    "lint": Command(
        "check the code (ruff, mypy) and the workflows (zizmor)",
        "lint",
        "lint",
        [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"], ["tests.workflows"]],
        needs_mongod=False,
    ),
    "build": Command(
        "build the sdist and the wheel in dist/, and check them",
        "build",
        "packaging",
        [["build"], ["twine", "check", "--strict", "dist/*"]],
        needs_mongod=False,
    ),
    "screenshots": Command(
        "take the pictures of the docs, from the demo", "screenshots", "screenshots", [["testproject.screenshots"]]
    ),
    "load": Command(
        "an hour's worth of locking in minutes, to find leaks (--quick)",
        "load",
        "demo",
        [["bench.load"]],
    ),
    "bench": Command("compare with other locks (--quick, NAME ...)", "bench", "bench", [["bench"]]),
}


def main(arguments: list[str]) -> int:
    """Run the command that *arguments* begin with, and return its exit code."""
    name, *rest = arguments or ["--help"]
    if name in {"-h", "--help"}:
        print(usage())
        return 0
    if name not in COMMANDS:
        fail(f"there is no command {name!r}, only {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    started = time.monotonic()
    if command.needs_mongod and not (os.environ.get("MONGODB_URI") or os.environ.get("MONGOD")):
        check_mongod_runs_here(libraries_come="--with-system-packages" in rest)
    with one_at_a_time():
        prepare(command.group)
    LEFT_OUT.unlink(missing_ok=True)
    code = 0
    for step in command.steps:
        code = run([*step, *rest]) or code
        if code > 128:
            break
    left_out = LEFT_OUT.read_text() if LEFT_OUT.exists() else ""
    print("; ".join(filter(None, [f"{command.noun}: {time.monotonic() - started:.0f} s", left_out])), flush=True)
    return code


def usage() -> str:
    """Return the text of --help."""
    commands = [f"  {name:<12}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join([f"usage: python3 dev.py COMMAND [ARGUMENT ...]\n\n{__doc__}\nCommands:", *commands])


def fail(message: str) -> NoReturn:
    """End with one line for the person at the terminal."""
    sys.exit(f"dev.py: {message}")


def check_mongod_runs_here(*, libraries_come: bool) -> None:
    """Fail where the mongod of the dependency group has no wheel, or lacks a library that will not be installed."""
    system = f"{sys.platform} {platform.machine().lower()}"
    if system not in MONGOD_WHEELS or (sys.platform == "linux" and platform.libc_ver()[0] != "glibc"):
        fail(f"there is no MongoDB wheel for this platform ({system}): set MONGODB_URI to a replica set that runs")
    for library in ["libcurl.so.4", "libcrypto.so.3"] if sys.platform == "linux" and not libraries_come else []:
        try:
            ctypes.CDLL(library)
        except OSError:
            fail(f"MongoDB needs {library}: apt-get install libcurl4 libssl3, or dnf install libcurl openssl-libs")


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let only one dev.py install at a time (on Windows, more)."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    folder = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def prepare(group: str) -> None:
    """See to it that .venv is of this Python, in this place, and holds *group* as pyproject.toml has it now."""
    origin = f"{platform.python_version()} of {sys.base_prefix} in {VENV}"
    content = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamp = read_stamp()
    groups: dict[str, str] = stamp["groups"] if stamp.get("origin") == origin else {}
    if groups.get(group) == content:
        return
    print(f"dev.py: installing the group '{group}' into {VENV}", flush=True)
    if not groups:
        make_venv()
    STAMP.write_text("{}")  # stays where this is interrupted, and then .venv is made again
    try:
        install(group)
    except SystemExit:
        STAMP.write_text(json.dumps({"origin": origin, "groups": groups}))
        raise
    STAMP.write_text(json.dumps({"origin": origin, "groups": {**groups, group: content}}))


def read_stamp() -> dict[str, Any]:
    """Return the notes of the last complete installation, or {}."""
    try:
        return dict(json.loads(STAMP.read_text()))
    except (OSError, ValueError):
        return {}


def make_venv() -> None:
    """Make .venv with this Python, in place of an earlier one of dev.py."""
    if VENV.is_symlink():
        fail(f"{VENV} is a link to an environment of another place: remove the link, and run this again")
    config = VENV / "pyvenv.cfg"
    if config.exists() and not STAMP.exists():
        fail(f"{VENV} was not made by dev.py: move it away and run this again")
    config.unlink(missing_ok=True)
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    STAMP.write_text("{}")
    uv = shutil.which("uv")
    if uv:
        logged([uv, "venv", "--allow-existing", "--seed", "--python", sys.executable, str(VENV)])
    elif importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip"):
        logged([sys.executable, "-m", "venv", str(VENV)])
    else:
        fail(f"this Python has no venv: apt-get install python3.{sys.version_info[1]}-venv, or install uv")


def install(group: str) -> None:
    """Install the project, editable, and the dependency group."""
    wanted = ["--editable", ".", "--group", group]
    uv = shutil.which("uv")
    if uv:
        logged([uv, "pip", "install", "--python", str(PYTHON), *wanted])
    else:
        logged([str(PYTHON), "-m", "pip", "install", "pip>=25.1"])  # older ones have no --group
        logged([str(PYTHON), "-m", "pip", "install", *wanted])


def logged(command: list[str]) -> None:
    """Run *command* with its output in the log; fail with the line of it that tells the error."""
    with LOG.open("ab") as log:
        code = subprocess.call(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    if code:
        said = [line for line in LOG.read_text(errors="replace").split("\n") if line.strip()]
        errors = [line for line in said if line.lower().startswith("error")]
        fail(f"cannot install, is there a network? {(errors or said or ['no word'])[-1]} (all of it: {LOG})")


def run(module: list[str]) -> int:
    """Run a module of .venv in the foreground, and return its exit code, or 128 + n where signal n ended it."""
    # Ctrl-C reaches the child as well, and how to end is its decision. An exception here could lose its exit code.
    signal.signal(signal.SIGINT, lambda *_: None)
    environment = {**os.environ, "MONGOLOCK_LEFT_OUT": str(LEFT_OUT)}
    # Without files of bytecode, each process of the tests compiles each of its modules again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen([str(PYTHON), "-m", *module], cwd=ROOT, env=environment)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        fail(str(error))
