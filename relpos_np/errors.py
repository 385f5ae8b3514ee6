"""The one error class, in the kinds that Python callers expect to catch."""

from __future__ import annotations

from typing import Any

_LONGEST = 200


class RelposError(Exception):
    """Base of every error this library raises on purpose; each is also the built-in kind it refines."""


class RelposValueError(RelposError, ValueError):
    """An argument of the right type has an unusable value or shape."""


class RelposTypeError(RelposError, TypeError):
    """An argument has an unusable type or dtype."""


class RelposIndexError(RelposError, IndexError, ValueError):
    """An index lies outside its table."""


class RelposImportError(RelposError, ImportError):
    """An optional package that the request needs is missing."""


class RelposMemoryError(RelposError, MemoryError):
    """A call needs more memory than its limit allows, or than the machine or the device has for it."""


def shown(value: Any) -> str:
    """What a message shows of an argument: its start if it is long, its type if it cannot be printed.

    Python prints no integer of more than 4,300 digits.
    """
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a representation may raise anything
        return f"a value of type {type(value).__name__} that cannot be printed"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
