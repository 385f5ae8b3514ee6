"""A scheme as its class's name and its constructor's arguments, and back: for copies in float64 and for files.

Every scheme keeps the argument NAME of its constructor as the attribute NAME, in a form that the constructor takes
again. That is all that is needed here, and a test holds every scheme to it.
"""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.absolute import AbsoluteEncoding
from relpos_np.schemes.base import Scheme
from relpos_np.schemes.registry import SCHEMES
from relpos_np.types import Array

CLASSES: Mapping[str, type] = {info.cls.__name__: info.cls for info in SCHEMES.values()}
_MISSING = object()
# Lists and mappings within each other, in what a file says; real ones have three.
_DEPTH = 16


@cache
def parameters(constructor: type) -> dict[str, inspect.Parameter]:
    """The parameters of a class by name."""
    # A class without a constructor of its own reports (*args, **kwargs).
    return {
        name: parameter
        for name, parameter in inspect.signature(constructor).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def arguments(scheme: Any) -> dict[str, Any]:
    """The arguments that make a scheme: ``type(scheme)(**arguments(scheme))`` is another one like it.

    Parameters
    ----------
    scheme : scheme or absolute encoding
        Of a class in `relpos_np.SCHEMES`.

    Returns
    -------
    dict
        By the names of the constructor's parameters.

    Raises
    ------
    RelposTypeError
        If the scheme does not keep one of them.
    """
    found = {}
    cls: type = type(scheme)
    for name in parameters(cls):
        value = getattr(scheme, name, _MISSING)
        if value is _MISSING:
            raise RelposTypeError(
                f"{type(scheme).__name__}: the argument {name} of its constructor is not kept as an attribute"
            )
        found[name] = value
    return found


def rebuilt(scheme: Any, dtype: Any) -> Any:
    """The same scheme, encoding or tuple of them, or None, with its arrays of floats in another precision."""
    return changed(scheme, lambda x: x.astype(dtype))


def changed(value: Any, change: Callable[[Array], Array]) -> Any:
    """A value with other arrays of floats: itself, or those in a scheme, an encoding, a list, a tuple or a mapping."""
    if isinstance(value, np.ndarray):
        return change(value) if value.dtype.kind == "f" or value.dtype.name == "bfloat16" else value
    if isinstance(value, Mapping):
        return {name: changed(entry, change) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return tuple(changed(entry, change) for entry in value)
    if isinstance(value, Scheme | AbsoluteEncoding):
        return type(value)(**changed(arguments(value), change))
    return value


# Parameters that came after set v1 of the vectors, which is never to change: their defaults are not written.
LATER = {("DeBERTa", "clamped"): False}


def encode(value: Any, name: str, arrays: dict[str, Array]) -> Any:
    """What JSON can hold for a value, for `decode`.

    The value is None, a bool, a number, a string, an array, a scheme, or a list, tuple or mapping of such; anything
    else is a RelposTypeError. What it contains is called `name` with more after dots. Arrays go into `arrays` under
    these names, and references stand in their place.
    """
    if isinstance(value, np.ndarray):
        arrays[name] = value
        return {"array": name}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [encode(entry, f"{name}.{n}", arrays) for n, entry in enumerate(value)]
    if isinstance(value, Mapping):
        return {"mapping": {str(key): encode(entry, f"{name}.{key}", arrays) for key, entry in value.items()}}
    if isinstance(value, Scheme | AbsoluteEncoding):
        kind = type(value).__name__
        named = {key: x for key, x in arguments(value).items() if (kind, key) not in LATER or x != LATER[kind, key]}
        given = {key: encode(entry, f"{name}.{key}", arrays) for key, entry in named.items()}
        return {"class": kind, "arguments": given}
    raise RelposTypeError(f"{name}: a {type(value).__name__} cannot be written to a file")


def decode(node: Any, arrays: Mapping[str, Array]) -> Any:
    """The value of what `encode` made; lists come back as tuples.

    A RelposError says that a reference leads nowhere, or a scheme is unknown or refuses its arguments.
    """
    return _decoded(node, arrays, _DEPTH)


def _decoded(node: Any, arrays: Mapping[str, Array], depth: int) -> Any:
    if not isinstance(node, list | dict):
        return node
    if not depth:
        raise RelposValueError(f"expected values within no more than {_DEPTH} others")
    if isinstance(node, list):
        return tuple(_decoded(entry, arrays, depth - 1) for entry in node)
    kind = set(node)
    if kind == {"array"} and isinstance(node["array"], str):
        if node["array"] not in arrays:
            raise RelposValueError(f"array {reprlib.repr(node['array'])} is missing")
        return arrays[node["array"]]
    if kind == {"float"} and node["float"] in ("nan", "inf", "-inf"):
        return float(node["float"])
    if kind == {"mapping"} and isinstance(node["mapping"], dict):
        return {key: _decoded(entry, arrays, depth - 1) for key, entry in node["mapping"].items()}
    if kind == {"class", "arguments"} and isinstance(node["class"], str) and isinstance(node["arguments"], dict):
        given = {key: _decoded(entry, arrays, depth - 1) for key, entry in node["arguments"].items()}
        return _made(node["class"], given)
    raise RelposValueError(f"expected a value, a reference to an array or a scheme, found {reprlib.repr(node)}")


def _made(name: str, given: Mapping[str, Any]) -> Any:
    """A scheme of that class."""
    if name not in CLASSES:
        raise RelposValueError(f"class: expected one of {', '.join(CLASSES)}; found {reprlib.repr(name)}")
    known = parameters(CLASSES[name])
    unknown = [key for key in given if key not in known]
    missing = [key for key, one in known.items() if one.default is one.empty and key not in given]
    if unknown or missing:
        raise RelposTypeError(
            f"{name}: expected arguments {', '.join(known) or 'none'}; found {reprlib.repr(list(given))}"
        )
    return CLASSES[name](**given)
