"""A real browser for the tests and the screenshots. Playwright drives the system's Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class NoBrowserError(Exception):
    """There is no browser on this machine."""


def chromium_path() -> str:
    """Return the browser of $CHROMIUM, or one on PATH. Raise NoBrowserError if there is none."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise NoBrowserError("there is no Chromium on this machine: install it, or name it in CHROMIUM")
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser without a window. Raises NoBrowserError."""
    from playwright.sync_api import sync_playwright

    path = chromium_path()
    arguments = ["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()
