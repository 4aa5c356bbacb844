"""Promises of single modules of the engine, called directly, without a server, a thread or a wait."""

import asyncio
import gc
import itertools
import os
import re
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pymongo import CursorType, MongoClient
from pymongo.errors import (
    AutoReconnect,
    InvalidOperation,
    NetworkTimeout,
    OperationFailure,
    PyMongoError,
    WriteConcernError,
)

from django_mongolock.engine import clock, logs, text_checks
from django_mongolock.engine.lock import transaction
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.lock.transaction import TRANSIENT, UNKNOWN, Atomic
from django_mongolock.engine.protocol import processes
from django_mongolock.engine.protocol.processes import this_process
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.rule.options import LockOptions, check_age, check_wait, refuse_options
from django_mongolock.engine.rule.replies import Bell
from django_mongolock.engine.session import releases as releases_module
from django_mongolock.engine.session.releases import (
    FAILOVER_LOOK_EVERY,
    NO_GUESS_FOR,
    REMEMBERED_FOR,
    KeyGuesses,
    Releases,
    UnconfirmedRelease,
)
from django_mongolock.engine.session.waits import LINGER, LOOK_LAST, RETRY_FIRST, RETRY_LAST, SILENCE, Listener
from django_mongolock.engine.store import errors, layout
from django_mongolock.engine.store.base import is_heard_here
from django_mongolock.engine.store.election import ClockEncoder, _ClusterTimeEncoder
from django_mongolock.exceptions import (
    LockBackendFailed,
    LockKeyInvalid,
    LockLost,
    LockMisused,
    LockTransactionAborted,
)

# Options


async def coroutine(_: object) -> None:
    """A coroutine function, refused as a callback."""


class AsyncCall:
    async def __call__(self, _: object) -> None:
        """An object with an asynchronous call, refused as a callback."""


@pytest.mark.parametrize(
    ("options", "error"),
    [
        *(({"lease": value}, ValueError) for value in (0, -1, timedelta(0), 10**10, float("nan"))),
        *(({"lease": value}, TypeError) for value in (True, "3")),
        *(({"max_hold": 0}, ValueError), ({"max_hold": "1"}, TypeError)),
        *(({"wait": value}, TypeError) for value in (True, False, "3")),
        *(({"wait": value}, ValueError) for value in (-1, float("nan"), timedelta(days=-1), 10**10)),
        *(({"min_hold": value}, TypeError) for value in (True, False, "3")),
        *(({"min_hold": -1}, ValueError), ({"owner": ""}, ValueError), ({"owner": 3}, TypeError)),
        *(
            ({"label": "x" * (text_checks.MAX_FACT_LENGTH + 1)}, ValueError),
            ({"label": "\n"}, ValueError),
            ({"label": b"x"}, TypeError),
        ),
        *(({name: value}, TypeError) for name in ("resize", "reentrant", "auto_renew") for value in (1, "no", None)),
        *(({name: 3}, TypeError) for name in ("on_lost", "on_release_requested")),
        *(({"on_lost": coroutine}, TypeError), ({"on_release_requested": AsyncCall()}, TypeError)),
        *(({"mode": "semaphore"}, ValueError), ({"release": "later"}, ValueError)),
        *(({"permits": 2, "mode": "shared"}, TypeError), ({"permits": 0}, ValueError), ({"permits": True}, TypeError)),
        *(({"permits": value}, TypeError) for value in ("2", 2.5)),
        *(({"permits": 2, "weight": 3}, ValueError), ({"permits": 10**6}, ValueError)),
        *(({"permits": 2, "weight": 0}, ValueError), ({"weight": 2}, TypeError), ({"resize": True}, TypeError)),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0][:40],
)
def test_an_option_that_is_wrong(options: dict[str, Any], error: type[Exception]) -> None:
    """A wrong option is refused when the lock object is made, not when a caller waits."""
    with pytest.raises(error):
        LockOptions(**options)


def test_options_that_are_right() -> None:
    """Options are accepted up to their bounds."""
    for right in (
        *({"lease": value} for value in (0.001, 1, timedelta(hours=1), None)),
        *({"wait": value} for value in (0, 0.0, timedelta(0), 1, None)),
        *({"min_hold": value} for value in (0, 0.0, 1, timedelta(1))),
        *({"permits": 1}, {"permits": 2, "weight": 2, "resize": True}, {"weight": 1, "mode": "shared"}),
        *(
            {"release": "now", "label": "x" * text_checks.MAX_FACT_LENGTH, "owner": "é"},
            {"on_lost": print, "on_release_requested": print},
        ),
    ):
        LockOptions(**right)  # type: ignore[arg-type]
    assert LockOptions(owner="e\u0301").owner == "\xe9"
    for name, told in (
        *(("blocking", "single try"), ("ttl", "lease="), ("max_wait", "wait="), ("timeout", "two things")),
        ("permits", "mongo_semaphore"),
        ("colour", "acquire\\(\\) takes wait="),
    ):
        with pytest.raises(TypeError, match=told):
            refuse_options({name: 1})
    refuse_options({})
    for check, value, seconds in (
        *((check_age, 0, 0.0), (check_age, 1, 1.0), (check_age, timedelta(seconds=2), 2.0)),
        *((check_wait, 0, 0.0), (check_wait, 1, 1.0), (check_wait, 2.5, 2.5), (check_wait, None, None)),
    ):
        assert (found := check(value)) == seconds
        assert type(found) is type(seconds)
    for check, wrong, told in (
        *((check_age, False, "older_than is a number"), (check_age, -1, "older_than must be more than 0")),
        *((check_wait, -1, "wait is 0 for a single try"), (check_wait, "3", "wait is a number of seconds or")),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            check(wrong)
    with pytest.raises(TypeError, match="two things"):
        MongoLock(lambda: None, ("k",), Terms()).acquire(timeout=1)  # type: ignore[arg-type,return-value]


def test_texts_that_are_stored() -> None:
    """Keys, owners and labels must be plain, composed and short. Texts that the package finds itself are made so."""
    assert text_checks.check_key("e\u0301", "pre:") == "pre:\xe9"
    assert text_checks.check_key("x" * text_checks.MAX_KEY_BYTES)
    for wrong in ("", "a\n", "\ud800", "x" * (text_checks.MAX_KEY_BYTES + 1), "\xe9" * text_checks.MAX_KEY_BYTES):
        with pytest.raises(LockKeyInvalid):
            text_checks.check_key(wrong)
    for number in (3, 2.5):
        with pytest.raises(TypeError, match="order:"):
            text_checks.check_key(number)
    with pytest.raises(TypeError, match="must be a str"):
        text_checks.check_key(type("Text", (str,), {})("x"))
    assert text_checks.check_fact("owner", None) is None
    with pytest.raises(ValueError, match="characters"):
        text_checks.check_text("owner", "x" * (text_checks.MAX_TEXT_LENGTH + 1))
    text_checks.check_length("owner", "x" * text_checks.MAX_TEXT_LENGTH)
    assert text_checks.tidy_fact("e\u0301\n\xe9") == "\xe9?\xe9"
    assert (
        len(text_checks.tidy_fact("\xe9" * 999)) == len(text_checks.tidy_fact("x" * 999)) == text_checks.MAX_FACT_LENGTH
    )


def test_plain_text_is_not_gone_through_letter_by_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    """P8: Plain text is checked at once, because nearly every key, owner and label is plain, and each lock has some."""
    monkeypatch.setattr(text_checks, "unicodedata", None)
    assert text_checks.check_text("owner", "order:5") == text_checks.tidy_fact("order:5") == "order:5"


# Lines in the log, and pauses


def test_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """F57, F60: A line in the log has an event and facts that cannot pass for one another. Readers of JSON get the same
    facts as fields."""
    caplog.set_level(logs.INFO, "django_mongolock")
    logs.log(logs.DEBUG, "not wanted")
    logs.log(logs.INFO, "lock lost", key="a", why='two "words"', label="x=y", token=5, left=1.5, place="", at=Path("/"))
    try:
        raise ValueError("no")
    except ValueError:
        logs.log_exception("callback failed", key="b")
    said, failed = caplog.records
    assert said.getMessage() == r'lock lost key=a why="two \"words\"" label="x=y" token=5 left=1.5 at=/'
    fields = {name: value for name, value in vars(said).items() if name.startswith("lock_")}
    assert fields == {
        "lock_key": "a", "lock_why": 'two "words"', "lock_label": "x=y", "lock_token": 5, "lock_left": 1.5,
        "lock_place": "", "lock_at": "/",
    }  # fmt: skip
    assert said.funcName == failed.funcName == "test_a_line_in_the_log"
    assert (failed.levelname, failed.getMessage()) == ("ERROR", "callback failed key=b")
    assert failed.exc_info
    assert not said.exc_info
    assert failed.exc_info[0] is ValueError


def test_a_pause_grows_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause after a failure is random, up to twice the base. Callers that failed together do not retry together."""
    monkeypatch.setattr("random.uniform", lambda least, most: (least, most))
    longest: list[Any] = [clock.backoff(attempt) for attempt in (1, 2, 3, 5, 6, 5_000)]
    assert longest == [(0, 0.05), (0, 0.1), (0, 0.2), (0, 0.8), (0, 1.0), (0, 1.0)]


# Errors of the driver

REFUSED_TLS = AutoReconnect("10.0.0.1:27017: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed (_ssl.c:1000)")


def server(error: Exception | None = None, kind: str = "RSPrimary", address: Any = ("h", 1), known: bool = True) -> Any:
    return SimpleNamespace(error=error, server_type_name=kind, address=address, is_server_type_known=known)


def client(*servers: Any, writable: bool = False) -> Any:
    topology = SimpleNamespace(
        server_descriptions=lambda: dict(enumerate(servers)),
        has_writable_server=lambda: writable,
        replica_set_name="rs0",
        topology_type_name="ReplicaSetNoPrimary",
    )
    return SimpleNamespace(topology_description=topology)


def failure(code: int, *labels: str, name: str = "") -> OperationFailure:
    return OperationFailure("the command, secret", code, {"errorLabels": list(labels), "codeName": name})


@pytest.mark.parametrize(
    ("error", "at", "told", "passing"),
    [
        (InvalidOperation("closed"), None, "session was closed", False),
        (REFUSED_TLS, None, "no TLS connection .CERTIFICATE_VERIFY_FAILED", True),
        (REFUSED_TLS, client(server(REFUSED_TLS), server(REFUSED_TLS)), "no TLS", False),
        (REFUSED_TLS, client(server(REFUSED_TLS), server(OSError("refused"))), "no TLS", True),
        (WriteConcernError("secret", 64, {"codeName": "Late"}), None, "did not confirm in time .Late", True),
        (AutoReconnect("secret"), None, "did not answer within 2.0 s .AutoReconnect", True),
        (NetworkTimeout("secret"), None, "did not answer within 2.0 s .NetworkTimeout.$", True),
        (
            NetworkTimeout("secret"),
            client(),
            "no primary here.*no server of this address belongs to the replica set 'rs0'",
            True,
        ),
        (failure(50, name="Late"), None, "did not answer within", True),
        (failure(13), None, "it needs the right$", False),
        (failure(18), None, "authentication failed: check user", False),
        (failure(8000), None, "Atlas", False),
        (failure(11000, name="Twice"), None, "code 11000, Twice", True),
        (failure(2, name="Bad"), None, "code 2, Bad", False),
        (failure(2, "RetryableWriteError"), None, "code 2", True),
        (failure(189), None, "code 189", True),
        (OperationFailure("secret", 2), None, "code 2, OperationFailure", False),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, (str, bool)) else "",
)
def test_what_an_error_of_the_driver_becomes(error: PyMongoError, at: Any, told: str, passing: bool) -> None:
    """F14, F86: The error says whether a retry may help, and shows nothing of the command. The cause is translated as
    well."""
    with pytest.raises(LockBackendFailed, match=told) as caught, errors.bounded(2.0, at, "the right"):
        raise error
    assert caught.value.passing is passing
    if isinstance(error, OperationFailure):
        assert "secret" not in f"{caught.value}{caught.value.__cause__}"
    is_final = isinstance(error, OperationFailure) and error.code in (2, 11000) and not error.has_error_label("R")
    assert errors.is_refusal(error) == (is_final and not error.has_error_label("RetryableWriteError"))
    assert errors.translate(error, 2.0, "k").key == "k"


def test_an_error_keeps_no_frame_alive() -> None:
    """An error drops the frames of the driver's callers. The frames hold the lock object and would keep it in use for
    ever."""
    for error in (failure(2), AutoReconnect("away")):
        try:
            try:
                raise OSError("refused")
            except OSError:
                raise error  # noqa: B904 - as the driver does
        except PyMongoError as caught:
            shown = errors.bare(caught)
        assert (error.__traceback__, getattr(error.__context__, "__traceback__", error)) == (None, None)
        assert (shown is error) == isinstance(error, AutoReconnect)
    assert (str(errors.bare(failure(2, name="Bad"))), errors.bare(failure(2)).code) == ("Bad", 2)  # type: ignore[attr-defined]


def test_a_process_has_no_name_where_proc_shows_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: A process has no name if /proc belongs to another namespace. Another process there has this number, and would
    seem to have ended."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1/stat").write_text("1 (init) S " + " ".join("0" * 30))
    (tmp_path / "self").symlink_to("2")
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("boot")
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    assert processes._name.__wrapped__(1) == ""


@pytest.mark.parametrize(
    ("state", "threads", "started"),
    [(b"S", "7", "19"), (b"Z", "7", None), (b"X", "7", None), (b"Z", "78", "19"), (b"S", "78", "19")],
)
def test_when_a_process_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: bytes, threads: str, started: str | None
) -> None:
    """F49: The start of a process is found under any name. A process that has ended stays in the list until its parent
    reads its status. A process without its first thread looks the same, except for its other threads."""
    for thread in threads:
        (tmp_path / "7/task" / thread).mkdir(parents=True)
    (tmp_path / "7/stat").write_bytes(b"7 (a) \xff) " + state + "".join(f" {n}" for n in range(1, 30)).encode())
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[1]")
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("boot\n")
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    assert (processes._started(7), processes._place()) == (started, "boot pid:[1] -")


def test_a_process_that_has_ended_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_started", lambda pid: None)
    assert processes._name.__wrapped__(os.getpid()) == ""


def test_whether_a_process_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F49: A process has ended if no process has its number, or if one has it that started at another time. The state
    is unknown for a process of another machine, or one without such a number."""
    sent, error = list[tuple[int, int]](), iter(list[type[Exception] | None]())
    (tmp_path / "8").mkdir()
    (tmp_path / "8/stat").write_text(f"8 (x) S {' '.join(map(str, range(1, 30)))}")

    def kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        if (kind := next(error)) is not None:
            raise kind

    monkeypatch.setattr(processes, "_PROC", tmp_path)
    monkeypatch.setattr(os, "kill", kill)
    for mine, name, raised, outcome in (
        ("p 7 1", "p 8 19", None, "alive"),
        ("p 7 1", "p 8 20", None, "gone"),
        ("p 7 1", "p 8 19", ProcessLookupError, "gone"),
        ("p 7 1", "p 8 19", PermissionError, "alive"),
        ("p 7 1", "p 8 20", OverflowError, "gone"),
        ("p 7 1", "p 9 19", None, "alive"),  # hidden
        *(("p 7 1", name, None, "unknown") for name in ("q 8 20", "p \u00b2 20", "p x 20", "", "20")),
        *(("", name, None, "unknown") for name in ("p 8 20", " 8 20", "8 20", "20", "")),
        ("", processes.NO_PROCESS, None, "gone"),
    ):
        monkeypatch.setattr(processes, "this_process", lambda mine=mine: mine)
        error = iter([raised])
        assert (name, processes.fate(name)) == (name, outcome)
    assert sent == [(8, 0)] * 5 + [(9, 0)]


@pytest.mark.skipif(not os.path.isdir("/proc/self/ns"), reason="names of processes are for Linux")  # noqa: PTH112
def test_a_process_is_named_by_its_namespaces() -> None:
    """F32: Two containers of a machine that each have a process 7 are told apart. The end of one process is not taken
    for the end of the other."""
    assert re.fullmatch(r"[-0-9a-f]{36} pid:\[\d+\] (time:\[\d+\]|-) \d+ \d+", this_process())


def test_where_a_server_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """F9: An error names the servers that do not answer, says why, and says where to look."""
    refused = OSError("h:1: [Errno 111] Connection refused (configured timeouts: …)")
    for servers, writable, told in (
        ([server()], True, "h:1 (primary). Is the primary overloaded"),
        ([server(kind="RSSecondary")], False, "h:1 (secondary). There is no primary"),
        ([server(), server(refused, known=False)], False, "h:1 (Connection refused). There is no primary"),
        ([server(refused, known=False)], False, "h:1 (Connection refused). Is it running"),
        ([server(OSError("it timed out"), known=False, address=("::1", 2))], False, "[::1]:2 (no answer)"),
        ([server(ValueError("x"), known=False, address=("/s.sock", None))], False, "/s.sock (ValueError)"),
        ([server()] * 4, True, "h:1 (primary) and 1 more. "),
        ([server()] * 3, True, "h:1 (primary). "),
    ):
        assert told in errors.whereabouts(client(*servers, writable=writable))
    away = client(server(refused, known=False))
    assert errors.whereabouts(away).endswith(" A test that asks for the fixture mongolock needs no server.")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert errors.whereabouts(away).endswith("are HOST and PORT right?")
    assert errors.is_out_of_reach(client(server(refused), server(refused)))
    assert not errors.is_out_of_reach(client(server(refused), server()))


# The contents of the database, and its server


class Cursor:
    """A cursor that finds nothing.

    - stays: whether it is alive after that.
    """

    def __init__(self, stays: bool) -> None:
        self.alive, self.stays = True, stays

    def __next__(self) -> object:
        self.alive = self.stays
        raise StopIteration


class Capped:
    """A collection, and its database.

    - code: the error code of making it.
    - there: whether it exists.
    - alive: whether a cursor stays open. None if the server refuses a cursor.
    """

    name = "bells"

    def __init__(self, code: int | None, there: bool, alive: bool | None) -> None:
        self.code, self.there, self.alive, self.changed = code, there, alive, False
        self.database = self

    def create_collection(self, name: str, *, check_exists: bool, capped: bool, size: int) -> None:
        assert (name, check_exists, capped, size) == ("bells", False, True, 4096)
        if self.code:
            raise failure(self.code)

    def list_collection_names(self, *, filter: dict[str, str], authorizedCollections: bool) -> list[str]:  # noqa: A002, N803
        assert authorizedCollections
        return [self.name] if self.there and filter == {"name": self.name} else []

    @contextmanager
    def find(self, where: object, *, cursor_type: int) -> Iterator[Any]:
        assert cursor_type == CursorType.TAILABLE
        if self.alive is None:
            raise failure(2)
        yield Cursor(self.alive)

    def command(self, name: str, collection: str, *, cappedSize: int) -> None:  # noqa: N803
        assert (name, collection, cappedSize) == ("collMod", "bells", 4096)
        self.changed = True


@pytest.mark.parametrize(
    ("code", "there", "alive", "raises"),
    [
        *((None, False, False, False), (48, True, True, False), (48, True, False, False), (48, True, None, True)),
        *((13, False, True, True), (13, True, True, False), (13, True, None, True), (99, True, True, True)),
        (48, False, True, False),
    ],
)
@pytest.mark.parametrize("resize", [False, True])
def test_a_collection_with_a_limit(
    code: int | None, there: bool, alive: bool | None, *, raises: bool, resize: bool
) -> None:
    """F44: The collection is made, or exists with a limit to its size. Otherwise the error is raised."""
    collection: Any = Capped(code, there, alive)
    with pytest.raises(OperationFailure) if raises else nullcontext():
        layout.make_capped(collection, 4096, resize=resize)
    assert collection.changed is (resize and code is not None and not raises)
    assert (layout.exists(collection), layout.stays_open(collection)) == (there, alive)


def test_indexes_are_looked_for_once_in_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """F144: Missing indexes are made in the background once in a minute, by a thread that keeps no process from
    ending."""
    now, started, made = 1_000.0, list[Any](), list[str]()
    monkeypatch.setattr(clock, "now", lambda: now)
    monkeypatch.setattr("threading.Thread", lambda **how: SimpleNamespace(start=lambda: started.append(how)))
    there = dict.fromkeys(layout.INDEXES)
    collection: Any = SimpleNamespace(
        index_information=lambda: there,
        create_indexes=lambda models: made.extend(each.document["name"] for each in models),
    )
    keeper = layout.IndexKeeper()
    for seconds in (59, 1, 0, 59, 1):
        now += seconds
        keeper.look_after(collection)
    assert started == 2 * [
        {"target": layout._make_missing, "args": [collection], "name": "mongolock-indexes", "daemon": True}
    ]
    layout._make_missing(collection)
    assert made == []
    del there["mongolock_purge_at"], there["mongolock_contended"]
    layout._make_missing(collection)
    assert made == list(layout.INDEXES)  # the server makes only missing ones


def test_a_bell_is_told_to_the_session_of_this_process() -> None:
    """A bell for another session is rung at the server."""
    heard: list[Bell] = []
    store: Any = SimpleNamespace(hearers={"mine": heard.append})
    for session in ("mine", "another"):
        assert is_heard_here(store, Bell(session, "g")) == (session == "mine")
    assert heard == [Bell("mine", "g")]


def test_the_name_of_the_primary() -> None:
    """P4, F21: The name of the primary is the election of the server that this thread selected last. A single server
    has no election, and no cluster time."""
    encoder = ClockEncoder()
    times: Any = _ClusterTimeEncoder(encoder)
    one, two = (SimpleNamespace(election_id=f"e{n}", server_type_name="RSPrimary", is_writable=n == 2) for n in (1, 2))
    alone: Any = SimpleNamespace(election_id=None, server_type_name="Standalone", is_writable=True)
    assert (encoder.sent_to(), encoder.primary(), times.transform_python(None)) == ("", "", "$$CLUSTER_TIME")
    for servers, selected, sent_to, primary, time_ in (
        ([one, two], [one], "e1", "e2", "$$CLUSTER_TIME"),
        ([one, two], [one, two], "", "e2", "$$CLUSTER_TIME"),
        ([two], [], "e2", "e2", "$$CLUSTER_TIME"),
        ([alone], [alone], "", "", None),
        ([alone, one], [alone], "", "", None),
    ):
        encoder.client = client(*servers)
        chosen: Any = selected
        assert encoder.select(chosen) is selected
        assert (encoder.sent_to(), encoder.primary(), times.transform_python(None)) == (sent_to, primary, time_)


# Transactions


class Held:
    """A lock that is held, for a transaction."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        grant = SimpleNamespace(key="k", token=7, resume_renewals=lambda: self.calls.append("resume"))
        self.grants, self.lost = (grant,), False

    def ensure_held(self) -> None:
        if self.lost:
            raise LockLost("k", 7)

    def extend(self) -> None:
        self.calls.append("extend")


def in_transaction(lock: Any, matches: bool = True) -> Any:
    """Return a transaction that has begun, with its calls named."""
    atomic: Any = Atomic(lock, MongoClient(connect=False))
    atomic._grants = lock.grants
    atomic._registry = SimpleNamespace(schedule=lambda grant: lock.calls.append("see to"))
    named = {name: (lambda name=name: name) for name in ("commit_transaction", "abort_transaction", "end_session")}
    atomic._client_session = SimpleNamespace(in_transaction=True, session_id="id", **named)

    def match() -> Generator[Any, Any, bool]:
        yield from ()
        return matches

    atomic._match = match
    return atomic


def play(calls: Generator[Any, Any, Any], **fails: BaseException | None) -> list[str]:
    """Make the calls of a transaction, and return their names and the raised error.

    - fails: the errors of the calls that fail.
    """
    made, outcome = list[str](), None
    try:
        while True:
            call = calls.throw(outcome) if outcome is not None else next(calls)
            name = getattr(call, "__name__", "command")
            made.append(str(call()) if name == "<lambda>" else name)
            if made[-1] == "extend":
                call()
            outcome = fails.get(made[-1])
    except StopIteration:
        return made
    except Exception as error:  # noqa: BLE001 - it is what is looked at
        return [*made, type(error).__name__]


def labelled(*labels: str) -> PyMongoError:
    return failure(1, *labels)


OVER = ["abort_transaction", "end_session"]
ABORTED = ["commit_transaction", *OVER, "extend", "LockTransactionAborted"]
UNCLEAR = ["commit_transaction", "command", "LockBackendFailed"]


@pytest.mark.parametrize(
    ("given", "fails", "made"),
    [
        ({}, {}, ["commit_transaction"]),
        ({"error": ValueError()}, {}, []),
        ({"lost": True}, {}, ["LockLost"]),
        ({"matches": False}, {}, [*OVER, "extend", "LockMisused"]),
        ({"matches": False}, {"extend": LockLost("k", 7)}, [*OVER, "extend", "LockLost"]),
        ({}, {"commit_transaction": labelled(TRANSIENT)}, ABORTED),
        (
            {},
            {"commit_transaction": labelled(TRANSIENT), "extend": LockBackendFailed("away", "k")},
            ABORTED,
        ),
        (
            {},
            dict.fromkeys(("commit_transaction", *OVER), labelled(TRANSIENT)),
            ABORTED,
        ),
        ({}, {"commit_transaction": labelled()}, ["commit_transaction", "OperationFailure"]),
        (
            {"limit": 0.0},
            {"commit_transaction": labelled(UNKNOWN)},
            UNCLEAR,
        ),
        (
            {"limit": 0.0},
            dict.fromkeys(("commit_transaction", "command"), labelled(UNKNOWN)),
            UNCLEAR,
        ),
    ],
)
def test_how_a_transaction_ends(
    given: dict[str, Any], fails: dict[str, Any], made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P9: Each end of a transaction makes these calls, and raises this error. Afterwards the lock is renewed as usual
    in any case."""
    monkeypatch.setattr(transaction, "COMMIT_LIMIT", given.get("limit", 30.0))
    lock = Held()
    lock.lost = given.get("lost", False)
    atomic = in_transaction(lock, given.get("matches", True))
    assert play(atomic._end(given.get("error"), lock.extend), **fails) == made
    assert lock.calls[-2:] == ["resume", "see to"]


def test_a_commit_is_repeated_while_its_outcome_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """P9, F7: A commit that is safe to repeat is repeated until the limit. After any other error it is not repeated."""
    monkeypatch.setattr(clock, "now", itertools.count().__next__)
    made = play(in_transaction(Held())._commit(), commit_transaction=labelled(UNKNOWN))
    assert made == ["commit_transaction"] * 30 + ["OperationFailure"]
    assert not list(transaction.pauses(0))
    assert len(list(transaction.pauses(5))) == 4


def test_what_begins_no_transaction() -> None:
    """P9: A transaction refuses an object that is no client, a second entry, and a lost lock."""
    with pytest.raises(TypeError, match='using="locks"'):
        Atomic(Held(), "locks")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs a client"):
        MongoLock(lambda: None, ("k",), Terms()).atomic()  # type: ignore[arg-type,return-value]
    atomic = in_transaction(Held())
    assert play(atomic._begin()) == ["LockMisused"]
    lost: Any = Held()
    lost.lost = True
    assert play(Atomic(lost, MongoClient(connect=False))._begin()) == ["LockLost"]


def test_which_errors_have_a_transaction_done_again() -> None:
    """P9: A transaction is retried after errors with which MongoDB aborted it, also below a Django error. A hook after
    the commit is not retried."""
    reasons = [transaction._reason(error) for error in (failure(2, name="Bad"), PyMongoError(), OperationFailure(""))]
    assert reasons == ["Bad", "PyMongoError", "OperationFailure"]
    aborted = LockTransactionAborted("k", 1, "conflict")
    wrapped = ValueError("Django's")
    wrapped.__cause__ = labelled(TRANSIENT)
    for error, again in (
        *((labelled(TRANSIENT), True), (labelled(), False), (wrapped, True), (ValueError(), False)),
        *((aborted, True), (LockBackendFailed("x", "k"), False)),
    ):
        assert transaction.is_transient(error) == again
    source = "def on_commit(error): raise error\ndef else_where(error): raise error"
    for module, name, is_hook in (
        *(("django.db.models", "on_commit", True), ("django_mongodb_backend.base", "on_commit", True)),
        *(("django.db.models", "else_where", False), ("shop.models", "on_commit", False)),
    ):
        space: dict[str, Any] = {"__name__": module}
        exec(source, space)  # noqa: S102 - code of another module
        with pytest.raises(OperationFailure) as caught:
            space[name](labelled(TRANSIENT))
        assert transaction.is_transient(caught.value) != is_hook
        group = ExceptionGroup("", [ExceptionGroup("", [caught.value]), ValueError()])
        assert transaction.out_of_commit_hook(group) == is_hook
        assert transaction.leaves(group) == [caught.value, group.exceptions[1]]


@pytest.mark.parametrize("awaited", [False, True])
async def test_work_in_a_transaction_is_done_again(  # noqa: C901
    awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P9: Work is retried while MongoDB aborts its transaction, and not after its limit or another error."""

    class Aborting(MongoLock):
        @contextmanager
        def atomic(self, *fails: BaseException, using: str = "") -> Iterator[Any]:  # type: ignore[override]
            yield f"session {using}"
            if len(done) <= len(fails):
                raise fails[len(done) - 1]

    class Entered:
        def __init__(self, plain: Any) -> None:
            self.plain = plain

        async def __aenter__(self) -> Any:
            return self.plain.__enter__()

        async def __aexit__(self, *error: object) -> Any:
            return self.plain.__exit__(*error)

    lock = Aborting(lambda: None, ("k",), Terms())  # type: ignore[arg-type,return-value]
    plain, done, slept = lock.atomic, list[Any](), list[float]()

    def plain_work(session: Any) -> str:
        done.append(session)
        return "result"

    async def work(session: Any) -> str:
        return plain_work(session)

    async def run(*fails: BaseException, **options: Any) -> Any:
        done.clear()
        slept.clear()
        if not awaited:
            return lock.run_atomic(plain_work, *fails, using="x", **options)
        monkeypatch.setattr(lock, "atomic", lambda *fails, using: Entered(plain(*fails, using=using)))
        return await lock.arun_atomic(work, *fails, using="x", **options)

    async def asleep(pause: float) -> None:
        slept.append(pause)

    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(asyncio, "sleep", asleep)
    again = LockTransactionAborted("k", 1, "conflict")
    assert await run(again, again) == "result"
    assert done == ["session x"] * 3
    assert len(slept) == 2
    for fails, options, tries in (((again,) * 9, {"limit": 0}, 1), ((ValueError(),), {}, 1)):
        with pytest.raises((LockTransactionAborted, ValueError)):
            await run(*fails, **options)
        assert len(done) == tries
    assert await run(again, limit=timedelta(seconds=30)) == "result"
    with pytest.raises(TypeError, match="mongo_locked"):
        lock()  # type: ignore[operator]
    with pytest.raises(LockMisused, match="several keys"):
        MongoLock(lambda: None, ("a", "b"), Terms()).key  # type: ignore[arg-type,return-value]  # noqa: B018


async def test_a_wait_outlasts_its_cancellations() -> None:
    """A wait ends when the awaited call is done. An error of the call is then not reported to the loop."""
    loop, complaints = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    for outcome in (ValueError(), asyncio.CancelledError(), None):
        call: asyncio.Future[None] = loop.create_future()
        waiter = asyncio.ensure_future(transaction.outlast(call))
        for _ in range(2):
            await asyncio.sleep(0)
            waiter.cancel()
        await asyncio.sleep(0)
        assert not waiter.done()
        call.cancel() if isinstance(outcome, asyncio.CancelledError) else (
            call.set_exception(outcome) if outcome else call.set_result(None)
        )
        with pytest.raises(asyncio.CancelledError):
            await waiter
        del call
    gc.collect()
    assert not complaints


# Releases


def test_releases_are_remembered_until_a_majority_has_them() -> None:
    """F7: An election may undo a release until a majority has it. Until then the release is repeated at the next
    primary, within a limit."""

    def release(key: str, primary: str = "one", at: float = 100.0) -> UnconfirmedRelease:
        return UnconfirmedRelease(key, "g", primary, at)

    releases, second, third = Releases(), release("b", at=101.0), release("c", at=200.0)
    assert (releases.look_at, releases.made(release("x", primary=""))) == (float("inf"), False)
    assert (releases.made(release("a")), releases.made(second)) == (True, False)
    assert releases.look_at == 100 + FAILOVER_LOOK_EVERY
    for primary, sent, left in (("two", 200, 2), ("one", 100, 2), ("one", 100.5, 1), ("one", 101, 1)):
        releases.confirmed(primary, sent)
        assert len(releases) == left
    for primary, now, undone, left in (
        *(("", 500, [], 1), ("one", 100.9 + REMEMBERED_FOR, [], 1), ("two", 160, [second], 0), ("two", 160, [], 0)),
    ):
        assert releases.undone(primary, now) == undone
        assert len(releases) == left
        assert releases.look_at == (now + FAILOVER_LOOK_EVERY if left else float("inf"))
    assert releases.made(third)
    assert (releases.undone("one", 200 + REMEMBERED_FOR), len(releases)) == ([], 0)
    assert releases.made(third)
    releases.confirmed("one", 201)
    assert not len(releases)
    releases.close()
    assert (releases.made(third), len(releases)) == (False, 0)


def test_which_keys_are_probably_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """P8, F118: Each release allows one guess for its key. An unknown key is guessed while other keys were free. A
    wrong guess stops the guesses for a while. The number of remembered keys is limited."""
    keys = KeyGuesses()
    assert not keys.is_free("a")
    keys.released("a")
    keys.released("a")
    assert [keys.is_free(key) for key in "aabb"] == [True, False, True, False]
    keys.was_wrong("b")
    assert not keys.is_free("c")
    for _ in range(NO_GUESS_FOR):
        keys.released("b")
        assert not keys.is_free("b")
    keys.released("b")
    assert keys.is_free("b")
    assert not keys.is_free("c")
    monkeypatch.setattr(releases_module, "MAX_KEYS", 3)
    for key in "defdg":
        keys.released(key)
    assert list(keys._left) == ["f", "d", "g"]


def test_which_keys_probably_have_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last release counts. The number of remembered keys is limited."""
    keys = KeyGuesses()
    assert not keys.has_waiters("a")
    keys.handed_over("a")
    keys.handed_over("b")
    keys.released("b")
    assert [keys.has_waiters(key) for key in "ab"] == [True, False]
    monkeypatch.setattr(releases_module, "MAX_KEYS", 2)
    for key in "cad":
        keys.handed_over(key)
    assert [keys.has_waiters(key) for key in "acd"] == [True, False, True]


def test_a_key_that_was_handed_over_is_not_free() -> None:
    """P8: A key that another process holds is not asked for by the form for a free key."""
    keys = KeyGuesses()
    keys.released("a")
    keys.handed_over("a")
    assert not keys.is_free("a")


class Hearing:
    """A session, and its waits, for a listener. Time goes by where it sleeps."""

    id = "s"

    def __init__(self, heard: list[Any]) -> None:
        self.time, self.heard, self.looks, self.slept = 0.0, heard, 0, list[float]()
        self.store, self.waited = self, True

    def now(self) -> float:
        return self.time

    def is_waited(self) -> bool:
        return self.waited

    def look_at_queues(self) -> bool:
        self.looks += 1
        return False

    def on_bell(self, bell: object) -> None:
        self.slept.append(-1)

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.slept.append(seconds)

    def listen(self, _: str) -> Iterator[Any]:
        if not self.heard:
            self.waited, self.time = False, self.time + LINGER + 1
        for each in self.heard.pop(0) if self.heard else ():
            if isinstance(each, Exception):
                raise each
            yield each


def test_a_listener_that_cannot_listen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """F44, F52: A listener that fails retries with growing pauses, and logs the failure once. If it has heard a bell
    and then fails, it wakes all waiters."""
    away = LockBackendFailed("away", "k")
    session: Any = Hearing([[away]] * 8 + [[None, "bell", away], [AutoReconnect("gone")], []])
    monkeypatch.setattr("django_mongolock.engine.session.waits.time", SimpleNamespace(sleep=session.sleep))
    listener: Any = Listener(session, session)
    begins = list[float]()
    listen = session.listen

    def watched(name: str) -> Any:
        begins.append(session.time)
        return listen(name)

    session.listen = watched
    listener._run()
    pauses = [after - before for before, after in itertools.pairwise(begins)]
    assert pauses == pytest.approx([1, 2, 4, 8, 16, *[RETRY_LAST] * 3, RETRY_FIRST, 1, 2], abs=LOOK_LAST)
    assert session.looks > len(pauses)
    assert session.slept.count(-1) == 1
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [("LockBackendFailed" in each.getMessage()) for each in warned] == [True, True]
    assert listener._thread is None


def test_for_how_long_it_is_listened() -> None:
    """P8: The listener listens while a caller waits, and a moment longer. A listener that hears nothing for seconds is
    deaf."""
    session: Any = Hearing([[None, "bell", "bell"]])
    listener: Any = Listener(session, session)
    session.waited = False
    assert not listener.listening
    assert not listener.keep_listening()
    assert listener._goes_on()
    assert listener._listen() == "it ended"
    assert listener.listening
    session.time = LINGER
    assert not listener._goes_on()
    session.time = SILENCE
    assert not listener.listening
    session.waited = True
    assert listener._goes_on()
    listener.close()
    assert not listener._goes_on()
    assert listener.keep_listening()
