"""Act in the project `tests.outside` as a user of MongoDB. The tasks come from standard input, and the reports are
JSON.

``python -m tests.security.as_user`` gets a JSON list of tasks. A task is the words of a command, or the name of a
function here.
"""

import io
import json
import re
import sys
import threading
from typing import Any

import django
from django.core.management import call_command


def locks() -> str:
    """Acquire a lock, wait for it and renew it, also in a transaction of several."""
    from django_mongolock import mongo_lock
    from django_mongolock.backends import get_backend

    got = threading.Event()

    def wait() -> None:
        with mongo_lock("handed", wait=20):
            got.set()

    with mongo_lock("handed", "other", lease=3) as lock:
        thread = threading.Thread(target=wait)
        thread.start()
        got.wait(2)
        lock.extend(9)
        lock.ensure_held()
    thread.join(20)
    heard = get_backend().session().waits.listener.listening
    return f"handed over: {got.is_set()}, by a bell: {heard}"


def admin() -> str:
    """Open the list, the dashboard, the page of a lock, the actions, and the status."""
    from django.contrib.auth.models import User
    from django.test import Client
    from django.test.utils import setup_test_environment

    from django_mongolock import mongo_lock

    setup_test_environment()
    call_command("migrate", database="default", verbosity=0)
    User.objects.create_superuser("root", password="root")
    client = Client(raise_request_exception=False)
    client.login(username="root", password="root")
    start = "/admin/django_mongolock/lock"
    pages = ("/", "/?state=all", "/?state=waited", "dashboard/", "/status/", "/others/", "/shop:shown/change/")
    with mongo_lock("shown"):
        statuses = [client.get(start + page).status_code for page in pages]
        history = client.get("/admin/mongolock_history/lockevent/")
        statuses.append(history.status_code)
        form = {"action": "ask_to_release", "index": 0, "_selected_action": ["shop:shown"]}
        statuses.append(client.post(f"{start}/?state=all", form).status_code)
    said = re.search(r'class="errornote">([^<]*)', history.content.decode())
    return str(statuses) + (f" {said[1]}" if said else "")


def declare() -> Any:
    """Declare a document lock, as a project does."""
    from django_mongolock.backends import mongo_store
    from django_mongolock.documents import DocumentLock

    def ads() -> Any:
        store = mongo_store()
        return store.client[store.config.database]["shop_ad"]

    return DocumentLock(
        ads, name="ads", state="state", pending={"exporting": "failed"}, final=["exported"], stale_after=60
    )


def documents() -> str:
    """Hold and finish a document, list and clear others."""
    lock = declare()
    with lock.hold((1, 0)) as held:
        held.renew()
        listed = [each.id for each in lock.snapshots("held")]
    return f"held {listed}, cleared {lock.clear_stale().count}"


def run(task: list[str]) -> dict[str, Any]:
    """Carry out one task, and report its output, or its error in one line."""
    out = io.StringIO()
    try:
        if task[0] in ("locks", "admin", "declare", "documents"):
            out.write(str(globals()[task[0]]()))
        else:
            checks: dict[str, Any] = {"skip_checks": False} if task[0] == "migrate" else {}  # as on a command line
            call_command(*task, stdout=out, stderr=out, **checks)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the report
        return {"task": task, "error": f"{type(error).__name__}: {error}", "out": out.getvalue()}
    return {"task": task, "error": None, "out": out.getvalue()}


if __name__ == "__main__":
    tasks = json.loads(sys.stdin.read())
    django.setup()
    sys.stdout.write("\n" + json.dumps([run(task) for task in tasks]))
