"""Every text of the package that people read has a German translation. The tests name missing ones.

To add missing texts: `cd django_mongolock`, `python -m django makemessages -l de --no-location --no-obsolete`, fill in
empty and fuzzy texts in locale/de/LC_MESSAGES/django.po, then `python -m django compilemessages -l de`.
"""

from __future__ import annotations

import ast
import gettext
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from django.utils.translation import template

ROOT = Path(__file__).resolve().parents[1] / "django_mongolock"
FOLDER = ROOT / "locale" / "de" / "LC_MESSAGES"
#: The functions that take a text to translate, and the number of its forms.
FUNCTIONS = {"_": 1, "gettext": 1, "gettext_lazy": 1, "gettext_noop": 1, "ngettext": 2, "ngettext_lazy": 2}
Message = tuple[str, ...]


def messages_in(source: str) -> Iterator[Message]:
    """Yield the texts of a Python source, as one or as singular and plural."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
            texts = [each.value for each in node.args[: FUNCTIONS[node.func.id]] if isinstance(each, ast.Constant)]
            if texts:
                yield tuple(str(text) for text in texts)


@cache
def all_messages() -> dict[Message, str]:
    """Every text of the package, and where one finds it."""
    found: dict[Message, str] = {}
    for path in sorted(ROOT.rglob("*.py")):
        found |= {message: str(path.relative_to(ROOT)) for message in messages_in(path.read_text())}
    for path in sorted(ROOT.rglob("*.html")):
        calls = re.findall(r"\b(?:gettext|ngettext|_)\((?:[^()\"']|\"(?:\\.|[^\"])*\"|'(?:\\.|[^'])*')*\)",
                           template.templatize(path.read_text()))  # fmt: skip
        for call in calls:
            # The counted value is written there without quotes, so any name will do.
            found |= {message: str(path.relative_to(ROOT)) for message in messages_in(call)}
    return found


def written() -> dict[Message, tuple[str, ...]]:
    """Return the translations of the .po file, without fuzzy and empty ones."""
    found: dict[Message, tuple[str, ...]] = {}
    for block in (FOLDER / "django.po").read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        fields: dict[str, str] = {}
        name = ""
        for line in lines:
            if not line.startswith('"'):
                name, line = line.split(" ", 1)  # noqa: PLW2901
            fields[name] = fields.get(name, "") + ast.literal_eval(line)
        texts = tuple(value for key, value in fields.items() if key.startswith("msgstr"))
        if "#, fuzzy" not in block and fields.get("msgid") and all(texts):
            found[tuple(value for key, value in fields.items() if key.startswith("msgid"))] = texts
    # A text that is said with a plural somewhere has one entry for both.
    return {message[:1]: texts[:1] for message, texts in found.items() if len(message) > 1} | found


def test_messages_are_found() -> None:
    """The search finds texts in Python and in templates. The tests below can therefore fail."""
    found = all_messages()
    assert len(found) > 200
    for message in (("stale",), ("%d stale lock was cleared.", "%d stale locks were cleared."),
                    ("No waiters.",), ("%d waiter.", "%d waiters."),
                    ("The locks cannot be shown now: %(problem)s",)):  # fmt: skip
        assert message in found, message


def test_nothing_is_missing() -> None:
    """Each text has a German translation that is neither empty nor fuzzy. The .po file has no unused texts."""
    found, known = all_messages(), written()
    missing = [f"{where}: {' | '.join(message)}" for message, where in found.items() if message not in known]
    assert not missing, f"without German ({__doc__}):\n" + "\n".join(missing)
    said = {message[:1] for message in found}
    left = [" | ".join(message) for message in known if message[:1] not in said]
    assert not left, "nobody says this any more:\n" + "\n".join(left)


def test_compiled() -> None:
    with (FOLDER / "django.mo").open("rb") as file:
        compiled = gettext.GNUTranslations(file)
    for message, texts in written().items():
        if len(message) == 1:
            assert compiled.gettext(message[0]) == texts[0]
        else:
            assert tuple(compiled.ngettext(message[0], message[1], n) for n in (1, 2)) == texts


def test_places() -> None:
    """German texts have the same placeholders as the English ones, in every form."""
    places = re.compile(r"%\(\w+\)[sd]|%[sd]|\{\w+\}")
    for message, texts in written().items():
        allowed = {place for text in message for place in places.findall(text)}
        assert all(set(places.findall(text)) <= allowed for text in texts), message
        assert set(places.findall(texts[-1])) == set(places.findall(message[-1])), message
