"""Run the tests that a new Django or Python can break on the oldest and the newest pair: `python3 dev.py versions`.

The oldest pair is that of .venv. The newest pair is made in .venv-newest, from the newest Python of this machine and
the newest Django and django-mongodb-backend of the index. With --write, the table of docs/reference/compatibility.md is
written, with the commit that was run. Further arguments go to pytest.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn
from xml.etree import ElementTree as ET

ROOT: Final = Path(__file__).resolve().parents[1]
VENV: Final = ROOT / ".venv-newest"
PAGE: Final = ROOT / "docs/reference/compatibility.md"
BEGIN: Final = "<!-- python3 dev.py versions --write: begin -->\n"
END: Final = "<!-- python3 dev.py versions --write: end -->\n"
HEAD: Final = """\
| pair | Python | Django | django-mongodb-backend | PyMongo | MongoDB | tests |
|---|---|---|---|---|---|---|
"""
#: Tests that depend on Django's own ways, such as the pages of the admin, edit locks, versions of rows, and checks.
TESTS: Final = (
    "tests/test_admin.py",
    "tests/test_dashboard.py",
    "tests/test_history.py",
    "tests/editing/test_admin.py",
    "tests/test_versions.py",
    "tests/test_versions_forms.py",
    "tests/test_checks.py",
)
#: Without these, because texts that others write into a lock look alike on each Django.
SELECTED: Final = "not hostile and not damage"
#: The oldest Python of the newest Django.
NEEDED: Final = (3, 12)
FACTS: Final = """
import json, os, platform, subprocess
import django, django_mongodb_backend, pymongo
from testproject.servers import mongod_path
if uri := os.environ.get("MONGODB_URI"):
    server = pymongo.MongoClient(uri).server_info()["version"]
else:
    server = subprocess.check_output([mongod_path(), "--version"], text=True).split()[2].lstrip("v")
drivers = [django_mongodb_backend.__version__, pymongo.version]
print(json.dumps([platform.python_version(), django.__version__, *drivers, server]))
"""
PROBE: Final = "import sys; print(*sys.version_info[:3] if sys.version_info.releaselevel == 'final' else ())"


class Candidate(NamedTuple):
    version: tuple[int, ...]
    path: str


def main(arguments: Sequence[str]) -> int:
    """Run both pairs, and return 0 if all tests passed."""
    write = "--write" in arguments
    strict = write or bool(os.environ.get("CI"))
    rest = [argument for argument in arguments if argument != "--write"]
    if write and git("status", "--porcelain"):
        fail("commit your changes first: the table names the commit that was run")
    if strict and sys.version_info[:2] != oldest_supported():
        fail(f"the oldest pair needs Python {'.'.join(map(str, oldest_supported()))}: run dev.py with it")
    commit = git("log", "-1", "--format=`%h` of %cs") if write else ""
    newest = max(pythons(), default=None)
    if newest is None or newest.version < NEEDED:
        lack = "no Python 3.12 or newer on this machine (PATH, pyenv, uv): the newest Django was not tried"
        if strict:
            fail(lack)
        print(f"versions: {lack}", flush=True)
        return run("oldest", sys.executable, rest)[0]
    results = [run("oldest", sys.executable, rest), run("newest", environment(newest.path), rest)]
    code = max(code for code, _row in results)
    if write and not code:
        write_table([row for _code, row in results], commit)
    return code


def fail(message: str) -> NoReturn:
    """End with one line of advice."""
    sys.exit(f"versions: {message}")


def git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()


def oldest_supported() -> tuple[int, ...]:
    """Return the oldest Python that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))


def pythons() -> Iterator[Candidate]:
    """Yield the released Pythons of this machine, found on PATH, by pyenv, by uv, and beside this one."""
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv") / "versions"
    homes = (pyenv, home / ".local/share/uv/python", Path(sys.base_prefix).parent)
    folders = [*map(Path, os.get_exec_path()), *(folder for each in homes for folder in each.glob("*/bin"))]
    found = {str(path) for folder in folders for path in folder.glob("python3.*") if re.search(r"3\.\d+$", path.name)}
    for path in sorted(found | {sys.executable}):
        answer = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, check=False)
        if answer.returncode == 0 and (version := tuple(map(int, answer.stdout.split()))):
            yield Candidate(version, path)


def environment(python: str) -> str:
    """Make .venv-newest or bring it up to date, and return its Python."""
    own = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = [str(own), "-m", "pip", "install", "--upgrade"]
    print(f"versions: installing the newest Django into {VENV}", flush=True)
    for command in (
        [python, "-m", "venv", str(VENV)],
        [*pip, "pip>=25.1"],  # older ones have no --group
        [*pip, "--editable", ".", "--group", "newest"],
    ):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            fail(f"cannot install: {done.stdout}{done.stderr}")
    return str(own)


def run(name: str, python: str, arguments: Sequence[str]) -> tuple[int, str]:
    """Run the tests with *python*, and return pytest's exit code and the row of the table."""
    # django-mongodb-backend 6 asks for MongoDB 7, and the server of the group `mongod` is a 6.0 (see tox.ini).
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "MONGOLOCK_TEST_OLD_SERVER": "1"}
    facts = json.loads(subprocess.check_output([python, "-c", FACTS], cwd=ROOT, env=variables))
    print(f"versions: {name}: Python {facts[0]}, Django {facts[1]}", flush=True)
    report = ROOT / f".versions-{name}.xml"
    options = ["--no-limit", "--numprocesses", str(os.cpu_count() or 1), "-k", SELECTED, f"--junit-xml={report}"]
    try:
        code = subprocess.call([python, "-m", "pytest", *options, *TESTS, *arguments], cwd=ROOT, env=variables)
        return code, row(name, facts, passed(report) if code == 0 else 0)
    finally:
        report.unlink(missing_ok=True)


def passed(report: Path) -> int:
    """Return how many tests of pytest's report passed."""
    suites: Any = ET.parse(report).getroot().iter("testsuite")  # noqa: S314 - pytest wrote it just now
    return sum(int(suite.get("tests")) - int(suite.get("skipped")) for suite in suites)


def row(name: str, facts: Sequence[str], tests: int) -> str:
    return f"| {' | '.join([name, *facts, f'{tests} passed'])} |\n"


def write_table(rows: Sequence[str], commit: str) -> None:
    """Write the table with these rows, and the commit that was run."""
    before, rest = PAGE.read_text().split(BEGIN)
    _table, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}{HEAD}{''.join(rows)}\nRun at commit {commit}.\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
