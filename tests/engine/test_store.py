"""The meeting of engine and PyMongo: clocks, errors, numbers of commands, and removals."""

import traceback
from collections.abc import Callable

import pymongo.errors
import pytest
from pymongo import MongoClient
from pymongo.synchronous.database import Database

from django_mongolock.engine.rule.document import Step, Terms, entry
from django_mongolock.engine.store.mongo import MongoStore, StoreConfig
from django_mongolock.exceptions import LockBackendFailed
from tests.engine.conftest import Document, Here, HoldUp, make_lock, store_of
from tests.support.lock_fixtures import Commands
from tests.support.waiting import eventually

SECRET = "hunter2-very-secret"
GRANT = "the-grant-id"
ADD = Step(ask=GRANT, add=entry(GRANT, "s", Terms(), {}))


def election(mongo: MongoClient[Document]) -> str:
    return str(mongo.admin.command("hello").get("electionId", ""))


# The clock


def test_a_document_names_the_election_of_the_primary_that_wrote_it(
    store: MongoStore, mongo: MongoClient[Document], stored: Callable[..., Document]
) -> None:
    """P4: Every kind of command stores the election by whose clock its times are."""
    store.apply("k", ADD, 5)
    assert stored()["clock"] == election(mongo) != ""
    for call in (
        lambda: store.renew(["k"], Step(renew=(GRANT,), beat=1), 5),
        lambda: store.apply("k", Step(remove=(GRANT,), given=GRANT), 5).found,
    ):
        mongo[store.config.database][store.config.collection].update_one({"_id": "k"}, {"$set": {"clock": "other"}})
        call()
        assert stored()["clock"] == election(mongo)


def test_a_direct_connection_names_the_same_election(
    config: StoreConfig, mongo: MongoClient[Document], stored: Callable[..., Document]
) -> None:
    """P4: Without a selection by the driver, the name is still that of the server. One clock has one name."""
    host, port = mongo.primary or ("", 0)
    assert host
    direct = StoreConfig({"host": host, "port": port, "directConnection": True}, config.database, config.collection)
    store = MongoStore(direct)
    store.apply("k", ADD, 5)
    assert stored()["clock"] == election(mongo) != ""
    store.close()


# Concerns


@pytest.mark.parametrize(
    "uri", ["w=1&readPreference=secondaryPreferred", "w=0", "retryWrites=false&readConcernLevel=local"]
)
def test_the_uri_cannot_weaken_a_lock(config: StoreConfig, mongo_uri: str, commands: Commands, uri: str) -> None:
    """P3, F68: Writes go to the journals of the majority, and reads come from the primary's majority, whatever the
    URI or the replica set says. A release that may let others in is no exception. Each command has a limit on the
    server."""
    client = {**config.client, "host": f"{mongo_uri}{'&' if '?' in mongo_uri else '/?'}{uri}"}
    store = MongoStore(StoreConfig(client, config.database, config.collection))
    assert store.apply("k", ADD, 5).held
    store.read("k", GRANT, 5)
    store.renew(["k"], Step(renew=(GRANT,), beat=1), 5)
    assert store.apply("k", Step(remove=(GRANT,), given=GRANT), 5).found
    sent = list(zip(commands.names(), commands.sent, strict=True))
    assert [name for name, _ in sent] == ["findAndModify", "find", "update", "find", "findAndModify"]
    concerns = [document.get("writeConcern") or document["readConcern"] for _, document in sent]
    write, read = {"w": "majority", "j": True}, {"level": "majority"}
    shown = [{k: v for k, v in c.items() if k in ("w", "j", "level")} for c in concerns]
    assert shown == [write, read, write, read, write]
    assert all(document.get("$readPreference", {"mode": "primary"})["mode"] == "primary" for _, document in sent)
    assert all(0 < document["maxTimeMS"] <= 5_000 for _, document in sent)  # the server gives up as well
    store.close()


# Errors


def told(error: BaseException) -> str:
    """Return the text that a log or an error page would show of an error."""
    return "\n".join([str(error), repr(error), repr(error.args), *traceback.format_exception(error)])


def assert_clean(error: BaseException) -> None:
    assert SECRET not in told(error)
    assert GRANT not in told(error)


CALLS: dict[str, Callable[[MongoStore], object]] = {
    "apply": lambda store: store.apply("k", ADD, 0.1),
    "release": lambda store: store.apply("k", Step(remove=(GRANT,), given=GRANT), 0.1).found,
    "release_uncontended": lambda store: store.release_uncontended(["k"], [GRANT], 0.1),
    "read": lambda store: store.read("k", GRANT, 0.1),
    "renew": lambda store: store.renew(["k"], Step(renew=(GRANT,)), 0.1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_unreachable_server_is_a_clear_error_in_time(
    call: Callable[[MongoStore], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F3, F57: The error comes within the command's own limit, may pass, and shows neither a password nor the id of a
    grant."""
    monkeypatch.setattr("pymongo.common.MIN_HEARTBEAT_INTERVAL", 0.05)  # for so long the driver waits in any case
    store = MongoStore(StoreConfig({"host": f"mongodb://ann:{SECRET}@127.0.0.1:1/"}, "d"))
    with pytest.raises(LockBackendFailed, match=r"did not answer within 0\.1 s") as refusal:
        call(store)
    assert refusal.value.passing
    assert_clean(refusal.value)
    assert SECRET not in repr(store.config)
    store.close()


@pytest.mark.parametrize("host", [f"mongodb://ann:{SECRET}@", f"mongodb://ann:{SECRET}@h:x", f"http://{SECRET}"])
def test_a_wrong_uri_is_a_clear_error_without_the_uri(host: str) -> None:
    """F57: The driver's complaint may quote the URI. Our error does not, and is final."""
    store = MongoStore(StoreConfig({"host": host}, "d"))
    with pytest.raises(LockBackendFailed, match="connection settings are wrong") as refusal:
        store.apply("k", ADD, 0.1)
    assert not refusal.value.passing
    assert_clean(refusal.value)


@pytest.mark.parametrize("name", ["", " ", "a/b"])
def test_a_wrong_name_of_the_database_is_no_outage(name: str) -> None:
    store = MongoStore(StoreConfig({"host": "mongodb://127.0.0.1:1"}, name))
    with pytest.raises(LockBackendFailed, match="look at NAME") as refusal:
        store.apply("k", ADD, 0.1)
    assert not refusal.value.passing
    store.close()


@pytest.mark.parametrize(
    ("code", "name", "words", "passing"),
    [
        (13, "Unauthorized", "needs find, insert and update", False),
        pytest.param(91, "ShutdownInProgress", "no primary here|did not answer", True, marks=pytest.mark.long),
        pytest.param(189, "PrimarySteppedDown", "no primary here|did not answer", True, marks=pytest.mark.long),
        pytest.param(10107, "NotWritablePrimary", "no primary here|did not answer", True, marks=pytest.mark.long),
    ],
)
def test_what_the_server_refuses_is_reported_in_our_words(
    store: MongoStore, failpoint: Callable[..., None], *, code: int, name: str, words: str, passing: bool
) -> None:
    """F14, F57: The error names the missing right. An error that may pass is marked as passing. The command, quoted in
    the server's own text, is not shown."""
    failpoint(["findAndModify", "find", "update"], errorCode=code, errorLabels=[])
    calls: list[Callable[[], object]] = [lambda: store.apply("k", ADD, 2), lambda: store.read("k", GRANT, 2)]
    for call in calls:
        with pytest.raises(LockBackendFailed, match=words) as refusal:
            call()
        assert refusal.value.passing == passing
        assert_clean(refusal.value)


def test_the_servers_words_are_not_shown(store: MongoStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """F57: Error 13 prints the whole command with all its values. Our error and the chained error do not show it."""

    def refuse(*_: object, **__: object) -> None:
        text = f"not authorized to execute command {{ let: '{GRANT}', pwd: '{SECRET}' }}"
        raise pymongo.errors.OperationFailure(text, 13, {"errmsg": text, "code": 13, "codeName": "Unauthorized"})

    monkeypatch.setattr(Database, "command", refuse)
    with pytest.raises(LockBackendFailed, match="needs find, insert and update") as refusal:
        store.apply("k", ADD, 1)
    assert_clean(refusal.value)
    assert str(refusal.value.__cause__).startswith("Unauthorized")


# Unknown outcomes


def test_a_write_concern_error_is_no_grant(
    store: MongoStore, failpoint: Callable[..., None], stored: Callable[..., Document]
) -> None:
    """F4, F8, P3: A grant that was applied, but not confirmed by the majority, is not reported."""
    failpoint(["findAndModify"], times=1, writeConcernError={"code": 64, "errmsg": f"waiting timed out {SECRET}"})
    with pytest.raises(LockBackendFailed, match="majority") as refusal:
        store.apply("k", ADD, 5)
    assert refusal.value.passing
    assert_clean(refusal.value)
    assert len(stored()["holders"]) == 1


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "failure",
    [
        pytest.param({"closeConnection": True}, marks=pytest.mark.long, id="connection"),
        pytest.param({"writeConcernError": {"code": 64, "errmsg": "x"}}, id="concern"),
        pytest.param({"errorCode": 91}, marks=pytest.mark.long, id="shutdown"),
    ],
)
def test_what_got_no_answer_is_sent_again_and_granted_once(
    here: Here, failpoint: Callable[..., None], failure: Document, times: int
) -> None:
    """F2, F8, F15: Whether or not the command was applied, there is one holder after the answer, and none after the
    release."""
    failpoint(["findAndModify"], times=times, **failure)
    mine = here.lock()
    with mine:
        assert mine.held
        assert [e["token"] for e in here.entries()] == [mine.fencing_token]
    assert here.entries() == []


def test_an_outcome_that_stays_unknown_is_removed(here: Here, failpoint: Callable[..., None]) -> None:
    """F8, F15: The caller gets an error, and a lock that was applied all the same is removed in the background."""
    failpoint(["findAndModify"], times=2, writeConcernError={"code": 64, "errmsg": "x"})
    with pytest.raises(LockBackendFailed):
        here.lock(wait=0).acquire()
    assert eventually(lambda: not here.session.background.pending, 5)
    assert here.entries() == []
    assert here.other(wait=0).try_acquire()


def test_a_copy_of_a_command_that_arrives_after_the_release_is_refused(here: Here, hold_up: HoldUp, door: str) -> None:
    """F17: The first copy is held up in the network, and the second is granted and released before the first
    arrives."""
    gate = hold_up(here.session.store, door).fail(LockBackendFailed("no answer", "k"))
    with make_lock(here.session):
        pass
    gate.call(*gate.arguments or ())
    assert here.entries() == []


# Counting


@pytest.mark.parametrize(
    ("address", "given", "had"),
    [
        *(("", {"maxPoolSize": 3}, 3), ("", {"maxPoolSize": 200}, 200), ("", {}, 160), ("", {"maxPoolSize": 0}, 0)),
        *(("&maxPoolSize=7", {}, 7), ("&maxpoolsize=200", {}, 200), ("&maxPoolSize=0", {}, 0)),
        ("&maxPoolSize=7", {"maxpoolsize": 9}, 9),
    ],
)
def test_how_many_connections_a_store_may_open(mongo_uri: str, address: str, given: Document, had: int) -> None:
    """F183: The project sets the number of connections in OPTIONS or in the URI."""
    store = MongoStore(StoreConfig({"host": f"{mongo_uri}{address}", **given}, "d"))
    assert store.client.options.pool_options.max_pool_size == had
    assert store.connections == had
    store.close()


@pytest.mark.parametrize(("owner", "found"), [(None, False), ("import", True), ("another", False)])
def test_a_read_names_the_former_run_of_an_owner(here: Here, owner: str | None, found: bool) -> None:
    """A waiter that reads learns of the death of the former run, like the command that queued it."""
    with here.other("k", terms=Terms(owner="import")):
        assert (store_of(here.session).read("k", "mine", 5, owner).former is not None) == found
