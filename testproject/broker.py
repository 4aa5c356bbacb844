"""The address of the Celery broker, made from the MongoDB URI."""

from urllib.parse import quote


def broker_url(uri: str, database: str) -> str:
    """Return *uri* with *database* in place of the database it names, if any.

    Celery's queues get their own database beside the shop's. A database named in a URI is also the one in which its
    user is looked up. That one stays, as ``authSource``.
    """
    scheme, _, rest = uri.partition("://")
    address, _, options = rest.partition("?")
    hosts, _, named = address.partition("/")
    if named and "@" in hosts and "authsource=" not in options.lower():
        options = "&".join(filter(None, [options, f"authSource={named}"]))
    query = f"?{options}" if options else ""
    return f"{scheme}://{hosts}/{quote(database)}{query}"
