"""The store by itself, with its commands and its handling of the answers. A collection made by the test replaces the
server."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import bson
import pytest
from bson.codec_options import DatetimeConversion
from pymongo import CursorType, ReadPreference, UpdateOne, WriteConcern
from pymongo.errors import AutoReconnect, OperationFailure, PyMongoError, WriteError
from pymongo.read_concern import ReadConcern

from django_mongolock.engine import clock
from django_mongolock.engine.rule.document import Limits, Step, Terms, entry
from django_mongolock.engine.rule.pipeline import pipeline
from django_mongolock.engine.rule.replies import REPLY, REPLY_TAKEN, REPLY_TO_OWNER, Beat, Bell, Former, Found, Reply
from django_mongolock.engine.rule.short_forms import IS_UNCONTENDED, RELEASE_UNCONTENDED, TAKE_FREE
from django_mongolock.engine.store import bells
from django_mongolock.engine.store.election import CLOCK
from django_mongolock.engine.store.mongo import GONE, MAJORITY, UNNOTICED, MongoStore, StoreConfig
from django_mongolock.exceptions import LockBackendFailed, LockDocumentDamaged
from tests.engine.test_document import NOW, document, holder

ADD = Step(ask="g", add=entry("g", "s", Terms(), {}))
TRY = replace(ADD, trial=True)
OWNED = Step(ask="g", add=entry("g", "s", Terms(owner="o"), {}))
RESUME = replace(OWNED, remove=("old",), resumes=True)
RENEW = Step(ask="g", renew=("g",), beat=3)
THERE: dict[str, Any] = {"lastErrorObject": {"updatedExisting": True}, "value": None}
#: A document that is unlike all documents of ours.
DAMAGED = {"document": document(token=7), "whole": False}


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time limits given to the driver."""
    made: list[float] = []

    def timeout(seconds: float) -> AbstractContextManager[None]:
        made.append(seconds)
        return nullcontext()

    monkeypatch.setattr("pymongo.timeout", timeout)
    return made


@pytest.fixture
def store() -> MongoStore:
    """Return a store with a client, collection, bells and indexes that record their calls."""
    made = MongoStore(StoreConfig({}, "d", "locks", Limits(waiters=2)))
    vars(made).update(client=MagicMock(), collection=MagicMock(), bells=Mock(), indexes=Mock())
    collection_of(made).with_options.return_value = collection_of(made)
    collection_of(made).find_one.return_value = None
    answers(made, THERE)
    return made


def collection_of(store: MongoStore) -> Any:
    return store.collection


def answers(store: MongoStore, answer: object) -> None:
    """Let the next commands return *answer*, or raise it."""
    collection_of(store).database.command.configure_mock(side_effect=lambda *_, **__: give(answer))


def give(answer: object) -> object:
    if isinstance(answer, Exception):
        raise answer
    return answer


def refusal(code: int = 2) -> OperationFailure:
    return OperationFailure("x", code)


# The connection


def test_what_a_project_may_choose_of_the_client() -> None:
    """F20, F68, F183: A project may choose time limits and the number of connections. The basis of the locks is
    fixed."""
    fewest = {"maxPoolSize": 160}
    for given, made in (
        ({}, {"serverSelectionTimeoutMS": 10_000, "maxIdleTimeMS": 60_000, **fewest}),
        ({"appname": "x", "maxIdleTimeMS": 5}, {"serverSelectionTimeoutMS": 10_000, **fewest}),
        ({"serverSelectionTimeoutMS": 5, "maxPoolSize": 161}, {"maxIdleTimeMS": 60_000}),
        ({"retryWrites": False, "tz_aware": False, "maxPoolSize": 0}, {"maxPoolSize": 0}),
        ({"maxPoolSize": 3, "server_selector": print}, {"maxPoolSize": 3}),
    ):
        store = MongoStore(StoreConfig(given, "d"))
        fixed = {"server_selector": store._clock.select, "retryWrites": True, "tz_aware": True}
        usual = {"appname": "django_mongolock", "serverSelectionTimeoutMS": 10_000, "maxIdleTimeMS": 60_000}
        assert store._client_options() == {**usual, **given, **made, **fixed}


def test_how_documents_are_read_and_written() -> None:
    """P3, F55: Documents are read and written with the majority at the primary, whatever the project uses itself. An
    undecodable document spoils no other."""
    weak = {"w": 1, "readConcernLevel": "local", "readPreference": "secondaryPreferred"}
    store = MongoStore(StoreConfig({"connect": False, **weak}, "d"))
    options = store.collection.codec_options
    assert options.datetime_conversion is DatetimeConversion.DATETIME_AUTO
    assert (options.tz_aware, options.unicode_decode_error_handler) == (True, "replace")
    assert store.collection.write_concern == MAJORITY
    assert store.collection.read_preference == ReadPreference.PRIMARY
    assert (store.collection.read_concern, store.latest.read_concern) == (ReadConcern("majority"), ReadConcern("local"))
    assert store._clock.client is store.client
    assert bson.encode({"clock": CLOCK}, codec_options=options)
    store.close()


@pytest.mark.parametrize(("timeout", "given"), [(5.0, 5.0), (0.0, 0.001), (-3.0, 0.001)])
def test_no_command_is_without_a_limit(store: MongoStore, times: list[float], timeout: float, given: float) -> None:
    """P6: The driver would take 0 as no limit."""
    store.read("k", "g", timeout)
    assert times == [given]


@pytest.mark.parametrize("error", [None, AutoReconnect("away")])
def test_what_a_store_closes(store: MongoStore, times: list[float], error: PyMongoError | None) -> None:
    """P6: A store closes its client and its history within a second, whatever the answers."""
    store.history, client = Mock(), vars(store)["client"]
    client.close.side_effect = error
    store.close()
    assert (store.history.close.call_count, client.close.call_count, times) == (1, 1, [1.0])
    MongoStore(store.config).close()
    assert times == [1.0]


# One step


@pytest.mark.parametrize(
    ("step", "where", "fields", "upserts"),
    [
        (ADD, {}, REPLY, True),
        (OWNED, {}, REPLY_TO_OWNER, True),
        (Step(remove=("g",), given="g"), {"holders.grant": {"$eq": "g"}}, REPLY, False),
    ],
)
def test_what_is_sent_of_a_step(
    store: MongoStore, step: Step, where: dict[str, Any], fields: object, upserts: bool
) -> None:
    """P3, P8: A step is one command for one document, confirmed by the majority. A caller without an owner is told of
    no former grant."""
    assert not store.apply("k", step, 5).found
    ((command,), options) = collection_of(store).database.command.call_args
    assert next(iter(command)) == "findAndModify"
    assert (command["query"], command["upsert"]) == ({"_id": {"$eq": "k"}, **where}, upserts)
    assert (command["new"], command["writeConcern"]) == (True, {"w": "majority", "j": True})
    assert command["fields"] is fields
    assert command["update"] is pipeline(step)
    assert options == {"codec_options": collection_of(store).codec_options}
    assert not collection_of(store).find_one.called


@pytest.mark.parametrize(
    ("last", "is_new"), [({"updatedExisting": True}, False), ({"updatedExisting": False}, True), (None, True)]
)
def test_a_new_document_has_the_indexes_looked_at(store: MongoStore, last: object, is_new: bool) -> None:
    """F144: The indexes are checked for a new document, because the collection may be new as well."""
    answers(store, {"value": None} if last is None else {**THERE, "lastErrorObject": last})
    store.apply("k", ADD, 5)
    assert store.indexes.look_after.called == is_new  # type: ignore[attr-defined]


def test_what_the_majority_has_not_confirmed_is_an_error(store: MongoStore) -> None:
    """P1, P3: An unconfirmed grant is an error, and no bell is rung for it. An election may undo the grant, and let in
    another one."""
    value = {"now": NOW, "waiting": 2, "granted": found_in("a")["granted"]}
    answers(store, {**THERE, "value": value, "writeConcernError": {"code": 64}})
    for call_ in (store.apply, store.take_free):
        with pytest.raises(LockBackendFailed, match=r"majority .*code 64"):
            call_("k", ADD, 5)
    assert not store.bells.ring.called  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("step", "reply", "is_puzzling"),
    [
        *((ADD, Reply(found=False), False), (ADD, Reply(held=True), False), (ADD, Reply(place=0, first_end=9), False)),
        *((ADD, Reply(waiting=1), True), (ADD, Reply(waiting=2), False), (Step(remove=("g",)), Reply(), False)),
        *((RENEW, Reply(held=True, beat=3), False), (RENEW, Reply(held=True, beat=2), True)),
        *((RENEW, Reply(beat=2), False), (TRY, Reply(waiting=2), True), (TRY, Reply(waiting=2, first_end=0.0), True)),
        *((TRY, Reply(first_end=0.5), False), (TRY, Reply(waiting=2, first_end=-1.0), True)),
        *((ADD, Reply(place=0, first_end=left), True) for left in (None, 0.0, -1.0)),
        *((RESUME, Reply(place=0, first_end=0.5, former=Former(of, "p")), of == "old") for of in ("old", "another")),
        (replace(RESUME, trial=True), Reply(first_end=0.5, former=Former("old", "p")), True),
    ],
)
def test_an_answer_that_the_rule_never_gives(store: MongoStore, step: Step, reply: Reply, is_puzzling: bool) -> None:
    """F55, P8: Only an answer that the rule never gives makes the store look at the document."""
    assert store._is_puzzling(step, reply) == is_puzzling


def test_whom_a_step_has_granted_the_key_besides_is_rung_for(store: MongoStore) -> None:
    """P5: Bells are rung for other waiters that the step has granted the key."""
    answers(store, {**THERE, "value": {"now": NOW, "waiting": 2, "granted": found_in("a")["granted"]}})
    bells_ = store.apply("k", ADD, 5).bells
    assert [bell.session for bell in bells_] == ["session of a"]
    assert store.bells.ring.call_args_list == [call(list(bells_))]  # type: ignore[attr-defined]


def test_damage_is_looked_for_where_the_answer_is_puzzling(store: MongoStore) -> None:
    """F55: A puzzling answer makes the store look for damage. No caller waits for a lock that the rule leaves alone."""
    answers(store, {**THERE, "value": {"now": NOW, "waiting": 0}})
    assert store.apply("k", ADD, 5).found
    collection_of(store).find_one.return_value = DAMAGED
    with pytest.raises(LockDocumentDamaged, match="'token'"):
        store.apply("k", ADD, 5)


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        *((None, None), ({"document": document(), "whole": True}, None), (AutoReconnect("away"), None)),
        *((DAMAGED, "'token'"), ({"document": document(), "whole": False}, "another type")),
    ],
)
def test_a_document_is_damaged_or_it_is_not(store: MongoStore, seen: object, told: str | None) -> None:
    """F55: A document that cannot be read at the moment is not damaged."""
    collection_of(store).find_one.side_effect = lambda *_, **__: give(seen)
    with nullcontext() if told is None else pytest.raises(LockDocumentDamaged, match=told):
        store.diagnose("k")


@pytest.mark.parametrize(("code", "looks"), [(2, 1), (13, 0), (189, 0)])
def test_damage_is_looked_for_where_the_server_refuses(store: MongoStore, code: int, looks: int) -> None:
    """F55, F86: Damage is not looked for after missing rights or passing errors. An error of many keys names none of
    them."""
    answers(store, refusal(code))
    with pytest.raises(LockBackendFailed):
        store.apply("k", ADD, 5)
    assert collection_of(store).find_one.call_count == looks
    collection_of(store).find_one.return_value = DAMAGED
    with pytest.raises(LockDocumentDamaged if looks else LockBackendFailed):
        store.apply("k", ADD, 5)
    collection_of(store).update_many.side_effect = refusal(code)
    with pytest.raises(LockBackendFailed) as told:
        store.renew(["k"], RENEW, 5)
    assert (told.value.key, collection_of(store).find_one.call_count) == (None, 2 * looks)


def test_an_outage_says_where_the_server_is(store: MongoStore) -> None:
    """F9: The error of an outage names the server's state."""
    store.client.topology_description.server_descriptions.return_value = {}  # type: ignore[attr-defined]
    answers(store, AutoReconnect("away"))
    with pytest.raises(LockBackendFailed, match=r"within 3\.0 s .*no server of this address belongs") as told:
        store.apply("k", ADD, 3.0)
    assert told.value.key == "k"


# The short forms


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        *((None, None), ({"now": NOW, "token": 5}, None), (refusal(11_000), None), (refusal(2), None)),
        *((refusal(50), LockBackendFailed), (AutoReconnect("away"), LockBackendFailed)),
        ({"now": NOW, "token": 5, "mine": holder()}, 5),
    ],
)
def test_a_free_lock_is_taken_or_the_whole_rule_says_why_not(store: MongoStore, answer: Any, outcome: Any) -> None:
    """P8: A refusal by the short form is followed by the whole rule. An outage is an error, and is not waited for
    twice. A refusal keeps no frame alive."""
    answers(store, answer if isinstance(answer, Exception) else {**THERE, "value": answer})
    with pytest.raises(outcome) if outcome is LockBackendFailed else nullcontext():
        reply = store.take_free("k", ADD, 5)
        assert (reply and reply.token) == outcome
        assert answer is None or getattr(answer, "__traceback__", None) is None
    ((command,), _) = collection_of(store).database.command.call_args
    assert (command["query"]["_id"], command["upsert"]) == ({"$eq": "k"}, True)
    assert command["fields"] is REPLY_TAKEN
    assert command["update"] is TAKE_FREE


@pytest.mark.parametrize(
    ("keys", "answer", "left"),
    [
        *((["a"], 1, set()), (["a"], 0, {"a"}), (["a"], WriteError("x", 2), {"a"}), (["a"], WriteError("x", 50), None)),
        *((["a", "b"], 2, set()), (["a", "b"], 1, {"b"}), (["a", "b"], WriteError("x", 2), None)),
    ],
)
def test_what_a_release_in_one_command_has_left(
    store: MongoStore, keys: list[str], answer: int | Exception, left: set[str] | None
) -> None:
    """P8: A release of a single key says whether it succeeded. An error of a release of many keys names no key, and is
    not hidden."""
    grants, collection = [f"grant of {key}" for key in keys], collection_of(store)
    single = len(keys) == 1
    update = collection.update_one if single else collection.update_many
    update.side_effect = lambda *_: SimpleNamespace(matched_count=give(answer))
    collection.find.return_value = [{"_id": "b"}]
    if left is None:
        with pytest.raises(LockBackendFailed) as told:
            store.release_uncontended(keys, grants, 5)
        assert told.value.key == ("a" if single else None)
    else:
        assert store.release_uncontended(keys, grants, 5) == left
    one_of = {"$eq": "a"} if single else {"$in": keys}
    where = {"_id": one_of, "holders.grant": {"$eq": grants[0]} if single else {"$in": grants}}
    assert update.call_args_list == [call({**where, **IS_UNCONTENDED}, RELEASE_UNCONTENDED)]
    assert collection.with_options.call_args_list[0] == call(write_concern=UNNOTICED)
    assert [each.args[0] for each in collection.find.call_args_list] == ([where] if left == {"b"} else [])


# Reads, and renewals


@pytest.mark.parametrize(("owner", "asked"), [(None, {"ask": "g"}), ("o", {"ask": "g", "add": {"owner": "o"}})])
def test_what_is_sent_of_a_read(store: MongoStore, owner: str | None, asked: dict[str, Any]) -> None:
    """P8: A read asks for a former run only if there may be one."""
    store.read("k", "g", 5, owner)
    assert collection_of(store).find_one.call_args_list == [
        call({"_id": {"$eq": "k"}}, REPLY if owner is None else REPLY_TO_OWNER, let={"c": {"$literal": asked}})
    ]


def found_in(key: str) -> dict[str, Any]:
    granted = [{"to": f"session of {key}", "grant": "next", "token": 5, "at": NOW}]
    return {"_id": key, "token": 5, "holders": [{"grant": key, "beat": 3, "token": 5}], "granted": granted}


@pytest.mark.parametrize("made", [{0: "b"}, None])
def test_a_document_that_is_gone_is_made_again(store: MongoStore, made: dict[int, str] | None) -> None:
    """F6, F144, P5: Only a document that had to be made was gone, and the rest is read again. All granted waiters are
    told, and each read is a single answer."""
    collection = collection_of(store)
    collection.find.side_effect = [[found_in("a")], [] if made else [found_in("b")]]
    collection.bulk_write.return_value = SimpleNamespace(upserted_ids=made)
    found = store.renew(["a", "b"], RENEW, 5)
    there = {key: Found(5, {key: Beat(3, None, 5)}, {}) for key in "ab"}
    assert found == {"a": there["a"], "b": GONE if made else there["b"]}
    reads = [(each.args[0]["_id"]["$in"], each.kwargs["batch_size"]) for each in collection.find.call_args_list]
    assert reads == [(["a", "b"], 3), (["b"], 2)]
    (update,), how = collection.bulk_write.call_args[0][0], collection.bulk_write.call_args[1]
    assert isinstance(update, UpdateOne)
    assert update._upsert
    assert not how["ordered"]
    assert how["let"]["c"]["$literal"]["tombstone_ttl"] == 1  # the least that makes a document
    rung = [bell.session for each in store.bells.ring.call_args_list for bell in each.args[0]]  # type: ignore[attr-defined]
    assert rung == ["session of a"] if made else ["session of a", "session of b"]


def test_nothing_is_made_where_nothing_is_gone(store: MongoStore) -> None:
    """P8: A renewal costs one update and one read."""
    collection_of(store).find.side_effect = [[found_in("a")]]
    assert set(store.renew(["a"], RENEW, 5)) == {"a"}
    assert collection_of(store).update_many.call_args.kwargs["let"]["c"]["$literal"]["renew"] == ("g",)
    assert not collection_of(store).bulk_write.called


@pytest.mark.parametrize(
    ("seen", "looks", "told"), [([None], 1, None), (["ab", None], 2, None), (["ab", "ba"], 2, None), (["ab"] * 2, 2, 1)]
)
def test_a_cycle_of_waits_is_seen_twice(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch, seen: list[str | None], looks: int, told: int | None
) -> None:
    """F29: Waits that were read one after another need not exist at one time."""
    cycles: list[Any] = [grants and SimpleNamespace(grants=grants) for grants in seen]
    look = Mock(side_effect=cycles)
    monkeypatch.setattr(store, "_find_cycle", look)
    assert store.deadlock("k", "g", 5) is (None if told is None else cycles[told])
    assert look.call_args_list == looks * [call("k", "g", 5)]


def test_a_cycle_is_looked_for_in_what_was_read(store: MongoStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """F29: A lock without a document is in no cycle."""
    monkeypatch.setattr("django_mongolock.engine.store.mongo.cycle_of", lambda *read: SimpleNamespace(grants=read))
    first = {"now": NOW, "chain": ["second", "third"]}
    collection_of(store).aggregate.return_value = [first]
    found: Any = store.deadlock("k", "g", 5)
    assert found.grants == ([first, "second", "third"], "g", NOW)
    collection_of(store).aggregate.return_value = []
    assert store.deadlock("k", "g", 5) is None


# Bells


def test_bells_for_this_process_are_not_sent(store: MongoStore) -> None:
    """P8: The sessions of this process hear their bells at once."""
    heard: list[Bell] = []
    store.hearers["mine"] = heard.append
    mine, theirs = Bell("mine", "g"), Bell("theirs", "g")
    store.ring([mine])
    assert store.bells.ring.call_args_list == []  # type: ignore[attr-defined]
    store.ring(iter([mine, theirs]))
    assert store.bells.ring.call_args_list == [call([theirs])]  # type: ignore[attr-defined]
    assert heard == [mine, mine]


def test_whom_a_command_without_an_answer_has_granted_a_key_is_rung_for(store: MongoStore) -> None:
    """P5: Waiters granted by a command without an answer are told. An outage meanwhile is no error of that command."""
    collection_of(store).find.side_effect = [[found_in("a"), found_in("b")], AutoReconnect("away")]
    store.ring_for(["a", "b"])
    rung = [bell.session for each in store.bells.ring.call_args_list for bell in each.args[0]]  # type: ignore[attr-defined]
    assert rung == ["session of a", "session of b"]
    assert collection_of(store).find.call_args == call({"_id": {"$in": ["a", "b"]}}, REPLY, let={"c": {"ask": ""}})
    store.ring_for(["a", "b"])


class Tower:
    """The bells of a collection. Each look at one is recorded.

    - there: whether cursors stay open in them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.looks, self.made = 1_000.0, list[int](), list[int]()
        self.there: bool | PyMongoError = True
        locks: Any = Mock()
        locks.name = "locks"
        locks.database.get_collection = lambda name, **options: Mock(number=int(name[-1]), options=options)
        self.bells = bells.Bells(locks)
        monkeypatch.setattr(clock, "now", lambda: self.now)
        monkeypatch.setattr(bells, "stays_open", self._look)
        monkeypatch.setattr(bells, "make", lambda collection: self.made.append(collection.number))

    def _look(self, collection: Any) -> bool:
        self.looks.append(collection.number)
        return bool(give(self.there))

    def sent(self, number: int) -> list[Any]:
        """Return the messages that were sent to a bell."""
        unconfirmed: Any = self.bells._unconfirmed[number]
        return list(unconfirmed.insert_many.call_args_list)


@pytest.fixture
def tower(monkeypatch: pytest.MonkeyPatch) -> Tower:
    return Tower(monkeypatch)


def at(number: int, which: int = 0) -> str:
    """Return the id of a session that listens to that bell."""
    ids: Iterator[str] = (f"s{each}" for each in range(1_000) if bells._number(f"s{each}") == number)
    return [next(ids) for _ in range(which + 1)][-1]


def test_messages_go_to_each_bell_together(tower: Tower) -> None:
    """P8: Messages for one bell are one command, and each message is tried. A good bell is checked once a minute."""
    rung = [Bell(session, "g") for session in (at(3), at(5), at(3, 1))]
    for seconds, looks in ((0.0, [3, 5]), (59.9, [3, 5]), (0.1, [3, 5, 3, 5]), (0.0, [3, 5, 3, 5])):
        tower.now += seconds
        tower.bells.ring(rung)
        assert tower.looks == looks
    assert tower.sent(3) == 4 * [call([rung[0].message, rung[2].message], ordered=False)]
    assert tower.sent(5) == 4 * [call([rung[1].message], ordered=False)]
    options: Any = tower.bells.collections[3]
    assert options.with_options.call_args == call(write_concern=WriteConcern(w=0))


def test_nothing_is_sent_to_a_bell_that_is_not_there(tower: Tower) -> None:
    """F11: A missing bell would grow without limit. The bell is checked again each time, and a listener makes it."""
    tower.bells.ring([Bell(at(3), "g")])
    tower.now, tower.there = tower.now + 60, False
    for _ in range(2):
        tower.bells.ring([Bell(at(3), "g")])
    assert (tower.looks, len(tower.sent(3))) == ([3, 3, 3], 1)
    assert not tower.bells._seen


def test_a_bell_that_cannot_be_rung_silences_no_other(tower: Tower) -> None:
    """F11: A network error at one bell takes nothing from the listeners of the next."""
    tower.there = AutoReconnect("connection closed")
    tower.bells.ring([Bell(at(3), "g"), Bell(at(5), "g")])
    assert tower.looks == [3, 5]


class Reading(MagicMock):
    """A cursor that waits for each answer, with its state then."""

    def play(self, *answers_: tuple[object, bool]) -> None:
        steps = iter(answers_)

        def following(_: object = None) -> object:
            message, self.alive = next(steps)
            if message is None:
                raise StopIteration
            return message

        self.__enter__.return_value = self
        self.__next__ = following


@pytest.mark.parametrize("there", [True, False])
def test_who_listens_hears_all_until_its_cursor_ends(tower: Tower, there: bool) -> None:
    """F11: A listener also hears a bell that came together with the end of its cursor, and makes the collection again
    then. Meanwhile it looks at all bells twice a minute, whether or not they exist, and spares the releases of this
    process that work."""
    tower.there = there
    bell, cursor, session = Bell(at(3), "g"), Reading(), at(3)
    collection: Any = tower.bells.collections[3]
    first: Any = tower.bells.collections[0]
    first.database.client.options = SimpleNamespace(pool_options=SimpleNamespace(socket_timeout=None), timeout=None)
    collection.find.return_value.max_await_time_ms.return_value = cursor
    cursor.play((None, True), (bell.message, True), (None, True), (bell.message, False), (None, False))
    heard, looks = tower.bells.listen(session), []
    for seconds in (0.0, 0.0, 29.9, 0.1):
        tower.now += seconds
        looks.append((next(heard), len(tower.looks)))
    assert looks == [(None, 0), (bell, 7), (None, 7), (bell, 15)]
    assert tower.made == [3]
    tower.bells.ring([bell])
    assert len(tower.looks) == (15 if there else 16)
    assert list(heard) == []
    assert set(tower.bells._seen) == (set(range(8)) - {3} if there else set())
    assert collection.find.call_args == call({"to": session}, cursor_type=CursorType.TAILABLE_AWAIT)
    assert collection.find.return_value.max_await_time_ms.call_args == call(bells.AWAIT_MS)


@pytest.mark.parametrize(("is_good", "error"), [(True, None), (False, None), (False, refusal(48))])
def test_a_bell_is_made_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, is_good: bool, error: Exception | None
) -> None:
    """F11, F44: A missing bell is made with a limit to its size. A message is put in it in any case, because no cursor
    stays open in an empty one."""
    collection, make_capped = MagicMock(), Mock(side_effect=error)
    collection.name = "bells"
    monkeypatch.setattr(bells, "stays_open", lambda _: is_good)
    monkeypatch.setattr(bells, "make_capped", make_capped)
    bells.make(collection)
    assert make_capped.call_args_list == ([] if is_good else [call(collection, bells.SIZE)])
    converted = [call("convertToCapped", "bells", size=bells.SIZE)] if error else []
    assert collection.database.command.call_args_list == converted
    assert collection.with_options.call_args == call(write_concern=WriteConcern(w=1))
    assert collection.with_options.return_value.insert_one.call_args == call({"to": ""})
