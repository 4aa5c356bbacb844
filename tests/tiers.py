"""The tiers of the tests, and the rule that each case is in its own.

A pytest plugin: `-p tests.tiers`.

    pytest                a case without a mark, with a limit of half a second, and each `witness`
    pytest --long         each case that is marked `long`: elections, kills, workers, browsers, skewed clocks
    pytest --all          both
    pytest -m program     each case that is marked `program`, with a duration of minutes

A case that is marked `long` and `witness` is a witness. With that mark, a whole file can be `long` except for one case.
If all arguments name cases (`::`), or `-m` selects, the tiers select nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest
from _pytest.runner import runtestprotocol
from environ import Env

SHORT, WITNESS, LONG, PROGRAM = "short", "witness", "long", "program"

#: The seconds for a short case on an otherwise idle machine. The machines of CI are slower.
LIMIT: Final = 0.5
LIMIT_IN_CI: Final = 1.0

#: The file in which Linux records how long runnable processes had no processor (PSI).
PRESSURE: Final = Path("/proc/pressure/cpu")
STAT: Final = Path("/proc/stat")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose other tiers than the short one."""
    parser.addoption("--long", action="store_true", help="run the cases that are marked `long`, and no others")
    parser.addoption("--all", action="store_true", help="run all cases but those that are marked `program`")
    parser.addoption("--no-limit", action="store_true", help="do not judge how long a case takes")


def pytest_configure(config: pytest.Config) -> None:
    """Judge the times of cases, where the machine says how busy it is."""
    if PRESSURE.exists() and not config.option.no_limit:
        config.pluginmanager.register(Stopwatch(LIMIT_IN_CI if Env().bool("CI", default=False) else LIMIT))


def tier(item: pytest.Item) -> str:
    for name in (PROGRAM, WITNESS, LONG):
        if item.get_closest_marker(name):
            return name
    return SHORT


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cases of the tier that runs. Raises UsageError where a case of the short tier would be repeated."""
    for item in items:
        if item.get_closest_marker("flaky") and tier(item) in {SHORT, WITNESS}:
            raise pytest.UsageError(f"{item.nodeid} is marked `flaky`: nothing in the short tier is repeated")
    options = config.option
    if options.markexpr or (config.args and all("::" in argument for argument in config.args)):
        return
    wanted = {SHORT, WITNESS, LONG} if options.all else {LONG} if options.long else {SHORT, WITNESS}
    left_out = [item for item in items if tier(item) not in wanted]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if tier(item) in wanted]


class Stopwatch:
    """A stopwatch that fails each short case that takes longer than the limit, twice in a row.

    The second run judges, because the first one pays for modules and tables that a library loads once. The time of the
    case, of its own fixtures, and of their ends counts. Fixtures that other cases share do not count. The time in which
    any process of the machine waited for a processor does not count, either. On a busy machine that is nearly all of
    the time. A case therefore fails only if there is no other possible reason.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._spent = 0.0
        self._since = 0.0
        self._stalled_before = 0.0
        self._shared = 0  # fixtures that other cases share, and that are being set up, one inside the other

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        if tier(item) != SHORT:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if self._seconds() > self.limit and all(report.passed for report in reports):
            item._initrequest()  # type: ignore[attr-defined]  # as pytest-rerunfailures does it
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
            if (seconds := self._seconds()) > self.limit and all(report.passed for report in reports):
                reports[-1].outcome = "failed"
                reports[-1].longrepr = f"takes {seconds:.2f} s, more than {self.limit:g} s: mark it, or make it faster"
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None]:
        self._spent = 0.0
        self._stalled_before = stalled()
        self._go_on()
        yield
        self._pause()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None]:
        self._go_on()
        yield
        self._pause()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
        self._go_on()
        yield
        if nextitem and nextitem.parent is item.parent:  # else, shared fixtures end here, too
            self._pause()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        if not self._shared:
            self._pause()
        self._shared += 1
        try:
            return (yield)
        finally:
            self._shared -= 1
            if not self._shared:
                self._go_on()

    def _seconds(self) -> float:
        return self._spent - (stalled() - self._stalled_before)

    def _go_on(self) -> None:
        self._since = now()

    def _pause(self) -> None:
        self._spent += now() - self._since


def now() -> float:
    """Return the seconds of a clock that is never set."""
    return time.monotonic()


def stalled() -> float:
    """Return for how many seconds, since this machine began, a process of it waited for a processor."""
    waited = int(PRESSURE.read_text().partition("total=")[2].split()[0]) / 1e6
    stolen = int(STAT.read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")
    return waited + stolen
