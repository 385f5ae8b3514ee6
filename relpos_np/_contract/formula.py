"""The edge of formulas that users call one by one: what annotations say of an argument is checked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposError, RelposTypeError, RelposValueError

_Formula = TypeVar("_Formula", bound=Callable[..., Any])


def _array(name: str, value: Any) -> None:
    """An array of numbers or truth values; also a single number of NumPy's, as sums return them."""
    x = value if isinstance(value, np.generic) else check.array(name, value)
    if x.dtype.kind not in "biufc" and x.dtype.name != "bfloat16":
        raise RelposTypeError(f"{name}: expected numbers, found dtype {x.dtype}")


def _integers(name: str, value: Any) -> None:
    """A short sequence of integers, such as the sides of a grid."""
    if isinstance(value, str) or not hasattr(value, "__len__") or np.ndim(value) != 1:
        raise RelposTypeError(f"{name}: expected a sequence of integers, found {value!r:.80}")
    for entry in value:
        check.integer(name, entry)


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise RelposTypeError(f"{name}: expected a str, found {value!r:.80}")


# By what is written in the formula's signature; other annotations are the formula's own concern.
_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "Array": _array,
    "Int64": check.integers,
    "int": check.integer,
    "float": check.real,
    "bool": check.flag,
    "str": _text,
    "Sequence[int]": _integers,
}


def words(formula: Callable[..., Any]) -> dict[str, tuple[str, ...]]:
    """The words that each parameter may be: those of its `Literal`, whether or not None may stand in their place."""
    found = {}
    for name, hint in get_type_hints(formula).items():
        for kind in (hint, *get_args(hint)):
            if get_origin(kind) is Literal and name != "return":
                found[name] = get_args(kind)
    return found


def checked(formula: _Formula) -> _Formula:
    """The formula as users call it: arguments of a wrong type are refused before any work.

    Formulas say of arrays which axes they have, and NumPy finds where these do not fit; that error becomes one that
    names the shapes. Inside the package formulas are called as they are, with what has been checked before.
    """
    signature = inspect.signature(formula)
    by_name = {name: str(p.annotation) for name, p in signature.parameters.items()}
    allowed = words(formula)

    @functools.wraps(formula)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return formula(*args, **kwargs)  # Python says which argument is missing, or one too many
        for name, value in given.items():
            kind = by_name[name].removesuffix(" | None")
            if kind in _CHECKS and not (value is None and kind != by_name[name]):
                _CHECKS[kind](name, value)
            if name in allowed and not (value is None and kind != by_name[name]):
                check.choice(name, value, allowed[name])
        try:
            return formula(*args, **kwargs)
        except RelposError:
            raise
        except (ValueError, IndexError, TypeError, AttributeError) as error:
            found = ", ".join(f"{name} {_shown(value)}" for name, value in given.items())
            raise RelposValueError(f"{formula.__name__}: these arguments do not fit: {found}: {error}") from error

    return call  # type: ignore[return-value]


def _shown(value: Any) -> str:
    return str(value.shape) if isinstance(value, np.ndarray) else f"{value!r:.40}"
