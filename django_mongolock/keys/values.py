"""The text of a value in a key."""

from __future__ import annotations

import unicodedata
from typing import Final
from urllib.parse import quote

from django.db.models import Model

from ..conf import SEPARATORS
from ..engine.text_checks import check_length

# A separator stands between two fields of a template. In a value it is escaped, so that values with different texts
# never make the same key.
_ESCAPES: Final = {ord(character): f"%{ord(character):02X}" for character in "%" + SEPARATORS}


def escape(value: object) -> str:
    """The text of a value in a key, with the separators escaped.

    Raises TypeError for values without a text of their own (None, containers, bytes, model instances, objects that only
    show their address): two processes would not agree on it, or two values would share it. Raises ValueError for text
    that is too long for a key.
    """
    if value is None or isinstance(value, (bytes, bytearray, memoryview, dict, list, set, frozenset, tuple)):
        raise TypeError(f"a value of type {type(value).__name__} cannot be part of a key")
    if isinstance(value, Model):
        raise TypeError(f"a {type(value).__name__} instance cannot be part of a key: use its .pk")
    text = str(value)
    check_length("a lock key", text)
    # Compose first, then escape: composing turns U+037E, for example, into a semicolon.
    text = unicodedata.normalize("NFC", text)
    if not isinstance(value, str) and " at 0x" in text:
        raise TypeError(f"a {type(value).__name__} has no text of its own that could be part of a key")
    # A combining character at the start would change the separator before it into another character.
    first = quote(text[0]) if text and unicodedata.combining(text[0]) else text[:1].translate(_ESCAPES)
    return first + text[1:].translate(_ESCAPES)
