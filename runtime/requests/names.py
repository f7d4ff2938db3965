"""Converts names that callers choose, such as a tenant's, to plain strings. It imports nothing but errors."""

from __future__ import annotations

from ..shared.errors import RequestError, shown

MOST_NAME = 1024
"""The most characters of a name."""


def checked_name(name: str, value: object) -> str:
    """Returns a name, such as a tenant's, as a plain string. Raises RequestError naming the argument ``name``."""
    if not isinstance(value, str):
        raise RequestError(f"{name}: {shown(value)} is of type {type(value).__name__}", hint="It must be a name.")
    plain = plain_text(value)
    if plain is None or len(plain) > MOST_NAME:
        hint = f"It must be text of {MOST_NAME} characters or fewer, without lone surrogates."
        raise RequestError(f"{name}: {shown(value)} isn't a name", hint=hint)
    return plain


def plain_text(value: object) -> str | None:
    """Returns a string as Python's own type; None for another type, and for lone surrogates, which aren't text."""
    if not isinstance(value, str):
        return None
    plain = str.__str__(value)
    try:
        plain.encode()
    except UnicodeEncodeError:
        return None
    return plain
