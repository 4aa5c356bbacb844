"""Attacks from outside through pages, forms and long texts, and leaks."""

from __future__ import annotations

import io
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.http import HttpRequest, HttpResponse
from django.test import Client, RequestFactory
from pymongo.errors import PyMongoError
from pytest_django import Settings

from django_mongolock import mongo_lock, mongo_locked
from django_mongolock.backends import get_backend
from django_mongolock.engine.text_checks import check_key, check_text
from django_mongolock.exceptions import LockBackendFailed, LockError
from django_mongolock.inspection.kinds import glob
from django_mongolock.keys import lock_key
from django_mongolock.models import Lock
from tests.security import surfaces
from tests.security.surfaces import ACTIONS, COMMANDS
from tests.support.grants import own
from tests.support.lock_documents import HOSTILE_KEYS, TOKEN, Locks
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.waiting import eventually
from tests.test_admin import LIST, NAMES, RELEASE, browser, page_of, select

SECRET = "hunter2"

# Pages and endpoints

WITNESS = pytest.param("get", marks=pytest.mark.witness)
METHODS = ["get", "head", "options", "post", "put", "patch", "delete"]
#: Each page of the admin that leads to the login, by its name.
PAGES = {name: paths[0].format(key="k") for name, paths in surfaces.PAGES.items() if name != "lock_status"}
#: Pages for which the right to view is not enough.
CONFIRMED = {"lock_force_release", "lock_ask_to_release"}
NOT_FOR_VIEWERS = {*CONFIRMED, "lockevent_changelist"}
#: Forms that force the release of the lock "k", on the page that asks and in the list.
SHOWN = {"lock": f'["locks", "k", [{TOKEN + 1}]]', "reason": "x"}
CHOSEN = {"index": 0, "_selected_action": ["k", "old"]}


def whoever() -> dict[str, Client]:
    """Return the clients that may not change anything."""
    return {
        "stranger": Client(),
        "customer": browser(*NAMES, is_staff=False),
        "dismissed": browser(*NAMES, is_active=False),
        "staff": browser(),
        "looks": browser("view_lock"),
        "forces blindly": browser("force_release_lock"),
    }


@WITH_MONGO
class TestPages:
    @pytest.fixture(autouse=True)
    def unchanged(self, locks: Locks) -> Iterator[None]:
        """Provide a held lock and a stale one, and check that neither is changed."""
        locks.held("k")
        locks.stale("old")
        before = [locks.read("k"), locks.read("old")]
        yield
        assert [locks.read("k"), locks.read("old")] == before

    @pytest.mark.parametrize("method", [WITNESS, *(pytest.param(name, marks=pytest.mark.long) for name in METHODS[1:])])
    def test_without_the_permission(self, method: str) -> None:
        """No client without the right gets a page or changes a lock, whatever the method and the form."""
        forms: list[dict[str, Any]] = [SHOWN, *({"action": action, **CHOSEN} for action in sorted(ACTIONS))]
        for name, client in whoever().items():
            for page, address in PAGES.items():
                for form in forms if method == "post" else [{}]:
                    response = getattr(client, method)(address, form)
                    assert response.status_code < 500
                    if name in ("stranger", "customer", "dismissed"):
                        assert (response.status_code, response["Location"].split("?")[0]) == (302, "/admin/login/")
                    elif name in ("staff", "forces blindly") or page in NOT_FOR_VIEWERS:
                        assert response.status_code == 403, (name, page, method)

    @pytest.mark.parametrize("method", [method for method in METHODS if method != "post"])
    def test_only_post_changes(self, method: str) -> None:
        client = browser(*NAMES)
        for name, address in PAGES.items():
            response = getattr(client, method)(address, {"action": "force_release", **SHOWN, **CHOSEN})
            assert response.status_code == 405 if name in CONFIRMED else response.status_code < 500

    @pytest.mark.parametrize("protected", [True, False], ids=["middleware", "no middleware"])
    def test_no_form_without_its_token(self, settings: Settings, *, protected: bool) -> None:
        """CSRF: a form of another site changes nothing, on any page. This holds in a project that protects no other
        pages."""
        if not protected:
            settings.MIDDLEWARE = [name for name in settings.MIDDLEWARE if not name.endswith("CsrfViewMiddleware")]
        client = browser(*NAMES)
        client.handler.enforce_csrf_checks = True
        for address in PAGES.values():
            for action in sorted(ACTIONS):
                assert client.post(address, {"action": action, **SHOWN, **CHOSEN}).status_code == 403

    @pytest.mark.parametrize(
        "filters",
        ["//evil.example", "https://evil.example/", "\r\nLocation: //evil.example", "@evil.example", "../../x"],
    )
    def test_no_way_out(self, locks: Locks, filters: str) -> None:
        """A form cannot redirect to another site or to another page."""
        client = browser(*NAMES)
        for field, start in (("filters", f"{LIST}?"), ("back", LIST)):
            response = client.post(RELEASE, {field: filters})
            assert response.status_code == 302
            assert response["Location"].startswith(start)
            assert not {"\r", "\n"} & set(response["Location"])
        for query in ("?next=//evil.example", "?_popup=1&_to_field=holders", "?e=1", "?state=//evil.example"):
            answer = client.get(LIST + query)
            assert answer.status_code < 500
            assert not answer.get("Location", "/").startswith(("http", "//"))

    @pytest.mark.parametrize(
        "shown",
        [
            *('["\\ud800", [1]]', '["a\\u0000b", [1]]', "[" * 100_000, f'["k", [{"9" * 5_000}]]', '["k", [1e999]]'),
            *("x", "[]", '["k", 1]', "[1, [1]]", '["k", [true]]'),
        ],
    )
    def test_forms_that_no_browser_sends(self, shown: str) -> None:
        """Lone surrogates, NUL, thousands of brackets and huge numbers are refused without a crash."""
        assert browser(*NAMES).post(RELEASE, {"lock": shown}).status_code == 400

    @pytest.mark.parametrize(
        "name", ["%00", "%ff%fe", "%ed%a0%80", "a%0ab", "%E2%80%AE", "_", "_ZZ_", "%F0%9F%94%92" * 300]
    )
    def test_addresses_without_a_link(self, name: str) -> None:
        """Broken text in the address of a lock leads back, or is refused."""
        client = browser(*NAMES)
        for page in ("change", "history"):
            assert client.get(f"{LIST}{name}/{page}/").status_code in (200, 302, 400, 404)


# Arguments

LONG = "a" + "\u0300\u0327" * 50_000


@pytest.mark.parametrize(
    "use",
    [
        check_key,
        lambda text: check_text("label", text),
        lambda text: lock_key("tag:{tag}", tag=text),
        lambda text: lock_key("tag:{tag:>5}", tag=text),
        lambda text: mongo_lock("k", label=text),
        lambda text: mongo_lock("k", owner=text),
        glob,
        lambda text: Lock(key="k").ask_to_release(text),
    ],
    ids=["key", "text", "template", "format", "label", "owner", "pattern", "caller"],
)
@pytest.mark.parametrize("text", [LONG, "x" * 10_000_000], ids=["combining", "plain"])
def test_a_text_of_megabytes_costs_nothing(use: Callable[[str], object], text: str) -> None:
    """F54: The length of a text is checked before anything else. Composing 100,000 combining characters takes seconds,
    and a key may come from a request."""
    started = time.thread_time()
    with pytest.raises(ValueError, match=r"at most|1 to"):
        use(text)
    assert time.thread_time() - started < 1


@WITH_MONGO
@pytest.mark.parametrize("key", [*HOSTILE_KEYS, "$expr", "$$ROOT", "a.b", "'; drop", '{"$gt": ""}'])
def test_names_are_never_expressions(locks: Locks, key: str) -> None:
    """F54: A text is used as key, owner, label and caller for a whole life, and comes back unchanged."""
    name = key[:256]
    with mongo_lock(key, owner=name, label=name, wait=0) as lock:
        [holder] = locks.read(key)["holders"]
        assert (holder["owner"], holder["label"]) == (name, name)
        [found] = Lock.objects.filter(holders__owner=name)
        assert found.key == key
        assert found.ask_to_release(name) == 1
        assert locks.read(key)["holders"][0]["release_requested_by"] == name
        lock.extend(60)
    assert locks.read(key)["holders"] == []


# Leaks

HOSTS = [
    f"mongodb://ann:{SECRET}@127.0.0.1:9/?directConnection=true",
    f"mongodb://ann:{SECRET}@@h/",
    f"mongodb://ann:{SECRET}@h:port/",
    f"mongodb://ann:{SECRET}@h/?tls=true&tlsCAFile=/no/{SECRET}",
    f"mongodb://ann:{SECRET}@h/?authMechanism={SECRET}",
    f"mongodb+srv://ann:{SECRET}@no-such-host.invalid/",
]


def everything_of(error: BaseException) -> str:
    """Return the text that an error reporter shows, with the error, its causes, and the variables of every function on
    the way."""
    shown = [str(error), repr(error), repr(vars(error))]
    for frame, _ in traceback.walk_tb(error.__traceback__):
        shown += [repr(value) for name, value in frame.f_locals.items() if name not in ("request", "refusal")]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(shown) + (everything_of(cause) if cause else "")


@WITH_MONGO
class TestLeaks:
    """F57: No text shows a password, a URI, or the id that releases a lock."""

    @pytest.fixture(params=HOSTS, ids=["away", "two @", "port", "no CA", "mechanism", "no DNS"])
    def wrong(self, request: pytest.FixtureRequest, connect: Callable[..., None], settings: Settings) -> None:
        settings.MONGOLOCK = {**settings.MONGOLOCK, "COMMAND_TIMEOUT": 0.5}
        connect(request.param)

    @pytest.mark.long
    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_errors(self, wrong: None) -> None:
        """An unusable address leaks no secret in the error, its causes, or the variables that an error reporter
        shows."""
        with pytest.raises((LockBackendFailed, PyMongoError)) as refusal:
            mongo_lock("k", wait=0).acquire()
        assert isinstance(refusal.value, LockBackendFailed)
        assert SECRET not in everything_of(refusal.value)

    @pytest.mark.long
    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_checks_and_commands(self, wrong: None, caplog: pytest.LogCaptureFixture) -> None:
        """`check --database`, the commands and the log name the fault without quoting the address."""
        caplog.set_level(logging.DEBUG, "django_mongolock")
        found = run_checks(databases=["mongo"], include_deployment_checks=True)
        said = " ".join(f"{message.msg} {message.hint}" for message in found if "mongolock" in str(message.id))
        assert {"mongolock.E101", "mongolock.E019"} & {message.id for message in found}
        for command, ways in COMMANDS.items():
            if command == "run_leader":  # waits until MongoDB answers, with the same log as run_locked
                continue
            out = io.StringIO()
            try:
                call_command(command, *(word.format(key="k", owner="o") for word in ways[-1]), stdout=out, stderr=out)
            except CommandError as refusal:
                said += str(refusal) + "".join(traceback.format_exception(refusal))
            said += out.getvalue()
        assert SECRET not in said + caplog.text

    @pytest.mark.long
    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_pages(self, wrong: None) -> None:
        """The admin's page of a server that is away, and the answers of a view, show no secret."""
        client = browser(*NAMES)
        responses = [respond("k"), *(client.get(address) for address in PAGES.values())]
        assert {response.status_code for response in responses} <= {503, 405, 302, 403, 200}
        assert [responses[0].status_code, client.get(LIST).status_code] == [503, 503]
        for response in responses:
            assert SECRET not in response.content.decode() + str(response.headers)
            assert "mongodb" not in response.content.decode().replace("MongoDB", "")

    def test_a_whole_life(self, locks: Locks, caplog: pytest.LogCaptureFixture) -> None:
        """A lock is taken, renewed, asked for, forced and lost. No text in logs, pages or errors has the id of a
        grant."""
        caplog.set_level(logging.DEBUG, "django_mongolock")
        shown: list[object] = []
        lock = mongo_lock("k", lease=1).acquire()
        [holder] = locks.read("k")["holders"]
        secrets = [holder["grant"], holder["session"]]
        with suppress(LockError):
            mongo_lock("k", wait=0, reentrant=False).acquire()
        refused = respond("k")
        shown += [repr(lock), str(lock), refused.content, refused.headers, repr(get_backend()), repr(own(lock).grants)]
        admin = browser(*NAMES)
        shown += [admin.get(address).content for address in (LIST, page_of("k"), f"{LIST}?state=waited")]
        shown.append(select(admin, "force_release", "k").content)
        out = io.StringIO()
        for arguments in (["list_locks"], ["list_locks", "--json"], ["release_lock", "k", "--no-input"]):
            call_command(*arguments, stdout=out)
        assert eventually(lambda: lock.lost)
        with pytest.raises(LockError) as loss:
            lock.ensure_held()
        shown += [out.getvalue(), str(loss.value), repr(loss.value.args), caplog.text]
        assert eventually(lambda: "lock lost" in caplog.text)  # another thread logs it, after the lock is lost
        assert refused.status_code == 423
        for text in map(str, shown):
            assert not any(secret in text for secret in secrets)

    @pytest.mark.long
    @pytest.mark.parametrize("form", [{"lock": "x"}, {"lock": '["locks", "other-site:k", [1]]'}])
    def test_refusals(self, locks: Locks, settings: Settings, form: dict[str, str]) -> None:
        """A page that refuses names no key of the form or of the database."""
        settings.MONGOLOCK = {**settings.MONGOLOCK, "KEY_PREFIX": "shop:"}
        locks.held("other-site:k", "shop:k")
        client = browser(*NAMES)
        refusals = [client.post(RELEASE, form), browser().get(LIST), client.get(f"{LIST}?holders__host=web-1")]
        assert [refusal.status_code for refusal in refusals] == [400, 403, 400]
        for refusal in refusals:
            assert "shop:k" not in refusal.content.decode()
            assert "other-site" not in refusal.content.decode()


def respond(key: str) -> Any:
    """Return the response of a locked view to another caller."""

    @mongo_locked("{key}", wait=0, on_contention="respond")
    def view(request: HttpRequest, key: str) -> HttpResponse:
        return HttpResponse("done")

    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(view(RequestFactory().get("/"), key=key)))
    thread.start()
    thread.join()
    [answer] = answers
    return answer
