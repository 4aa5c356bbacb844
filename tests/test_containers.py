"""Run docs/howto/testing.md with a user's test on a real replica set, and with a stand-in for Docker.

The stand-in for the container starts a mongod. tests/test_testcontainers.py does the same with Docker itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Self

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_mongolock.testing import containers
from testproject.servers import Mongod
from tests.support.programs import python

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "howto/testing.md").read_text().partition("## Against a real MongoDB")[2]

SETTINGS = """
SECRET_KEY = "x"
USE_TZ = True
INSTALLED_APPS = ["django_mongolock"]
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
    "locks": {"ENGINE": "django_mongodb_backend", "HOST": "mongodb://127.0.0.1:1/?timeoutMS=100", "NAME": "shop"},
}
DATABASE_ROUTERS = ["django_mongolock.router.MongoLockRouter"]
MONGOLOCK = {"DATABASE": "locks"}
from django_mongodb_backend.features import DatabaseFeatures
DatabaseFeatures.minimum_database_version = (6, 0)
"""
VIEWS = """
from django.http import HttpResponse
from django_mongolock import mongo_locked

@mongo_locked("order:{order_id}", on_contention="respond")
def pay(request, order_id):
    return HttpResponse("paid")
"""


class StandIn:
    """The interface of testcontainers' DockerContainer, with a mongod that is no container."""

    def __init__(self, image: str) -> None:
        self.server = Mongod(replica_set="mongolock")

    def with_command(self, command: list[str]) -> Self:
        return self

    def with_exposed_ports(self, port: int) -> Self:
        assert port == 27017
        return self

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.server.close()

    def get_container_host_ip(self) -> str:
        return "127.0.0.1"

    def get_exposed_port(self, port: int) -> int:
        return self.server.port


PLUGIN = """
import testcontainers.core.container
from tests.test_containers import StandIn
testcontainers.core.container.DockerContainer = StandIn
"""


@pytest.mark.long
@pytest.mark.parametrize("docker", [True, False])
def test_the_page(tmp_path: Path, mongo_uri: str, docker: bool) -> None:
    """Run conftest.py and the tests of the page in a user's project without its own MongoDB.

    The page also works with a MongoDB that runs already.
    """
    conftest, tests, image, without = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "conftest.py").write_text(conftest + (image if docker else without))
    (tmp_path / "test_in_a_container.py").write_text(tests)
    (tmp_path / "views.py").write_text(VIEWS)
    (tmp_path / "settings.py").write_text(SETTINGS)
    (tmp_path / "stand_in.py").write_text(PLUGIN)
    plugins = [*(["-p", "stand_in"] if docker else []), "-p", "no:asyncio", "-p", "no:cacheprovider"]
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "DJANGO_SETTINGS_MODULE": "settings"}
    environment |= {"MONGODB_URI": mongo_uri, "DOCKER_HOST": "tcp://127.0.0.1:9"}
    assert "2 passed" in python("-m", "pytest", "-q", *plugins, folder=tmp_path, **environment)


def test_without_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the program to start, and the alternative."""
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    with pytest.raises(ImproperlyConfigured, match=r"start it.*keep_locks_in\(address\)"):
        containers.replica_set("mongo:8.0").__enter__()
