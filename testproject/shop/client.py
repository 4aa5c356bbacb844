"""The shop's side of the external service, with two slow calls over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass

from django.conf import settings

# The service is on this machine. The proxies of the environment are therefore ignored.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ExportError(Exception):
    """The external service did not take a call: *status* is its answer, None if there was none."""

    def __init__(self, ad_id: str, status: int | None) -> None:
        super().__init__(ad_id, status)
        self.ad_id, self.status = ad_id, status

    def __str__(self) -> str:
        return f"ad {self.ad_id}: the external service answered {self.status or 'nothing'}"


@dataclass(frozen=True)
class Content:
    """The content of an ad at the external service."""

    title: str
    body: str
    price: int


def put_ad(ad_id: str, version: int, content: Content) -> None:
    """Show *content* at the external service. Raises ExportError."""
    _call("PUT", ad_id, version, asdict(content))


def withdraw_ad(ad_id: str, version: int) -> None:
    """Take the ad out of the external service. Raises ExportError."""
    _call("DELETE", ad_id, version, {})


def _call(method: str, ad_id: str, version: int, body: dict[str, str | int]) -> None:
    request = urllib.request.Request(  # noqa: S310 - the address is a setting
        f"{settings.EXTERNAL_URL}/ads/{ad_id}/?version={version}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
        method=method,
    )
    try:
        _opener.open(request, timeout=10).close()
    except urllib.error.HTTPError as error:
        error.close()
        raise ExportError(ad_id, error.code) from error
    except OSError as error:
        raise ExportError(ad_id, None) from error
