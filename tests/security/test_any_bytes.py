"""Any bytes at any address cause no error 500 and no way to another site, and take no lock of another user."""

import base64
import re
from typing import Any
from urllib.parse import quote

import pytest
from django.contrib.auth.models import User
from django.test import Client
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from django_mongolock.inspection.display import quote_key
from testproject.rates.models import Rate
from testproject.shop.models import Ad, Order
from tests.editing.conftest import _site  # noqa: F401 - its fixture
from tests.editing.staff import holders, staff
from tests.security.surfaces import EDITED, OWN_ADMINS, PAGES, clean, leaves, operator
from tests.support.lock_documents import Locks
from tests.support.lock_fixtures import WITH_MONGO
from tests.test_admin import LIST, browser

pytestmark = [WITH_MONGO, pytest.mark.long]

METHODS = ["get", "head", "options", "post", "put", "patch", "delete"]
#: Messages of an edit lock's script, messages that it does not send, and an empty message.
ACTIONS = ["take", "take-over", "beat", "leave", "read", "nonsense", ""]
HEADERS = st.dictionaries(
    st.sampled_from(
        ["Authorization", "Accept", "Accept-Language", "Cookie", "Content-Type", "Referer", "X-Requested-With", "Range",
         "Sec-Fetch-Dest", "Sec-Purpose", "Purpose", "If-None-Match", "X-Forwarded-For"]
    ),
    st.text(st.characters(max_codepoint=255), max_size=30)
    | st.binary(max_size=20).map(lambda raw: f"Basic {base64.b64encode(raw).decode()}"),
    max_size=3,
)  # fmt: skip
VALUES = st.text(max_size=12) | st.sampled_from(
    ["k", "0", "1", "-1", "9" * 30, "\0", "[1]", '["locks", "k", [1]]', "x" * 3_000, "1e9", "on", "true"]
)
NAMES = [
    "lock", "reason", "back", "filters", "action", "_selected_action", "index", "q", "p", "o", "state", "mode", "event",
    "part", "e", "all", "select_across", "next", "force", "owner", "kind", "_popup", "_to_field",
]  # fmt: skip
EDIT_NAMES = [
    "edit_lock_tab", "version_read", "edit_lock_take_over", "idle", "had", "_save", "_saveasnew", "_continue",
    "_popup", "item", "price", "buyer", "state", "order_set-INITIAL_FORMS", "order_set-TOTAL_FORMS", "order_set-0-id",
    "order_set-9999999999-id", "username", "post",
]  # fmt: skip
QUERIES = st.dictionaries(
    st.sampled_from([*NAMES, "edit-tab", "_changelist_filters"]) | st.text(max_size=4), VALUES, max_size=4
)


@pytest.mark.parametrize("is_edited", [False, True])
@pytest.mark.parametrize("name", [*PAGES, *EDITED, *OWN_ADMINS])
def test_any_bytes(locks: Locks, name: str, *, is_edited: bool) -> None:
    """F75: Every address takes every method, with any query, form, header and path, from any user.

    The ids of an action on documents are those of documents. Any other text is a 500 of Django's, before an action is
    called.
    """
    locks.held("k")
    order = Order.objects.create(buyer=User.objects.create(username="buyer"), item="bike", price=100)
    Rate.objects.create(name="EUR", value=5)
    ad = Ad.objects.create(user_id="u", title="bike", price=5)
    if is_edited:
        staff("ben", superuser=True).get(EDITED["change"].format(order.pk))
    held = [holder["grant"] for holder in holders(order)]
    clients = [operator(is_superuser=name in OWN_ADMINS), Client()]
    names, more = NAMES, {}
    if name in PAGES:
        paths = VALUES.map(lambda key: PAGES[name][0].format(key=quote_key(key.encode(errors="replace").decode())))
    elif name in EDITED:
        ids = [str(order.pk), "0", "x", "_", "_2", "9" * 30, "1\u0660"]
        paths = st.sampled_from(ids).map(lambda pk: EDITED[name].format(quote(pk)))
        clients, names = [staff("anna"), browser("view_order"), Client()], EDIT_NAMES
    else:
        path = OWN_ADMINS[name].format(rate="EUR", ad=ad.pk)
        page = clients[0].get(path).content.decode()
        paths, names = st.just(path), re.findall(r'<(?:input|select|textarea)[^>]*? name="([^"]+)"', page)
        assert {"document_version", "select_across", "value", "price"} & {*names}
        more = {"_selected_action": str(ad.pk), "index": "0"}
    for client in clients:
        client.raise_request_exception = False

    @settings(
        max_examples=15,
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large,
        ],
    )  # fmt: skip
    @given(
        st.sampled_from(METHODS),
        paths,
        st.sampled_from(ACTIONS),
        QUERIES,
        st.dictionaries(
            st.sampled_from(names) | st.text(max_size=4),
            VALUES | st.sampled_from(["clear_stale_documents", "force_release_documents", "delete_selected"]),
            max_size=4,
        ),
        HEADERS,
    )
    @example("get", f"{LIST}status/", "", {}, {}, {"Authorization": "Basic \xff"})
    @example("post", f"{LIST}force-release/", "", {}, {"lock": '["locks", "k", [1]]', "reason": "\0"}, {})
    def ask(  # noqa: PLR0917 - as they are generated
        method: str, path: str, action: str, query: dict[str, str], form: dict[str, str], headers: dict[str, str]
    ) -> None:
        body = clean({**form, **more}) if method == "post" else {}
        sent: dict[str, Any] = {"query_params": clean({"edit-lock": action, **query}), "headers": headers}
        for client in clients:
            response = getattr(client, method)(path, body, **sent)
            assert response.status_code < 500, (method, path, action, query, form, headers)
            assert not leaves(response), (method, path, action, query, form, headers)

    ask()
    assert locks.read("k")["holders"]
    if is_edited:
        assert [holder["grant"] for holder in holders(order)] == held


@pytest.mark.parametrize("query", ["_to_field=", "_to_field=pk", "_to_field=%00", "_popup=1&_to_field="])
def test_queries_of_popups(locks: Locks, query: str) -> None:
    """F75: Names of fields that Django's own lists accept do no harm."""
    locks.held("k")
    client = operator()
    for paths in PAGES.values():
        assert client.get(f"{paths[0].format(key='k')}?{query}").status_code < 500
