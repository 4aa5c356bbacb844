"""dev.py needs one command on a fresh machine, and gives one line of advice if it cannot work."""

import ast
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.waiting import eventually

SOURCE = Path(__file__).resolve().parent.parent / "dev.py"
PYPROJECT = """
[project]
name = "fresh"
version = "0"
dependencies = ["django-mongolock-has-no-such-dependency"]
[dependency-groups]
test = []
"""
COMMANDS = (
    *("test", "versions", "faults", "platforms", "simulate", "demo"),
    *("docs", "lint", "build", "screenshots", "load", "bench"),
)
# Run dev.py unchanged, after a change to the parts that it finds on the machine.
PATCHED = "import runpy, sys; sys.argv = ['dev.py', 'test']; {patch}; runpy.run_path('dev.py', run_name='__main__')"
# A substitute for pytest in a project of its own. It prints its arguments, and waits for a signal if told to.
FAKE_PYTEST = """
import os, pathlib, sys, time
try:
    print(*sys.argv[1:], flush=True)
    if "some" in sys.argv:
        pathlib.Path(os.environ["MONGOLOCK_LEFT_OUT"]).write_text("left out: some")
    time.sleep(60 if "wait" in sys.argv else 0)
except KeyboardInterrupt:
    sys.exit(7)
sys.exit(3)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with dev.py and a pyproject.toml, as in a fresh clone."""
    shutil.copy(SOURCE, tmp_path / "dev.py")
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    return tmp_path


@pytest.fixture
def dev(project: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return dev.py of that project as a module. Instead of installing, it notes the commands in `dev.did`."""
    spec = importlib.util.spec_from_file_location("dev_under_test", project / "dev.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "did", [], raising=False)
    monkeypatch.setattr(module, "logged", lambda command: module.did.append(" ".join(map(str, command))))
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    return module


@pytest.fixture
def installed(project: Path) -> Path:
    """Return the project with a .venv that has the group 'test' already, and with our own pytest."""
    (project / "pytest.py").write_text(FAKE_PYTEST)
    venv.create(project / ".venv", symlinks=os.name != "nt")
    done = {"test": hashlib.sha256(PYPROJECT.encode()).hexdigest()}
    origin = f"{platform.python_version()} of {sys.base_prefix} in {project.resolve() / '.venv'}"
    (project / ".venv/dev.json").write_text(json.dumps({"origin": origin, "groups": done}))
    return project


def run(project: Path, *arguments: str, patch: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run dev.py of *project*, with the machine changed by the Python statement *patch*."""
    code = ["-c", PATCHED.format(patch=patch)] if patch else ["dev.py", *arguments]
    variables = {name: value for name, value in os.environ.items() if name not in {"MONGODB_URI", "MONGOD"}}
    return subprocess.run(
        [sys.executable, *code], cwd=project, env=variables | environment, capture_output=True, text=True, check=False
    )


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    """Return the only line that a failed run wrote on stderr."""
    assert result.returncode != 0
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("dev.py: ")
    return lines[0]


def test_an_unknown_command_is_one_line(project: Path) -> None:
    """A typing error costs nothing, and shows the existing commands."""
    line = one_line(run(project, "tset"))
    assert line == f"dev.py: there is no command 'tset', only {', '.join(COMMANDS)}"


def test_it_needs_the_standard_library_only() -> None:
    """A fresh machine has only the standard library to import."""
    tree = ast.parse(SOURCE.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


def test_an_old_python_can_read_it() -> None:
    """The advice to use another Python is worth nothing if the old one stops at the syntax."""
    ast.parse(SOURCE.read_text(), feature_version=(3, 7))


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        (
            "sys.version_info = (3, 9); import platform; platform.python_version = lambda: '3.9.2'",
            "this is Python 3.9.2: ",
        ),
        ("import platform; platform.machine = lambda: 'riscv64'", "riscv64): set MONGODB_URI"),
        ("sys.platform = 'sunos5'", "(sunos5 "),
        ("import importlib.util as u; f = u.find_spec; u.find_spec = lambda n: n != 'ensurepip' and f(n)", "-venv"),
        ("import ctypes; ctypes.CDLL = lambda name: open(name)", "libcurl.so.4: apt-get install libcurl4 libssl3"),
    ],
    ids=["old python", "unknown machine", "unknown system", "no ensurepip", "no libcurl"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the advice is for Linux")
def test_what_the_machine_lacks_is_one_line(project: Path, patch: str, words: str) -> None:
    """Each missing part of a machine is reported in one line with the cure, without a traceback."""
    assert words in one_line(run(project, patch=patch, PATH=""))


def test_arguments_exit_code_and_time(installed: Path) -> None:
    """The program gets the arguments unchanged. Its exit code is dev.py's, and the last line has the duration."""
    result = run(installed, "test", "-k", "a or b", "--help")
    assert result.returncode == 3
    assert result.stdout.splitlines()[0] == f"--numprocesses {os.cpu_count()} -k a or b --help"
    assert re.fullmatch(r"tests: \d+ s", result.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 7), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_signals_reach_the_program_once_and_its_end_is_awaited(
    installed: Path, number: signal.Signals, code: int
) -> None:
    """Ctrl-C goes to the whole group, as from a terminal. SIGTERM goes to dev.py alone, as from a supervisor."""
    process = subprocess.Popen(
        [sys.executable, "dev.py", "test", "wait"],
        cwd=installed,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
        # A shell starts background processes with Ctrl-C ignored, and all their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no thread runs here
    )
    assert process.stdout
    assert process.stdout.readline() == f"--numprocesses {os.cpu_count()} wait\n"
    if number is signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == code
    assert output.startswith("tests: ")


def test_it_installs_once(dev: ModuleType, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run makes the environment. Another group or a changed pyproject.toml goes into the same one."""
    dev.prepare("test")
    assert "-m venv" in dev.did[0]
    assert dev.did[-1].endswith("-m pip install --editable . --group test")
    dev.did.clear()
    dev.prepare("lint")
    assert not any("venv" in command.split() for command in dev.did)
    dev.did.clear()
    for group in ("test", "lint"):
        dev.prepare(group)
    assert dev.did == []
    (project / "pyproject.toml").write_text(PYPROJECT + "# changed")
    monkeypatch.setattr(dev.shutil, "which", lambda name: "/somewhere/uv")
    dev.prepare("test")
    assert dev.did == [f"/somewhere/uv pip install --python {dev.PYTHON} --editable . --group test"]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no flock on Windows")
@pytest.mark.skipif(os.name == "nt", reason="links need a right there")
def test_a_linked_environment_is_left_alone(dev: ModuleType, tmp_path: Path) -> None:
    """A .venv that links to another folder keeps every file, because it is in use there."""
    other = tmp_path / "other"
    other.mkdir()
    files = {other / "pyvenv.cfg", other / dev.STAMP.name}
    for file in files:
        file.touch()
    dev.VENV.symlink_to(other)
    with pytest.raises(SystemExit, match="is a link"):
        dev.prepare("test")
    assert set(other.iterdir()) == files


def test_a_second_run_waits_for_the_first_to_install(dev: ModuleType, installed: Path) -> None:
    """If two terminals begin at once, the second starts when the first has finished installing."""
    with dev.one_at_a_time():
        second = subprocess.Popen([sys.executable, "dev.py", "test"], cwd=installed, stdout=subprocess.PIPE, text=True)
        assert not eventually(lambda: second.poll() is not None, seconds=0.2)
    assert second.wait(timeout=10) == 3
    second.communicate()
