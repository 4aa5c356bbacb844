"""Checks of keys, owners, labels and other texts, and the form in which they are stored."""

from __future__ import annotations

import unicodedata
from typing import Final

from ..exceptions import LockKeyInvalid

#: The kinds of characters that are never stored: controls, lone surrogates, separators of lines.
UNPRINTABLE: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})
#: The most bytes of UTF-8 that a key may have, prefix included.
MAX_KEY_BYTES: Final = 512
#: The most characters that a text may have before it is composed. A character has at most four parts. The time to
#: compose a text grows with the square of its length (measured: 8 s for 100,000 characters that were chosen with care).
MAX_TEXT_LENGTH: Final = 4 * MAX_KEY_BYTES
#: The most characters that an owner, a label or another fact about a holder may have.
MAX_FACT_LENGTH: Final = 256


def check_text(name: str, value: object, limit: str = f"{MAX_KEY_BYTES} bytes") -> str:
    """Return *value*, composed (NFC), if it is a plain string that can be stored and shown.

    Raise TypeError for anything but `str` itself. Raise ValueError for control characters, line separators, lone
    surrogates, and texts that are far too long. The error names *limit* as the allowed length.
    """
    if type(value) is not str:
        raise TypeError(f"{name} must be a str, not {type(value).__name__}: pass plain text")
    check_length(name, value, limit)
    if is_plain(value):
        return value
    for character in value:
        if unicodedata.category(character) in UNPRINTABLE:
            raise ValueError(f"{name} must not have control characters or lone surrogates: found {character!a}")
    return unicodedata.normalize("NFC", value)


def is_plain(text: str) -> bool:
    """Return whether *text* is certainly printable and composed. Most text is."""
    return text.isascii() and text.isprintable()


def check_length(name: str, text: str | bytes | bytearray, limit: str = f"{MAX_KEY_BYTES} bytes") -> None:
    """Raise ValueError for a text that is too long, whatever its content. See `check_text` for *limit*."""
    if len(text) > MAX_TEXT_LENGTH:
        raise ValueError(f"{name} has at most {limit}: this one has {len(text)} characters")


def check_key(key: object, prefix: str = "") -> str:
    """Return the id of the document of *key*, composed (NFC), with its prefix. Raise TypeError or LockKeyInvalid."""
    if isinstance(key, (int, float)):
        raise TypeError(f'a lock key must be a str, not {type(key).__name__}: say what it is, as in f"order:{{{key}}}"')
    try:
        text = check_text("a lock key", key)
    except ValueError as error:
        raise LockKeyInvalid(str(error)) from None
    if not text:
        raise LockKeyInvalid("a lock key must not be empty")
    text = unicodedata.normalize("NFC", prefix + text)
    if (size := len(text.encode())) > MAX_KEY_BYTES:
        raise LockKeyInvalid(f"a lock key has at most {MAX_KEY_BYTES} bytes, prefix included: this one has {size}")
    return text


def check_fact(name: str, value: object) -> str | None:
    """Return *value* as it may be stored beside a holder, or None without a value. Raise TypeError or ValueError."""
    if value is None:
        return None
    text = check_text(name, value, f"{MAX_FACT_LENGTH} characters")
    if not text or len(text) > MAX_FACT_LENGTH:
        raise ValueError(f"{name} has 1 to {MAX_FACT_LENGTH} characters: this one has {len(text)}")
    return text


def tidy_fact(value: object) -> str:
    """Return *value* as text that may be stored. For facts that the package looks up itself."""
    text = str(value)[:MAX_FACT_LENGTH]
    if is_plain(text):
        return text
    text = "".join("?" if unicodedata.category(c) in UNPRINTABLE else c for c in text)
    return unicodedata.normalize("NFC", text)[:MAX_FACT_LENGTH]
