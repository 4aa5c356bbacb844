"""The servers that tests and demo run on: they start, can be broken, come back, and never outlive their starter."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
from pymongo import MongoClient, WriteConcern
from pymongo.errors import PyMongoError

from testproject.servers import MariaDB, Mongod, Postgres, Redis, ReplicaSet, ServerError, mongod_path, mongodb
from tests import parts
from tests.support.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SIGSTOP and SIGKILL are POSIX signals")

ROOT = Path(__file__).resolve().parent.parent
STARTER = """
import signal, sys, time
from testproject.servers import Mongod
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background begins without
server = Mongod()
server.start()
print(server.pid, server.directory, flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def three() -> Iterator[ReplicaSet]:
    """Three members that elect a new primary after two seconds instead of ten."""
    with ReplicaSet(members=3, election_timeout=2) as replica_set:
        yield replica_set


@pytest.fixture
def fake_mongod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make $MONGOD a shell script with the given body."""

    def fake(body: str) -> None:
        script = tmp_path / "mongod"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setenv("MONGOD", str(script))

    return fake


def insert(uri: str) -> bool:
    """Write a document that a majority of the members has to confirm."""
    with MongoClient[dict[str, Any]](uri, serverSelectionTimeoutMS=5000) as client:
        majority = client.test.get_collection("written", write_concern=WriteConcern("majority", wtimeout=5000))
        return majority.insert_one({}).acknowledged


def alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        state = subprocess.check_output(["ps", "-o", "stat=", "-p", str(pid)], text=True)
    except subprocess.CalledProcessError:
        return False
    return not state.startswith("Z")


@pytest.mark.long
def test_parameters_and_compressors_reach_the_server() -> None:
    """Test commands can be switched on; zlib is off (CVE-2025-14847); it listens on loopback only."""
    with Mongod(parameters={"enableTestCommands": 1, "ttlMonitorSleepSecs": 1}) as server, server.client() as client:
        options = client.admin.command("getCmdLineOpts")["parsed"]
        assert client.admin.command("getParameter", 1, ttlMonitorSleepSecs=1)["ttlMonitorSleepSecs"] == 1
        assert client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})["ok"]
    assert options["net"]["bindIp"] == "127.0.0.1"
    assert options["net"]["compression"]["compressors"] == "snappy,zstd"


@pytest.mark.long
def test_closing_ends_the_process_and_removes_the_directory() -> None:
    """Nothing is left of a server after its block, process, watcher and files included."""
    with Mongod() as server:
        pid, directory = server.pid, server.directory
        assert alive(pid)
        assert server.log.exists()
    assert not server.running
    assert not alive(pid)
    assert not directory.exists()


@pytest.mark.long
def test_a_killed_primary_is_replaced_and_comes_back_with_its_data(three: ReplicaSet) -> None:
    """kill() makes the others elect; restart() brings the member back on its port, its data with it."""
    killed = three.primary()
    insert(three.uri)
    port = killed.port
    killed.kill()
    assert not killed.running
    assert three.primary() is not killed
    killed.restart()
    assert killed.port == port
    assert eventually(lambda: killed in three.secondaries())
    with killed.client() as client:
        assert "written" in client.test.list_collection_names()


@pytest.mark.long
def test_a_paused_primary_answers_nothing_and_is_replaced(three: ReplicaSet) -> None:
    """pause() is a hang, not a death: the process stays and the others elect; resume() ends it."""
    paused = three.primary()
    paused.pause()
    try:
        assert paused.running
        assert "paused" in repr(paused)
        with paused.client(timeout=0.3) as client, pytest.raises(PyMongoError):
            client.admin.command("ping")
        assert three.primary() is not paused
    finally:
        paused.resume()
    assert eventually(lambda: paused in three.secondaries())


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_server_ends_with_its_starter(how: signal.Signals) -> None:
    """However the starter ends, even by SIGKILL: server and directory are gone soon after."""
    command = [sys.executable, "-c", STARTER]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as starter:
        assert starter.stdout
        pid, directory = starter.stdout.readline().split()
        assert alive(int(pid))
        starter.send_signal(how)
    assert eventually(lambda: not alive(int(pid)))
    assert eventually(lambda: not Path(directory).exists())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "echo $0: error while loading shared libraries: libcurl.so.4: cannot open shared object file >&2; exit 127",
            "mongod did not start: it needs libcurl.so.4: apt-get install libcurl4 ",
        ),
        ("echo unknown option >&2; exit 2", "mongod did not start: unknown option"),
        ("exit 1", "mongod did not start: it said nothing"),
    ],
)
def test_a_server_that_dies_at_start_says_why_in_one_line(
    fake_mongod: Callable[[str], None], body: str, words: str
) -> None:
    """A missing library, a wrong option, a death without a word: one line, with the cure where there is one."""
    fake_mongod(body)
    server = Mongod()
    with pytest.raises(ServerError) as caught, server:
        pass
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    assert not server.running


def test_a_missing_mongod_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wheel and without one on PATH the message names the three cures."""
    monkeypatch.delenv("MONGOD", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"group 'mongod'.* MONGOD .*MONGODB_URI"):
        mongod_path()


@pytest.mark.long
def test_mongodb_starts_a_server_when_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MONGODB_URI (or with an empty one) there is a replica set for as long as the block runs."""
    monkeypatch.setenv("MONGODB_URI", " ")
    with mongodb() as uri:
        assert insert(uri)
    with pytest.raises(PyMongoError), MongoClient[dict[str, Any]](uri, serverSelectionTimeoutMS=200) as client:
        client.admin.command("ping")


def test_mongodb_uses_the_server_that_is_named(mongo_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With MONGODB_URI nothing is started; blanks around it do no harm."""
    monkeypatch.setenv("MONGODB_URI", f" {mongo_uri}\n")
    with mongodb() as uri:
        assert uri == mongo_uri


@pytest.mark.parametrize(
    "uri",
    [
        "mongodb://user:secret@127.0.0.1:1/",
        "mongodb://user:secret@127.0.0.1:secret/",
        "secret",
    ],
)
def test_mongodb_names_a_server_that_cannot_be_used_without_its_password(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that names the variable, and never a part of the URI."""
    monkeypatch.setattr("testproject.servers.mongo.CONTACT_TIMEOUT", 0.3)
    monkeypatch.setenv("MONGODB_URI", uri)
    with pytest.raises(ServerError, match="cannot use the server that MONGODB_URI names") as caught, mongodb():
        pass
    assert "secret" not in str(caught.value)


@pytest.mark.long
@parts.needs("PostgreSQL")
def test_postgres_answers_keeps_its_data_and_ends() -> None:
    """A PostgreSQL of its own, also for root; killed, it comes back with its data; closed, nothing is left."""
    with Postgres() as postgres:
        with psycopg.connect(postgres.uri) as connection:
            connection.execute("CREATE TABLE written ()")
        postgres.restart()
        with psycopg.connect(postgres.uri) as connection:
            assert connection.execute("SELECT count(*) FROM written").fetchone() == (0,)
            assert connection.execute("SHOW listen_addresses").fetchone() == ("127.0.0.1",)
        pid, directory = postgres.pid, postgres.directory
    assert not alive(pid)
    assert not directory.exists()


def answers(server: Any) -> bool:
    """Whether it answers a query."""
    if isinstance(server, MariaDB):
        with pymysql.connect(host="127.0.0.1", port=server.port, user="root", database="test") as connection:
            return bool(connection.cursor().execute("SELECT DATABASE()"))
    if isinstance(server, Redis):
        return server.answers()
    with psycopg.connect(server.uri) as connection:
        return connection.execute("SHOW listen_addresses").fetchone() == ("127.0.0.1",)


@pytest.mark.long
@pytest.mark.parametrize("kind", [Redis, Postgres, MariaDB])
def test_another_server_answers_and_ends(kind: type[Redis | Postgres | MariaDB]) -> None:
    """Each on a port of its own, also for root; closed, nothing is left."""
    parts.require("PostgreSQL" if kind is Postgres else kind.__name__)
    with kind() as server:
        assert answers(server)
        pid, directory = server.pid, server.directory
    assert not alive(pid)
    assert not directory.exists()


@pytest.mark.parametrize(("kind", "package"), [(Redis, "redis-server"), (Postgres, "postgresql"), (MariaDB, "mariadb")])
def test_a_missing_server_is_a_reason_to_skip(
    kind: type[Redis | Postgres | MariaDB], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """missing() says how to get one, and starting it raises the same line."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("testproject.servers.postgres._programs", lambda: None)
    assert f"apt-get install {package}" in str(kind.missing())
    with pytest.raises(ServerError, match=f"apt-get install {package}"), kind():
        pass
