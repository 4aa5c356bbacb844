"""Use the installed package, with a lock, its model, a view that meets it, the pages of the admin, and a command. An
error is raised if one fails."""

import importlib.util
import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import django
from django.contrib.staticfiles import finders
from django.core.management import call_command
from django.test import Client

#: Modules that must not be imported, because they are optional or belong to our own tests.
OPTIONAL = ("celery", "prometheus_client", "opentelemetry", "rest_framework", "pytest", "redis")


def use() -> None:
    """All of it."""
    from django.contrib.auth.models import User

    import django_mongolock
    from django_mongolock import mongo_lock
    from django_mongolock.models import Lock

    installed = Path(django_mongolock.__file__).resolve()
    assert Path(sys.prefix).resolve() in installed.parents, f"this is not what was installed: {installed}"
    found = [name for name in OPTIONAL if importlib.util.find_spec(name)]
    assert found == [], f"a plain installation brings {found}"

    User.objects.create_superuser("root", password="root")
    browser = Client()
    browser.login(username="root", password="root")
    assert browser.get("/pay/5/").content == b"paid"
    with mongo_lock("pay:5") as lock:
        assert [held.key for held in Lock.objects.held()] == ["pay:5"]
        out = io.StringIO()
        call_command("list_locks", "--json", stdout=out)
        assert [shown["key"] for shown in json.loads(out.getvalue())["kinds"][0]["locks"]] == ["pay:5"]
        with ThreadPoolExecutor(1) as somebody:
            busy = somebody.submit(Client().get, "/pay/5/", headers={"accept": "text/html"}).result()
        assert (busy.status_code, int(busy["Retry-After"]) > 0) == (423, True)
        assert "django_mongolock/contention.html" in [template.name for template in busy.templates]
        for page in ("", "pay:5/change/"):
            shown = browser.get(f"/admin/django_mongolock/lock/{page}", follow=True)
            assert shown.status_code == 200
            assert b"pay:5" in shown.content
        assert lock.held
    assert not Lock.objects.held().exists()
    for style in (installed.parent / "static").rglob("*.css"):
        assert finders.find(str(style.relative_to(installed.parent / "static")))
    sys.stdout.write(f"django {django.__version__}, {installed.parent}\n")


if __name__ == "__main__":
    django.setup()
    from django.test.utils import setup_test_environment

    setup_test_environment()
    use()
