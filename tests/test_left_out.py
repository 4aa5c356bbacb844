"""The sentence about left-out tests, and the failure in CI. The tests run pytest in a project of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import left_out
from tests.support.packages import ROOT

pytest_plugins = ["pytester"]

SKIPPED = """
import pytest
@pytest.mark.skip("needs Redis")
@pytest.mark.parametrize("number", [1, 2])
def test_mark(number): pass
"""
FIXTURE = """
import pytest
@pytest.fixture
def engine(): pytest.skip("needs a Docker engine")
def test_fixture(engine): pass
"""
XFAIL = """
import pytest
@pytest.mark.xfail(strict=True)
def test_xfail(): assert False
"""
MODULE = """
import pytest
pytest.importorskip("no_such_module", reason="no such module")
def test_module(): pass
"""
PASSES = "def test_passes(): pass"
MODULES = {"redis": SKIPPED, "docker": FIXTURE, "xfail": XFAIL, "module": MODULE, "passes": PASSES}

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs modules with the plugin, on a machine without a Docker engine."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in (left_out.FILE, "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    pytester.makeini("[pytest]\ntestpaths = .\n")

    def run(*modules: str, ci: bool = False, arguments: tuple[str, ...] = ()) -> pytest.RunResult:
        pytester.makepyfile(**{f"test_{name}": MODULES[name] for name in modules})
        monkeypatch.setenv("CI", str(ci).lower())
        return pytester.runpytest_subprocess("-p", "xdist", "-p", "tests.left_out", *arguments)

    return run


@pytest.mark.long
def test_the_sentence_for_dev_py(run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that all workers of pytest-xdist leave out counts once. dev.py gets the sentence in a file."""
    monkeypatch.setenv(left_out.FILE, "sentence")
    assert "left out" not in run("module", "passes", arguments=("-n", "2")).stdout.str()
    assert (pytester.path / "sentence").read_text() == "left out: 1 for the reasons that pytest gives"
    (pytester.path / "test_module.py").unlink()
    run("passes")
    assert (pytester.path / "sentence").read_text() == ""


@pytest.mark.long
@pytest.mark.parametrize("distributed", [(), ("-n", "2")], ids=["here", "xdist"])
def test_in_ci_it_is_a_failure(run: Run, distributed: tuple[str, ...]) -> None:
    """A left-out test has failed, by its mark or by its fixture. xfail does not count as left out."""
    result = run("redis", "docker", "passes", "xfail", ci=True, arguments=distributed)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*left out in CI (needs Redis): *", "*1 passed, 1 xfailed, 3 errors*"])
