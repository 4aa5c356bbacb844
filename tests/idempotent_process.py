"""A process that begins a charge and does not end it: ``python -m tests.idempotent_process DATABASE KEY``."""

from __future__ import annotations

import os
import sys
import time

import django


def main(database: str, key: str) -> None:
    """Run the view of the test until the process is killed."""
    os.environ |= {"DJANGO_SETTINGS_MODULE": "testproject.settings", "MONGODB_NAME": database}
    django.setup()
    from django.http import HttpRequest, HttpResponse
    from django.test import RequestFactory

    from django_mongolock.idempotency import idempotent

    @idempotent(client=lambda request: "shop", lease=2)
    def charge(request: HttpRequest) -> HttpResponse:
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        time.sleep(120)
        return HttpResponse("never")

    make = RequestFactory(SERVER_NAME="localhost")
    charge(make.post("/charge/", "5", content_type="text/plain", headers={"Idempotency-Key": key}))


if __name__ == "__main__":
    main(*sys.argv[1:3])
