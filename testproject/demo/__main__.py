"""``python -m testproject.demo``: run the shop, check it in about half a minute, or go through a bad night.

Exit code 0: what was expected was seen. For ``--check`` that is: nothing wrong. For
``--check --no-locks`` it is the reverse: at least one wrong re-export, which the locks prevent. The traffic goes on
until there is one, for three minutes at most.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from testproject.demo import site, tour
from testproject.demo.processes import ProcessEndedError, Processes
from testproject.servers import ServerError, mongodb

if TYPE_CHECKING:
    from testproject.demo.checks import Finding

CHECK_SECONDS = 24.0
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CheckError(Exception):
    """The error of a check that found a violation. The report names the violation."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo, and return its exit code."""
    options = _options(argv)
    for number in END_SIGNALS:
        signal.signal(number, _interrupt)
    begin = time.monotonic()
    try:
        with running_site(options) as running:
            (check if options.check else show)(running, options)
            if options.incident:
                tour.guide(running)
    except KeyboardInterrupt:
        print("\nStopped; nothing is left running.")
        return 0 if not options.check else 1
    except (CheckError, ProcessEndedError, ServerError, site.SiteError) as error:
        print(f"FAILED after {time.monotonic() - begin:.1f} s: {error}", file=sys.stderr)
        return 1
    print(f"Done in {time.monotonic() - begin:.1f} s.")
    return 0


@contextmanager
def running_site(options: argparse.Namespace) -> Iterator[site.Site]:
    """Start everything, and end it at the end of the block, whatever happens."""
    base = f"http://127.0.0.1:{site.free_port(options.port)}"
    with ExitStack() as stack:
        uri = stack.enter_context(mongodb())
        folder = stack.enter_context(_folder())
        env = stack.enter_context(
            site.databases(folder, base, uri, locking=options.locks, in_documents=options.in_documents)
        )
        running = site.Site(base, stack.enter_context(Processes(folder, env)))
        site.fill(running.password)
        running.start_servers(folder)
        running.start_traffic()
        yield running


def show(running: site.Site, options: argparse.Namespace) -> None:
    """Print all addresses, and wait for Ctrl-C (or for *--seconds*)."""
    print(
        f"""
  start page  {running.base}/
  dashboard   {running.base}/admin/django_mongolock/lockdashboard/
  locks       {running.base}/admin/django_mongolock/lock/
  edit locks  {running.base}/admin/shop/order/ (open the same one in two browsers)
  login       {site.ADMIN} / {running.password}
  or as       {site.EDITOR} / {running.password}
  terminal    {terminal(running)}
  logs        {running.processes.logs}
  locking     {kind(options) if options.locks else "OFF: watch the wrong re-exports on the start page"}

Ctrl-C stops everything.""",
        flush=True,
    )
    if not options.incident:
        running.watch(options.seconds or float("inf"))


def terminal(running: site.Site) -> str:
    """Return the command that shows the locks in a second terminal."""
    env = running.processes.env
    names = ("MONGODB_URI", "MONGODB_NAME", "SQLITE_PATH", "MONGOLOCK_HISTORY")
    settings = " ".join(f"{name}={shlex.quote(env[name])}" for name in names)
    here = Path(sys.executable)
    python = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
    return f"{settings} {python} -m testproject.manage list_locks"


def kind(options: argparse.Namespace) -> str:
    """Return which locks there are."""
    if not options.locks:
        return "off"
    return "on, in the ads themselves" if options.in_documents else "on"


def check(running: site.Site, options: argparse.Namespace) -> None:
    """Let the traffic run, judge it, print a table. Raises CheckError."""
    print(f"Checking {running.base}, locking {kind(options)}.", flush=True)
    findings = []
    for finding in _findings(running, options.seconds or CHECK_SECONDS, locking=options.locks):
        findings.append(finding)
        mark = {None: "", True: "as expected", False: "NOT AS EXPECTED"}[finding.passed]
        print(f"  {finding.name:<40}{finding.value:>16}  {mark}".rstrip(), flush=True)
    failed = [finding.name for finding in findings if finding.passed is False]
    if failed:
        raise CheckError(", ".join(failed))


def _findings(running: site.Site, seconds: float, *, locking: bool) -> Iterator[Finding]:
    from testproject.demo import checks  # Django is set up only now

    end = time.monotonic() + seconds
    if locking:
        yield from checks.abandoned_locks()
    running.watch(end - time.monotonic())
    if not locking:
        checks.await_wrong_export(running)
    yield from checks.traffic(running.stop_traffic())
    yield checks.drain(running, locking=locking)
    yield checks.tasks(running)
    yield from checks.verdict(locking=locking)
    yield checks.left_in_documents()
    if locking:
        yield from checks.pages(running)


@contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder for logs and the SQLite file. The folder is kept if the run fails."""
    folder = Path(tempfile.mkdtemp(prefix="mongolock-demo-"))
    try:
        yield folder
    except Exception:
        print(f"The logs stay in {folder}", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        raise
    else:
        shutil.rmtree(folder)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m testproject.demo", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="verify the demo without interaction, then end")
    parser.add_argument("--incident", action="store_true", help="a guided tour of a bad night, until Ctrl-C")
    parser.add_argument("--no-locks", dest="locks", action="store_false", help="run the same code without locks")
    parser.add_argument(
        "--document-locks",
        dest="in_documents",
        action="store_true",
        help="keep the locks of the ads in the ads themselves, not as named locks",
    )
    parser.add_argument(
        "--seconds", type=float, help=f"how long the traffic runs (--check: {CHECK_SECONDS:.0f}, else until Ctrl-C)"
    )
    parser.add_argument("--port", type=_port, help="port of the web server (8000 or, if that is taken, any; 0: any)")
    options = parser.parse_args(argv)
    if options.in_documents and not options.locks:
        parser.error("--document-locks and --no-locks exclude each other")
    if options.incident and (options.check or options.in_documents or not options.locks):
        parser.error("--incident goes with none of --check, --no-locks and --document-locks")
    return options


def _port(text: str) -> int:
    """Return the number of a port, or raise argparse's error of one line."""
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to 65535, not {text}")
    return int(text)


def _interrupt(*_: object) -> NoReturn:
    """End the run once; a second signal must not disturb the end of the processes."""
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.write(sys.stdout.fileno(), b"\nStopping: running work finishes first, which takes some seconds.\n")  # no buffer
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
