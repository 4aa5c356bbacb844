"""The way of users who test with Docker. Testcontainers starts the MongoDB of the locks."""

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from testcontainers.core.config import ConnectionMode, testcontainers_config

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.session.session import Session
from django_mongolock.engine.store.mongo import MongoStore, StoreConfig
from django_mongolock.testing.containers import replica_set
from testproject.servers import Docker, mongod_path
from tests import parts

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform != "linux", reason="the image holds a Linux mongod")]

IMAGE = "django-mongolock-tests/mongod:latest"
DOCKERFILE = """
FROM scratch
COPY root/ /
ENTRYPOINT ["/mongod", "--dbpath", "/data"]
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    """Return a Docker engine of DOCKER_HOST, of the usual socket, or of our own."""
    parts.require("a Docker engine")
    with contextlib.ExitStack() as stack:
        if not parts.runs_docker():
            uri = stack.enter_context(Docker()).uri
            stack.enter_context(pytest.MonkeyPatch.context()).setenv("DOCKER_HOST", uri)
        client = stack.enter_context(contextlib.closing(docker.from_env()))
        yield client


@pytest.fixture(scope="module")
def image(engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Build an image with only our mongod and its libraries, because there is no registry to pull one from here."""
    context = tmp_path_factory.mktemp("image")
    (context / "Dockerfile").write_text(DOCKERFILE)
    (context / "root/data").mkdir(parents=True)
    (context / "root/tmp").mkdir()
    mongod = mongod_path()
    shutil.copy(mongod, context / "root/mongod")
    for library in libraries(mongod):
        copy = context / "root" / library.relative_to("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, copy)
    engine.images.build(path=str(context), tag=IMAGE, rm=True)
    yield IMAGE
    engine.images.remove(IMAGE, force=True)


@pytest.fixture(scope="module")
def container_uri(image: str) -> Iterator[str]:
    """Return the URI of a replica set of one that testcontainers runs, as in the fixture `mongolock_container`."""
    with pytest.MonkeyPatch.context() as patch:
        # Ryuk is an image of its own, and the container's own address is not reachable everywhere.
        patch.setattr(testcontainers_config, "ryuk_disabled", True)
        patch.setattr(testcontainers_config, "connection_mode_override", ConnectionMode.docker_host)
        with replica_set(image) as uri:
            yield uri


def libraries(program: Path) -> list[Path]:
    """Return the shared libraries that *program* loads, the loader included."""
    listed = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    return [Path(path) for path in re.findall(r"(/\S+) \(0x", listed)]


def test_a_lock_is_held_in_a_container(container_uri: str) -> None:
    """A lock against a container has one holder at a time, and tokens that grow."""
    session = Session(MongoStore(StoreConfig({"host": container_uri}, "locks")))
    try:
        with MongoLock(lambda: session, ("k",)) as first:
            assert not MongoLock(lambda: session, ("k",)).try_acquire()
            token = first.fencing_token
        with MongoLock(lambda: session, ("k",)) as second:
            assert second.fencing_token > token
    finally:
        session.close()
