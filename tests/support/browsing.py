"""Common parts of the tests in a real browser, such as the browser, a strict Content-Security-Policy, and a user who is
logged in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.test import Client

from testproject.chromium import chromium
from tests import parts

#: Nothing inline, nothing from elsewhere.
POLICY: Final = "default-src 'self'; form-action 'self'; frame-ancestors 'none'"
MIDDLEWARE: Final = "tests.support.browsing.strict_policy"


def strict_policy(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    """Return the middleware of a site with a strict policy."""

    def middleware(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        response["Content-Security-Policy"] = POLICY
        return response

    return middleware


@contextmanager
def browser() -> Iterator[Any]:
    """Yield a browser, or skip the test. Playwright has an event loop in this thread, and Django shall not mind."""
    parts.require("Chromium")
    with chromium() as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
        yield running


@contextmanager
def opened(running: Any, base: str, user: User, **options: Any) -> Iterator[Any]:
    """Open a page of the browser for *user*. The page must have no complaints (`page.complaints`) at the end."""
    client = Client()
    client.force_login(user)
    context = running.new_context(base_url=base, **options)
    cookie = {"name": settings.SESSION_COOKIE_NAME, "value": client.cookies[settings.SESSION_COOKIE_NAME].value}
    context.add_cookies([{**cookie, "url": base}])
    page = context.new_page()
    page.complaints = []
    page.on("console", lambda said: page.complaints.append(said.text) if _matters(said) else None)
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    try:
        yield page
    finally:
        context.close()


def _matters(said: Any) -> bool:
    return said.type == "error" and not said.location["url"].endswith("/favicon.ico")
