"""Settings from the text of an environment variable, for a settings module: nothing here raises, and the checks of the
app report what is wrong with the text. No message quotes it: it may hold a password.

    DATABASES["locks"] = database_from_url(env.str("MONGOLOCK_URL"))
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from urllib.parse import unquote, unquote_plus

from pymongo.uri_parser import split_hosts, split_options

from .conf import ENGINE

__all__ = ["database_from_url"]

SCHEMES: Final = ("mongodb", "mongodb+srv")
#: The NAME of an address that has none. MongoDB refuses it. For "", django-mongodb-backend raises before checks run.
NO_NAME: Final = " "
#: The options that have secrets, by how they are compared: they are beside HOST as well.
SECRETS: Final = {_.lower(): _ for _ in ("tlsCertificateKeyFilePassword", "authMechanismProperties")}


class Address(NamedTuple):
    """The parts of a connection string. MongoDB's may name several servers, which urllib cannot read."""

    scheme: str
    user: str
    password: str
    hosts: str
    database: str
    options: tuple[str, ...]

    def without_user(self) -> str:
        """Return the connection string for HOST. The name of the database stays: users may be stored there."""
        query = f"?{'&'.join(self.options)}" if self.options else ""
        return f"{self.scheme}://{self.hosts}/{self.database}{query}"


def database_from_url(url: str) -> dict[str, Any]:
    """Return the entry of DATABASES for ``mongodb://user:password@host1,host2/name?replicaSet=rs0&tls=true``.

    User, password and options with secrets are beside HOST, where Django's debug page hides them. Of an address without
    a name, NAME is a blank, which a check reports.
    """
    address = _read(url)
    split = [(option, *option.partition("=")[::2]) for option in address.options]
    secrets = {SECRETS[name.lower()]: unquote_plus(value) for _, name, value in split if name.lower() in SECRETS}
    mongo = address._replace(options=tuple(option for option, name, _ in split if name.lower() not in SECRETS))
    entry: dict[str, Any] = {"ENGINE": ENGINE, "HOST": mongo.without_user(), "NAME": address.database or NO_NAME}
    entry |= {"OPTIONS": secrets} if secrets else {}
    return {**entry, "USER": unquote(address.user), "PASSWORD": unquote(address.password)} if address.user else entry


def address_problem(host: str) -> str | None:
    """Return what is wrong with a connection string, without quoting any of it but the names of options."""
    address = _read(host)
    if address.scheme not in SCHEMES:
        return "it does not begin with mongodb:// or mongodb+srv://"
    try:
        if not split_hosts(address.hosts):
            return "it names no server"
    except Exception:  # noqa: BLE001 - the driver raises several, whose texts quote the address
        return (
            "its servers cannot be read; characters such as @ : / ? # % in user and password have to be percent-encoded"
        )
    for option in address.options:
        try:
            split_options(option, validate=True, warn=False)
        except Exception:  # noqa: BLE001 - see above
            name = option.partition("=")[0]
            return f"its option {name!r} is unknown to MongoDB, or has a wrong value"
    return None


def _read(url: str) -> Address:
    scheme, _, rest = url.strip().partition("://")
    before, _, query = rest.partition("?")
    if scheme not in SCHEMES or "@" in query:  # either may be a part of the password: nothing of it may end up in HOST
        return Address(scheme if scheme in SCHEMES else "", "", "", "", "", ())
    credentials, _, place = before.rpartition("@")
    user, _, password = credentials.partition(":")
    hosts, _, database = place.partition("/")
    return Address(scheme, user, password, hosts, unquote(database), tuple(filter(None, query.split("&"))))
