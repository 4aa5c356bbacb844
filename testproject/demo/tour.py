"""``--incident``, a guided tour of a bad night. The tour presses the buttons of the start page, and names the next
step."""

from __future__ import annotations

import textwrap
import time
from typing import Any

from testproject.demo import site
from testproject.demo.browser import Browser

LOOK_EVERY = 0.5


def guide(running: site.Site) -> None:
    """Go through all incidents, and return when the last is over."""
    browser = Browser(running.base)
    browser.login("/admin/login/", site.ADMIN, running.password)
    names = [incident["name"] for incident in _incidents(browser)]
    print(f"\nA bad night, in {len(names)} incidents. The steps are also on the start page, below “A bad night”.")
    for number, name in enumerate(names, 1):
        browser.post_form(f"/incidents/{name}/", {})
        incident = _incident(browser, name)
        _say(f"\n{number} of {len(names)}: {incident['title']}\n", incident["story"])
        step = -1
        while "lesson" not in incident:
            running.processes.check()
            if incident.get("step", -1) > step:
                step = incident["step"]
                _say(f"  look at  {running.base}{incident['look']}\n", incident["press"])
            time.sleep(LOOK_EVERY)
            incident = _incident(browser, name)
        _say("  done\n", incident["lesson"])
    print("\nThe night is over. What happened is in the history:", flush=True)
    print(f"  look at  {running.base}/admin/mongolock_history/lockevent/", flush=True)
    print("Ctrl-C stops everything.", flush=True)
    running.watch(float("inf"))


def _incidents(browser: Browser) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = browser.get("/incidents/").json()["incidents"]
    return found


def _incident(browser: Browser, name: str) -> dict[str, Any]:
    return next(each for each in _incidents(browser) if each["name"] == name)


def _say(head: str, text: str) -> None:
    print(head + textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="  "), flush=True)
