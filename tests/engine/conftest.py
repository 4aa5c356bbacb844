"""The fixtures of the engine's tests: stores, sessions and locks over a collection of their own."""

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Self

import pytest
from pymongo import MongoClient
from pymongo.collection import Collection

from django_mongolock.engine import clock
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.rule.options import LockOptions
from django_mongolock.engine.session.session import Session
from django_mongolock.engine.store.mongo import MongoStore, StoreConfig
from tests.engine.twins import CALM, Twin, in_memory, in_mongodb
from tests.engine.waiters import InThread, Waiter
from tests.support import DATABASE, failpoints
from tests.support.lock_fixtures import Commands
from tests.support.waiting import eventually

Document = dict[str, Any]

#: Short terms with a small margin, because the tests run on the same clock as the server. Even shorter terms would fail
#: on a loaded machine. A command takes a second there, and a renewal still has to be in time.
QUICK = Terms(lease=3.0, margin=0.1, waiter_lease=3.0)


class Timer:
    """A clock of sessions that a test moves on instead of waiting. The server's clock goes on as always."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self._ahead = 0.0

    def __call__(self) -> float:
        return clock.now() + self._ahead

    def move(self, seconds: float) -> None:
        """Move the clock on. All sleepers look at it again, as after a sleep of the machine."""
        self._ahead += seconds
        for session in self.sessions:
            session.wake()


@pytest.fixture
def appname() -> str:
    """The name of this test's clients at the server, as an aim for failpoints."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def test_name(request: pytest.FixtureRequest) -> str:
    """The name of this test in a form for collections."""
    return "".join(letter if letter.isalnum() else "_" for letter in request.node.name)[:60]


@pytest.fixture
def commands() -> Commands:
    """The commands that the stores of this test send."""
    return Commands()


@pytest.fixture
def config(collection: Collection[Document], mongo_uri: str, appname: str, commands: Commands) -> StoreConfig:
    """The store's configuration for this test's collection."""
    return StoreConfig(
        {"host": mongo_uri, "appname": appname, "event_listeners": [commands], "heartbeatFrequencyMS": 500},
        collection.database.name,
        collection.name,
    )


@pytest.fixture
def store(config: StoreConfig) -> Iterator[MongoStore]:
    """A store over this test's collection."""
    store = MongoStore(config)
    yield store
    store.close()


@pytest.fixture
def new_session(config: StoreConfig) -> Iterator[Callable[..., Session]]:
    """Return a function that makes sessions, each with a store and a client of its own, as in another process."""
    made: list[Session] = []

    def new_session(**arguments: Any) -> Session:
        made.append(Session(MongoStore(config), **arguments))
        return made[-1]

    yield new_session
    for session in made:
        session.close()


@pytest.fixture
def session_at(test_name: str) -> Iterator[Callable[..., Session]]:
    """Return a function that makes sessions at another server, on a collection of this test, such as session_at(uri,
    timeout=1.0)."""
    made: list[Session] = []

    def session_at(uri: str, timeout: float = 5.0) -> Session:
        config = StoreConfig({"host": uri, "heartbeatFrequencyMS": 500}, DATABASE, test_name)
        made.append(Session(MongoStore(config), timeout))
        return made[-1]

    yield session_at
    for session in made:
        session.close()


@pytest.fixture
def timer() -> Timer:
    """The clock of the session of `session` and `lock`."""
    return Timer()


@pytest.fixture
def session(new_session: Callable[..., Session], timer: Timer) -> Session:
    """One session over this test's collection."""
    timer.sessions.append(new_session(now=timer))
    return timer.sessions[0]


@pytest.fixture(params=["mongodb", "memory"])
def twin(request: pytest.FixtureRequest) -> Twin:
    """The key "k" in each of the two implementations of the rule."""
    return in_mongodb(request.getfixturevalue("store")) if request.param == "mongodb" else in_memory()


@pytest.fixture
def memory(in_thread: InThread) -> Iterator[Any]:
    """Processes in memory."""
    from tests.engine.memory import Memory

    made = Memory(in_thread)
    yield made
    made.close()


Entries = Callable[..., list[Any]]
LockMaker = Callable[..., MongoLock]


def store_of(session: Session) -> MongoStore:
    """Return the store of a session on MongoDB."""
    assert isinstance(session.store, MongoStore)
    return session.store


def make_lock(session: Session, *keys: str, **options: Any) -> MongoLock:
    """Return a lock with short terms, unless *options* say otherwise."""
    terms: Terms = options.pop("terms", QUICK)
    return MongoLock(lambda: session, keys or ("k",), terms, LockOptions(**{"wait": 5.0, **options}))


def nothing_left(session: Session) -> bool:
    """Wait until the session has nothing held, waited for, or to be removed."""
    return eventually(lambda: not session.known)


def renewed(lock: MongoLock) -> bool:
    """Return whether a lock on CALM terms is held, and was renewed since the clock was moved."""
    return lock.remaining > 0.9 * CALM.lease


@pytest.fixture
def lock(session: Session) -> LockMaker:
    """Return a function that makes locks of this test's session."""
    return lambda *keys, **options: make_lock(session, *keys, **options)


@pytest.fixture
def other(new_session: Callable[..., Session]) -> LockMaker:
    """Return a function that makes locks of another session, as in another process."""
    session = new_session()
    return lambda *keys, **options: make_lock(session, *keys, **options)


@dataclass(frozen=True)
class Here:
    """The usual fixtures in one, with locks of this test's session and of another one, and the stored documents."""

    lock: LockMaker
    other: LockMaker
    session: Session
    new_session: Callable[..., Session]
    in_thread: InThread
    entries: Callable[..., list[Any]]
    stored: Callable[..., Document]
    timer: Timer
    commands: Commands
    collection: Collection[Document]
    take_away: Callable[..., None]

    def waiter(self, lock: MongoLock, first: MongoLock | None = None) -> Waiter:
        """Return a thread that waits for *lock*, and holds *first* meanwhile."""
        return Waiter(self.in_thread, lock, first)


@pytest.fixture
def here(request: pytest.FixtureRequest) -> Here:
    """See the class."""
    return Here(**{each.name: request.getfixturevalue(each.name) for each in fields(Here)})


@pytest.fixture(params=["apply", "take_free"])
def door(request: pytest.FixtureRequest, session: Session, monkeypatch: pytest.MonkeyPatch) -> str:
    """The method of the store that the session uses for an unknown key."""
    monkeypatch.setattr("django_mongolock.engine.session.commands.JUST_CAME", 60.0)  # however busy the machine is
    if request.param == "take_free":
        session.commands.guesses.released("another")
    return str(request.param)


@pytest.fixture
def failpoint(mongo: MongoClient[Document], appname: str) -> Iterator[Callable[..., None]]:
    """Return a function that makes the server fail commands of this test's clients, such as failpoint(["find"],
    times=1, errorCode=91)."""

    def set_failpoint(names: list[str], times: int | None = None, **data: Any) -> None:
        mode: Any = "alwaysOn" if times is None else {"times": times}
        mongo.admin.command(
            {
                "configureFailPoint": "failCommand",
                "mode": mode if names else "off",
                "data": {"failCommands": names, "appName": appname, **data},
            }
        )

    with failpoints.failpoint(mongo, "failCommand", {}, "off"):
        yield set_failpoint


@pytest.fixture
def stored(collection: Collection[Document]) -> Callable[..., Document]:
    """Return a function that reads the stored document of a key."""

    def stored(key: str = "k") -> Document:
        document = collection.find_one({"_id": key})
        assert document is not None
        return document

    return stored


@pytest.fixture
def entries(collection: Collection[Document]) -> Callable[..., list[Any]]:
    """Return a function that reads the holders and waiters of a key. Tombstones do not count."""

    def entries(key: str = "k") -> list[Any]:
        document = collection.find_one({"_id": key}) or {"holders": [], "waiters": []}
        return list(document["holders"] + document["waiters"])

    return entries


@pytest.fixture
def take_away(collection: Collection[Document]) -> Callable[..., None]:
    """Return a function that removes all holders of a key, behind the holders' backs."""

    def take_away(key: str = "k") -> None:
        collection.update_one({"_id": key}, {"$set": {"holders": []}})

    return take_away


class Gate:
    """A gate that holds up the first call of a method, or (*late*) its answer.

    - only: condition on its arguments.
    - error: error raised in place of its answer.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        only: Callable[..., object] | None = None,
        *,
        late: bool = False,
        error: BaseException | None = None,
    ) -> None:
        self.call, self.only, self.late, self.error = call, only, late, error
        self.there, self.go, self.over = threading.Event(), threading.Event(), threading.Event()
        self.arguments: tuple[Any, ...] | None = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.arguments is not None or not (self.only is None or self.only(*arguments)):
            return self.call(*arguments, **options)
        self.arguments = arguments
        answer = self.call(*arguments, **options) if self.late else None
        self.there.set()
        assert self.go.wait(20)
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # it leads to the frames of who called
        try:
            return answer if self.late else self.call(*arguments, **options)
        finally:
            self.over.set()

    def fail(self, error: BaseException) -> Self:
        """Let the first call fail, at once."""
        self.error = error
        self.go.set()
        return self


HoldUp = Callable[..., Gate]


@pytest.fixture
def hold_up(monkeypatch: pytest.MonkeyPatch) -> HoldUp:
    """Return a function that puts a gate before a method, such as hold_up(session.store, "apply")."""

    def hold_up(owner: Any, name: str, *arguments: Any, **options: Any) -> Gate:
        gate = Gate(getattr(owner, name), *arguments, **options)
        monkeypatch.setattr(owner, name, gate)
        return gate

    return hold_up


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop for tests that are not coroutines themselves."""
    with asyncio.Runner() as runner:
        yield runner.get_loop()
