"""The servers for tests and demo start, can be broken, come back, and never outlive their starter."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testproject.servers import ServerError, mongodb
from tests.support.programs import runs
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


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_server_ends_with_its_starter(how: signal.Signals) -> None:
    """However the starter ends, even by SIGKILL, the server and its directory are gone soon after."""
    command = [sys.executable, "-c", STARTER]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as starter:
        assert starter.stdout
        pid, directory = starter.stdout.readline().split()
        assert runs(int(pid))
        starter.send_signal(how)
    assert eventually(lambda: not runs(int(pid)))
    assert eventually(lambda: not Path(directory).exists())


@pytest.mark.parametrize(
    "uri", ["mongodb://user:secret@127.0.0.1:1/", "mongodb://user:secret@127.0.0.1:secret/", "secret"]
)
def test_mongodb_names_a_server_that_cannot_be_used_without_its_password(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is one line that names the variable, and no part of the URI."""
    monkeypatch.setattr("testproject.servers.mongo.CONTACT_TIMEOUT", 0.1)
    monkeypatch.setenv("MONGODB_URI", uri)
    with pytest.raises(ServerError, match="cannot use the server that MONGODB_URI names") as caught, mongodb():
        pass
    assert "secret" not in str(caught.value)
