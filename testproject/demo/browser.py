"""A browser of forty lines, with cookies, login and CSRF token, for the traffic and the check."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from http.cookiejar import CookieJar
from typing import Any


class LoginError(Exception):
    """The site refused the login of *username*."""


@dataclass(frozen=True)
class Answer:
    """An answer, including errors of the site."""

    status: int
    url: str
    text: str

    def json(self) -> Any:
        """Return the body, parsed."""
        return json.loads(self.text)


class Browser:
    """One session on the site at *base*. Threads may share its cookies."""

    def __init__(self, base: str) -> None:
        self.base = base
        self._cookies = CookieJar()
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(self._cookies)
        )

    def get(self, path: str) -> Answer:
        """Fetch a page."""
        return self._open("GET", path)

    def send(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        """Send JSON to the API."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        return self._write(method, path, json.dumps(body).encode(), headers)

    def post_form(self, path: str, fields: dict[str, str]) -> Answer:
        """Submit a form."""
        return self._write("POST", path, urllib.parse.urlencode(fields).encode(), {})

    def login(self, path: str, username: str, password: str) -> None:
        """Log in through the form at *path*. Raises LoginError."""
        self.get(path)
        answer = self.post_form(path, {"username": username, "password": password, "next": "/"})
        if "sessionid" not in self._jar():
            raise LoginError(f"{username}: {answer.status}")

    def _jar(self) -> dict[str, str]:
        return {cookie.name: cookie.value or "" for cookie in self._cookies}

    def _write(self, method: str, path: str, data: bytes, headers: dict[str, str]) -> Answer:
        token = {"X-CSRFToken": self._jar().get("csrftoken", "")}
        return self._open(method, path, data, headers | token)

    def _open(self, method: str, path: str, data: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        request = urllib.request.Request(self.base + path, data, headers or {}, method=method)  # noqa: S310 - http
        try:
            response = self._opener.open(request, timeout=30)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            return Answer(response.status, response.url, response.read().decode(errors="replace"))


def links(page: str, pattern: str) -> list[str]:
    """Return the targets of a page's links that match *pattern*."""
    return [target for target in re.findall(r'href="([^"]+)"', page) if re.search(pattern, target)]
