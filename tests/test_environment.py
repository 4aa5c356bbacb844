"""From environment variables to settings: docs/reference/settings.md is run, and a wrong text is found by a check."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from django.core.exceptions import ImproperlyConfigured
from pytest_django import Settings

from django_mongolock.conf import database_from_url, get_settings
from django_mongolock.management import checks
from testproject.servers import ReplicaSet
from tests.support.programs import python
from tests.test_authentication import Authority
from tests.test_checks import ids

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/reference/settings.md").read_text()
EXAMPLE, JSON_EXAMPLE = re.findall(r"^```console\n(.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE)
SECRET = "hunter2"

SETTINGS = """
INSTALLED_APPS = ["django_mongolock"]
DATABASE_ROUTERS = ["django_mongolock.router.MongoLockRouter"]
SECRET_KEY = "x"
from django_mongodb_backend.features import DatabaseFeatures
DatabaseFeatures.minimum_database_version = (6, 0)
"""
HOLD = """
import django
django.setup()
from django_mongolock import mongo_lock
from django_mongolock.conf import get_settings
with mongo_lock("k") as lock:
    print(f"{get_settings().LEASE:g}", lock.held)
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Return a project with the settings of the page."""
    url, of_json = re.findall(r"^```python\n(.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "from_url.py").write_text(url + SETTINGS)
    (tmp_path / "from_json.py").write_text(f"{url}\n{of_json}{SETTINGS}")
    return tmp_path


@pytest.mark.long
def test_a_project_from_the_environment(shop: Path) -> None:
    """A project with the settings of the page can lock, with several servers, TLS, a login, and a password that must be
    encoded."""
    access = replace(Authority(shop).access("127.0.0.1", "localhost"), users=True)
    with ReplicaSet(access=access) as servers:
        with servers.members[0].client() as client:
            client.admin.command("createUser", "ro@t", pwd=f"{SECRET}/?", roles=["root"])
        port = servers.members[0].port
        url = f"mongodb://ro%40t:{SECRET}%2F%3F@127.0.0.1:{port},localhost:{port}/shop?authSource=admin"
        url += f"&replicaSet=rs0{access.query}"
        environment = {"PYTHONPATH": f"{shop}{os.pathsep}{ROOT}", "DATABASE_URL": "sqlite:///:memory:"}
        environment["MONGOLOCK_URL"] = url
        assert python("-c", HOLD, folder=None, DJANGO_SETTINGS_MODULE="from_url", **environment) == "30 True\n"
        environment["MONGOLOCK"] = json.dumps({"DATABASE": "locks", "LEASE": 35})
        assert python("-c", HOLD, folder=None, DJANGO_SETTINGS_MODULE="from_json", **environment) == "35 True\n"


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("", "E019", "does not begin with mongodb://"),
        ("nonsense", "E019", "does not begin with mongodb://"),
        (f"postgres://u:{SECRET}@h/db", "E019", "does not begin with mongodb://"),
        (f"u:{SECRET}@h/db", "E019", "does not begin with mongodb://"),
        (f"mongodb://u:{SECRET}@h", "E021", "has no NAME"),
        (f"mongodb://u:{SECRET}@h/a/b", "E021", "has '/' in its NAME"),
        (f"mongodb://u:{SECRET}@/db", "E019", "cannot be read"),
        (f"mongodb://u:{SECRET}@h:x/db", "E019", "cannot be read"),
        (f"mongodb://u:a?{SECRET}@h/db", "E019", "percent-encode"),
        (f"mongodb://u:a@{SECRET}/b@h:x/db", "E019", "percent-encode"),
        (f"mongodb://u:{SECRET}@h/db?beat=30", "E019", "option 'beat' is unknown to MongoDB, or has a wrong value."),
        (f"mongodb://h/db?tlsCAFile=/{SECRET}", "E019", "option 'tlsCAFile'"),
        (f"mongodb://h/db?tls={SECRET}", "E019", "option 'tls' is unknown to MongoDB, or has a wrong value"),
    ],
)
@pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")
def test_wrong_addresses(url: str, code: str, words: str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wrong address is found by a check with the cure, and is an error at the first lock. No text shows the
    password."""
    settings.DATABASES = {**settings.DATABASES, "wrong": database_from_url(url)}
    settings.MONGOLOCK = {"DATABASE": "wrong"}
    found = checks.check_settings(app_configs=None)
    assert ids(found) == [code]
    assert words in found[0].msg
    assert "mongodb://" in str(found[0].hint)
    assert SECRET not in repr(found)
    assert SECRET not in settings.DATABASES["wrong"]["HOST"] or "option" in words


@pytest.mark.parametrize(
    ("host", "name", "code"),
    [
        ("mongodb://h/db", "", None),
        ("mongodb://h/?w=1", "", "E021"),
        ("h", "", "E021"),
        ("mongodb://h", "d b", "E021"),
        (f"mongodb://user:{SECRET}@@/", "db", "E019"),
        (f"mongodb://u:{SECRET}@h:99999/", "db", "E019"),
        (f"mongodb://a:{SECRET}@h/?w=x&w=7&ssl=maybe", "db", "E019"),
    ],
)
@pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")
def test_a_host_that_is_an_address(host: str, name: str, code: str | None, settings: Settings) -> None:
    """The name of the database may be in the address, because django-mongodb-backend reads it from there. No text
    quotes the address."""
    entry = {"ENGINE": "django_mongodb_backend", "HOST": host, "NAME": name}
    settings.DATABASES = {**settings.DATABASES, "mongo": entry}
    found = checks.check_settings(app_configs=None)
    assert ids(found) == ([code] if code else [])
    assert SECRET not in repr(found)


@pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")
def test_right_addresses(settings: Settings, mongo_uri: str) -> None:
    """Addresses of one server, of several, and of a DNS name are right, in the forms that people write into HOST."""
    for url in (mongo_uri, "mongodb://[::1]:27017/db", "mongodb+srv://c.example.net/db", "mongodb://a,b:1/?w=majority"):
        entry = {**database_from_url(url), "NAME": "db"}
        for host in (entry["HOST"], url):
            settings.DATABASES = {**settings.DATABASES, "mongo": {**entry, "HOST": host}}
            assert checks.check_settings(app_configs=None) == []
    assert urlsplit(mongo_uri).netloc in database_from_url(mongo_uri)["HOST"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "E001"),
        (f"{{'DATABASE': '{SECRET}'}}", "E018"),
        ('{"DATABASE": "mongo"', "E018"),
        ("[1]", "E018"),
        (f"mongodb://u:{SECRET}@h/db", "E018"),
        ('{"DATABASE": "mongo", "LEASE": "30"}', "E005"),
        ('{"DATABASE": "mongo", "LEASE": 30}', None),
    ],
)
def test_json(text: str, code: str | None, settings: Settings) -> None:
    """MONGOLOCK as JSON text, right and wrong."""
    settings.MONGOLOCK = text
    found = checks.check_settings(app_configs=None)
    assert ids(found) == ([code] if code else [])
    assert SECRET not in repr(found)
    if code is None:
        assert get_settings().LEASE == 30
    else:
        assert all(message.hint for message in found)
        with pytest.raises(ImproperlyConfigured, match="JSON, but not an object" if text == "[1]" else None) as caught:
            get_settings()
        assert SECRET not in str(caught.value)
