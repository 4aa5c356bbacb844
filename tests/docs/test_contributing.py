"""The commands of CONTRIBUTING.md and of docs/project/tests.md do what these pages say."""

import importlib.util
import re
import runpy
import shlex
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

COMMANDS = runpy.run_path(str(ROOT / "dev.py"))["COMMANDS"]
TEXT = "".join((ROOT / page).read_text() for page in ("CONTRIBUTING.md", "docs/project/tests.md"))
#: The arguments of each `python3 dev.py`, as they are in a block or in the text.
CALLS = sorted({tuple(shlex.split(call, comments=True)) for call in re.findall(r"\bdev\.py ([^`\n]+)", TEXT)})
#: The arguments of pytest in each call that runs tests. Nothing is installed here.
SELECTIONS = sorted(
    {
        (*command.steps[0][1:], *(argument for argument in rest if argument != "--with-system-packages"))
        for name, *rest in CALLS
        if (command := COMMANDS.get(name)) and command.steps[0][0] == "pytest"
    }
)


def test_each_command_exists() -> None:
    """The pages name each command of dev.py and no other, and the modules that they run exist."""
    assert {name for name, *_ in CALLS} == set(COMMANDS)
    modules = re.findall(r"\bpython3 -m ([\w.]+)", TEXT)
    assert modules
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []


@pytest.mark.long
@pytest.mark.parametrize("arguments", SELECTIONS, ids=" ".join)
def test_each_command_selects_a_case(arguments: tuple[str, ...]) -> None:
    """A command that runs tests collects at least one case."""
    command = [sys.executable, "-m", "pytest", *arguments, "--collect-only", "--quiet", "--numprocesses", "0"]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert collected.returncode == 0, collected.stdout + collected.stderr
    assert int(re.findall(r"(\d+)(?:/\d+)? tests collected", collected.stdout)[-1]) > 0
