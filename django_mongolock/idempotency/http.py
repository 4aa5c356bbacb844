"""HTTP's part of `idempotent`: the key and the fingerprint of a request, and a response or a result as it is kept."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from io import BytesIO
from typing import Any, Final

from django.http import HttpRequest, HttpResponse
from django.http.multipartparser import MultiPartParser, MultiPartParserError
from django.http.request import RawPostDataException
from django.http.response import HttpResponseBase
from django.template.response import SimpleTemplateResponse

from ..exceptions import LockMisused

#: The header of a response that was kept, as Stripe's API names it.
REPLAYED: Final = "Idempotent-Replayed"
#: Responses that mean "try again", besides those from 500 on, and those with Retry-After.
_PASSING: Final = (408, 423, 425, 429)
#: The most bytes that a response or a result may have to be kept. What is kept instead of one that cannot be.
LARGEST: Final = 1_000_000
ONLY_THE_FACT: Final[dict[str, Any]] = {"status": None}
#: What is never kept of a response.
_DROPPED: Final = ("set-cookie", "date")
#: A String of RFC 9651, in double quotes, as the draft wants it; or what most clients send, without them. A comma would
#: stand between two headers of that name.
_KEY: Final = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\]){1,255})"|([!#-+\--~]{1,255})')


def read_key(sent: str) -> str | None:
    """Return the key that a header has; None if it has none that can be read, or one that is too long."""
    match = _KEY.fullmatch(sent)
    return match and (match[2] or re.sub(r"\\(.)", r"\1", match[1]))


def fingerprint(request: HttpRequest) -> str:
    """Return what is the same in a request that is sent again: a hash of method, host, address and body.

    Of a form with files, it is that of the fields and files: the text between them is another one each time.
    """
    # The test client of django-ninja makes requests without one.
    host = request.get_host() if {"HTTP_HOST", "SERVER_NAME"} & request.META.keys() else ""
    made = hashlib.sha256(json.dumps([request.method, host, request.get_full_path()]).encode())
    for part in _parts(request) if request.content_type == "multipart/form-data" else (_body(request),):
        made.update(part)
    return made.hexdigest()


def _parts(request: HttpRequest) -> Iterator[bytes]:
    """Yield the fields and files of a form. Django itself reads only those that are sent by POST."""
    fields: Any = request.POST
    all_files = request.FILES
    if request.method != "POST":
        body = BytesIO(_body(request))
        try:
            fields, all_files = MultiPartParser(request.META, body, request.upload_handlers, request.encoding).parse()
        except MultiPartParserError:
            yield body.getvalue()
            return
    yield json.dumps(list(fields.lists())).encode()
    for name, files in all_files.lists():
        for file in files:
            yield json.dumps([name, file.name, file.size]).encode()
            yield from file.chunks()
            file.seek(0)


def _body(request: HttpRequest) -> bytes:
    try:
        return request.body
    except RawPostDataException:
        raise LockMisused(
            "the body of the request was read as a stream before @idempotent could compare it: have what reads it, "
            "such as a middleware or a permission of Django REST framework, read request.body first"
        ) from None


def check_response(view: str, result: object, arguments: list[object]) -> None:
    """Render *result*, of a *view* with these *arguments*. Raises LockMisused for what is not kept."""
    if not isinstance(result, HttpResponseBase):
        raise LockMisused(
            f"{view} returned a {type(result).__name__}, which is not kept: return an HttpResponse; in django-ninja, "
            "api.create_response(request, data, status=201)"
        )
    if result.streaming:
        raise LockMisused(
            f"{view} returned a streaming response, which is not kept: return an HttpResponse, or take @idempotent off"
        )
    if isinstance(result, SimpleTemplateResponse):
        for facts in (getattr(argument, "__dict__", {}) for argument in arguments):
            if "accepted_renderer" in facts:  # as Django REST framework does after the view
                vars(result).update({name: facts[name] for name in ("accepted_renderer", "accepted_media_type")})
                vars(result)["renderer_context"] = dict(facts["parser_context"])
        result.render()


def as_kept(response: HttpResponse) -> dict[str, Any] | None:
    """Return what is kept of a response; None if it means "try again". Raises ValueError if it is too large."""
    if response.status_code >= 500 or response.status_code in _PASSING or "Retry-After" in response.headers:
        return None
    headers = [[name, value] for name, value in response.headers.items() if name.lower() not in _DROPPED]
    return _small({"status": response.status_code, "headers": headers, "body": response.content})


def json_as_kept(result: object) -> dict[str, Any]:
    """Return what is kept of a result. Raises TypeError and ValueError if it is not JSON, or too large."""
    return _small({"status": 200, "headers": [], "body": json.dumps(result).encode()})


def _small(kept: dict[str, Any]) -> dict[str, Any]:
    if len(kept["body"]) + sum(len(name) + len(value) for name, value in kept["headers"]) > LARGEST:
        raise ValueError(f"it is too large: more than {LARGEST} bytes")
    return kept


def replayed(kept: dict[str, Any]) -> HttpResponse:
    """Return the response that was kept."""
    made = HttpResponse(kept["body"], status=kept["status"])
    del made.headers["Content-Type"]
    for name, value in (*kept["headers"], (REPLAYED, "true")):
        made.headers[name] = value
    return made
